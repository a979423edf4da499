"""Messages and descriptors arrive whole, or the channel is closed; nothing that came is left open."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy import channel, memory_file
from proxy.channel import Channel, ChannelClosed


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, two = channel.pair()
    with one, two:
        yield one, two


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


class TestMessages:
    @settings(max_examples=50)
    @given(st.dictionaries(st.text(), JSON))
    def test_any_object_arrives_as_it_was_sent(self, message: dict[str, object]) -> None:
        one, two = channel.pair()
        with one, two:
            channel.send(one, message)
            assert channel.receive(two) == (message, [])

    @pytest.mark.parametrize("size", [0, 32_000, 33_000, 300_000, 5_000_000])
    def test_a_message_of_any_size_arrives(self, ends: tuple[socket.socket, socket.socket], size: int) -> None:
        before = open_descriptors()
        channel.send(ends[0], {"text": "x" * size})
        message, fds = channel.receive(ends[1])
        assert (message, fds) == ({"text": "x" * size}, [])
        assert open_descriptors() == before

    @pytest.mark.parametrize("size", [10, 100_000])
    def test_descriptors_arrive_in_order_and_close_on_exec(
        self, ends: tuple[socket.socket, socket.socket], size: int
    ) -> None:
        before = open_descriptors()
        readers, writers = zip(*(os.pipe() for _ in range(20)), strict=True)
        channel.send(ends[0], {"text": "x" * size}, writers)
        _, fds = channel.receive(ends[1])
        for number, fd in enumerate(fds):
            assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
            os.write(fd, bytes([number]))
        assert [os.read(reader, 10) for reader in readers] == [bytes([number]) for number in range(20)]
        for fd in (*readers, *writers, *fds):
            os.close(fd)
        assert open_descriptors() == before

    def test_messages_do_not_run_together(self, ends: tuple[socket.socket, socket.socket]) -> None:
        for number in range(5):
            channel.send(ends[0], {"number": number})
        assert [channel.receive(ends[1])[0] for _ in range(5)] == [{"number": number} for number in range(5)]


class TestWhatIsNoMessage:
    @pytest.mark.parametrize(
        "data",
        [b"J", b"Jnonsense", b"J[1]", b"J1", b"Jnull", b"M", b"X{}", b"J{}" + b" " * 40_000, b"J\xff", b'J{"a":'],
    )
    def test_it_closes_the_channel_and_what_came_with_it(
        self, ends: tuple[socket.socket, socket.socket], data: bytes
    ) -> None:
        reader, writer = os.pipe()
        before = open_descriptors()
        socket.send_fds(ends[0], [data], [writer, writer] if data != b"M" else [])
        if data.startswith(b"X"):
            with contextlib.suppress(ChannelClosed):
                for fd in channel.receive(ends[1])[1]:
                    os.close(fd)
        else:
            with pytest.raises(ChannelClosed):
                channel.receive(ends[1])
        assert open_descriptors() == before
        os.close(reader)
        os.close(writer)

    def test_more_descriptors_than_are_expected_close_it(self, ends: tuple[socket.socket, socket.socket]) -> None:
        reader, writer = os.pipe()
        before = open_descriptors()
        socket.send_fds(ends[0], [b"J{}"], [writer] * 100)
        with pytest.raises(ChannelClosed):
            channel.receive(ends[1])
        assert open_descriptors() == before
        os.close(reader)
        os.close(writer)

    def test_a_memory_file_that_is_too_large_closes_it(self, ends: tuple[socket.socket, socket.socket]) -> None:
        memory = memory_file.create("large")
        os.ftruncate(memory, 1 << 40)
        socket.send_fds(ends[0], [b"M"], [memory])
        os.close(memory)
        with pytest.raises(ChannelClosed):
            channel.receive(ends[1])

    def test_the_end_closes_it(self, ends: tuple[socket.socket, socket.socket]) -> None:
        ends[0].close()
        with pytest.raises(ChannelClosed):
            channel.receive(ends[1])
        with pytest.raises(ChannelClosed):
            channel.send(ends[1], {})

    def test_a_closed_end_cannot_be_used(self, ends: tuple[socket.socket, socket.socket]) -> None:
        async def use() -> None:
            link = Channel(ends[0])
            link.close()
            with pytest.raises(ChannelClosed):
                await link.receive()
            with pytest.raises(ChannelClosed):
                await link.send({})

        asyncio.run(use())


class TestChannel:
    def test_a_reader_waits_for_a_writer_and_a_writer_for_a_reader(
        self, ends: tuple[socket.socket, socket.socket]
    ) -> None:
        async def talk() -> None:
            one, two = Channel(ends[0]), Channel(ends[1])
            count = 2000

            async def write() -> None:
                for number in range(count):
                    await one.send({"number": number, "text": "x" * 1000})

            writing = asyncio.create_task(write())
            received = [(await two.receive())[0]["number"] for _ in range(count)]
            await writing
            assert received == list(range(count))

        asyncio.run(talk())

    def test_many_that_wait_to_send_are_all_served(self, ends: tuple[socket.socket, socket.socket]) -> None:
        async def talk() -> None:
            one, two = Channel(ends[0]), Channel(ends[1])
            writing = [asyncio.create_task(one.send({"n": number, "text": "x" * 30_000})) for number in range(40)]
            await asyncio.sleep(0)
            assert not all(task.done() for task in writing), "the control: some wait"
            async with asyncio.timeout(10):
                received = [(await two.receive())[0]["n"] for _ in writing]
                await asyncio.gather(*writing)
            assert sorted(received, key=str) == sorted(range(40), key=str)

        asyncio.run(talk())

    def test_the_other_sides_end_wakes_a_reader(self, ends: tuple[socket.socket, socket.socket]) -> None:
        async def talk() -> None:
            link = Channel(ends[0])
            reading = asyncio.create_task(link.receive())
            await asyncio.sleep(0)  # let it begin to wait
            ends[1].close()
            with pytest.raises(ChannelClosed):
                await reading

        asyncio.run(talk())


def test_the_form_on_the_wire_is_one_letter_and_json(ends: tuple[socket.socket, socket.socket]) -> None:
    channel.send(ends[0], {"type": "x"})
    data = ends[1].recv(100)
    assert (data[:1], json.loads(data[1:])) == (b"J", {"type": "x"})
