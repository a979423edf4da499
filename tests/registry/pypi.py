"""A Python package index: what it holds, and what it answers.

    index = PypiIndex(now)
    index.add(wheel("good", "1.0"), age_days=100)
    index.add(wheel("good", "1.1"), yanked="broken")
    index.add(wheel("liar", "1.0"), said_sha256="0" * 64)      # the index says what is not so
    index.lazily("bomb", lambda: index.add(big()))             # made when first asked for

Two sites serve it, as `server.py` does: `answer_index` the pages, `answer_file` the files. It speaks the simple index
as HTML (PEP 503) and JSON (PEP 691) by what is accepted, with yanked files (PEP 592), core metadata (PEP 658, 714),
upload times and sizes (PEP 700), provenance (PEP 740) and the project's status (PEP 792).

Owns: the pages and the paths. Must not: open a socket, or know which packages the tests need.
"""

from __future__ import annotations

import hashlib
import html
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import unquote

from tests.registry.answers import NOT_FOUND, Answer
from tests.registry.build import Artifact, project_name
from tests.servers import SeenRequest

JSON_KIND = "application/vnd.pypi.simple.v1+json"
HTML_KIND = "application/vnd.pypi.simple.v1+html"
_PAGE_HEADERS = {"Cache-Control": "max-age=600, public", "Vary": "Accept, Accept-Encoding"}
_FILE_HEADERS = {"Cache-Control": "max-age=365000000, immutable, public"}


@dataclass(frozen=True)
class IndexedFile:
    """One file, and what the index says of it, true or not."""

    artifact: Artifact
    path: str
    sha256: str
    metadata: bytes | None
    metadata_sha256: str
    uploaded: datetime | None
    yanked: bool | str
    requires_python: str | None
    attested: bool
    said_url: str | None

    @property
    def provenance_path(self) -> str:
        one = self.artifact
        return f"/integrity/{project_name(one.name)}/{one.version}/{one.filename}/provenance"


@dataclass
class Project:
    name: str
    files: list[IndexedFile] = field(default_factory=list)
    status: str = "active"


