"""Inside a preparation sandbox: asking a registry what it says of projects.

Owns: which of it comes out. Must not: judge it.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sandbox.packages.inside import MAX_MESSAGE
from sandbox.packages.inside_client import Client, trust

_ASKERS = 8
_MAX_PAGE = 128 * 1024 * 1024  # the largest packuments are of some tens of MB


def facts(job: Mapping[str, Any]) -> dict[str, Any]:
    """What the registry says of each project of the job, cut down to what is judged."""
    questions = job["questions"]
    context = trust(job)
    mine = threading.local()  # a thread keeps its connection

    def answer(question: Mapping[str, Any]) -> dict[str, Any]:
        if not hasattr(mine, "client"):
            mine.client = Client(context)
        return _answer(mine.client, question)

    with ThreadPoolExecutor(_ASKERS) as pool:
        return {"answers": list(pool.map(answer, questions))}


def _answer(client: Client, question: Mapping[str, Any]) -> dict[str, Any]:
    try:
        with client.get(question["url"], question["accept"]) as response:
            body = response.read(_MAX_PAGE + 1)
            if response.status != 200:
                return {"status": response.status, "message": body[:MAX_MESSAGE].decode("utf-8", "replace")}
        if len(body) > _MAX_PAGE:
            return {"status": None, "message": "the registry's answer is too large"}
        page = json.loads(body)
        wanted = None if question["wanted"] is None else frozenset(question["wanted"])
        cut = _cut_simple if question["kind"] == "pypi" else _cut_packument
        small, first = cut(page, wanted)
        return {"status": 200, "page": small, "first": first}
    except (OSError, http.client.HTTPException) as error:
        return {"status": None, "message": f"{type(error).__name__}: {error}"[:MAX_MESSAGE]}
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        return {"status": None, "message": f"the registry's answer is not of its form: {error}"[:MAX_MESSAGE]}


def _cut_simple(page: Mapping[str, Any], wanted: frozenset[str] | None) -> tuple[dict[str, Any], object]:
    """PEP 691's page of a project, with those files. The earliest upload is of all."""
    times = [file["upload-time"] for file in page["files"] if isinstance(file.get("upload-time"), str)]
    keys = ("filename", "url", "upload-time", "yanked", "size", "hashes")
    cut = {key: page[key] for key in ("meta", "name", "project-status") if key in page}
    cut["files"] = [
        {key: file[key] for key in keys if key in file}
        for file in page["files"]
        if wanted is None or file["filename"] in wanted
    ]
    return cut, min(times, default=None)


def _cut_packument(page: Mapping[str, Any], wanted: frozenset[str] | None) -> tuple[dict[str, Any], object]:
    """npm's document of a project, with those versions."""
    keys = ("name", "version", "deprecated", "hasInstallScript", "gypfile", "scripts")
    cut = {key: page[key] for key in ("name", "dist-tags") if key in page}
    times = page.get("time", {})
    cut["time"] = {key: times[key] for key in times if key == "created" or wanted is None or key in wanted}
    cut["versions"] = {
        version: {key: value[key] for key in keys if key in value}
        | {"dist": {key: value["dist"][key] for key in ("tarball", "integrity", "shasum") if key in value["dist"]}}
        for version, value in page.get("versions", {}).items()
        if wanted is None or version in wanted
    }
    return cut, times.get("created")
