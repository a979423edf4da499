"""Registries through the real proxy: what clients see of them, what reaches them, and what the log says.

The registries are real servers with hostile packages (`tests/registry`); the clients are raw, and pip, uv and npm.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from proxy.destinations import parse_host
from proxy.network import Grant, Mode, PrivateAddress, Protocol
from proxy.packages.model import Ecosystem
from proxy.packages.policy import (
    DAY,
    AdvisoriesPolicy,
    Age,
    DeniedVersions,
    Names,
    NamesPolicy,
    PackagePolicy,
)
from proxy.packages.ranges import parse_range
from proxy.packages.requests import Registry, RegistryGrant, parse_base
from tests.proxy.rig import Answer, Attempt, Http2Client, Rig, ask, get, grant, read_answer, read_to_end, rule
from tests.registry.build import wheel
from tests.registry.cast import write_advisories
from tests.registry.server import (
    NpmRegistry,
    PypiRegistry,
    arguments,
    client_environment,
    npm_command,
    pip_command,
    uv_command,
)

PATIENCE = 100
JSON = "application/vnd.pypi.simple.v1+json"
READ = ("GET", "HEAD")


@pytest.fixture(scope="module")
def rig(directory: Path, _pypi: PypiRegistry, _npm: NpmRegistry) -> Iterator[Rig]:
    """The proxy, trusting the registries' authority. It serves every test, so what is kept of pages is kept."""
    rig = Rig(directory, _pypi.ca_file)
    yield rig
    rig.close()
    assert rig.complaints() == []


@pytest.fixture(scope="module")
def advisories(directory: Path) -> Path:
    return write_advisories(directory / "osv")


POLICY = PackagePolicy(
    names=NamesPolicy(deny=Names(pypi=("denied",), npm=("ndenied",))),
    versions_deny=(
        DeniedVersions(
            id="packages.versions.deny[0]", ecosystem=Ecosystem.PYPI, name="good",
            versions=parse_range(Ecosystem.PYPI, "==9.9"),
        ),
    ),
    age=Age(version_min=10 * DAY),
)  # fmt: skip


def registry_grant(registry: PypiRegistry | NpmRegistry, policy: PackagePolicy = POLICY) -> RegistryGrant:
    index = parse_base(registry.url)
    if isinstance(registry, PypiRegistry):
        files = (parse_base(registry.files.url + "/"),)
        one = Registry(id="registries.python[0]", ecosystem=Ecosystem.PYPI, index=index, files=files)
    else:
        one = Registry(id="registries.javascript[0]", ecosystem=Ecosystem.NPM, index=index)
    return RegistryGrant(registries=(one,), policy=policy)


def granted(
    registry: PypiRegistry | NpmRegistry,
    policy: PackagePolicy = POLICY,
    mode: Mode = Mode.REGISTRY_DEFAULT,
    *,
    methods: tuple[str, ...] | None = READ,
    **more: Any,
) -> Grant:
    """A grant for a registry's hosts: as narrowing makes it, or wider."""
    sites = [site for site in registry.sites if site is not registry.rogue]
    return grant(
        *(rule(site.name, site.port, methods=methods, subdomains=False) for site in sites),
        mode=mode,
        hosts=registry.hosts,
        private_addresses=tuple(
            PrivateAddress(id="private", host=parse_host(site.name), cidr="127.0.0.0/8", ports=(site.port,))  # type: ignore[arg-type]  # text is read
            for site in registry.sites
        ),
        packages=registry_grant(registry, policy),
        **more,
    )


@pytest.fixture
def pypi(rig: Rig, pypi_registry: PypiRegistry) -> Iterator[Attempt]:
    with rig.explicit(granted(pypi_registry)) as attempt:
        yield attempt


@pytest.fixture
def npm(rig: Rig, npm_registry: NpmRegistry) -> Iterator[Attempt]:
    with rig.explicit(granted(npm_registry)) as attempt:
        yield attempt


def fetch(attempt: Attempt, url: str, *headers: str, method: str = "GET") -> Answer:
    authority, slash, path = url.removeprefix("https://").partition("/")
    name, _, port = authority.partition(":")
    sock = attempt.https(name, int(port or 443))
    return ask(sock, get(authority, slash + path, *headers, "Connection: close", method=method), method)


def index(attempt: Attempt, registry: PypiRegistry, name: str, *headers: str, accept: str = JSON) -> Answer:
    return fetch(attempt, f"{registry.url}{name}/", f"Accept: {accept}", *headers)


def file_url(registry: PypiRegistry, name: str, version: str) -> str:
    return registry.files.url + registry.packages.find(name, version)[0].path


def tarball_url(registry: NpmRegistry, name: str, version: str) -> str:
    return f"{registry.url}{name}/-/{name.rpartition('/')[2]}-{version}.tgz"


# Policies that change meanwhile


STRICTER = POLICY.model_copy(update={"names": NamesPolicy(deny=Names(pypi=("good",), npm=("nlib",)))})


