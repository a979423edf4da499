"""Two tenants at once, and two users of one: each tries everything with what is the other's, and sees nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from sandbox.code_exec import CodeExecCall
from sandbox.contract import ToolResult
from sandbox.owners import Caller
from sandbox.service.live import LiveCall
from sandbox.service.model import NotFound
from sandbox.service.service import Service
from tests.service.in_process import ALICE, BOB, HOLD, OTHER, Site, cancelled, ended, plain, policy, says, site

SECRET = "this is what only its owner may see"
OPERATORS = Caller("", "alice", admin=True)
CALLERS = {"acme/alice": ALICE, "acme/bob": BOB, "other/alice": OTHER, "the operator's alice": OPERATORS}
PAIRS = [(mine, theirs) for mine in CALLERS for theirs in CALLERS if mine != theirs]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    tenants = [
        {"name": "acme", "concurrency": 8, "network": {"allow": [{"host": "acme-only.example"}]}},
        {"name": "other", "concurrency": 8, "network": {"deny": [{"host": "other-only.example"}]}},
    ]
    network = {"modes": ["block-all", "named"], "allow": [{"host": "acme-only.example"}, {"host": "all.example"}]}
    loaded = policy(*tenants, network=network)
    with site(tmp_path_factory.mktemp("site"), loaded, max_concurrency=16) as here:
        yield here


@dataclass
class Belongings:
    """What one caller has: a call that has ended, a detached one that has, and one that runs; one is code_exec's."""

    done: LiveCall
    detached: LiveCall
    running: LiveCall

    @property
    def ids(self) -> list[str]:
        return [live.call_id for live in (self.done, self.detached, self.running)]


async def settle_in(service: Service, caller: Caller) -> Belongings:
    done = await service.submit_call(caller, plain(f"print({SECRET!r})"))
    detached = await service.submit_code_exec(
        caller, CodeExecCall(f"open('mine', 'w').write({SECRET!r})\nprint({SECRET!r})", background=True)
    )
    running = await service.submit_code_exec(caller, CodeExecCall(f"print({SECRET!r}, flush=True)\n{HOLD}"))
    await ended(done, detached)
    await says(running, "running")
    return Belongings(done, detached, running)


async def look_at(service: Service, caller: Caller, call_id: str) -> list[str]:
    """What a caller is told of an id, by every question that there is. Raises nothing but `NotFound`."""

    async def events() -> None:
        async for _ in service.events(caller, call_id):
            pass

    told = []
    for question in (
        service.record(caller, call_id), service.wait(caller, call_id, 5), service.cancel(caller, call_id),
        service.output(caller, call_id, "stdout"), service.output(caller, call_id, "stderr"), events(),
    ):  # fmt: skip
        with pytest.raises(NotFound) as refused:
            await question
        told.append(str(refused.value))
    return told


@pytest.mark.parametrize(("mine", "theirs"), PAIRS)
def test_nothing_of_anothers_is_seen_or_touched(here: Site, mine: str, theirs: str) -> None:
    """At once, in both directions: each id of the other's is answered word for word as one that never was."""

    async def scenario() -> None:
        service = here.service
        callers = CALLERS[mine], CALLERS[theirs]
        have = await asyncio.gather(*(settle_in(service, caller) for caller in callers))
        nowhere = "call-0000000000000000"

        async def pry(caller: Caller, others: Belongings) -> None:
            for call_id in others.ids:
                told = await look_at(service, caller, call_id)
                assert [text.replace(call_id, nowhere) for text in told] == await look_at(service, caller, nowhere)
            listed = {one.call_id for one in (await service.calls(caller, limit=200)).calls}
            listed |= {one.call_id for one in (await service.calls(caller, background=True, limit=200)).calls}
            assert not listed & set(others.ids)
            files = await service.submit_code_exec(
                caller, CodeExecCall("import os\nprint([os.path.join(a, x) for a, b, c in os.walk('/') for x in c"
                                     " if a.startswith(('/workspace', '/tmp')) and 'code_exec_' not in x])")
            )  # fmt: skip
            assert (await files.code_exec_result()).output == "['/workspace/mine']\n", "its own, and no other"
            await ended(files)

        await asyncio.gather(pry(callers[0], have[1]), pry(callers[1], have[0]))
        for caller, own in zip(callers, have, strict=True):
            assert own.running.answer is None, "it was cancelled by nobody"
            notes = await service.take_notes(caller)
            assert not {note.task_id for note in notes} & set(have[callers.index(caller) - 1].ids)
            assert (await service.record(caller, own.done.call_id)).result == await own.done.result()
            await cancelled(own.running)

    here.run(scenario())


