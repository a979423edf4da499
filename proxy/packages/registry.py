"""Registries as an attempt sees them: pages without what the policy forbids, and files that it allows.

Theory of operation. Every request to a registry's host ends up in `answer`, after it was allowed as a request:

    recognised?      no: denied                                  `requests`
    name allowed?    no: denied                                  `judge_name`
    the page         read by the proxy itself, kept for a while  `fetching`, `pages`
    asked for        a page: answered here, filtered             `filtering`
                     a file: on the page, and allowed now?       `judge_file`; it is then forwarded and streams through

So a file is judged by what the registry says of it at that time, whatever made the client ask: a page, a pin, a lock, a
shrinkwrap, a cache. What can't be read can't be judged, and is denied. A client's own headers reach no registry: a
forwarded request is written anew, with no more of it than the range that it asks for.

Where an attempt's grant was amended, each of its grants that knows the registry judges, and each has to allow.
Pages are kept per group of attempts with the same grants, and read and filtered on threads of their own: a large one
takes a fifth of a second. What a filtered page says holds for an hour at most, since time alone makes versions allowed.
Owns: the above. Must not: decide what is allowed; `judging` and `judge` do.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mitmproxy import http

from proxy.attempts import Attempt, Connection
from proxy.network import Decision, Grant, Reason, Request, allow, deny
from proxy.packages.data_files import InvalidData, load_policy_data
from proxy.packages.facts import to_message
from proxy.packages.fetching import FetchDenied, Fetcher, FetchFailed
from proxy.packages.filtering import JSON_INDEX, PACKUMENT, FilteredPage, filter_page
from proxy.packages.judge import PolicyData, judge_file, policy_revision
from proxy.packages.judging import (
    RULE,
    decide_name,
    is_the_same,
    judge_file_by_all,
    recognise_request,
    to_decision,
    unknown,
)
from proxy.packages.model import Ecosystem, FileFacts, PackageName, parse_name
from proxy.packages.pages import InvalidPage, ProjectPage, read_document, read_page
from proxy.packages.policy import PackagePolicy
from proxy.packages.reasons import Availability
from proxy.packages.requests import Purpose, Registry, RegistryRequest, Unknown, page_target
from proxy.resolver import Resolver
from proxy.responses import without_body
from proxy.standing import RegistryView, group_of

_FRESH_SECONDS = 60.0  # then the registry is asked whether its page has changed
_DATA_SECONDS = 600.0  # then lists and advisories are read again
_WORKERS = 2
_POLICIES = 16  # whose data is kept
_KEPT_BYTES = 64 * 1024 * 1024  # of pages, and as much of filtered ones
_LISTED_BYTES = 2000  # that the facts of one file take
_HOUR = 3600
_RANGE = re.compile(r"bytes=(?:\d{1,15}-\d{0,15}|-\d{1,15})(?:, ?(?:\d{1,15}-\d{0,15}|-\d{1,15})){0,9}", re.ASCII)
_JSON = ("application/vnd.pypi.simple.v1+json", "application/vnd.pypi.simple.latest+json")


@dataclass(frozen=True, slots=True)
class Forwarded:
    """The request, written anew, goes on to the registry."""

    decision: Decision


@dataclass(frozen=True, slots=True)
class Answered:
    """A page, or that there is none."""

    response: http.Response
    decision: Decision


@dataclass(frozen=True, slots=True)
class Failed:
    """The registry's page could not be read. No denial: nothing was asked for but the page, which is allowed."""

    code: str
    message: str
    decision: Decision


type Outcome = Decision | Forwarded | Answered | Failed


@dataclass(frozen=True, slots=True)
class _Project:
    """A project's page as the registry gave it. `page` is None where the registry has no such project."""

    body: bytes
    digest: str
    etag: str | None
    page: ProjectPage | None
    fresh_until: float

    @property
    def size(self) -> int:
        return len(self.body) + (len(self.page.files) * _LISTED_BYTES if self.page is not None else 0) + 500