def test_a_package_that_the_new_policy_refuses_is_not_had_any_more(rig: Rig, pypi_registry: PypiRegistry) -> None:
    """Nor what the old one refuses, and the registry is not asked: by its page, and by a file's address from before."""
    with rig.explicit(granted(pypi_registry)) as attempt:
        assert index(attempt, pypi_registry, "good").status == 200
        url = file_url(pypi_registry, "good", "1.0")
        assert fetch(attempt, url).status == 200
        attempt.amend(granted(pypi_registry, STRICTER))
        pypi_registry.forget()
        for answer in (index(attempt, pypi_registry, "good"), fetch(attempt, url)):
            assert (answer.code, answer.json["rule"]) == ("policy_revoked", "packages.names.deny.pypi[0]")
            assert "name_denied" in answer.json["reason"]
        assert index(attempt, pypi_registry, "denied").code == "name_denied"
        assert pypi_registry.untouched
        assert index(attempt, pypi_registry, "libx").status == 200, "the control"


def test_a_page_shows_what_both_policies_allow(rig: Rig, pypi_registry: PypiRegistry) -> None:
    narrower = POLICY.model_copy(
        update={
            "versions_deny": (
                DeniedVersions(
                    id="packages.versions.deny[0]", ecosystem=Ecosystem.PYPI, name="libx",
                    versions=parse_range(Ecosystem.PYPI, "==1.1"),
                ),
            ),
            "age": Age(version_min=0),
        }
    )  # fmt: skip
    with rig.explicit(granted(pypi_registry)) as attempt:
        attempt.amend(granted(pypi_registry, narrower))
        answer = index(attempt, pypi_registry, "libx")
        assert answer.json["versions"] == ["1.0", "1.2"]
        assert answer.headers["x-sluicegate-withheld"] == "version_denied=1, version_too_new=1, version_yanked=1"
        assert fetch(attempt, file_url(pypi_registry, "libx", "1.1")).code == "policy_revoked"
        assert fetch(attempt, file_url(pypi_registry, "libx", "1.3")).code == "version_too_new"
        assert fetch(attempt, file_url(pypi_registry, "libx", "1.2")).status == 200


def test_a_host_that_is_a_registry_now_is_read_as_one(rig: Rig, npm_registry: NpmRegistry) -> None:
    open_ = granted(npm_registry, methods=None).model_copy(update={"packages": None})
    with rig.explicit(open_) as attempt:
        url = f"{npm_registry.url}-/v1/search?text=x"
        assert fetch(attempt, url).status != 403
        attempt.amend(granted(npm_registry))
        npm_registry.forget()
        assert fetch(attempt, url).code == "policy_revoked"
        assert npm_registry.untouched
        assert fetch(attempt, f"{npm_registry.url}nlib").status == 200
        assert fetch(attempt, f"{npm_registry.url}ndenied").code == "policy_revoked"


def test_a_registry_of_another_address_is_not_asked_in_the_place_of_the_first(
    rig: Rig, pypi_registry: PypiRegistry
) -> None:
    with rig.explicit(granted(pypi_registry)) as attempt:
        grant_ = registry_grant(pypi_registry)
        moved = grant_.registries[0].model_copy(
            update={"index": parse_base(pypi_registry.url.replace("simple", "other"))}
        )
        attempt.amend(
            granted(pypi_registry).model_copy(update={"packages": grant_.model_copy(update={"registries": (moved,)})})
        )
        pypi_registry.forget()
        assert index(attempt, pypi_registry, "good").code == "policy_revoked"
        assert pypi_registry.untouched


# Pages


def test_a_page_shows_what_is_allowed_and_why_the_rest_is_not(pypi: Attempt, pypi_registry: PypiRegistry) -> None:
    """What is too new, or was taken back, is marked with its reason; the rest is as it was. The log counts."""
    answer = index(pypi, pypi_registry, "libx")
    assert (answer.status, answer.headers["content-type"]) == (200, JSON)
    files = {one["filename"].split("-")[1]: one for one in answer.json["files"]}
    assert {version: one.get("yanked") for version, one in files.items() if version in ("1.0", "1.1", "1.2")} == {
        "1.0": None, "1.1": None, "1.2": None,
    }  # fmt: skip
    assert files["1.3"]["yanked"].startswith("sluicegate: version_too_new: `1.3` of `libx` was published at ")
    assert files["1.2.5"]["yanked"].startswith("sluicegate: version_yanked: ")
    assert files["1.2"]["url"] == file_url(pypi_registry, "libx", "1.2")
    assert answer.json["versions"] == ["1.0", "1.1", "1.2"]
    assert answer.headers["x-sluicegate-withheld"] == "version_too_new=1, version_yanked=1"
    (line,) = pypi.events(event="decision", layer="package")
    assert (line["decision"], line["package"], line["version"]) == ("allow", "pkg:pypi/libx", None)
    assert "2 of 5 files are withheld: 1 version_too_new, 1 version_yanked" in line["detail"]
    pypi.end()
    (end,) = pypi.events(event="connection")
    assert (end["package"], end["status"], end["outcome"]) == ("pkg:pypi/libx", 200, "completed")


