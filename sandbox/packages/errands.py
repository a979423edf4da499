"""The errands of a preparation: each is one job of a sandbox of its own, and comes back as values.

Owns: the jobs that `inside` does, as they are written, and the grant of each. Must not: judge what comes back.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from proxy.network import Grant
from proxy.packages.facts import read_message
from proxy.packages.judge import PolicyData
from proxy.packages.model import Ecosystem, Specifier, parse_name
from proxy.packages.pages import InvalidPage, read_page, read_time
from proxy.packages.policy import PackagePolicy
from proxy.packages.requests import Registry, page_target
from sandbox.isolation.plan import PACKAGES
from sandbox.packages import resolve_npm, resolve_python
from sandbox.packages.chamber import Chamber, ChamberFailed, Spool
from sandbox.packages.diagnosis import Page
from sandbox.packages.locked import LockedArtifact
from sandbox.packages.platforms import Platform
from sandbox.packages.receive import receive
from sandbox.packages.specifiers import installer_argument
from sandbox.packages.unpack import Bounds
from sandbox.runtimes import python

_MAX_REPORT_BYTES = 64 * 1024 * 1024
_OVERHEAD = 1.1  # what the outlet adds
_ACCEPT = {Ecosystem.PYPI: "application/vnd.pypi.simple.v1+json", Ecosystem.NPM: "application/json"}


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be prepared, and for whom. `grant` is for reading the registry, filtered: its `packages` is set.

    `specifiers` have been screened. The grant's attempt id is the start of those of the preparation's sandboxes.
    """

    registry: Registry
    specifiers: tuple[Specifier, ...]
    grant: Grant
    policy: PackagePolicy
    data: PolicyData

    @property
    def ecosystem(self) -> Ecosystem:
        return self.registry.ecosystem


@dataclass(frozen=True, slots=True)
class Resolved:
    """What a resolver answered: its lock, if it found one, and what it said."""

    lock: str | None
    said: str


