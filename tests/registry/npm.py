"""An npm registry: what it holds, and what it answers.

    registry = NpmIndex(now)
    registry.add({"name": "good", "version": "1.0.0"}, age_days=100)
    registry.add({"name": "@scope/x", "version": "1.0.0"}, files={"index.js": "..."})
    registry.add(manifest, said={"scripts": {}})              # the packument says what the tarball does not
    registry.lazily("bomb", lambda: registry.add(...))        # made when first asked for

One site serves it, as `server.py` does, through `answer`: packuments (whole and abbreviated), tarballs, one version's
manifest, search, and what writes: advisories and publication. Those are answered kindly, so that a client that gets
through to them does not stop by itself; a test asks the site's journal what came.

Owns: the documents and the paths. Must not: open a socket, or know which packages the tests need.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import unquote

from tests.registry.answers import NOT_FOUND, Answer
from tests.registry.build import Entry, Files, npm_tarball
from tests.servers import SeenRequest

CORGI_KIND = "application/vnd.npm.install-v1+json"
_CORGI_FIELDS = set(
    "name version deprecated dependencies optionalDependencies devDependencies bundleDependencies peerDependencies "
    "peerDependenciesMeta bin directories dist engines cpu os libc hasInstallScript _hasShrinkwrap".split()
)
_INSTALL_SCRIPTS = {"preinstall", "install", "postinstall"}
_HEADERS = {"Cache-Control": "public, max-age=300", "Vary": "Accept, Accept-Encoding"}


@dataclass
class Package:
    name: str
    versions: dict[str, dict[str, Any]] = field(default_factory=dict)
    time: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)


class NpmIndex:
    """The packages and their tarballs. `url` is the base of the tarballs' addresses, set by who serves them."""

    def __init__(self, now: datetime) -> None:
        self.now = now
        self.url = ""
        self.advisories: dict[str, list[dict[str, Any]]] = {}
        self._packages: dict[str, Package] = {}
        self._tarballs: dict[str, bytes] = {}
        self._later: dict[str, Callable[[], object]] = {}

    def add(
        self,
        manifest: Mapping[str, Any],
        *,
        files: Files | None = None,
        extra: tuple[Entry, ...] = (),
        tarball: bytes | None = None,
        age_days: float = 100.0,
        tag: str = "latest",
        said: Mapping[str, Any] | None = None,
        said_dist: Mapping[str, Any] | None = None,
    ) -> bytes:
        """Hold one version. `said` are fields of the packument, `said_dist` of its `dist`, instead of what is so."""
        name, version = manifest["name"], manifest["version"]
        data = tarball if tarball is not None else npm_tarball(manifest, files, extra=extra)
        self._tarballs[_tarball_path(name, version)] = data
        about = {**manifest, "_id": f"{name}@{version}"}
        scripts = set(manifest.get("scripts", ()))
        if scripts & _INSTALL_SCRIPTS or (files and "binding.gyp" in files):
            about["hasInstallScript"] = True
        if any(entry.path == "package/npm-shrinkwrap.json" for entry in extra) or "npm-shrinkwrap.json" in (
            files or ()
        ):
            about["_hasShrinkwrap"] = True
        about |= said or {}
        about["dist"] = {
            "tarball": self.url + _tarball_path(name, version),
            "integrity": "sha512-" + base64.b64encode(hashlib.sha512(data).digest()).decode(),
            "shasum": hashlib.sha1(data).hexdigest(),
            **(said_dist or {}),
        }
        package = self._packages.setdefault(name, Package(name))
        package.versions[version] = about
        package.time[version] = _time(self.now - timedelta(days=age_days))
        package.tags[tag] = version
        return data

    def lazily(self, name: str, make: Callable[[], object]) -> None:
        """Let `make` add the package's versions when the package is first asked for."""
        self._later[name] = make

    def package(self, name: str) -> Package | None:
        if make := self._later.pop(name, None):
            make()
        return self._packages.get(name)

    def tarball(self, name: str, version: str) -> bytes:
        self.package(name)
        return self._tarballs[_tarball_path(name, version)]

    @property
    def names(self) -> list[str]:
        return sorted({*self._packages, *self._later})

    def answer(self, seen: SeenRequest) -> Answer:
        """One request, by its raw path."""
        path, _, query = seen.target.partition("?")
        if seen.method == "POST" and path == "/-/npm/v1/security/advisories/bulk":
            return self._bulk(seen)
        if seen.method not in {"GET", "HEAD"}:
            return Answer.of_json({"ok": True, "id": "taken"}, status=201)
        if path == "/-/v1/search":
            return self._search(query)
        if path == "/-/ping":
            return Answer.of_json({})
        return self._document(unquote(path), seen)

    def _document(self, path: str, seen: SeenRequest) -> Answer:
        found = re.fullmatch(r"/((?:@[^/]+/)?[^/@]+)(/-/[^/]+\.tgz|/[^/]+)?", path)
        package = self.package(found[1]) if found else None
        if found is None or package is None:
            return NOT_FOUND
        rest = found[2] or ""
        if rest.startswith("/-/"):
            data = self._tarballs.get(path)
            return NOT_FOUND if data is None else Answer(200, data, headers=_HEADERS)
        if rest:
            wanted = package.tags.get(rest[1:], rest[1:])
            about = package.versions.get(wanted)
            return NOT_FOUND if about is None else Answer.of_json(about)
        if "install-v1" in (seen.header("accept") or ""):
            return Answer(200, json.dumps(_abbreviated(package)).encode(), CORGI_KIND, _HEADERS)
        return Answer(200, json.dumps(_whole(package)).encode(), "application/json", _HEADERS)

    def _bulk(self, seen: SeenRequest) -> Answer:
        """Every advisory for the packages that were named. Clients send the list compressed; then all are said."""
        try:
            asked = set(json.loads(seen.body))
        except ValueError:
            asked = set(self.advisories)
        return Answer.of_json({name: found for name, found in self.advisories.items() if name in asked})

    def _search(self, query: str) -> Answer:
        text = next((unquote(part[5:]) for part in query.split("&") if part.startswith("text=")), "")
        about = {"version": "1.0.0", "date": _time(self.now), "keywords": [], "maintainers": [], "links": {}}
        objects = [{"package": {"name": name, **about}} for name in self.names if text in name]
        return Answer.of_json({"objects": objects, "total": len(objects), "time": _time(self.now)})


def _tarball_path(name: str, version: str) -> str:
    return f"/{name}/-/{name.rpartition('/')[2]}-{version}.tgz"


def _whole(package: Package) -> dict[str, Any]:
    times = sorted(package.time.values())
    return {
        "_id": package.name,
        "name": package.name,
        "dist-tags": package.tags,
        "versions": package.versions,
        "time": {"created": times[0], "modified": times[-1], **package.time},
    }


def _abbreviated(package: Package) -> dict[str, Any]:
    versions = {
        version: {key: value for key, value in about.items() if key in _CORGI_FIELDS}
        for version, about in package.versions.items()
    }
    modified = max(package.time.values())
    return {"name": package.name, "dist-tags": package.tags, "modified": modified, "versions": versions}


def _time(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%S.000Z")