def test_a_client_that_reads_only_html_gets_the_same(pypi: Attempt, pypi_registry: PypiRegistry) -> None:
    """HTML has no upload times: it is written from the JSON that the registry was asked for."""
    answer = index(pypi, pypi_registry, "libx", accept="text/html")
    assert answer.headers["content-type"].startswith("text/html")
    text = answer.body.decode()
    assert text.count("<a ") == 5
    assert text.count("data-yanked=") == 2
    assert "sluicegate: version_too_new" in text
    assert [seen.header("accept") for seen in pypi_registry.index.journal.requests] in ([JSON], [])


def test_a_packument_has_no_forbidden_version_and_latest_is_one_that_is_left(
    npm: Attempt, npm_registry: NpmRegistry
) -> None:
    answer = fetch(npm, f"{npm_registry.url}nlib", "Accept: application/vnd.npm.install-v1+json")
    document = answer.json
    assert list(document["versions"]) == ["1.0.0", "1.1.0", "1.2.0"]
    assert document["dist-tags"] == {"latest": "1.2.0"}
    assert "1.3.0" not in document["time"]
    assert document["versions"]["1.2.0"]["dist"]["tarball"] == tarball_url(npm_registry, "nlib", "1.2.0")
    assert list(document["policyRestrictions"]["versions"]) == ["1.3.0"]
    assert document["policyRestrictions"]["message"].startswith("sluicegate: version_too_new: `1.3.0` of `nlib`")


def test_a_scoped_packument_is_asked_for_in_both_spellings(npm: Attempt, npm_registry: NpmRegistry) -> None:
    for path in ("@scope%2fthing", "@scope%2Fthing", "@scope/thing"):
        assert list(fetch(npm, npm_registry.url + path).json["versions"]) == ["1.0.0"]
    assert {line["package"] for line in npm.events(layer="package")} == {"pkg:npm/%40scope/thing"}


def test_what_is_not_there_is_not_found_and_not_refused(
    pypi: Attempt, pypi_registry: PypiRegistry, npm: Attempt, npm_registry: NpmRegistry
) -> None:
    assert index(pypi, pypi_registry, "nobody-has-this").status == 404
    assert fetch(npm, f"{npm_registry.url}nobody-has-this").status == 404
    assert pypi.denials() == npm.denials() == []


def test_a_page_that_has_not_changed_is_answered_304_by_the_proxy(pypi: Attempt, pypi_registry: PypiRegistry) -> None:
    """The validator is of the filtered page: the registry's own never reaches a client, nor a client's the registry."""
    first = index(pypi, pypi_registry, "good")
    again = index(pypi, pypi_registry, "good", f"If-None-Match: W/{first.headers['etag']}")
    assert (again.status, again.body) == (304, b"")
    assert index(pypi, pypi_registry, "good", 'If-None-Match: "other"').status == 200
    assert all(seen.header("if-none-match") is None for seen in pypi_registry.index.journal.requests)


def test_the_head_of_a_page_has_no_body(pypi: Attempt, pypi_registry: PypiRegistry) -> None:
    """On one connection: what follows is read as what it is. A denial is the last on its own."""
    whole = index(pypi, pypi_registry, "good")
    sock = pypi.https("pypi.test", pypi_registry.index.port)
    host = f"pypi.test:{pypi_registry.index.port}"
    for path, status in (("/simple/good/", 200), ("/simple/nobody-has-this/", 404)):
        answer = ask(sock, get(host, path, f"Accept: {JSON}", method="HEAD"), "HEAD")
        assert (answer.status, answer.body) == (status, b"")
    answer = ask(sock, get(host, "/simple/good/", f"Accept: {JSON}"))
    assert answer.body == whole.body
    sock.sendall(get(host, "/simple/denied/", f"Accept: {JSON}", method="HEAD"))
    head, end, body = read_to_end(sock).partition(b"\r\n\r\n")
    assert (head[:13], end, body) == (b"HTTP/1.1 403 ", b"\r\n\r\n", b"")


def test_http2_clients_get_pages_and_files(pypi: Attempt, pypi_registry: PypiRegistry) -> None:
    """A page needs nothing of the server's; a file is asked for by HTTP/2 of a server that has none, and says so."""
    client = Http2Client(pypi.https("pypi.test", pypi_registry.index.port, alpn=["h2"]))
    answer = client.get(f"pypi.test:{pypi_registry.index.port}", "/simple/good/", ("accept", JSON))
    assert [one["filename"] for one in answer.json["files"]] == ["good-1.0-py3-none-any.whl"]
    answer = client.get(f"pypi.test:{pypi_registry.index.port}", "/simple/denied/", ("accept", JSON))
    assert (answer.status, answer.code) == (403, "name_denied")


