"""One proxy process and one set of peers for each module of tests."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.proxy.rig import Peers, Rig
from tests.servers import Loop


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="sg-") as path:
        yield Path(path)


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    with Loop() as loop:
        yield loop


@pytest.fixture(scope="module")
def peers(loop: Loop, directory: Path) -> Iterator[Peers]:
    peers = Peers(loop, directory)
    yield peers
    peers.close()


@pytest.fixture(scope="module")
def rig(directory: Path, peers: Peers) -> Iterator[Rig]:
    rig = Rig(directory, peers.ca_file)
    yield rig
    rig.close()
    assert rig.complaints() == []


@pytest.fixture(autouse=True)
def _no_clients_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a test has opened is closed after it: an attempt has a limit."""
    yield
    if "rig" in request.fixturenames:
        request.getfixturevalue("rig").close_clients()