def test_the_news_of_one_is_not_anothers(here: Site) -> None:
    """All ask at once, again and again: each has its own, once."""

    async def scenario() -> None:
        service = here.service
        for caller in CALLERS.values():
            await service.take_notes(caller)
        lives = {
            name: [await service.submit_call(caller, plain("print(1)"), background=True) for _ in range(3)]
            for name, caller in CALLERS.items()
        }
        await ended(*(live for one in lives.values() for live in one))
        taken = await asyncio.gather(*(service.take_notes(caller) for caller in CALLERS.values() for _ in range(5)))
        for place, name in enumerate(CALLERS):
            told = [note.task_id for notes in taken[place * 5 : place * 5 + 5] for note in notes]
            assert sorted(told) == sorted(live.call_id for live in lives[name])

    here.run(scenario())


def test_the_same_idempotency_key_is_another_key_for_everyone(here: Site) -> None:
    """All at once, with the same request or another: each is run for itself, none is told of a conflict."""

    async def scenario() -> None:
        service = here.service
        code = "import uuid\nprint(uuid.uuid4())"

        async def run(caller: Caller, text: str) -> ToolResult:
            live = await service.submit_call(caller, plain(text, idempotency_key="the same"))
            result = await live.result()
            await ended(live)
            return result

        first = await asyncio.gather(*(run(caller, code) for caller in CALLERS.values()))
        assert [result.error for result in first] == [None] * 4
        assert len({result.stdout for result in first}) == len({result.call_id for result in first}) == 4
        again = await asyncio.gather(*(run(caller, code) for caller in CALLERS.values()))
        assert again == first, "the control: one's own key has one's own answer"
        conflicts = await asyncio.gather(*(run(caller, "print(2)") for caller in CALLERS.values()))
        for result, own in zip(conflicts, first, strict=True):
            assert result.error is not None
            assert own.call_id in result.error.message
            assert not any(other.call_id in result.error.message for other in first if other is not own)

    here.run(scenario())


def test_an_admin_of_a_tenant_sees_no_more_calls_than_its_user(here: Site) -> None:
    """To be an admin is about directories. Another directory changes nothing of it, either."""

    async def scenario() -> None:
        service = here.service
        live = await service.submit_call(BOB, plain("print(1)"))
        await ended(live)
        admin = Caller("acme", "alice", admin=True, directory=Path("/srv"))
        await look_at(service, admin, live.call_id)
        same = Caller("acme", "bob", admin=True)
        assert (await service.record(same, live.call_id)).call_id == live.call_id

    here.run(scenario())


def test_an_explanation_is_of_ones_own_policy(here: Site) -> None:
    """The rules of other tenants are not in it, neither those that allow nor those that deny."""

    async def scenario() -> None:
        service = here.service
        for caller, host, verdict in (
            (ALICE, "acme-only.example", "allow"), (ALICE, "other-only.example", "refused"),
            (ALICE, "all.example", "refused"), (OTHER, "acme-only.example", "allow"),
            (OTHER, "other-only.example", "refused"), (OPERATORS, "all.example", "allow"),
        ):  # fmt: skip
            found = await service.explain(caller, f"https://{host}/", allow_network=True, domains=[host])
            assert found.verdict == verdict, found
            said = found.model_dump_json().replace(host, "")
            for name, theirs in (("acme", OTHER), ("other", ALICE)):
                assert caller != theirs or f"tenants.{name}" not in said
            assert caller is not OPERATORS or "tenants." not in said

    here.run(scenario())


def test_a_result_names_no_tenant_but_its_own(here: Site) -> None:
    """What a refused call is told of the rule."""

    async def scenario() -> None:
        for caller, own, theirs, host in (
            (ALICE, "acme", "other", "all.example"), (OTHER, "other", "acme", "other-only.example"),
        ):  # fmt: skip
            call = plain("1", allow_network=True, domains=[host])
            live = await here.service.submit_call(caller, call)
            result = await live.result()
            assert result.error is not None
            assert result.error.code == "policy_refused"
            assert f"tenants.{theirs}" not in result.model_dump_json()
            assert result.error.rule is not None
            assert result.error.rule.startswith((f"tenants.{own}", "network."))

    here.run(scenario())