def test_a_name_that_is_denied_is_never_asked_for(
    pypi: Attempt, pypi_registry: PypiRegistry, npm: Attempt, npm_registry: NpmRegistry
) -> None:
    """Whatever its spelling. The refusal says why where each client shows it, and the log names the package."""
    for spelling in ("denied", "Denied", "DENIED/"):
        answer = index(pypi, pypi_registry, spelling.rstrip("/"))
        assert (answer.status, answer.code) == (403, "name_denied")
        assert answer.phrase.startswith("Blocked by sluicegate: name_denied: `denied` is denied by the policy")
    answer = fetch(npm, f"{npm_registry.url}ndenied")
    assert answer.json["error"] == answer.phrase
    assert (answer.json["package"], answer.json["rule"]) == ("pkg:npm/ndenied", "packages.names.deny.npm[0]")
    assert fetch(npm, tarball_url(npm_registry, "ndenied", "1.0.0")).code == "name_denied"
    assert pypi_registry.untouched
    assert npm_registry.untouched
    assert {line["package"] for line in npm.events(decision="deny")} == {"pkg:npm/ndenied"}


def test_vulnerable_and_malicious_packages_are_refused(
    rig: Rig, pypi_registry: PypiRegistry, npm_registry: NpmRegistry, advisories: Path
) -> None:
    """By the operator's directory of advisories. One that was withdrawn, and one of low severity, refuse nothing."""
    policy = PackagePolicy(advisories=AdvisoriesPolicy(db_dir=advisories, max_db_age=0))
    with rig.explicit(granted(pypi_registry, policy)) as attempt:
        files = index(attempt, pypi_registry, "vulnerable").json["files"]
        assert [one.get("yanked", "")[:31] for one in files] == ["sluicegate: known_vulnerability", ""]
        answer = fetch(attempt, file_url(pypi_registry, "vulnerable", "1.0"))
        assert (answer.code, "GHSA-aaaa-aaaa-aaaa" in answer.phrase) == ("known_vulnerability", True)
        assert index(attempt, pypi_registry, "malicious").code == "malicious_package"
        for name in ("pardoned", "scratched"):
            assert fetch(attempt, file_url(pypi_registry, name, "1.0")).status == 200
    with rig.explicit(granted(npm_registry, policy)) as attempt:
        assert list(fetch(attempt, f"{npm_registry.url}nvulnerable").json["versions"]) == ["1.1.0"]
        assert fetch(attempt, f"{npm_registry.url}nmalicious").code == "malicious_package"


def test_without_the_data_that_a_policy_names_nothing_is_allowed(
    rig: Rig, pypi_registry: PypiRegistry, directory: Path
) -> None:
    policy = PackagePolicy(advisories=AdvisoriesPolicy(db_dir=directory / "nowhere"))
    with rig.explicit(granted(pypi_registry, policy)) as attempt:
        answer = index(attempt, pypi_registry, "good")
        assert (answer.status, answer.code) == (403, "package_facts_unavailable")
    assert pypi_registry.untouched


# Files


def test_a_file_is_judged_when_it_is_fetched_with_no_page_asked_for(pypi: Attempt, pypi_registry: PypiRegistry) -> None:
    """As a lock file does: the proxy reads the page by itself, once, and the log says so."""
    data = pypi_registry.packages.find("libx", "1.2")[0].artifact.data
    assert fetch(pypi, file_url(pypi_registry, "libx", "1.2")).body == data
    answer = fetch(pypi, file_url(pypi_registry, "libx", "1.3"))
    assert (answer.status, answer.code) == (403, "version_too_new")
    assert answer.phrase.startswith("Blocked by sluicegate: version_too_new: `1.3` of `libx` was published at ")
    assert "until" in answer.json["hint"]
    assert (answer.json["package"], answer.json["version"]) == ("pkg:pypi/libx", "1.3")
    assert fetch(pypi, file_url(pypi_registry, "libx", "1.3") + ".metadata").code == "version_too_new"
    assert not [seen for seen in pypi_registry.files.journal.requests if "libx-1.3" in seen.target]
    judged = [(line["decision"], line["version"]) for line in pypi.events(layer="package") if line["version"]]
    assert judged == [("allow", "1.2"), ("deny", "1.3"), ("deny", "1.3")]


def test_a_tarball_is_judged_when_it_is_fetched_with_no_packument_asked_for(
    npm: Attempt, npm_registry: NpmRegistry
) -> None:
    """As `npm ci` and a shrinkwrap do."""
    data = npm_registry.packages.tarball("nlib", "1.2.0")
    assert fetch(npm, tarball_url(npm_registry, "nlib", "1.2.0")).body == data
    assert fetch(npm, tarball_url(npm_registry, "nlib", "1.3.0")).code == "version_too_new"
    assert fetch(npm, tarball_url(npm_registry, "npostinstall", "1.0.0")).code == "install_script_required"
    assert fetch(npm, tarball_url(npm_registry, "@scope/thing", "1.0.0")).status == 200
    assert fetch(npm, tarball_url(npm_registry, "nlib", "7.7.7")).code == "artifact_not_listed"