class _Kept[K, V]:
    """The values used last, up to so many bytes of them."""

    def __init__(self, limit_bytes: int, size: Callable[[V], int]) -> None:
        self._limit = limit_bytes
        self._size = size
        self._values: OrderedDict[K, V] = OrderedDict()
        self._bytes = 0

    def get(self, key: K) -> V | None:
        value = self._values.get(key)
        if value is not None:
            self._values.move_to_end(key)
        return value

    def put(self, key: K, value: V) -> None:
        if (old := self._values.pop(key, None)) is not None:
            self._bytes -= self._size(old)
        self._values[key] = value
        self._bytes += self._size(value)
        while self._bytes > self._limit and len(self._values) > 1:
            _, gone = self._values.popitem(last=False)
            self._bytes -= self._size(gone)


@dataclass(slots=True)
class _Data:
    """What one policy is judged with, and when it was read."""

    loading: asyncio.Task[PolicyData]
    until: float = field(default_factory=lambda: time.monotonic() + _DATA_SECONDS)


class Registries:
    """The registries of every attempt. One instance for the process."""

    def __init__(self, resolver: Resolver, roots: Path | None) -> None:
        self._fetcher = Fetcher(resolver, roots)
        self._workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="packages")
        self._projects: _Kept[tuple[str, str, PackageName], _Project] = _Kept(_KEPT_BYTES, lambda one: one.size)
        self._filtered: _Kept[tuple[object, ...], FilteredPage] = _Kept(_KEPT_BYTES, lambda one: len(one.body) + 500)
        self._reading: dict[tuple[str, str, PackageName], asyncio.Task[_Project]] = {}
        self._filtering: dict[tuple[object, ...], asyncio.Future[FilteredPage]] = {}
        self._data: dict[str, _Data] = {}

    def close(self) -> None:
        for task in (*self._reading.values(), *(data.loading for data in self._data.values())):
            task.cancel()
        self._fetcher.close()
        self._workers.shutdown(wait=False, cancel_futures=True)

    async def recall(self, attempt: Attempt) -> None:
        """Have the pages that are being read for an attempt asked for anew, by what holds now."""
        await self._fetcher.recall(attempt)

    def expect(self, grant: Grant) -> None:
        """Begin to read what an attempt's packages are judged by: its first request needs not wait for it."""
        if grant.packages is not None:
            self._loading(grant.packages.policy)

    def known(self, grant: Grant, registry_id: str, wanted: Mapping[str, Collection[str]]) -> dict[str, dict[str, Any]]:
        """By project: what its page, read in the last minute for attempts with such a grant, says of these files.

        Nothing is asked. Projects whose pages are not kept are left out.
        """
        assert grant.packages is not None
        registry = next(one for one in grant.packages.registries if one.id == registry_id)
        group, now = group_of(grant), time.monotonic()
        found: dict[str, dict[str, Any]] = {}
        for name, filenames in wanted.items():
            project = self._projects.get((group, registry.id, parse_name(registry.ecosystem, name)))
            if project is not None and project.page is not None and project.fresh_until > now:
                found[name] = to_message(project.page, filenames)
        return found

    async def answer(
        self, attempt: Attempt, state: Connection, request: Request, wire: http.Request
    ) -> tuple[Request, Outcome]:
        """What becomes of a request that is allowed as one. With it, the request as the log has it.

        Where it is forwarded, `wire` is what is to be sent.
        """
        asked = _ask_all(attempt.standing.registries(request), request, wire.path)
        request = asked[0].request
        try:
            outcome = await self._decide(attempt, state, asked, wire)
        except FetchDenied as error:
            return request, error.decision
        if isinstance(outcome, Decision):
            outcome = attempt.refuse(request, outcome, state)
        else:
            written = attempt.write(request, outcome.decision, state)
            if not written.allowed:
                attempt.count(request, written)
                outcome = written
        return request, outcome

    async def _decide(
        self,
        attempt: Attempt,
        state: Connection,
        asked: tuple[_Asked, ...],
        wire: http.Request,
    ) -> Outcome:
        for one in asked:
            if isinstance(one.found, Unknown):
                return one.view.as_said(unknown(one.found))
        found, request = asked[0].found, asked[0].request
        assert isinstance(found, RegistryRequest)
        judges: list[_Judge] = []
        decision: Decision | None = None
        for one in asked:
            policy = one.view.grant.policy
            try:
                judges.append(_Judge(one.view, await self._policy_data(policy)))
            except InvalidData as error:
                why = f"what packages are judged by cannot be read: {error}"
                return deny(Reason.PACKAGE_FACTS_UNAVAILABLE, why, RULE)
            by_name = decide_name(one.view.grant, found, datetime.now(UTC), judges[-1].data)
            if not by_name.allowed:
                return one.view.as_said(by_name)
            decision = decision or by_name
        assert decision is not None
        try:
            project = await self._project(attempt, state, request, found)
        except (FetchFailed, InvalidPage) as error:
            message = f"the page of `{found.name}` cannot be read: {error}"
            if found.kind.is_page:
                return Failed(Availability.REGISTRY_UNAVAILABLE.value, message, decision)
            return deny(Reason.PACKAGE_FACTS_UNAVAILABLE, message, RULE)
        if found.kind.is_page:
            return await self._page(judges, found, project, wire)
        return _file(judges, found, project, wire)

    # -- a page

    async def _page(
        self, judges: Sequence[_Judge], found: RegistryRequest, project: _Project, wire: http.Request
    ) -> Answered:
        if project.page is None:
            decision = allow(f"the registry has no `{found.name}`", found.registry.id)
            return Answered(_not_found(found, wire), decision)
        as_html = found.registry.ecosystem is Ecosystem.PYPI and not _takes_json(wire)
        filtered = await self._filter(judges, project, project.page, as_html=as_html)
        decision = allow(f"`{found.name}`: {filtered.summary}", found.registry.id)
        return Answered(_response(filtered, wire), decision)

    async def _filter(
        self, judges: Sequence[_Judge], project: _Project, page: ProjectPage, *, as_html: bool
    ) -> FilteredPage:
        policies, now = [(judge.view.grant.policy, judge.data) for judge in judges], datetime.now(UTC)
        # The same for all whose registry is the same: what else of a grant differs shows in nothing of a page.
        preparing = judges[0].view.grant.purpose is Purpose.PREPARATION
        hour = int(now.timestamp()) // _HOUR
        revisions = tuple(policy_revision(policy, data) for policy, data in policies)
        key = (project.digest, page.registry, revisions, hour, as_html, preparing)
        if (known := self._filtered.get(key)) is not None:
            return known
        running = self._filtering.get(key)
        if running is None:
            package = page.package

            def work() -> FilteredPage:
                document = read_document(project.body)
                return filter_page(
                    page, document, lambda file: judge_file_by_all(policies, file, package, now), as_html=as_html,
                    only_choice=preparing,
                )  # fmt: skip

            running = asyncio.get_running_loop().run_in_executor(self._workers, work)
            self._filtering[key] = running
            running.add_done_callback(lambda _done: self._filtering.pop(key, None))
        filtered = await asyncio.shield(running)
        self._filtered.put(key, filtered)
        return filtered

    # -- what is known of a project

    async def _project(self, attempt: Attempt, state: Connection, request: Request, found: RegistryRequest) -> _Project:
        """The page of what is asked for: kept, or read now. Raises `FetchFailed`, `FetchDenied`, `InvalidPage`."""
        key = (attempt.standing.group, found.registry.id, found.name)
        while True:
            known = self._projects.get(key)
            if known is not None and known.fresh_until > time.monotonic():
                return known
            running = self._reading.get(key)
            if running is None:
                if not found.kind.is_page:
                    self._note_reading(attempt, state, request, found)
                work = self._read(attempt, state, found.registry, found.name, known)
                running = self._reading[key] = asyncio.create_task(work, name=f"page of {found.name}")
                running.add_done_callback(lambda _done: self._reading.pop(key, None))
                running.add_done_callback(_retrieve)
            try:
                # Others may wait for it too, so that it goes on when this request is given up.
                project = await asyncio.shield(running)
            except FetchDenied as error:
                if error.attempt is attempt:
                    raise
                continue  # another attempt had begun to read it, and may not any more: it is over, say
            self._projects.put(key, project)
            return project

    @staticmethod
    def _note_reading(attempt: Attempt, state: Connection, request: Request, found: RegistryRequest) -> None:
        """Write that the proxy asks for a page which no client has asked for. Raises `FetchDenied`."""
        own = _at(request, found.registry, page_target(found.registry, found.name))
        decision = allow(f"the page of `{found.name}` is read, to judge a file by", found.registry.id)
        written = attempt.write(own, decision, state)
        if not written.allowed:
            raise FetchDenied(written, attempt)

    async def _read(
        self, attempt: Attempt, state: Connection, registry: Registry, name: PackageName, known: _Project | None
    ) -> _Project:
        accept = JSON_INDEX if registry.ecosystem is Ecosystem.PYPI else PACKUMENT
        etag = None if known is None else known.etag
        fetched = await self._fetcher.get(attempt, state, registry.index, page_target(registry, name), accept, etag)
        until = time.monotonic() + _FRESH_SECONDS
        if fetched.status == 304 and known is not None and etag is not None:
            return _Project(known.body, known.digest, known.etag, known.page, until)
        if fetched.status in (404, 410):
            return _Project(b"", "", None, None, until)
        if fetched.status != 200:
            raise FetchFailed(f"the registry answered with status {fetched.status}")
        body = fetched.body

        def work() -> tuple[ProjectPage, str]:
            return read_page(registry, name, read_document(body)), hashlib.sha256(body).hexdigest()

        page, digest = await asyncio.get_running_loop().run_in_executor(self._workers, work)
        return _Project(body, digest, fetched.etag, page, until)

    async def _policy_data(self, policy: PackagePolicy) -> PolicyData:
        """Lists and advisories. Raises `InvalidData`."""
        known = self._loading(policy)
        try:
            return await asyncio.shield(known.loading)
        except InvalidData:
            if self._data.get(policy.digest) is known:
                del self._data[policy.digest]  # the operator may have mended it
            raise

    def _loading(self, policy: PackagePolicy) -> _Data:
        known = self._data.get(policy.digest)
        if known is not None and known.until > time.monotonic():
            return known

        async def load() -> PolicyData:
            return await asyncio.get_running_loop().run_in_executor(self._workers, load_policy_data, policy)

        while len(self._data) >= _POLICIES:
            self._data.pop(next(iter(self._data)))
        known = self._data[policy.digest] = _Data(asyncio.create_task(load(), name="policy data"))
        known.loading.add_done_callback(_retrieve)
        return known