class PypiIndex:
    """The projects and their files. `files_url` is the base of the files' addresses, set by who serves them."""

    def __init__(self, now: datetime) -> None:
        self.now = now
        self.index_url = self.files_url = ""
        self._projects: dict[str, Project] = {}
        self._files: dict[str, bytes] = {}
        self._later: dict[str, Callable[[], object]] = {}

    def add(
        self,
        artifact: Artifact,
        *,
        age_days: float = 100.0,
        upload_time: bool = True,
        yanked: bool | str = False,
        attested: bool = False,
        said_sha256: str | None = None,
        said_metadata: bytes | None = None,
        said_metadata_sha256: str | None = None,
        said_url: str | None = None,
        core_metadata: bool = True,
    ) -> IndexedFile:
        """Hold one file. What is `said_…` stands on the page, or in the metadata file, instead of what is so."""
        digest = hashlib.blake2b(artifact.data, digest_size=32).hexdigest()
        path = f"/packages/{digest[:2]}/{digest[2:4]}/{digest[4:]}/{artifact.filename}"
        metadata = (said_metadata or artifact.metadata) if core_metadata else None
        self._files[path] = artifact.data
        if metadata is not None:
            self._files[path + ".metadata"] = metadata
        held = IndexedFile(
            artifact=artifact,
            path=path,
            sha256=said_sha256 or artifact.sha256,
            metadata=metadata,
            metadata_sha256=said_metadata_sha256 or hashlib.sha256(metadata or b"").hexdigest(),
            uploaded=self.now - timedelta(days=age_days) if upload_time else None,
            yanked=yanked,
            requires_python=artifact.requires_python,
            attested=attested,
            said_url=said_url,
        )
        self.project(artifact.name).files.append(held)
        return held

    def lazily(self, name: str, make: Callable[[], object]) -> None:
        """Let `make` add the project's files when the project is first asked for."""
        self._later[project_name(name)] = make

    def project(self, name: str) -> Project:
        """The project, made now if there is none: one without files."""
        name = project_name(name)
        return self._projects.setdefault(name, Project(name))

    def find(self, name: str, version: str | None = None) -> list[IndexedFile]:
        """The files of a project, or of one version of it."""
        self._make(project_name(name))
        return [one for one in self.project(name).files if version is None or one.artifact.version == version]

    @property
    def names(self) -> list[str]:
        return sorted({*self._projects, *self._later})

    def answer_index(self, seen: SeenRequest) -> Answer:
        """One request at the pages' site, by its raw path."""
        if seen.method not in {"GET", "HEAD"}:
            return Answer.of_json({"message": "uploaded"}, status=200)  # it takes whatever gets here: the journal tells
        path = seen.target.partition("?")[0]
        if path == "/simple/":
            return self._root(seen)
        match path.split("/"):
            case ["", "simple", name, ""]:
                return self._page(unquote(name), seen)
            case ["", "simple", name]:
                return Answer(301, headers={"Location": f"/simple/{project_name(unquote(name))}/"})
            case ["", "pypi", name, "json"]:
                return self._legacy(unquote(name))
            case ["", "integrity", name, _version, filename, "provenance"]:
                return self._provenance(name, unquote(filename))
        return NOT_FOUND

    def answer_file(self, seen: SeenRequest) -> Answer:
        """One request at the files' site."""
        data = self._files.get(unquote(seen.target.partition("?")[0]))
        return NOT_FOUND if data is None else Answer(200, data, headers=_FILE_HEADERS)

    def _url(self, one: IndexedFile) -> str:
        return one.said_url or self.files_url + one.path

    def _make(self, name: str) -> None:
        if make := self._later.pop(name, None):
            make()

    def _root(self, seen: SeenRequest) -> Answer:
        if _wants_json(seen):
            projects = [{"name": name} for name in self.names]
            return Answer.of_json({"meta": {"api-version": "1.4"}, "projects": projects}, JSON_KIND)
        links = "".join(f'<a href="/simple/{name}/">{name}</a><br/>\n' for name in self.names)
        return Answer(200, _document(links), HTML_KIND)

    def _page(self, asked: str, seen: SeenRequest) -> Answer:
        name = project_name(asked)
        self._make(name)
        if name not in self._projects:
            return NOT_FOUND
        if asked != name:
            return Answer(301, headers={"Location": f"/simple/{name}/"})
        project = self._projects[name]
        if _wants_json(seen):
            return Answer(200, json.dumps(self._json_page(project)).encode(), JSON_KIND, _PAGE_HEADERS)
        return Answer(200, self._html_page(project), HTML_KIND, _PAGE_HEADERS)

    def _json_page(self, project: Project) -> dict[str, Any]:
        return {
            "meta": {"api-version": "1.4", "_last-serial": 1234},
            "name": project.name,
            "project-status": {"status": project.status},
            "alternate-locations": [],
            "versions": sorted({one.artifact.version for one in project.files}),
            "files": [self._json_file(one) for one in project.files],
        }

    def _json_file(self, one: IndexedFile) -> dict[str, Any]:
        metadata = {"sha256": one.metadata_sha256} if one.metadata is not None else False
        return {
            "filename": one.artifact.filename,
            "url": self._url(one),
            "hashes": {"sha256": one.sha256},
            "requires-python": one.requires_python,
            "size": len(one.artifact.data),
            **({"upload-time": one.uploaded.strftime("%Y-%m-%dT%H:%M:%S.%fZ")} if one.uploaded else {}),
            "yanked": one.yanked,
            "core-metadata": metadata,
            "data-dist-info-metadata": metadata,
            "provenance": self.index_url + one.provenance_path if one.attested else None,
        }

    def _html_page(self, project: Project) -> bytes:
        lines = [f'<meta name="pypi:project-status" content="{project.status}">\n']
        for one in project.files:
            attributes = {"href": f"{self._url(one)}#sha256={one.sha256}"}
            if one.requires_python:
                attributes["data-requires-python"] = one.requires_python
            if one.metadata is not None:
                said = f"sha256={one.metadata_sha256}"
                attributes |= {"data-dist-info-metadata": said, "data-core-metadata": said}
            if one.yanked is not False:
                attributes["data-yanked"] = one.yanked if isinstance(one.yanked, str) else ""
            if one.attested:
                attributes["data-provenance"] = self.index_url + one.provenance_path
            text = " ".join(f'{key}="{html.escape(value)}"' for key, value in attributes.items())
            lines.append(f"<a {text}>{html.escape(one.artifact.filename)}</a><br/>\n")
        return _document("".join(lines))

    def _legacy(self, asked: str) -> Answer:
        name = project_name(asked)
        files = self.find(name) if name in self.names else []
        if not files:
            return NOT_FOUND
        newest = files[-1].artifact
        return Answer.of_json({"info": {"name": newest.name, "version": newest.version}, "vulnerabilities": []})

    def _provenance(self, name: str, filename: str) -> Answer:
        for one in self.find(name) if name in self.names else []:
            if one.artifact.filename == filename and one.attested:
                publisher = {"kind": "GitHub", "repository": f"tests/{name}", "workflow": "release.yml"}
                bundles = [{"publisher": publisher, "attestations": []}]
                return Answer.of_json({"version": 1, "attestation_bundles": bundles})
        return NOT_FOUND


def _wants_json(seen: SeenRequest) -> bool:
    """Whether JSON is what the client likes best of the two. Who names no quality means 1."""
    qualities = {JSON_KIND: 0.0, HTML_KIND: 0.0, "text/html": 0.0}
    for part in (seen.header("accept") or "").split(","):
        kind, *parameters = (text.strip() for text in part.split(";"))
        quality = next((float(text[2:]) for text in parameters if text.startswith("q=")), 1.0)
        kind = kind.replace("simple.latest", "simple.v1")
        if kind in qualities:
            qualities[kind] = quality
    return qualities[JSON_KIND] > max(qualities[HTML_KIND], qualities["text/html"])


def _document(body: str) -> bytes:
    head = '<meta name="pypi:repository-version" content="1.4">'
    return f"<!DOCTYPE html>\n<html><head>{head}</head><body>\n{body}</body></html>\n".encode()