async def in_thread[**P, T](function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run in a thread, and to its end even if nobody waits for it any more: it works in directories that then go."""
    work = asyncio.create_task(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.gather(work, return_exceptions=True)
        raise


class Errands:
    """What one preparation has done for it. `scratch` is a directory for files without a name."""

    def __init__(self, wanted: Wanted, platform: Platform, chamber: Chamber, scratch: Path) -> None:
        self._wanted, self._platform, self._chamber, self._scratch = wanted, platform, chamber, scratch
        self._runs = 0

    async def resolve(self) -> Resolved:
        """Have the ecosystem's own resolver choose files, from the filtered registry."""
        report = await self._report(self._resolve_job(), filtered=True)
        said = str(report["message"])
        if report["exit"] != 0 and resolve_npm.REMOTE_OFF in said:
            report = await self._report(self._resolve_job(by_url=True), filtered=True)
            said += "\n" + str(report["message"])
        return Resolved(str(report["lock"]) if report["exit"] == 0 else None, said)

    async def known(self, wanted: Mapping[str, Sequence[str]]) -> dict[str, Page]:
        """What the proxy has read, for the resolver, of these files of projects. It may leave out projects."""
        registry = self._wanted.registry
        told = await self._chamber.proxy.facts(self._grant(filtered=True), registry.id, wanted)
        found: dict[str, Page] = {}
        for name in wanted.keys() & told.keys():
            package, files = read_message(parse_name(registry.ecosystem, name), told[name])
            found[name] = Page(package, files)
        return found

    async def pages(self, wanted: Mapping[str, Sequence[str] | None]) -> dict[str, Page]:
        """What the registry says of projects, unfiltered: of the files (npm: versions) named, or of all."""
        registry, names = self._wanted.registry, list(wanted)
        index = registry.index
        root = str(replace(index, path="/")).rstrip("/")
        parsed = [parse_name(registry.ecosystem, name) for name in names]
        questions = [
            {
                "kind": str(registry.ecosystem),
                "url": root + page_target(registry, name),
                "accept": _ACCEPT[registry.ecosystem],
                "wanted": wanted[name.normal],
            }
            for name in parsed
        ]
        report = await self._report(
            {"op": "facts", "questions": questions, "authority": self._authority}, filtered=False
        )
        return {
            name.normal: self._page(name.normal, answer) for name, answer in zip(parsed, report["answers"], strict=True)
        }

    def _page(self, name: str, answer: Mapping[str, Any]) -> Page:
        if answer["status"] != 200:
            return Page(status=answer["status"], message=str(answer.get("message", "")))
        registry = self._wanted.registry
        try:
            page = read_page(registry, parse_name(registry.ecosystem, name), answer["page"])
        except InvalidPage as error:
            return Page(status=None, message=f"the registry's page of `{name}`: {error}")
        first = read_time(answer.get("first")) or page.package.first_published
        tags = answer["page"].get("dist-tags")
        return Page(
            package=replace(page.package, first_published=first),
            files=tuple(listed.facts for listed in page.files.values()),
            tags={str(tag): str(version) for tag, version in tags.items()} if isinstance(tags, dict) else None,
        )

    async def fetch(self, artifacts: Sequence[LockedArtifact], spool: Spool, bounds: Bounds) -> None:
        """Have artifacts fetched and unpacked, each a stream of the spool, in this order."""
        is_python = self._wanted.ecosystem is Ecosystem.PYPI
        job = {
            "op": "fetch",
            "authority": self._authority,
            "artifacts": [
                {
                    "url": one.url,
                    "algorithm": one.algorithm,
                    "digest": one.digest,
                    "kind": "wheel" if is_python else "tarball",
                    "prefix": PACKAGES if is_python and self._chamber.bytecode else None,
                    "max_bytes": min(bounds.bytes, self._chamber.workspace_bytes),
                    "bounds": {"files": bounds.files, "bytes": bounds.bytes, "ratio": bounds.ratio},
                }
                for one in artifacts
            ],
        }
        # Bytecode is about as large as its source.
        await self._run(job, spool, filtered=True, max_bytes=int(bounds.bytes * 2 * _OVERHEAD))

    def _resolve_job(self, *, by_url: bool = False) -> dict[str, object]:
        index = str(self._wanted.registry.index)
        runtime = python.environment(self._chamber.interpreter)
        arguments = tuple(map(installer_argument, self._wanted.specifiers))
        if self._wanted.ecosystem is Ecosystem.PYPI:
            return {
                "op": "resolve",
                "directories": [resolve_python.HOME, resolve_python.EMPTY],
                "files": {},
                "cwd": resolve_python.EMPTY,
                "argv": resolve_python.uv_argv(index=index, interpreter=self._chamber.interpreter.executable),
                "environment": resolve_python.uv_environment(runtime, authority=self._authority),
                "stdin": resolve_python.uv_input(arguments),
                "lock": None,
            }
        pairs = [(one.name.normal, one.selector.text or "*") for one in self._wanted.specifiers]
        return {
            "op": "resolve",
            "directories": [resolve_npm.HOME, resolve_npm.PROJECT],
            "files": {f"{resolve_npm.PROJECT}/package.json": resolve_npm.npm_project(pairs)},
            "cwd": resolve_npm.PROJECT,
            "argv": resolve_npm.npm_argv(
                registry=index, node=self._platform.node, npm=self._platform.npm, by_url=by_url
            ),
            "environment": resolve_npm.npm_environment(runtime, authority=self._authority),
            "stdin": "",
            "lock": f"{resolve_npm.PROJECT}/package-lock.json",
        }

    @property
    def _authority(self) -> str:
        """The certificate of the proxy's own authority, in the sandbox."""
        return python.environment(self._chamber.interpreter)["NODE_EXTRA_CA_CERTS"]

    def _grant(self, *, filtered: bool) -> Grant:
        base = self._wanted.grant
        return base.model_copy(
            update={
                "attempt_id": f"{base.attempt_id}.prepare{self._runs}",
                # What the registry itself says is asked for without the filter, which makes what is refused look like
                # what is not there. The layers still hold: the registry's hosts, and reading.
                "packages": base.packages if filtered else None,
                "passthrough": (),  # so that each of its requests is in the log
            }
        )

    async def _run(self, job: Mapping[str, object], spool: Spool, *, filtered: bool, max_bytes: int) -> None:
        self._runs += 1
        await self._chamber.run(job, self._grant(filtered=filtered), spool, max_bytes=max_bytes)

    async def _report(self, job: Mapping[str, object], *, filtered: bool) -> dict[str, Any]:
        with self._chamber.spool(self._scratch) as spool:
            await self._run(job, spool, filtered=filtered, max_bytes=_MAX_REPORT_BYTES)
            report = json.loads(await in_thread(receive, spool.pieces(), ()))
        if not isinstance(report, dict):
            raise ChamberFailed("the report is of no known form")
        return report
