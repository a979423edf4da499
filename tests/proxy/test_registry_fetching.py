"""What a registry's answers can do to the proxy that reads them: nothing but fail, in words."""

from __future__ import annotations

import gzip
import json
import select
import time
import zlib
from asyncio import StreamWriter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from proxy.network import Grant, Mode, PrivateAddress
from proxy.packages.model import Ecosystem
from proxy.packages.policy import PackagePolicy
from proxy.packages.requests import Registry, RegistryGrant, parse_base
from tests import world
from tests.proxy.rig import Answer, Attempt, Rig, ask, get, grant, read_answer, read_to_end, rule
from tests.servers import Https, Loop, SeenRequest, write_authority

JSON = "application/vnd.pypi.simple.v1+json"
MIB = 1 << 20
HOLD = b"(hold)"
CLOSE = b"(close)"


class Raw(Https):
    """An HTTPS server that answers each path with the bytes that a test has put there. At `HOLD` it waits, at `CLOSE` it closes."""

    def __init__(self, loop: Loop, authority: trustme.CA, address: str = "") -> None:
        self.answers: dict[str, Callable[[SeenRequest], list[bytes]]] = {}
        super().__init__(loop, address or world.public_address(), 443, authority, ["raw.test"])

    async def _answer(self, seen: SeenRequest, writer: StreamWriter) -> None:
        for piece in self.answers[seen.target](seen):
            if piece is HOLD:
                await self._released.wait()
                continue
            if piece is CLOSE:
                writer.close()
                return
            writer.write(piece)
            await writer.drain()


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def raw(loop: Loop, authority: trustme.CA) -> Iterator[Raw]:
    with Raw(loop, authority) as server:
        yield server


@pytest.fixture(scope="module")
def rig(directory: Path, authority: trustme.CA) -> Iterator[Rig]:
    """Pages are stale at once, so that every request asks the registry."""
    code = "from proxy.packages import registry; registry._FRESH_SECONDS = 0.0; from proxy import server; server.main()"
    rig = Rig(directory, write_authority(authority, directory / "ca.pem"), code)
    yield rig
    rig.close()
    assert rig.complaints() == []


def granted(*addresses: str, ecosystem: Ecosystem = Ecosystem.PYPI, **more: Any) -> Grant:
    one = Registry(id="registries.python[0]", ecosystem=ecosystem, index=parse_base("https://raw.test/simple/"))
    return grant(
        rule("raw.test", 443, methods=("GET", "HEAD"), subdomains=False),
        mode=Mode.REGISTRY_DEFAULT,
        hosts={"raw.test": addresses[0]},
        packages=RegistryGrant(registries=(one,), policy=PackagePolicy()),
        **more,
    )


@pytest.fixture
def attempt(rig: Rig, raw: Raw) -> Iterator[Attempt]:
    raw.forget()
    with rig.explicit(granted(raw.address)) as attempt:
        yield attempt


def page(name: str, *files: str) -> bytes:
    entries = [
        {"filename": one, "url": f"/files/{one}", "hashes": {}, "upload-time": "2020-01-01T00:00:00Z"} for one in files
    ]
    return json.dumps({"meta": {"api-version": "1.1"}, "name": name, "files": entries}).encode()


def response(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def read(attempt: Attempt, name: str, *headers: str) -> Answer:
    sock = attempt.https("raw.test")
    return ask(sock, get("raw.test", f"/simple/{name}/", f"Accept: {JSON}", "Connection: close", *headers))


def filenames(answer: Answer) -> list[str]:
    assert answer.status == 200, answer
    return [one["filename"] for one in answer.json["files"]]


GOOD = page("foo", "foo-1.0-py3-none-any.whl")


@pytest.mark.parametrize(
    "pieces",
    [
        [response(GOOD)],
        [response(gzip.compress(GOOD), "Content-Encoding: gzip")],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(GOOD), GOOD)],
        [b"HTTP/1.1 103 Early Hints\r\n\r\n", response(GOOD)],
        [b"HTTP/1.0 200 OK\r\n\r\n" + GOOD, CLOSE],
        [response(GOOD)[:40], response(GOOD)[40:]],
    ],
    ids=["plain", "gzip", "chunked", "early-hints", "http-1.0", "in-two-pieces"],
)
def test_a_page_is_read_however_it_is_sent(pieces: list[bytes], attempt: Attempt, raw: Raw) -> None:
    raw.answers["/simple/foo/"] = lambda seen: pieces
    assert filenames(read(attempt, "foo")) == ["foo-1.0-py3-none-any.whl"]
    (seen,) = raw.journal.requests
    assert {name.lower() for name, _ in seen.headers} == {
        "host", "user-agent", "accept", "accept-encoding",
    }  # fmt: skip