def test_the_proxy_reads_a_page_for_a_file_and_the_log_has_it(rig: Rig, pypi_registry: PypiRegistry) -> None:
    """Under a grant that no other attempt has: else a connection that is there already could be used."""
    pypi_registry.packages.add(wheel("once", "1.0"))
    with rig.explicit(granted(pypi_registry, max_connections=77)) as attempt:
        for _ in range(2):
            assert fetch(attempt, file_url(pypi_registry, "once", "1.0")).status == 200
        read = [line["path"] for line in attempt.events(layer="package") if line["host"] == "pypi.test"]
        assert read == ["/simple/once/"]
        assert [line["address"] for line in attempt.events(layer="dial", host="pypi.test")] == ["127.0.0.1"]
    assert [path for path in pypi_registry.paths if path.startswith("GET /simple/")] == ["GET /simple/once/"]


def test_a_file_must_be_where_its_page_says(pypi: Attempt, pypi_registry: PypiRegistry) -> None:
    """The same name at another place, at the other host, or of a version that is not listed, is another file."""
    right = file_url(pypi_registry, "good", "1.0")
    assert fetch(pypi, right).status == 200
    filename = right.rpartition("/")[2]
    for wrong in (
        f"{pypi_registry.files.url}/packages/{filename}",
        f"{pypi_registry.index.url}{right.removeprefix(pypi_registry.files.url)}",
        right.replace("good-1.0", "good-1.1"),
        right.replace("/packages/", "/Packages/"),
    ):
        assert fetch(pypi, wrong).code == "artifact_not_listed"
    assert not [seen for seen in pypi_registry.index.journal.requests if "/packages/" in seen.target]


def test_a_plus_may_be_escaped(rig: Rig, pypi_registry: PypiRegistry) -> None:
    """pip escapes it, uv does not: they are one path. A local version is refused by default, and here allowed."""
    url = file_url(pypi_registry, "local", "1.0+evil")
    assert "+" in url
    policy = PackagePolicy.model_validate({"selectors": {"local_versions": "allow"}})
    with rig.explicit(granted(pypi_registry, policy)) as attempt:
        assert fetch(attempt, url).status == fetch(attempt, url.replace("+", "%2B")).status == 200
    with rig.explicit(granted(pypi_registry)) as attempt:
        for spelling in (url, url.replace("+", "%2b")):
            assert fetch(attempt, spelling).code == "local_version_denied"


def test_a_file_that_was_added_late_is_as_new_as_it_is(pypi: Attempt, pypi_registry: PypiRegistry) -> None:
    """The release is old, its wheel is not; and its source is not installed at all."""
    found = {one.artifact.filename: one for one in pypi_registry.packages.find("late-file")}
    codes = {name: fetch(pypi, pypi_registry.files.url + one.path).code for name, one in found.items()}
    assert codes == {"late_file-1.0-py3-none-any.whl": "version_too_new", "late_file-1.0.tar.gz": "no_wheel"}


def test_a_file_passes_in_parts(pypi: Attempt, pypi_registry: PypiRegistry) -> None:
    """uv reads the end of a wheel that has no metadata file."""
    data = pypi_registry.packages.find("good", "1.0")[0].artifact.data
    answer = fetch(pypi, file_url(pypi_registry, "good", "1.0"), "Range: bytes=-10")
    assert (answer.status, answer.body) == (206, data[-10:])
    answer = fetch(pypi, file_url(pypi_registry, "good", "1.0"), "Range: bytes=a secret")
    assert (answer.status, answer.body) == (200, data)
    head = fetch(pypi, file_url(pypi_registry, "good", "1.0"), method="HEAD")
    assert (head.status, head.headers["content-length"]) == (200, str(len(data)))


def test_files_off_the_registry_are_not_on_its_pages(pypi: Attempt, pypi_registry: PypiRegistry, npm: Attempt,
                                                      npm_registry: NpmRegistry) -> None:  # fmt: skip
    """What a page says to be at another host can't be fetched, so that a resolver must not choose it."""
    assert index(pypi, pypi_registry, "offsite").json["files"] == []
    assert fetch(npm, f"{npm_registry.url}noffsite").json["versions"] == {}
    assert any("1 more can't be read" in line["detail"] for line in pypi.events(layer="package"))


def test_a_page_that_can_not_be_read_is_a_failure_and_its_files_are_refused(
    rig: Rig, pypi_registry: PypiRegistry
) -> None:
    """No denial for the page: nobody has forbidden it. A file that nothing is known of is denied."""
    directory = pypi_registry.packages
    artifact = directory.add(wheel("broken-page", "1.0"))
    directory.project("broken-page").status = object()  # type: ignore[assignment]  # the server then answers 500
    with rig.explicit(granted(pypi_registry)) as attempt:
        answer = index(attempt, pypi_registry, "broken-page")
        assert (answer.status, answer.code) == (502, "registry_unavailable")
        answer = fetch(attempt, pypi_registry.files.url + artifact.path)
        assert (answer.status, answer.code) == (403, "package_facts_unavailable")
        assert attempt.denials() == ["package_facts_unavailable"]


# What does not get through


