"""A service in a process of its own, as any user, that is killed, and one that starts after it.

`python -m tests.faults.service_process ROOT begin` has calls at every stage, says which, and stays; `… ROOT look` says
what is known of them. `… ROOT load` has call after call answered, and says so of each; `… ROOT ask` says what is known
of those in `asked.json`, and what their keys give. Owns: that. Must not: judge what it finds.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from pathlib import Path
from typing import Any

from sandbox import Executor, Settings
from sandbox.code_exec import CodeExecCall, Note
from sandbox.contract import CodeCall
from sandbox.owners import Caller
from sandbox.policy_file import parse_policy
from sandbox.service.service import Service

ME = Caller(admin=True)
HOLD = "import time\nprint('running', flush=True)\ntime.sleep(600)"
KEYED = CodeCall(language="python", code=HOLD, idempotency_key="key")


async def begin(service: Service) -> dict[str, Any]:
    """One that has ended, four that run, of which two can be told of, and two that wait."""
    first = await service.submit_code_exec(ME, CodeExecCall("import os\nos.mkdir('below')", background=True))
    await first.ended.wait()
    lives = {
        "detached": await service.submit_code_exec(ME, CodeExecCall(HOLD, background=True)),
        "below": await service.submit_code_exec(ME, CodeExecCall(HOLD, working_dir="below")),
        "keyed": await service.submit_call(ME, KEYED, background=True),
        "plain": await service.submit_call(ME, CodeCall(language="python", code=HOLD)),
    }
    for live in lives.values():
        async for event in live.feed.follow():
            if event.kind == "stdout":
                break
    lives |= {
        "waiting": await service.submit_code_exec(ME, CodeExecCall(HOLD, background=True)),
        "waiting, plain": await service.submit_call(ME, CodeCall(language="python", code=HOLD), background=True),
    }
    return {"ended": first.call_id} | {name: live.call_id for name, live in lives.items()}


async def look(service: Service) -> dict[str, Any]:
    """Everything that its owner can be told, twice where it is to be told once."""
    ids = [one.call_id for one in (await service.calls(ME)).calls]
    again = await service.submit_call(ME, KEYED)
    answer = await again.result()
    await again.ended.wait()
    fresh = await service.submit_code_exec(ME, CodeExecCall("import os\nprint(sorted(os.listdir()))"))
    return {
        "lost": [entry.call_id for entry in service.executor.lost],
        "records": {one: (await service.record(ME, one)).model_dump(mode="json") for one in ids},
        "notes": [[note.model_dump() for note in await service.take_notes(ME)] for _ in range(2)],
        "keyed": answer.model_dump(mode="json"),
        "listing": (await fresh.result()).stdout,
    }


def counting(key: str) -> CodeCall:
    """What it says is another thing each time that it is run."""
    return CodeCall(language="python", code="import uuid\nprint(uuid.uuid4())", idempotency_key=key)


async def load(service: Service) -> None:
    """Clients that have calls answered, some waited for and some detached, each with a key; for ever."""

    def say(**what: str) -> None:
        print(json.dumps(what), flush=True)

    async def client(name: int) -> None:
        for number in itertools.count():
            key = f"{service.executor.ledger.executor}-{name}-{number}"
            live = await service.submit_call(ME, counting(key), background=number % 2 == 0)
            if number % 2 == 0:
                say(accepted=live.call_id, key=key)
            result = await live.result()
            say(answered=result.call_id, key=key, stdout=result.stdout)

    await asyncio.gather(*(client(name) for name in range(8)))


async def ask(service: Service, root: Path) -> dict[str, Any]:
    """What is known of each call, and what its key gives."""
    found = {}
    for call_id, key in json.loads((root / "asked.json").read_text()):
        record = await service.record(ME, call_id)
        again = await (await service.submit_call(ME, counting(key))).result()
        found[call_id] = {"record": record.model_dump(mode="json"), "again": again.model_dump(mode="json")}
    return {"calls": found, "notes": [[note.task_id for note in await taken(service)] for _ in range(2)]}


async def taken(service: Service) -> list[Note]:
    """All that there are."""
    notes: list[Note] = []
    while some := await service.take_notes(ME):
        notes += some
    return notes


async def main(root: Path, what: str) -> None:
    settings = Settings(state_dir=root / "state", audit_log=root / "audit.jsonl", max_concurrency=4, warm_sandboxes=0)
    async with (
        Executor(parse_policy("version: 1\nname: tests\n"), settings=settings) as executor,
        Service(executor) as service,
    ):
        match what:
            case "begin":
                print(json.dumps(await begin(service)), flush=True)
                await asyncio.sleep(600)
            case "look":
                print(json.dumps(await look(service)))
            case "load":
                await load(service)
            case "ask":
                print(json.dumps(await ask(service, root)))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