def zeros(size: int) -> bytes:
    """That many zeros, compressed: a thousandth of it."""
    packer = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS | 16)
    return b"".join(packer.compress(bytes(MIB)) for _ in range(size // MIB)) + packer.flush()


@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        ([response(zeros(80 * MIB), "Content-Encoding: gzip")], "larger than 64 MiB"),
        ([b"HTTP/1.1 200 OK\r\n\r\n", *([bytes(MIB)] * 65)], "larger than 64 MiB"),
        ([response(gzip.compress(GOOD)[:-4], "Content-Encoding: gzip")], "not whole"),
        ([response(gzip.compress(GOOD) + b"x", "Content-Encoding: gzip")], "not whole"),
        ([response(GOOD, "Content-Encoding: gzip")], "cannot be read"),
        ([response(GOOD, "Content-Encoding: br")], "an encoding that it was not asked for"),
        ([response(b"", "Location: https://rogue.test/", status="302 Found")], "status 302"),
        ([response(b"", status="500 Oops")], "status 500"),
        ([response(b"", status="304 Not Modified")], "status 304"),
        ([response(b"<html></html>")], "not JSON"),
        ([response(page("bar"))], "not of `foo`"),
        ([b"nonsense\r\n\r\n"], "is not HTTP/1.1, or not whole"),
        ([b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000], "is not HTTP/1.1, or not whole"),
        ([response(GOOD)[:-1], CLOSE], "is not HTTP/1.1, or not whole"),
        ([b"HTTP/1.1 200 OK\r\n", CLOSE], "closed the connection"),
        ([CLOSE], "closed the connection"),
    ],
    ids=[
        "bomb", "endless", "cut-gzip", "more-than-gzip", "no-gzip", "brotli", "redirect", "error", "304", "html", "other",
        "nonsense", "large-head", "cut", "cut-head", "nothing",
    ],
)  # fmt: skip
def test_what_can_not_be_read_is_a_failure_with_its_cause(
    pieces: list[bytes], why: str, attempt: Attempt, raw: Raw
) -> None:
    """For a page 502 and no denial; for a file, of which then nothing is known, a denial."""
    raw.answers["/simple/foo/"] = lambda seen: pieces
    answer = read(attempt, "foo")
    assert (answer.status, answer.code) == (502, "registry_unavailable")
    assert answer.json["reason"].startswith("the page of `foo` cannot be read: ")
    assert why in answer.json["reason"]
    sock = attempt.https("raw.test")
    answer = ask(sock, get("raw.test", "/files/foo-1.0-py3-none-any.whl"))
    assert (answer.status, answer.code) == (403, "package_facts_unavailable")
    attempt.end()
    assert attempt.denials() == ["package_facts_unavailable"]
    assert [one["error"].partition(":")[0] for one in attempt.events(event="connection")] == ["registry_unavailable"]


def test_a_page_that_is_kept_is_asked_for_again_with_its_validator(attempt: Attempt, raw: Raw) -> None:
    """The registry's own, which no client sees; what has changed is taken."""
    current = [GOOD, '"one"']

    def answer(seen: SeenRequest) -> list[bytes]:
        if seen.header("if-none-match") == current[1]:
            return [b"HTTP/1.1 304 Not Modified\r\n\r\n"]
        assert isinstance(current[0], bytes)
        return [response(current[0], f"ETag: {current[1]}")]

    raw.answers["/simple/foo/"] = answer
    first = read(attempt, "foo")
    assert first.headers["etag"] != '"one"'
    assert read(attempt, "foo").body == first.body
    assert read(attempt, "foo", f"If-None-Match: {first.headers['etag']}").status == 304
    current[:] = [page("foo", "foo-1.0-py3-none-any.whl", "foo-1.1-py3-none-any.whl"), '"two"']
    changed = read(attempt, "foo", f"If-None-Match: {first.headers['etag']}")
    assert filenames(changed) == ["foo-1.0-py3-none-any.whl", "foo-1.1-py3-none-any.whl"]
    assert [seen.header("if-none-match") for seen in raw.journal.requests] == [None, '"one"', '"one"', '"one"']


def test_a_validator_that_is_none_is_not_sent_back(attempt: Attempt, raw: Raw) -> None:
    raw.answers["/simple/odd/"] = lambda seen: [response(page("odd"), 'ETag: "a\tb"')]
    for _ in range(2):
        assert read(attempt, "odd").status == 200
    assert [seen.header("if-none-match") for seen in raw.journal.requests] == [None, None]