@pytest.mark.parametrize(
    "path",
    [
        "/simple/", "/simple", "/", "/pypi/good/json", "/simple/good/json", "/simple/good/?secret", "/simple/good/?",
        "/simple//good/", "/simple/../simple/good/", "/simple/good/..", "/simple/g%6fod/", "/simple/good%2f",
        "/simple/good/extra/", "/integrity/good/1.0/good-1.0-py3-none-any.whl/provenance", "/search?q=good",
        "/simple/good;x/", "/packages/x/secret.bin", "/simple/g\u00f6od/", "/%2e%2e/simple/good/", "/Simple/good/",
    ],
)  # fmt: skip
def test_what_no_client_needs_of_an_index_is_refused(path: str, pypi: Attempt, pypi_registry: PypiRegistry) -> None:
    answer = fetch(pypi, pypi_registry.index.url + path)
    assert (answer.status, answer.code) == (403, "registry_request_unknown")
    assert pypi_registry.untouched


@pytest.mark.parametrize(
    "path",
    [
        "/", "/-/ping", "/-/whoami", "/-/v1/search?text=good", "/nlib/1.0.0", "/nlib/latest", "/nlib?write=true",
        "/-/package/nlib/dist-tags", "/-/npm/v1/keys", "/nlib/-/nlib-1.0.0.tgz?secret", "/nlib/-/other-1.0.0.tgz",
        "/@scope%2f..", "/@scope%252fthing", "/nlib/-/nlib-1.0.0.tgz/..", "/nlib%2f-%2fnlib-1.0.0.tgz", "/-/all",
        "/nlib/-/nlib-latest.tgz", "/@scope", "/node_modules",
    ],
)  # fmt: skip
def test_what_no_client_needs_of_an_npm_registry_is_refused(path: str, npm: Attempt, npm_registry: NpmRegistry) -> None:
    answer = fetch(npm, npm_registry.index.url + path)
    assert (answer.status, answer.code) == (403, "registry_request_unknown")
    assert npm_registry.untouched


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_is_written_to_a_registry_in_any_mode(
    method: str, rig: Rig, npm_registry: NpmRegistry, pypi_registry: PypiRegistry
) -> None:
    """Nor where the network policy has no methods: what is granted of packages is granted for reading."""
    for registry in (npm_registry, pypi_registry):
        for mode in (Mode.NAMED, Mode.UNRESTRICTED):
            with rig.explicit(granted(registry, mode=mode, methods=None)) as attempt:
                answer = fetch(attempt, registry.index.url + "/nlib", "Content-Length: 0", method=method)
                assert (answer.status, answer.code) == (403, "registry_request_unknown")
    assert npm_registry.untouched
    assert pypi_registry.untouched


def test_a_body_is_not_sent_along(rig: Rig, npm_registry: NpmRegistry) -> None:
    with rig.explicit(granted(npm_registry, mode=Mode.NAMED, methods=None)) as attempt:
        sock = attempt.https("npm.test", npm_registry.index.port)
        host = f"npm.test:{npm_registry.index.port}"
        answer = ask(sock, get(host, "/nlib", "Content-Length: 6") + b"secret")
        assert (answer.status, answer.code) == (403, "registry_request_unknown")
    assert npm_registry.untouched


def test_a_clients_own_words_do_not_reach_a_registry(
    pypi: Attempt, pypi_registry: PypiRegistry, npm: Attempt, npm_registry: NpmRegistry
) -> None:
    """Credentials, cookies, the client's name, conditions: of no page and no file."""
    words = [
        "Authorization: Basic c2VjcmV0", "Cookie: a=secret", "User-Agent: secret", "Referer: https://secret/",
        "X-Secret: secret", "If-None-Match: \"secret\"", "If-Range: \"secret\"", "Accept-Language: secret",
        "npm-command: secret", "Accept: secret",
    ]  # fmt: skip
    pypi_registry.packages.add(wheel("silent", "1.0"))
    npm_registry.packages.add({"name": "nsilent", "version": "1.0.0"})
    assert fetch(pypi, f"{pypi_registry.url}silent/", *words).status == 200
    assert fetch(pypi, file_url(pypi_registry, "silent", "1.0"), *words).status == 200
    assert fetch(npm, f"{npm_registry.url}nsilent", *words).status == 200
    assert fetch(npm, tarball_url(npm_registry, "nsilent", "1.0.0"), *words).status == 200
    seen = [one for site in (*pypi_registry.sites, *npm_registry.sites) for one in site.journal.requests]
    assert len(seen) == 4
    for one in seen:
        assert "secret" not in repr(one).lower()
        assert one.header("user-agent") == "sluicegate"


def test_a_call_that_names_the_registry_gets_no_more_of_it(rig: Rig, pypi_registry: PypiRegistry) -> None:
    """In the modes `named` and `unrestricted` too; the port beside it and raw TCP are no way round."""
    for mode in (Mode.NAMED, Mode.UNRESTRICTED):
        with rig.explicit(granted(pypi_registry, mode=mode, methods=None)) as attempt:
            assert fetch(attempt, f"{pypi_registry.index.url}/pypi/good/json").code == "registry_request_unknown"
            assert index(attempt, pypi_registry, "denied").code == "name_denied"
            assert index(attempt, pypi_registry, "good").status == 200
    pypi_registry.forget()
    wide = granted(pypi_registry, mode=Mode.NAMED, methods=None)
    raw = rule("pypi.test", pypi_registry.index.port, protocol=Protocol.TCP)
    layer = wide.layers[0].model_copy(update={"rules": (raw,)})
    with rig.explicit(
        wide.model_copy(update={"layers": (layer,), "passthrough": (parse_host("pypi.test"),)})
    ) as attempt:
        sock = attempt.explicit()
        target = f"pypi.test:{pypi_registry.index.port}"
        answer = ask(sock, get(target, method="CONNECT", target=target), "CONNECT")
        assert (answer.status, answer.code) == (403, "protocol_not_allowed")
    assert pypi_registry.untouched


