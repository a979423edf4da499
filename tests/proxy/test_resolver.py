"""One look-up gives all answers, each is classified, and only vetted addresses can be dialled."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from proxy.destinations import AddressClass, Host, IPAddress, parse_host
from proxy.network import StaticHost
from proxy.resolver import PinnedLoop, ResolutionFailed, Resolver, observe_address, pin, system_lookup
from tests import world
from tests.proxy.rig import Peers
from tests.servers import Dns, Http

NAME = parse_host("name.test")
PUBLIC = ipaddress.ip_address("20.9.9.9")
PRIVATE = ipaddress.ip_address("10.0.0.1")


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=PinnedLoop) as runner:
        runner.run(work())


def answers(*addresses: IPAddress) -> Callable[[str], list[IPAddress]]:
    return lambda _name: list(addresses)


class Counting:
    """A look-up that can be held up and counts."""

    def __init__(self, result: list[IPAddress] | Exception) -> None:
        self.result = result
        self.asked: list[str] = []
        self.release = threading.Event()
        self.release.set()

    def __call__(self, name: str) -> list[IPAddress]:
        self.asked.append(name)
        self.release.wait()
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


class TestResolving:
    def test_all_answers_are_given_with_their_classes(self) -> None:
        async def work() -> None:
            resolver = Resolver(answers(PUBLIC, PRIVATE))
            resolved = await resolver.resolve(NAME, (), asyncio.Semaphore(1))
            assert [(r.address, r.address_class) for r in resolved] == [
                (PUBLIC, AddressClass.PUBLIC),
                (PRIVATE, AddressClass.PRIVATE),
            ]

        run(work)

    def test_a_static_answer_stands_before_a_look_up(self) -> None:
        async def work() -> None:
            lookup = Counting([PUBLIC])
            static = (StaticHost(host=NAME, addresses=(PRIVATE,)),)
            (resolved,) = await Resolver(lookup).resolve(NAME, static, asyncio.Semaphore(1))
            assert (resolved.address, lookup.asked) == (PRIVATE, [])

        run(work)

    def test_an_address_is_its_own_answer(self) -> None:
        async def work() -> None:
            lookup = Counting([PUBLIC])
            (resolved,) = await Resolver(lookup).resolve(Host(str(PRIVATE), PRIVATE), (), asyncio.Semaphore(1))
            assert (resolved.address, lookup.asked) == (PRIVATE, [])

        run(work)

    def test_an_answer_is_kept_for_a_while(self) -> None:
        async def work() -> None:
            lookup = Counting([PUBLIC])
            for ttl, times in ((60.0, 1), (0.0, 3)):
                lookup.asked.clear()
                resolver = Resolver(lookup, ttl_seconds=ttl)
                for _ in range(3):
                    await resolver.resolve(NAME, (), asyncio.Semaphore(1))
                assert len(lookup.asked) == times

        run(work)

    def test_who_asks_for_the_same_name_at_once_shares_a_look_up(self) -> None:
        async def work() -> None:
            lookup = Counting([PUBLIC])
            lookup.release.clear()
            resolver = Resolver(lookup)
            tasks = [asyncio.ensure_future(resolver.resolve(NAME, (), asyncio.Semaphore(1))) for _ in range(10)]
            await asyncio.sleep(0)  # all have begun
            lookup.release.set()
            assert {len(resolved) for resolved in await asyncio.gather(*tasks)} == {1}
            assert len(lookup.asked) == 1

        run(work)

    @pytest.mark.parametrize(
        "failure",
        [socket.gaierror(socket.EAI_NONAME, "unknown"), OSError("broken"), UnicodeError("label too long"), []],
    )
    def test_a_failure_is_named_and_not_kept(self, failure: Any) -> None:
        async def work() -> None:
            lookup = Counting(failure)
            resolver = Resolver(lookup)
            for times in (1, 2):
                with pytest.raises(ResolutionFailed, match=r"name\.test"):
                    await resolver.resolve(NAME, (), asyncio.Semaphore(1))
                assert len(lookup.asked) == times

        run(work)

    def test_a_look_up_that_hangs_is_given_up_and_still_takes_its_slot(self) -> None:
        """Else an attempt whose names hang could take all threads."""

        async def work() -> None:
            lookup = Counting([PUBLIC])
            lookup.release.clear()
            resolver = Resolver(lookup, timeout_seconds=0.01)
            slots = asyncio.Semaphore(2)
            for number in range(2):
                with pytest.raises(ResolutionFailed, match="took longer"):
                    await resolver.resolve(parse_host(f"n{number}.test"), (), slots)
            assert slots.locked()
            lookup.release.set()
            async with asyncio.timeout(10):
                await slots.acquire()

        run(work)

    def test_the_systems_look_up_gives_both_families_once(self, peers: Peers) -> None:
        dns = Dns(peers.loop)
        try:
            dns.zone["both.test"] = ["20.9.9.9", "2600:9::9", "20.9.9.9"]
            assert sorted(map(str, system_lookup("both.test"))) == ["20.9.9.9", "2600:9::9"]
            with pytest.raises(OSError, match=r"[Nn]ame"):
                system_lookup("unknown.test")
        finally:
            dns.close()


class TestOwnAddresses:
    def test_an_address_of_this_host_is_told_from_others(self) -> None:
        own = ipaddress.ip_address(world.OWN_ADDRESS)
        assert observe_address(own).address_class is AddressClass.OWN
        assert observe_address(PUBLIC).address_class is AddressClass.PUBLIC

    def test_asking_sends_nothing(self) -> None:
        before = world.traffic()
        observe_address(PUBLIC)
        observe_address(ipaddress.ip_address("2600:9::9"))
        assert (world.traffic() - before).udp_sent == 0


class TestPinning:
    """The loop goes where the task's own pin says, whatever form a host has, and nowhere without one."""

    @pytest.mark.parametrize("host", ["name.test", "20.9.9.9", "127.0.0.1", "::1", "localhost", "2600:9::9"])
    def test_nothing_is_dialled_that_was_not_vetted(self, host: str) -> None:
        async def work() -> None:
            before = world.traffic()
            with pytest.raises(socket.gaierror, match="vetted"):
                await asyncio.open_connection(host, 80)
            pin(parse_host("other.test"), (PUBLIC,))
            with pytest.raises(socket.gaierror, match="vetted"):
                await asyncio.open_connection(host, 80)
            assert (world.traffic() - before).tcp_opened == 0

        run(work)

    def test_a_name_goes_to_its_vetted_address(self, peers: Peers) -> None:
        async def work() -> None:
            pin(NAME, (ipaddress.ip_address(peers.allowed.address),))
            _, writer = await asyncio.open_connection("name.test", 80)
            assert writer.get_extra_info("peername")[0] == peers.allowed.address
            writer.close()
            await writer.wait_closed()

        run(work)

    def test_the_next_address_is_tried_when_one_does_not_answer(self, peers: Peers) -> None:
        """At a port where no other peer of these tests listens, at whatever address."""

        async def work() -> None:
            pin(NAME, (ipaddress.ip_address("20.250.0.7"), ipaddress.ip_address(peers.allowed.address)))
            _, writer = await asyncio.open_connection("name.test", 3107)
            assert writer.get_extra_info("peername")[0] == peers.allowed.address
            writer.close()
            await writer.wait_closed()

        with Http(peers.loop, peers.allowed.address, 3107):
            run(work)

    def test_a_pin_is_its_tasks_own(self) -> None:
        async def work() -> None:
            async def pinning() -> None:
                pin(NAME, (PUBLIC,))

            await asyncio.create_task(pinning())
            with pytest.raises(socket.gaierror, match="vetted"):
                await asyncio.open_connection("name.test", 80)

        run(work)