def test_a_registry_is_dialled_where_the_policy_lets_it_be(rig: Rig, loop: Loop, authority: trustme.CA) -> None:
    """The proxy's own request too: a registry at an address that is not public needs the operator's permission."""
    with Raw(loop, authority, "127.0.0.9") as private:
        private.answers["/simple/foo/"] = lambda seen: [response(GOOD)]
        with rig.explicit(granted("127.0.0.9")) as attempt:
            for path in ("/simple/foo/", "/files/foo-1.0-py3-none-any.whl"):
                answer = ask(attempt.https("raw.test"), get("raw.test", path, "Connection: close"))
                assert (answer.status, answer.code) == (403, "address_not_public")
            counts = attempt.end()
            assert (counts.allowed, counts.denied) == (0, 2)
            assert attempt.denials() == ["address_not_public"] * 2
        assert private.untouched
        permitted = PrivateAddress(id="private", registries=True, cidr="127.0.0.9/32")  # type: ignore[arg-type]  # text is read
        with rig.explicit(granted("127.0.0.9", private_addresses=(permitted,))) as attempt:
            assert filenames(read(attempt, "foo")) == ["foo-1.0-py3-none-any.whl"]
            assert [(one["host"], one["rule"]) for one in attempt.events(layer="dial")] == [("raw.test", "private")]


def test_a_registry_with_a_certificate_of_somebody_else_is_not_read(rig: Rig, loop: Loop) -> None:
    with Raw(loop, trustme.CA()) as stranger:
        stranger.answers["/simple/foo/"] = lambda seen: [response(GOOD)]
        with rig.explicit(granted(stranger.address)) as attempt:
            answer = read(attempt, "foo")
        assert (answer.status, answer.code) == (502, "registry_unavailable")
        assert "certificate" in answer.json["reason"]
        assert stranger.journal.requests == []


def test_npm_names_are_asked_for_as_npm_does(rig: Rig, raw: Raw) -> None:
    raw.forget()
    raw.answers["/simple/@s%2fn"] = lambda seen: [response(b'{"name": "@s/n", "versions": {}, "time": {}}')]
    with rig.explicit(granted(raw.address, ecosystem=Ecosystem.NPM)) as attempt:
        answer = ask(attempt.https("raw.test"), get("raw.test", "/simple/@s/n", "Accept: x/y"))
    assert answer.status == 200
    assert [seen.header("accept") for seen in raw.journal.requests] == ["application/json"]


def test_what_one_attempt_may_not_dial_another_is_not_refused(rig: Rig, raw: Raw) -> None:
    """Two attempts with one policy, at two addresses of the registry, are two: nothing kept of one is shown to the other."""
    raw.answers["/simple/foo/"] = lambda seen: [response(GOOD)]
    with rig.explicit(granted(raw.address)) as one, rig.explicit(granted("127.0.0.9")) as other:
        assert filenames(read(one, "foo")) == ["foo-1.0-py3-none-any.whl"]
        assert read(other, "foo").code == "address_not_public"
        assert filenames(read(one, "foo")) == ["foo-1.0-py3-none-any.whl"]


def test_a_request_that_is_given_up_leaves_its_line_and_hinders_nobody(rig: Rig, raw: Raw) -> None:
    """The page goes on being read for the other attempt that waits for it, though the first one is over."""
    raw.forget()
    raw.answers["/simple/slow/"] = lambda seen: [HOLD, response(page("slow"))]
    one, other = granted(raw.address), granted(raw.address)
    request = get("raw.test", "/simple/slow/", f"Accept: {JSON}")
    with rig.explicit(other) as waiting:
        with rig.explicit(one) as first:
            gone = first.https("raw.test")
            gone.sendall(request)
            raw.wait(lambda journal: len(journal.requests) == 1)
            sock = waiting.https("raw.test")
            sock.sendall(request)
            gone.close()
            first.end()
            (end,) = first.events(event="connection")
            assert (end["outcome"], end["path"]) == ("aborted", "/simple/slow/")
        raw.release()
        assert filenames(read_answer(sock)) == []
    assert len(raw.journal.requests) == 1