@dataclass(frozen=True, slots=True)
class _Asked:
    """What one of an attempt's grants takes a request for."""

    view: RegistryView
    request: Request
    found: RegistryRequest | Unknown


@dataclass(frozen=True, slots=True)
class _Judge:
    """One of an attempt's grants, with what its policy judges by."""

    view: RegistryView
    data: PolicyData


def _ask_all(views: Sequence[RegistryView], request: Request, target: str) -> tuple[_Asked, ...]:
    """What each grant takes the request for. Those that do not agree with the first do not know it."""
    asked = [_Asked(view, *recognise_request(view.grant, request, target)) for view in views]
    first = asked[0].found
    return tuple(
        replace(one, found=Unknown("for the policy now it is a request to another registry"))
        if isinstance(first, RegistryRequest)
        and isinstance(one.found, RegistryRequest)
        and not is_the_same(first, one.found)
        else one
        for one in asked
    )


def _file(
    judges: Sequence[_Judge], found: RegistryRequest, project: _Project, wire: http.Request
) -> Decision | Forwarded:
    """Judge a file by its project's page."""
    listed = None if project.page is None else project.page.files.get(found.location)
    if listed is None or not _is_same(listed.facts, found):
        detail = f"`{found.filename}` is not a file that the registry's page of `{found.name}` lists at this place"
        return deny(Reason.ARTIFACT_NOT_LISTED, detail, RULE)
    assert project.page is not None
    allowed: Decision | None = None
    for judge in judges:
        policy, package = judge.view.grant.policy, project.page.package
        verdict = judge_file(policy, listed.facts, package, datetime.now(UTC), judge.data)
        decision = to_decision(verdict, found, f"`{listed.facts.filename}` is allowed")
        if not decision.allowed:
            return judge.view.as_said(decision)
        allowed = allowed or decision
    assert allowed is not None
    _write_anew(wire, found)
    return Forwarded(allowed)


