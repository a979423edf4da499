"""The story of one preparation: from screened specifiers to a snapshot in use.

    request key -> is it in the store, and is it still allowed? -> a lease, and nothing else happens
    resolve          in a sandbox, through the filtered registry, without building anything
    judge            the names of the whole closure
    ask              what the registry itself says of each artifact that was locked: the proxy has read it for the
                     resolver; where it has not, a sandbox asks
    fetch            meanwhile, in a sandbox: the artifacts, by hash, judged by the proxy on their way, unpacked,
                     compiled; what comes out are plain trees
    judge            the closure by what was said, by what its trees hold, and by its size
    build            hard links, published by a rename

No code of a package runs at any point, on either side. Every request is in the audit log, under the call that wants it.
Concurrent preparations of one request are one: the others wait for it, and find it in the store.
Owns: this order. Must not: parse what is hostile (`inside`), touch the store's files (`store`), decide (`closure`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from proxy.packages.judge import policy_revision
from proxy.packages.model import (
    Ecosystem,
    FileFacts,
    SelectorKind,
)
from proxy.packages.pages import InvalidPage
from proxy.packages.reasons import PackageReason, hint_for
from sandbox.packages.chamber import Chamber, ChamberFailed, Spool
from sandbox.packages.closure import Rules, judge_artifact, judge_findings, judge_manifest, judge_package, judge_size
from sandbox.packages.diagnosis import diagnose, excerpt, from_words, mentions
from sandbox.packages.errands import Errands, Wanted, in_thread
from sandbox.packages.examination import examine, fault_with, known_as, unavailable
from sandbox.packages.lock_npm import parse_package_lock, read_integrity
from sandbox.packages.lock_python import parse_pylock
from sandbox.packages.locked import Fault, LockedArtifact, LockRefused, LockUnreadable
from sandbox.packages.manifest import (
    Artifact,
    Contents,
    Facts,
    Manifest,
    RequestRecord,
    artifact_key,
    facts_of_lock,
    registry_facts,
    request_key,
)
from sandbox.packages.platforms import Platform
from sandbox.packages.receive import Tree, receive
from sandbox.packages.records import InvalidOutlet
from sandbox.packages.specifiers import installer_argument, specifier_text
from sandbox.packages.store import DEFAULT_BUDGET_BYTES, FileConflict, Lease, Store
from sandbox.packages.unpack import Bounds

_PINNED_TTL = timedelta(hours=24)
_OTHER_TTL = timedelta(minutes=10)
_ATTEMPTS = 2  # a snapshot may be removed between being built and being leased


class NotPrepared(Exception):
    """The packages are not had. `faults` has every reason; `refused` tells a policy's from a registry's."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = tuple(dict.fromkeys(faults))
        super().__init__("\n".join(map(str, self.faults)))

    @property
    def refused(self) -> bool:
        return any(fault.refused for fault in self.faults)


class SnapshotFailed(Exception):
    """The preparation failed on our own side. Nothing of it is in the store."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What a preparation is at. `text` is for a line on a terminal."""

    stage: str  # resolve, fetch, build
    text: str


def _silent(_: Progress) -> None:
    pass


class Preparer:
    """Prepares packages in sandboxes, and keeps them in a store, which is pruned to its budget after each preparation.

    `chamber` is asked for only where one is needed.
    """

    def __init__(
        self, store: Store, platform: Platform, chamber: Callable[[], Awaitable[Chamber]], *,
        budget_bytes: int = DEFAULT_BUDGET_BYTES,
    ) -> None:  # fmt: skip
        self.store = store
        self.budget_bytes = budget_bytes
        self._platform = platform
        self._chamber = chamber

    async def prepare(
        self,
        wanted: Wanted,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        progress: Callable[[Progress], None] = _silent,
    ) -> Lease:
        """A snapshot of what is wanted, in use until the lease is closed.

        Raises `NotPrepared`, `SnapshotFailed`, and what the chamber raises when it can't be had.
        """
        if (lease := self._find(wanted, now())) is not None:
            return lease
        async with self.store.request_lock(self._key(wanted)):
            if (lease := self._find(wanted, now())) is not None:  # somebody else has made it meanwhile
                return lease
            try:
                return await _Preparation(self, wanted, await self._chamber(), now, progress).run()
            except (ChamberFailed, InvalidOutlet, LockUnreadable, InvalidPage) as error:
                raise SnapshotFailed(str(error)) from error
            except OSError as error:
                raise SnapshotFailed(f"the store of packages: {error}") from error

    def _key(self, wanted: Wanted) -> str:
        texts = map(installer_argument, wanted.specifiers)
        return request_key(wanted.ecosystem, self._tag(wanted), str(wanted.registry.index), texts)

    def _tag(self, wanted: Wanted) -> str:
        return self._platform.tag if wanted.ecosystem is Ecosystem.PYPI else self._platform.npm_tag

    def _find(self, wanted: Wanted, now: datetime) -> Lease | None:
        """What the store has, if it is neither old nor refused by the policy as it is now."""
        key = self._key(wanted)
        record = self.store.request(key)
        if record is None or record.expires_at <= now:
            return None
        lease = self.store.lease(record.snapshot)
        if lease is None:
            return None
        revision = policy_revision(wanted.policy, wanted.data)
        # Judged each time, also under the same policy: exemptions end, advisories grow stale.
        try:
            manifest = lease.manifest.for_request(one.name.normal for one in wanted.specifiers)
            refused = judge_manifest(Rules(wanted.policy, wanted.data, now), manifest)
        except ValueError:  # a manifest that was tampered with, or of another version
            refused = None
        if refused is None or refused:
            lease.close()
            return None
        if record.policy_revision != revision:
            self.store.put_request(key, record.model_copy(update={"policy_revision": revision}))
        return lease