def test_a_host_that_is_passed_through_is_opened_where_it_is_a_registry(rig: Rig, pypi_registry: PypiRegistry) -> None:
    """Else nobody would see which package is asked for."""
    with rig.explicit(granted(pypi_registry, passthrough=(parse_host("pypi.test"),))) as attempt:
        assert index(attempt, pypi_registry, "denied").code == "name_denied"


# Many at once, and what is kept


def test_requests_for_one_page_at_the_same_time_read_it_once(rig: Rig, pypi_registry: PypiRegistry) -> None:
    pypi_registry.packages.add(wheel("crowd", "1.0"))
    with rig.explicit(granted(pypi_registry)) as attempt:
        host = f"pypi.test:{pypi_registry.index.port}"
        socks = [attempt.https("pypi.test", pypi_registry.index.port) for _ in range(8)]
        for sock in socks:
            sock.sendall(get(host, "/simple/crowd/", f"Accept: {JSON}"))
        assert {read_answer(sock).status for sock in socks} == {200}
    assert pypi_registry.paths == ["GET /simple/crowd/"]


def test_another_policy_sees_another_page(rig: Rig, pypi_registry: PypiRegistry) -> None:
    """Pages are kept, but not what another policy has said of them."""
    for policy, versions in ((POLICY, ["1.0", "1.1", "1.2"]), (PackagePolicy(age=Age(version_min=0)), [
        "1.0", "1.1", "1.2", "1.3",
    ])):  # fmt: skip
        with rig.explicit(granted(pypi_registry, policy)) as attempt:
            assert index(attempt, pypi_registry, "libx").json["versions"] == versions


def test_clients_that_do_not_read_do_not_fill_the_proxys_memory(rig: Rig, npm_registry: NpmRegistry) -> None:
    """Twenty ask for a page of 12 MiB and read nothing. Who reads still gets it, once they have gone."""
    npm_registry.packages.add({"name": "nlarge", "version": "1.0.0", "description": "x" * (12 << 20)})
    with rig.explicit(granted(npm_registry)) as attempt:
        first = fetch(attempt, f"{npm_registry.url}nlarge")
        assert len(first.body) > 12 << 20
        before = rig.resident_bytes()
        idle = [attempt.https("npm.test", npm_registry.index.port) for _ in range(20)]
        for sock in idle:
            sock.sendall(get(f"npm.test:{npm_registry.index.port}", "/nlarge"))
        assert [sock.recv(1) for sock in idle[:2]] == [b"H", b"H"]  # they are being answered
        waiting = attempt.https("npm.test", npm_registry.index.port)
        waiting.sendall(get(f"npm.test:{npm_registry.index.port}", "/nlarge"))
        assert rig.resident_bytes() - before < 160 << 20
        for sock in idle:
            sock.close()
        assert read_answer(waiting).body == first.body
        assert attempt.denials() == []


# Real clients