def _is_same(facts: FileFacts, found: RegistryRequest) -> bool:
    return (facts.name, facts.version, facts.filename) == (found.name, found.version, found.filename)


def _write_anew(wire: http.Request, found: RegistryRequest) -> None:
    """Make the request one that says nothing but which file, and which part of it.

    Dropped: credentials, cookies, conditions (the file comes whole), and the client's own words about itself, which
    some registries publish.
    """
    old = wire.headers
    wire.path = found.target
    wire.headers = http.Headers()
    for name in ("host", "connection"):  # the first was judged; of the second no more is passed on than `close`
        if (value := old.get(name)) is not None:
            wire.headers[name] = value
    wire.headers["user-agent"] = "sluicegate"
    wire.headers["accept"] = "*/*"
    wire.headers["accept-encoding"] = "identity"
    if _RANGE.fullmatch(asked := old.get("range", "")):
        wire.headers["range"] = asked


def _response(filtered: FilteredPage, wire: http.Request) -> http.Response:
    headers = {
        "Content-Type": filtered.content_type,
        "Cache-Control": "private, max-age=0, must-revalidate",
        "ETag": filtered.etag,
        "Vary": "Accept",
    }
    if filtered.withheld:
        headers["X-Sluicegate-Withheld"] = ", ".join(f"{reason}={n}" for reason, n in sorted(filtered.withheld.items()))
    known = [tag.strip().removeprefix("W/") for tag in wire.headers.get("if-none-match", "").split(",")]
    if filtered.etag in known:
        response = http.Response.make(304, b"", headers)
        del response.headers["content-length"]
        return response
    response = http.Response.make(200, filtered.body, headers)
    return without_body(response) if wire.method == "HEAD" else response


def _not_found(found: RegistryRequest, wire: http.Request) -> http.Response:
    text = f'{{"error": "the registry has no package `{found.name}`"}}\n'
    headers = {"Content-Type": "application/json", "Cache-Control": "no-store"}
    response = http.Response.make(404, text, headers)
    return without_body(response) if wire.method == "HEAD" else response


def _takes_json(wire: http.Request) -> bool:
    """Whether a client that reads a Python index knows PEP 691. One that doesn't say so gets HTML, as ever."""
    accepted = wire.headers.get("accept", "").lower()
    return any(kind in accepted for kind in _JSON)


def _at(request: Request, registry: Registry, target: str) -> Request:
    """The proxy's own request for a page, as the log has it."""
    base = registry.index
    return Request(
        request.layer, base.host, base.port, tls=base.scheme == "https", method="GET", path=target,
        package=request.package,
    )  # fmt: skip


def _retrieve(task: asyncio.Task[object]) -> None:
    if not task.cancelled():
        task.exception()  # nobody need be waiting any more


__all__ = ["Answered", "Failed", "Forwarded", "Outcome", "Registries"]
