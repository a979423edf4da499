"""Every escape test runs twice: by an executor of the user who runs the tests, and by one of an unprivileged user's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.lab import Lab, Outside, Run
from tests.remote import RemoteLab

type Confined = Callable[..., Run]


@pytest.fixture(scope="session")
def unprivileged_lab(outside: Outside, packages: Path) -> Iterator[RemoteLab]:
    from tests.unprivileged import unprivileged_command

    with unprivileged_command() as prefix, RemoteLab(prefix, outside, packages) as lab:
        yield lab


@pytest.fixture(params=["as-we-are", "unprivileged"])
def confined(request: pytest.FixtureRequest) -> Confined:
    """Runs a probe in a sandbox."""
    if request.param == "unprivileged":
        if os.getuid() != 0:
            pytest.skip("the tests already run as an unprivileged user")
        remote: RemoteLab = request.getfixturevalue("unprivileged_lab")
        return remote.run
    lab: Lab = request.getfixturevalue("lab")
    return lab.run