class Clients:
    """pip, uv and npm through an attempt's proxy, with nothing of their own."""

    def __init__(self, attempt: Attempt, root: Path, registry: PypiRegistry | NpmRegistry) -> None:
        self.attempt, self.root, self.target = attempt, root, root / "target"
        proxy = f"http://127.0.0.1:{attempt.port}"
        authority = str(attempt.rig.certificate)
        named = dict.fromkeys(("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy"), proxy)
        trusted = dict.fromkeys(("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE", "NPM_CONFIG_CAFILE"), authority)
        self.env = {**client_environment(root / "home", registry), **named, **trusted, "PIP_RETRIES": "0"}

    def run(self, *argv: str, cwd: Path | None = None, fails: bool = False) -> str:
        done = subprocess.run(
            argv, env=self.env, cwd=cwd or self.root, capture_output=True, text=True, timeout=PATIENCE,
            stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        output = done.stdout + done.stderr
        assert (done.returncode != 0) == fails, f"{argv} ended with {done.returncode}:\n{output}"
        return output

    def pip(self, *specs: str, fails: bool = False) -> str:
        options = ["install", "--no-cache-dir", "--target", str(self.target)]
        return self.run(*arguments(pip_command(), options, specs), fails=fails)

    def uv(self, *specs: str, fails: bool = False) -> str:
        options = ["pip", "install", "--no-config", "--python", sys.executable, "--target", str(self.target)]
        return self.run(*arguments(uv_command(), options, specs), fails=fails)

    def npm(self, *parts: str, fails: bool = False) -> str:
        project = self.root / "project"
        if not project.exists():
            project.mkdir()
            (project / "package.json").write_text('{"name": "project", "version": "1.0.0"}')
        return self.run(*arguments(npm_command(), parts), cwd=project, fails=fails)

    def installed(self) -> set[str]:
        found = {path.name.removesuffix(".dist-info") for path in self.target.glob("*.dist-info")}
        for manifest in (self.root / "project" / "node_modules").glob("**/package.json"):
            one = json.loads(manifest.read_text())
            found.add(f"{one['name']}-{one['version']}")
        return found


@pytest.fixture
def python_clients(pypi: Attempt, tmp_path: Path, pypi_registry: PypiRegistry) -> Clients:
    return Clients(pypi, tmp_path, pypi_registry)


@pytest.fixture
def node_clients(npm: Attempt, tmp_path: Path, npm_registry: NpmRegistry) -> Clients:
    return Clients(npm, tmp_path, npm_registry)


@pytest.mark.parametrize("tool", ["pip", "uv"])
def test_a_client_chooses_the_newest_version_that_is_allowed(tool: str, python_clients: Clients) -> None:
    """For what it is asked for, and for what that needs."""
    getattr(python_clients, tool)("app", "good")
    assert python_clients.installed() == {"app-1.0", "good-1.0", "libx-1.2"}


@pytest.mark.parametrize("tool", ["pip", "uv"])
def test_a_client_that_asks_for_a_forbidden_version_says_why(tool: str, python_clients: Clients) -> None:
    output = getattr(python_clients, tool)("libx==1.3", fails=True)
    assert "version_too_new" in output
    assert python_clients.installed() == set()


def test_uv_says_why_nothing_is_left(python_clients: Clients) -> None:
    assert "version_too_new" in python_clients.uv("newborn", fails=True)


@pytest.mark.parametrize("tool", ["pip", "uv"])
def test_a_denied_name_is_not_installed(tool: str, python_clients: Clients) -> None:
    """Neither client shows why: pip says nothing of a page that it can't have, uv the bare status. The log does."""
    output = getattr(python_clients, tool)("denied", fails=True)
    assert ("403 Forbidden" in output) == (tool == "uv")
    assert set(python_clients.attempt.denials()) == {"name_denied"}


def test_uv_installs_a_wheel_without_a_metadata_file(python_clients: Clients, pypi_registry: PypiRegistry) -> None:
    """By ranges, through the proxy."""
    pypi_registry.packages.add(wheel("parted", "1.0"), core_metadata=False)
    python_clients.uv("parted")
    assert python_clients.installed() == {"parted-1.0"}
    assert any(seen.header("range") for seen in pypi_registry.files.journal.requests)


def test_npm_chooses_the_newest_version_that_is_allowed(node_clients: Clients) -> None:
    node_clients.npm("install", "napp", "@scope/thing")
    assert node_clients.installed() == {"napp-1.0.0", "nlib-1.2.0", "@scope/thing-1.0.0"}


def test_npm_says_why_it_can_not_have_a_version(node_clients: Clients) -> None:
    output = node_clients.npm("install", "nlib@1.3.0", fails=True)
    assert "version_too_new" in output
    assert "E403" in output
    assert "name_denied" in node_clients.npm("install", "ndenied", fails=True)
    assert node_clients.installed() == set()


def test_npm_ci_with_a_lock_is_refused_what_the_policy_refuses(
    node_clients: Clients, npm_registry: NpmRegistry
) -> None:
    """A lock asks for no packument. What is allowed of it is the positive control."""
    lock: dict[str, Any] = {"name": "project", "version": "1.0.0", "lockfileVersion": 3, "packages": {}}
    for version, fails in (("1.2.0", False), ("1.3.0", True)):
        project = node_clients.root / "project"
        project.mkdir(exist_ok=True)
        (project / "package.json").write_text(
            json.dumps({"name": "project", "version": "1.0.0", "dependencies": {"nlib": version}})
        )
        lock["packages"] = {
            "": {"name": "project", "version": "1.0.0", "dependencies": {"nlib": version}},
            "node_modules/nlib": {"version": version, "resolved": tarball_url(npm_registry, "nlib", version)},
        }
        (project / "package-lock.json").write_text(json.dumps(lock))
        output = node_clients.npm("ci", "--no-audit", fails=fails)
    assert "version_too_new" in output
    assert node_clients.installed() == set()


def test_audits_and_update_notices_do_not_stop_npm(node_clients: Clients, npm_registry: NpmRegistry) -> None:
    """An audit's POST is refused, and the installation goes on."""
    node_clients.npm("install", "nlib@1.2.0", "--audit")
    assert node_clients.installed() == {"nlib-1.2.0"}
    assert not [path for path in npm_registry.paths if not path.startswith("GET ")]


def test_a_publication_does_not_arrive(node_clients: Clients, npm_registry: NpmRegistry) -> None:
    scope = f"//npm.test:{npm_registry.index.port}/"
    node_clients.npm("publish", f"--{scope}:_authToken=secret-token", "--provenance=false", fails=True)
    assert not [path for path in npm_registry.paths if path.startswith("PUT")]
    assert "secret" not in repr(npm_registry.index.journal.requests)
