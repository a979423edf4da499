"""What the service has on the host is in no client's directory, under the policy that is in force."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import certifi
import pytest

from sandbox import Executor, Settings
from sandbox.code_exec import CodeExecCall, CodeExecResult, shown
from sandbox.owners import Caller
from sandbox.policy_file import LoadedPolicy, load_policy
from sandbox.service.guarded import places_of
from sandbox.service.model import PlaceRefused
from sandbox.service.service import Service
from tests.service.in_process import cancelled, says


@pytest.fixture
def host(tmp_path: Path) -> Path:
    for name in ("projects/one", "projects/two", "real", "state", "packages"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path


def write(host: Path, **network: object) -> Path:
    policy = {
        "version": 1, "name": "guarded", "network": {"modes": ["block-all"], **network},
        "code_exec": {"working_directories": [str(host / "projects")]},
    }  # fmt: skip
    (host / "real/policy.yaml").write_text(json.dumps(policy))
    return host / "real/policy.yaml"


@contextlib.asynccontextmanager
async def serving(host: Path, loaded: LoadedPolicy) -> AsyncIterator[Service]:
    settings = Settings(state_dir=host / "state", python_packages=host / "packages")
    async with Executor(loaded, settings=settings) as executor, Service(executor) as service:
        yield service


async def is_refused(service: Service, directory: Path) -> bool:
    try:
        live = await service.submit_code_exec(Caller("", "me", True, directory), CodeExecCall("print(1)"))
    except PlaceRefused as error:
        return error.code == "working_directory_refused"
    assert (await live.code_exec_result()).success
    return False


def test_the_policys_own_place_is_no_clients_directory(host: Path) -> None:
    """Where a link in a client's directory is the policy, it could be made to be another."""
    write(host)
    (host / "projects/one/policy.yaml").symlink_to("../../real/policy.yaml")

    async def scenario() -> None:
        async with serving(host, load_policy(host / "projects/one/policy.yaml")) as service:
            assert await is_refused(service, host / "projects/one")
            assert await is_refused(service, host / "projects")
            assert not await is_refused(service, host / "projects/two")

    asyncio.run(scenario())


def test_what_a_policy_that_is_loaded_anew_names_is_protected_from_then_on(host: Path) -> None:
    """And what the one before named is not any more; a call that runs there is ended."""
    loaded = load_policy(write(host))
    (host / "projects/one/policy.yaml").write_text((host / "real/policy.yaml").read_text())

    async def scenario() -> None:
        async with serving(host, replace(loaded, path=None)) as service:
            assert not await is_refused(service, host / "projects/one")
            caller = Caller("", "me", True, host / "projects/one")
            code = "print('up', flush=True)\nimport time; time.sleep(60)"
            running = await service.submit_code_exec(caller, CodeExecCall(code))
            elsewhere = await service.submit_code_exec(
                replace(caller, directory=host / "projects/two"), CodeExecCall(code)
            )
            await says(running, "up")
            await says(elsewhere, "up")
            await service.reload(load_policy(host / "projects/one/policy.yaml"))
            assert await is_refused(service, host / "projects/one")
            assert (await running.code_exec_result()).error == "cancelled"
            assert elsewhere.state == "running"
            await cancelled(elsewhere)
            await service.reload(replace(loaded, path=None))
            assert not await is_refused(service, host / "projects/one")

    asyncio.run(scenario())


def test_all_that_sandboxes_are_shown_and_the_service_keeps_is_among_the_places(host: Path) -> None:
    (host / "projects/one/ca.pem").write_bytes(Path(certifi.where()).read_bytes())
    loaded = load_policy(write(host, upstream={"ca_file": str(host / "projects/one/ca.pem")}))

    executor = Executor(loaded, settings=Settings(state_dir=host / "state", python_packages=host / "packages"))
    found = {place.path for place in places_of(executor, [host / "run/s.sock"])}
    wanted = {
        host / "projects/one/ca.pem", host / "real/policy.yaml", host / "state/audit.jsonl", host / "packages",
        host / "run/s.sock", *executor.readable,
    }  # fmt: skip
    assert found == wanted
    assert executor.readable, "the control: there is Node.js at least"


def test_who_has_filled_a_directory_is_told_makes_room_and_goes_on(host: Path) -> None:
    """With every answer, until there is room; nobody has to be asked for it."""
    policy = json.loads(write(host).read_text())
    policy["code_exec"]["user_data"] = {"max_mib": 2, "max_files": 100}
    (host / "real/policy.yaml").write_text(json.dumps(policy))
    me = Caller("", "me")

    async def scenario() -> None:
        async with serving(host, load_policy(host / "real/policy.yaml")) as service:

            async def run(code: str) -> CodeExecResult:
                return await (await service.submit_code_exec(me, CodeExecCall(code))).code_exec_result()

            filled = await run("for n in range(3): open(f'f{n}', 'wb').write(b'x' * 1_500_000)\nprint('written')")
            assert (filled.success, filled.error) == (False, "disk")
            told = await run("open('more', 'w')")
            assert (told.success, told.error, told.working_dir.replaced) == (False, "exit", False)
            assert told.working_dir.reason is not None
            assert told.working_dir.reason.startswith("user_data_full: the working directory holds more than 2 MiB")
            assert "user_data_full" in shown(told)
            freed = await run("import os\nfor n in os.listdir(): os.unlink(n)\nprint(os.listdir())")
            assert (freed.success, freed.output) == (True, "[]\n")
            after = await run("open('more', 'w').write('again')")
            assert (after.success, after.working_dir.reason) == (True, None)

    asyncio.run(scenario())