class _Preparation:
    """One that was not in the store."""

    def __init__(
        self, preparer: Preparer, wanted: Wanted, chamber: Chamber, now: Callable[[], datetime],
        progress: Callable[[Progress], None],
    ) -> None:  # fmt: skip
        self._preparer = preparer
        self._store, self._platform = preparer.store, preparer._platform
        self._wanted, self._chamber, self._now, self._progress = wanted, chamber, now, progress
        self._requested = frozenset(one.name.normal for one in wanted.specifiers)
        self._errands = Errands(wanted, self._platform, chamber, self._store.root / "tmp")

    @property
    def _rules(self) -> Rules:
        return Rules(self._wanted.policy, self._wanted.data, self._now())

    async def run(self) -> Lease:
        resolved_at = self._now()
        self._tell("resolve", f"resolving {_count(len(self._wanted.specifiers))}")
        locked = await self._resolve()
        self._judge_names(locked)
        # Fetching does not wait for the facts: the proxy judges each file by them before it lets it through.
        fetching = asyncio.create_task(self._unpacked(locked))
        try:
            facts = await self._ask(locked)
            self._judge(locked, facts)
            contents = await fetching
        finally:
            fetching.cancel()
            await asyncio.gather(fetching, return_exceptions=True)
        for _ in range(_ATTEMPTS):
            manifest = self._manifest(locked, facts, contents)
            self._judge_trees(manifest)
            self._tell("build", f"building a snapshot of {_count(len(locked))}")
            try:
                await in_thread(self._store.build, manifest)
            except FileConflict as conflict:
                raise NotPrepared([_of_tree(conflict.artifact, PackageReason.FILE_CONFLICT, str(conflict))]) from None
            except FileNotFoundError:  # an artifact was pruned after it was looked for
                contents = await self._unpacked(locked)
                continue
            if (lease := self._store.lease(manifest.id)) is not None:
                self._record(manifest, resolved_at)
                await self._keep_within_budget(lease)
                return lease
        raise SnapshotFailed("the snapshot was removed while it was made; hint: give the store of packages more room")

    async def _keep_within_budget(self, lease: Lease) -> None:
        """What was just made is in use, and so stays, even if it is larger than the budget."""
        try:
            if await in_thread(self._store.size_bytes) > self._preparer.budget_bytes:
                await in_thread(self._store.prune, self._preparer.budget_bytes)
        except BaseException:
            lease.close()
            raise

    def _tell(self, stage: str, text: str) -> None:
        self._progress(Progress(stage, text))

    def _record(self, manifest: Manifest, resolved_at: datetime) -> None:
        pinned = all(one.selector.kind is SelectorKind.EXACT for one in self._wanted.specifiers)
        record = RequestRecord(
            snapshot=manifest.id,
            resolved_at=resolved_at,
            expires_at=resolved_at + (_PINNED_TTL if pinned else _OTHER_TTL),
            policy_revision=policy_revision(self._wanted.policy, self._wanted.data),
            specifiers=tuple(map(specifier_text, self._wanted.specifiers)),
        )
        self._store.put_request(self._preparer._key(self._wanted), record)

    # Resolve

    async def _resolve(self) -> tuple[LockedArtifact, ...]:
        resolved = await self._errands.resolve()
        if resolved.lock is None:
            raise NotPrepared(await self._diagnose(resolved.said))
        try:
            return self._parse_lock(resolved.lock)
        except LockRefused as refused:
            raise NotPrepared(refused.faults) from None

    async def _diagnose(self, said: str) -> tuple[Fault, ...]:
        """Why the resolver failed: by the pages of what was asked for, then of what it speaks of, then by its words."""
        asked = self._wanted.specifiers
        others = tuple(one for one in mentions(self._wanted.registry, said) if one.name.normal not in self._requested)
        for specifiers, requested in ((asked, True), (others, False)):
            if specifiers:
                pages = await self._errands.pages({one.name.normal: None for one in specifiers})
                tags = self._platform.tags
                if faults := diagnose(self._rules, specifiers, pages, tags=tags, requested=requested, said=said):
                    return faults
        return (from_words([one.name.normal for one in asked], said),)

    def _parse_lock(self, text: str) -> tuple[LockedArtifact, ...]:
        if self._wanted.ecosystem is Ecosystem.PYPI:
            return parse_pylock(text, tags=self._platform.tags)
        return parse_package_lock(
            text, registry=str(self._wanted.registry.index), cpu=self._platform.npm_cpu, libc=self._platform.npm_libc
        )

    # Ask

    async def _ask(self, locked: Sequence[LockedArtifact]) -> dict[LockedArtifact, Facts]:
        """What the registry says of each artifact. What it says nothing of is not of this registry.

        By artifact, here and below, and never by digest alone: two packages may say that they are one file.
        """
        python_ = self._wanted.ecosystem is Ecosystem.PYPI
        wanted: dict[str, list[LockedArtifact]] = {}
        for one in locked:
            wanted.setdefault(one.name.normal, []).append(one)
        pages = await self._errands.known({name: [one.filename for one in files] for name, files in wanted.items()})
        if missing := wanted.keys() - pages.keys():
            pages |= await self._errands.pages(
                {name: [one.filename if python_ else one.version.text for one in wanted[name]] for name in missing}
            )
        faults: list[Fault] = []
        found: dict[LockedArtifact, Facts] = {}
        for one in locked:
            page = pages[one.name.normal]
            if page.package is None:
                faults.append(unavailable(one, excerpt(page.message) or f"status {page.status}"))
                continue
            same = (file for file in page.files if (file.version, file.filename) == (one.version, one.filename))
            file = next(same, None)
            if file is None:
                detail = "the registry's own page has no such file"
                faults.append(fault_with(one, PackageReason.NON_REGISTRY_SOURCE, detail))
                continue
            if hashes_of(file).get(one.algorithm) != one.digest:
                detail = "the lock's hash is not the one that the registry's own page gives"
                faults.append(fault_with(one, PackageReason.HASH_MISMATCH, detail))
                continue
            found[one] = facts_of_lock(one).model_copy(
                update={
                    "first_published": page.package.first_published,
                    "uploaded_at": file.uploaded_at,
                    "yanked": file.yanked,
                    "yanked_reason": file.yanked_reason,
                    "deprecated": file.deprecated,
                    "has_install_script": file.has_install_script or one.has_install_script,
                    "size_bytes": file.size_bytes or one.size_bytes,
                    "quarantined": file.quarantined,
                    # Of a page that was cut down nobody can say which file was the first.
                    "released_at": None if one.name.normal in missing else file.released_at,
                }
            )
        if faults:
            raise NotPrepared(faults)
        return found

    # Judge

    def _judge_names(self, locked: Sequence[LockedArtifact]) -> None:
        """What can be said before anything is asked: of the names, and of how many there are."""
        rules = self._rules
        size = sum(one.size_bytes or 0 for one in locked)
        faults = [judge_size(rules, packages=len(locked), size_bytes=size, files=0)]
        faults += [
            judge_package(rules, one.name, one.version, requested=one.name.normal in self._requested) for one in locked
        ]
        if any(faults):
            raise NotPrepared(fault for fault in faults if fault is not None)

    def _judge(self, locked: Sequence[LockedArtifact], facts: Mapping[LockedArtifact, Facts]) -> None:
        rules = self._rules
        sizes = sum(facts[one].size_bytes or 0 for one in locked)
        faults = [judge_size(rules, packages=len(locked), size_bytes=sizes, files=0)]
        for one in locked:
            file, package = registry_facts(one.name, one.version, one.filename, facts[one])
            requested = one.name.normal in self._requested
            faults.append(judge_artifact(rules, file, package, requested=requested))
        if any(faults):
            raise NotPrepared(fault for fault in faults if fault is not None)

    def _judge_trees(self, manifest: Manifest) -> None:
        if faults := judge_manifest(self._rules, manifest):
            raise NotPrepared(faults)

    # Fetch

    async def _unpacked(self, locked: Sequence[LockedArtifact]) -> dict[LockedArtifact, Contents]:
        """The contents of each artifact; what is not in the store yet is fetched."""
        have: dict[LockedArtifact, Contents] = {}
        faults: list[Fault] = []
        for one in locked:
            if (contents := self._store.artifact(self._artifact_key(one))) is not None:
                have[one] = contents
                if (fault := known_as(one, contents)) is not None:
                    faults.append(fault)
        if faults:
            raise NotPrepared(faults)
        missing = [one for one in locked if one not in have]
        if missing:
            self._tell("fetch", f"fetching {_count(len(missing))}")
            have |= await self._fetch(missing)
        return have

    def _artifact_key(self, locked: LockedArtifact) -> str:
        ecosystem = self._wanted.ecosystem
        return artifact_key(ecosystem, self._preparer._tag(self._wanted), locked.algorithm, locked.digest)

    async def _fetch(self, missing: Sequence[LockedArtifact]) -> dict[LockedArtifact, Contents]:
        limits = self._wanted.policy.max_closure
        bounds = Bounds(files=limits.files, bytes=limits.bytes)
        # The largest first, so that none is left to be unpacked alone at the end.
        order = sorted(missing, key=lambda one: -(one.size_bytes or 0))
        with ExitStack() as stack:
            staging = stack.enter_context(self._store.staging())
            spool = stack.enter_context(self._chamber.spool(staging))
            # What comes out is taken while the sandbox still works.
            taking = asyncio.create_task(in_thread(self._take, order, spool, staging, bounds))
            try:
                await self._errands.fetch(order, spool, bounds)
                return await taking
            finally:
                spool.complete()
                await asyncio.gather(taking, return_exceptions=True)

    def _take(
        self, order: Sequence[LockedArtifact], spool: Spool, staging: Path, bounds: Bounds
    ) -> dict[LockedArtifact, Contents]:
        """Make the trees of what came out, look at them, and publish those that are what they should be."""
        trees = [
            Tree(staging / str(number), replace(bounds, files=2 * bounds.files, bytes=2 * bounds.bytes))
            for number in range(len(order))
        ]
        receive(spool.pieces(), trees)
        found: dict[LockedArtifact, Contents] = {}
        faults: list[Fault] = []
        for one, tree in zip(order, trees, strict=True):
            outcome = examine(one, tree)
            if isinstance(outcome, Contents):
                found[one] = outcome
                self._store.publish_artifact(self._artifact_key(one), tree.root, outcome)
                faults += judge_findings(self._rules, one.name, one.version, outcome.findings)
            else:
                faults.append(outcome)
        if faults:
            raise NotPrepared(faults)
        return found

    def _manifest(
        self,
        locked: Sequence[LockedArtifact],
        facts: Mapping[LockedArtifact, Facts],
        contents: Mapping[LockedArtifact, Contents],
    ) -> Manifest:
        return Manifest(
            ecosystem=self._wanted.ecosystem,
            platform=self._preparer._tag(self._wanted),
            created_at=self._now(),
            artifacts=tuple(
                Artifact(
                    name=one.name.normal, version=one.version.text, url=one.url, filename=one.filename,
                    algorithm=one.algorithm, digest=one.digest, places=one.places,
                    requested=one.name.normal in self._requested, facts=facts[one],
                    contents=contents[one], dependencies=one.dependencies,
                )
                for one in locked
            ),
        )  # fmt: skip


def hashes_of(file: FileFacts) -> dict[str, str]:
    """What the registry's page says: algorithm -> hex digest."""
    if file.name.ecosystem is Ecosystem.NPM:
        return read_integrity(file.hashes.get("integrity", ""))
    return {algorithm: digest.lower() for algorithm, digest in file.hashes.items()}


def _of_tree(artifact: Artifact, reason: PackageReason, detail: str) -> Fault:
    return Fault(reason, artifact.name, detail, artifact.version, hint=hint_for(reason, artifact.name))


def _count(number: int) -> str:
    return "1 package" if number == 1 else f"{number} packages"


__all__ = ["NotPrepared", "Preparer", "Progress", "SnapshotFailed", "Wanted"]