def test_while_a_large_page_is_read_others_are_answered(rig: Rig, raw: Raw) -> None:
    """Thirty thousand files take a second or two of one thread. Meanwhile small requests take milliseconds each."""
    raw.answers["/simple/large/"] = lambda seen: [
        response(page("large", *(f"large-{number}.0-py3-none-any.whl" for number in range(30_000))))
    ]
    raw.answers["/simple/foo/"] = lambda seen: [response(GOOD)]
    with rig.explicit(granted(raw.address)) as attempt:
        busy, quick = attempt.https("raw.test"), attempt.https("raw.test")
        for sock in (busy, quick):  # what TLS sends by itself is read with it
            assert ask(sock, get("raw.test", "/simple/foo/")).status == 200
        busy.sendall(get("raw.test", "/simple/large/", f"Accept: {JSON}"))
        raw.wait(lambda journal: any(seen.target == "/simple/large/" for seen in journal.requests))
        slowest, count = 0.0, 0
        while not select.select([busy], [], [], 0)[0]:
            before = time.monotonic()
            assert ask(quick, get("raw.test", "/simple/foo/")).status == 200
            slowest, count = max(slowest, time.monotonic() - before), count + 1
        assert len(filenames(read_answer(busy))) == 30_000
    assert count > 10
    assert slowest < 1.0


def test_a_connection_is_used_again_and_one_that_was_closed_is_not_missed(rig: Rig, raw: Raw) -> None:
    """By attempts with the same grant alone. What a server sends unasked on an idle one is not taken for an answer."""
    raw.forget()
    raw.answers["/simple/foo/"] = lambda seen: [response(GOOD)]
    raw.answers["/simple/closed/"] = lambda seen: [response(page("closed"), "Connection: close")]
    raw.answers["/simple/more/"] = lambda seen: [response(page("more")) + response(page("foo"))]
    with (
        rig.explicit(granted(raw.address, max_connections=97)) as attempt,
        rig.explicit(granted(raw.address, max_connections=99)) as other,
    ):
        for _ in range(3):
            assert filenames(read(attempt, "foo")) == ["foo-1.0-py3-none-any.whl"]
        assert raw.journal.connections == 1
        assert read(other, "foo").status == 200
        assert raw.journal.connections == 2
        for name in ("closed", "foo", "more", "foo"):
            assert read(attempt, name).status == 200
        assert filenames(read(attempt, "foo")) == ["foo-1.0-py3-none-any.whl"]
        assert [seen.connection for seen in raw.journal.requests] == [1, 1, 1, 2, 1, 3, 3, 4, 4]
        dials = attempt.events(layer="dial", decision="allow")
        assert len(dials) == 3


def test_a_server_that_ends_an_idle_connection_is_dialled_again(rig: Rig, raw: Raw) -> None:
    raw.forget()
    raw.answers["/simple/foo/"] = lambda seen: [response(GOOD)]
    raw.answers["/simple/gone/"] = lambda seen: [response(page("gone")), CLOSE]
    with rig.explicit(granted(raw.address, max_connections=98)) as attempt:
        assert read(attempt, "gone").status == 200
        assert read(attempt, "foo").status == 200
        assert [seen.connection for seen in raw.journal.requests] == [1, 2]


def test_a_page_that_is_being_read_is_given_up_when_the_registry_is_not_allowed_any_more(
    attempt: Attempt, raw: Raw
) -> None:
    """For good, and at once: the registry's connection has ended when the amendment is in force."""
    raw.answers["/simple/slow/"] = lambda seen: [HOLD, response(page("slow"))]
    sock = attempt.https("raw.test")
    sock.sendall(get("raw.test", "/simple/slow/", f"Accept: {JSON}"))
    raw.wait(lambda journal: len(journal.requests) == 1)
    attempt.amend(None)
    raw.release()
    raw.wait(lambda journal: journal.open == 0)
    assert read_to_end(sock) == b""
    assert read(attempt, "slow").code == "policy_revoked"
    assert len(raw.journal.requests) == 1


def test_a_page_that_is_being_read_is_asked_for_again_when_it_is_allowed_still(attempt: Attempt, raw: Raw) -> None:
    """What is read is judged by what holds when it is read; who asked for it waits, and is not cut."""
    raw.answers["/simple/slow/"] = lambda seen: [HOLD, response(page("slow"))]
    sock = attempt.https("raw.test")
    sock.sendall(get("raw.test", "/simple/slow/", f"Accept: {JSON}"))
    raw.wait(lambda journal: len(journal.requests) == 1)
    attempt.amend(attempt.grant.model_copy(update={"max_connections": 5}))
    raw.wait(lambda journal: len(journal.requests) == 2)
    raw.release()
    assert read_answer(sock).json["name"] == "slow"
    assert attempt.denials() == []
