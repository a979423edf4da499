"""The registries are real ones, and the hostile packages do their harm: what the escape tests are worth.

Here nothing of the product runs: the package clients speak to the registries directly.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tarfile
import venv
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from io import BytesIO
from pathlib import Path

import httpx
import pytest

from tests.registry.build import ZEROS, Entry, Markers, sdist, tar_bomb, wheel
from tests.registry.cast import BOMB_PIECES, GOOD_DATA, MANY, fill_npm, fill_pypi, write_advisories
from tests.registry.npm import NpmIndex
from tests.registry.pypi import HTML_KIND, JSON_KIND, PypiIndex
from tests.registry.server import (
    NpmRegistry,
    PypiRegistry,
    arguments,
    client_environment,
    node_command,
    npm_command,
    pip_command,
    uv_command,
)

PATIENCE = 100


def run(argv: Sequence[str], env: Mapping[str, str], cwd: Path, *, fails: bool = False) -> str:
    """What a program printed, on both of its outputs. It ends well, or as it `fails`."""
    done = subprocess.run(
        argv, env=dict(env), cwd=cwd, capture_output=True, text=True, timeout=PATIENCE, stdin=subprocess.DEVNULL
    )
    output = done.stdout + done.stderr
    assert (done.returncode != 0) == fails, f"{argv} ended with {done.returncode}:\n{output}"
    return output


class Python:
    """A place to install into with pip or uv, and the interpreter that imports from it."""

    def __init__(self, root: Path, registry: PypiRegistry) -> None:
        self.root, self.target = root, root / "target"
        self.env = client_environment(root / "home", registry)

    def pip(self, *specs: str, fails: bool = False) -> str:
        options = ["install", "--quiet", "--no-cache-dir", "--target", str(self.target)]
        return run(arguments(pip_command(), options, specs), self.env, self.root, fails=fails)

    def uv(self, *specs: str, fails: bool = False, target: Path | None = None) -> str:
        where = str(target or self.target)
        options = ["pip", "install", "--no-config", "--python", sys.executable, "--target", where]
        return run(arguments(uv_command(), options, specs), self.env, self.root, fails=fails)

    def code(self, code: str, **env: str) -> str:
        """Run with what was installed, as the PYTHONPATH."""
        where = {"PYTHONPATH": str(self.target), **env}
        return run([sys.executable, "-c", code], {**self.env, **where}, self.root)

    def version(self, name: str) -> str:
        found = [path.name for path in self.target.glob(f"{name.replace('-', '_')}-*.dist-info")]
        assert len(found) == 1, found
        return found[0].removesuffix(".dist-info").rpartition("-")[2]


class Node:
    """A place to install into with npm, and the interpreter that runs there."""

    def __init__(self, root: Path, registry: NpmRegistry) -> None:
        self.root, self.modules = root / "project", root / "project" / "node_modules"
        self.root.mkdir()
        self.env = client_environment(root / "home", registry)
        (self.root / "package.json").write_text('{"name": "project", "version": "1.0.0"}')

    def npm(self, *parts: str, fails: bool = False) -> str:
        return run(arguments(npm_command(), parts), self.env, self.root, fails=fails)

    def install(self, *specs: str, fails: bool = False) -> str:
        return self.npm("install", "--no-audit", *specs, fails=fails)

    def code(self, code: str, kind: str = "commonjs") -> str:
        return run(arguments(node_command(), f"--input-type={kind}", "--eval", code), self.env, self.root)

    def version(self, name: str) -> str:
        version: str = json.loads((self.modules / name / "package.json").read_text())["version"]
        return version


@pytest.fixture
def python(tmp_path: Path, pypi_registry: PypiRegistry) -> Python:
    return Python(tmp_path, pypi_registry)


@pytest.fixture
def node(tmp_path: Path, npm_registry: NpmRegistry) -> Node:
    return Node(tmp_path, npm_registry)


# The Python index is a real one


def test_uv_installs_what_works(python: Python, pypi_registry: PypiRegistry) -> None:
    """Resolved by the metadata files, without a yanked version; a page by its normal name; data and submodules there."""
    python.uv("good==1.0", "app", "foo-bar-baz", "with-tool", "with-extra[more]")
    code = "import good.sub.value, foo_bar_baz, pathlib as p; print(good.sub.value.VALUE, (p.Path(good.__file__).parent / 'data.txt').read_text(), end='')"
    assert python.code(code) == f"42 {GOOD_DATA}"
    assert python.version("libx") == "1.3"
    assert (python.target / "bin" / "with-tool").exists()
    assert "GET /simple/foo-bar-baz/" in pypi_registry.paths
    assert [path for path in pypi_registry.paths if path.endswith(".whl.metadata")]
    assert pypi_registry.rogue.untouched


def test_pip_installs_what_works(python: Python) -> None:
    """The entry point's script runs, and a dependency is resolved."""
    python.pip("good==1.0", "app", "with-tool")
    assert python.code("import good.sub.value, libx; print(good.sub.value.VALUE, libx.VERSION)") == "42 1.3\n"
    script = run([str(python.target / "bin" / "with-tool")], {"PYTHONPATH": str(python.target)}, python.root)
    assert script == "with-tool ran\n"


def test_pip_downloads_a_wheel_as_it_is(python: Python, pypi_registry: PypiRegistry) -> None:
    """What arrives is what the index holds."""
    run(arguments(pip_command(), ["download", "--quiet", "--no-cache-dir", "good==1.0"]), python.env, python.root)
    held = pypi_registry.packages.find("good", "1.0")[0].artifact
    assert (python.root / held.filename).read_bytes() == held.data


def test_uv_and_pip_obey_upload_times(python: Python, pypi_registry: PypiRegistry) -> None:
    """PEP 700's times are read: with a limit of ten days, the version of two days ago is passed over."""
    limit = (pypi_registry.now - timedelta(days=10)).isoformat()
    python.uv("--exclude-newer", limit, "libx")
    assert python.version("libx") == "1.2"


def test_uv_asks_again_with_the_validator(python: Python, pypi_registry: PypiRegistry) -> None:
    """A second look at a page is answered 304, since the client sends the ETag that it was given."""
    python.uv("good")
    pypi_registry.forget()
    python.uv("--refresh", "--reinstall", "good")
    asked = [seen for seen in pypi_registry.index.journal.requests if seen.target == "/simple/good/"]
    assert [seen.header("if-none-match") is not None for seen in asked] == [True]


def test_uv_reads_metadata_in_parts(python: Python, pypi_registry: PypiRegistry) -> None:
    """Where there is no metadata file, it is read out of the wheel by ranges."""
    pypi_registry.packages.add(wheel("ranged", "1.0"), core_metadata=False)
    python.uv("ranged")
    assert any(seen.header("range") for seen in pypi_registry.files.journal.requests)


@pytest.fixture
def page(pypi_registry: PypiRegistry):
    """Asks for a page as a client that likes one form best."""
    import ssl

    with httpx.Client(verify=ssl.create_default_context(cafile=str(pypi_registry.ca_file)), trust_env=False) as client:
        yield lambda path, accept, **headers: client.get(
            pypi_registry.index.url + path, headers={"accept": accept, **headers}
        )


def test_a_page_is_html_or_json_by_what_is_accepted(page) -> None:
    """Both say the same: hashes, yanked, metadata, Python versions, provenance; JSON has times, sizes and versions too."""
    html = page("/simple/libx/", f"{HTML_KIND}, {JSON_KIND};q=0.1")
    assert html.headers["content-type"] == HTML_KIND
    assert 'data-yanked="broken"' in html.text
    assert html.text.count("data-core-metadata") == 5
    answer = page("/simple/libx/", f"{JSON_KIND}, text/html;q=0.1")
    assert answer.headers["content-type"] == JSON_KIND
    body = answer.json()
    assert body["versions"] == ["1.0", "1.1", "1.2", "1.2.5", "1.3"]
    assert {one["yanked"] for one in body["files"]} == {False, "broken"}
    assert all(one["size"] > 0 and datetime.fromisoformat(one["upload-time"]) for one in body["files"])
    assert page("/simple/libx/", JSON_KIND, **{"if-none-match": answer.headers["etag"]}).status_code == 304
    assert 'data-requires-python="&gt;=3.99"' in page("/simple/future-python/", "text/html").text
    provenance = page("/simple/attested/", JSON_KIND).json()["files"][0]["provenance"]
    assert page(httpx.URL(provenance).path, "*/*").json()["version"] == 1
    assert page("/simple/quarantined/", JSON_KIND).json()["files"] == []
    assert page("/simple/Foo.Bar_Baz/", JSON_KIND).headers["location"] == "/simple/foo-bar-baz/"
    assert page("/simple/nobody/", JSON_KIND).status_code == 404


# The hostile Python packages do their harm


@pytest.mark.parametrize("name", ["setup-py", "backend-py", "mixed"])
def test_a_source_distribution_runs_when_pip_installs_it(
    name: str, python: Python, pypi_registry: PypiRegistry
) -> None:
    """The positive control of all that says that no code of a package runs. Of `mixed`, the newer one is the source."""
    python.pip(name)
    assert pypi_registry.markers.ran(name)


@pytest.mark.parametrize("name", ["setup-py", "backend-py"])
def test_a_source_distribution_runs_when_uv_only_resolves(
    name: str, python: Python, pypi_registry: PypiRegistry
) -> None:
    """A dry run is enough."""
    options = ["--no-config", "--python", sys.executable, "--dry-run"]
    run(arguments(uv_command(), "pip", "install", options, name, "--target", python.target), python.env, python.root)
    assert pypi_registry.markers.ran(name)


@pytest.mark.parametrize("name", ["pth-hook", "data-pth", "sitecustom", "usercustom"])
def test_a_hook_runs_at_the_start_of_the_interpreter(name: str, python: Python, pypi_registry: PypiRegistry) -> None:
    """In a virtual environment, nothing need be imported."""
    home = python.root / "venv"
    venv.create(home, symlinks=True)
    interpreter = home / "bin" / "python"
    run(
        arguments(uv_command(), "pip", "install", "--no-config", "--python", interpreter, name), python.env, python.root
    )
    assert not pypi_registry.markers.ran(name)
    run([str(interpreter), "-c", ""], python.env, python.root)
    # Python reads no user's customisation in a virtual environment, but where the packages are on the path it does.
    if name == "usercustom":
        site = next((home / "lib").glob("python*/site-packages"))
        run([sys._base_executable, "-c", ""], {**python.env, "PYTHONPATH": str(site)}, python.root)  # type: ignore[attr-defined]  # undocumented
    assert pypi_registry.markers.ran(name)


def test_a_module_shadows_the_standard_library(python: Python, pypi_registry: PypiRegistry) -> None:
    """`import json` gets the package's."""
    python.uv("json-shadow")
    python.code("import json")
    assert pypi_registry.markers.ran("json-shadow")


def test_the_installers_find_what_is_not_as_it_is_said(python: Python) -> None:
    """The index's hash, the wheel's name and the version are compared: a real client sees the lie, so it is one."""
    assert "hash" in python.uv("hash-liar", fails=True).lower()
    assert "hash" in python.pip("hash-liar", fails=True).lower()
    assert "hash" in python.pip("metadata-hash", fails=True).lower()
    assert "metadata" in python.uv("liar-name", fails=True).lower()
    assert "malformed wheel" in python.uv("liar-version", fails=True).lower()


def test_a_dependency_can_be_hidden_from_the_resolver(python: Python, pypi_registry: PypiRegistry) -> None:
    """By the metadata file nothing is needed; the wheel that is installed says otherwise."""
    python.uv("hidden-need")
    metadata = next(python.target.glob("hidden_need-*.dist-info/METADATA")).read_text()
    assert "Requires-Dist: denied" in metadata
    assert "GET /simple/denied/" not in pypi_registry.paths


def test_a_chain_brings_what_is_denied(python: Python) -> None:
    """Four packages deep."""
    python.uv("chain-a")
    assert python.version("denied") == "1.0"


def test_pip_follows_a_dependency_to_another_host(python: Python, pypi_registry: PypiRegistry) -> None:
    """And takes what it has there."""
    python.pip("url-need")
    assert "GET /libx-6.6-py3-none-any.whl" in pypi_registry.paths
    assert python.version("libx") == "6.6"


def test_an_index_page_leads_to_another_host(python: Python, pypi_registry: PypiRegistry) -> None:
    """The client goes wherever the page says."""
    python.uv("offsite")
    assert "GET /offsite-1.0-py3-none-any.whl" in pypi_registry.paths
    assert not [seen for seen in pypi_registry.files.journal.requests if "offsite" in seen.target]


def test_a_wheel_brings_a_program_with_a_name_of_the_systems(python: Python) -> None:
    """Whoever has its `bin` on the PATH runs it instead. pip lets it, where uv reserves the name."""
    python.pip("python-shadow")
    assert run([str(python.target / "bin" / "python")], {}, python.root) == "shadowed\n"


@pytest.mark.parametrize(
    "name", "quarrel missing-need page-liar windows-only future-python all-yanked quarantined nobody-has-this".split()
)
def test_what_cannot_be_had_is_no_policys_doing(name: str, python: Python) -> None:
    """A plain client without any policy gets none of these either."""
    python.uv(name, fails=True)


@pytest.mark.parametrize("name", "fresh newborn vulnerable malicious requestss acme-utils late-file no-time".split())
def test_what_a_policy_refuses_can_be_had_without_one(name: str, python: Python) -> None:
    """So that a refusal is the policy's doing."""
    python.uv(name)
    assert python.version(name)


def test_two_wheels_have_one_path(python: Python) -> None:
    """With a file and a directory of one name one of the two loses; so it does with two files."""
    python.uv("clash-one", "clash-two")
    assert python.code("import clash_same; print(clash_same.WHO)") in {"clash-one\n", "clash-two\n"}
    for name in ("clash-file", "clash-directory"):
        python.uv(name, target=python.root / name)
    assert (python.root / "clash-file" / "clash_shared").is_file()
    assert (python.root / "clash-directory" / "clash_shared").is_dir()


@pytest.mark.parametrize("name", ["escape-dots", "escape-absolute", "escape-symlink", "escape-data"])
def test_a_wheel_has_members_that_lead_out(name: str, pypi_registry: PypiRegistry) -> None:
    """Unpacked as they say, by a naive program, they write where nobody has said."""
    markers = pypi_registry.markers
    root = markers.directory.parent / "unpacked" / name / "a" / "b"
    data = pypi_registry.packages.find(name)[0].artifact.data
    naive_unzip(data, root)
    outside = [path for path in markers.below(markers.directory.parent) if not path.resolve().is_relative_to(root)]
    assert [path.name for path in outside] == [markers.name(name)]
    for path in outside:
        path.unlink()


def naive_unzip(data: bytes, root: Path) -> None:
    with zipfile.ZipFile(BytesIO(data)) as archive:
        for member in archive.infolist():
            path = root / member.filename
            path.parent.mkdir(parents=True, exist_ok=True)
            if member.external_attr >> 28 == 0o12:
                path.symlink_to(archive.read(member).decode())
            else:
                path.write_bytes(archive.read(member))


def test_bombs_are_small_until_they_are_unpacked(pypi_registry: PypiRegistry, npm_registry: NpmRegistry) -> None:
    """Less than 8 MiB to fetch, 4 GiB to unpack."""
    data = pypi_registry.packages.find("zip-bomb")[0].artifact.data
    with zipfile.ZipFile(BytesIO(data)) as archive:
        assert sum(member.file_size for member in archive.infolist()) > BOMB_PIECES * len(ZEROS)
        assert archive.read("zip_bomb/255.bin") == ZEROS
    assert npm_registry.packages.package("nbomb") is not None
    tarball = npm_registry.packages.tarball("nbomb", "1.0.0")
    with tarfile.open(fileobj=gzip.GzipFile(fileobj=BytesIO(tarball)), mode="r|") as stream:
        stream.next()
        bomb = stream.next()
        assert bomb is not None
        assert bomb.size == BOMB_PIECES * len(ZEROS)
    assert max(len(data), len(tarball)) < 8 << 20


def test_a_small_bomb_is_a_whole_archive() -> None:
    """The same maker's archive is read to its end, so the large one is not merely broken."""
    tarball = tar_bomb([Entry("package/package.json", b"{}")], "package/zeros.bin", 2)
    with tarfile.open(fileobj=BytesIO(tarball), mode="r:gz") as archive:
        assert [(one.name, one.size) for one in archive] == [
            ("package/package.json", 2),
            ("package/zeros.bin", 2 * len(ZEROS)),
        ]
        file = archive.extractfile("package/zeros.bin")
        assert file is not None
        assert zlib.crc32(file.read()) == zlib.crc32(ZEROS, zlib.crc32(ZEROS))


def test_an_archive_has_very_many_files(pypi_registry: PypiRegistry) -> None:
    """More than a zip file's plain count holds."""
    with zipfile.ZipFile(BytesIO(pypi_registry.packages.find("many-files")[0].artifact.data)) as archive:
        assert len(archive.infolist()) > MANY
        assert archive.testzip() is None


# The npm registry is a real one


def test_npm_installs_what_works(node: Node, npm_registry: NpmRegistry) -> None:
    """CommonJS, ES modules, both, a scope, a program, and a dependency."""
    node.install("cjs-lib", "esm-lib@1.0.0", "dual-lib@^1", "@scope/thing", "with-bin", "napp", "ntags@next")
    code = "console.log(require('cjs-lib').kind, require('cjs-lib/lib/sub').value, require('dual-lib').kind, require('dual-lib/sub').value, require('@scope/thing').kind)"
    assert node.code(code) == "cjs 42 cjs 42 scoped\n"
    module = "import {kind} from 'esm-lib'; import {kind as both} from 'dual-lib'; console.log(kind, both)"
    assert node.code(module, "module") == "esm esm\n"
    assert node.version("nlib") == "1.3.0"
    assert node.version("ntags") == "2.0.0-rc.1"
    assert run([str(node.modules / ".bin" / "with-bin")], node.env, node.root) == "with-bin ran\n"
    assert "GET /@scope%2fthing" in npm_registry.paths
    assert "GET /@scope/thing/-/thing-1.0.0.tgz" in npm_registry.paths


def test_npm_says_what_is_deprecated(node: Node) -> None:
    """The packument's word arrives."""
    assert "use something else" in node.install("deprecated-lib")


def test_npm_obeys_release_times(node: Node) -> None:
    """The whole packument's times are read."""
    node.install("--min-release-age=10", "nlib")
    assert node.version("nlib") == "1.2.0"


def test_npm_gets_through_with_what_must_never_arrive(node: Node, npm_registry: NpmRegistry) -> None:
    """Publication, audit and search reach the registry, and it records them: that a journal has none says something."""
    node.npm("search", "cjs-lib", "--json")
    node.npm("install", "nvulnerable@1.0.0")
    (node.root / "leak.txt").write_text("a secret")
    scope = f"//npm.test:{npm_registry.index.port}/"
    node.npm("publish", "--access=public", f"--{scope}:_authToken=secret-token", "--provenance=false")
    seen = npm_registry.index.journal.requests
    assert [one.target for one in seen if one.method == "PUT"] == ["/project"]
    assert [one.header("authorization") for one in seen if one.method == "PUT"] == ["Bearer secret-token"]
    assert [one.target for one in seen if one.method == "POST"] == ["/-/npm/v1/security/advisories/bulk"]
    assert any(one.target.startswith("/-/v1/search?") for one in seen)


# The hostile npm packages do their harm


@pytest.mark.parametrize("name", ["npreinstall", "ninstall", "npostinstall", "nconfused"])
def test_a_lifecycle_script_runs_when_npm_installs(name: str, node: Node, npm_registry: NpmRegistry) -> None:
    """The positive control of all that says that no script runs."""
    node.install(name)
    assert npm_registry.markers.ran(name) == (name != "nconfused"), "npm 11 believes the packument about scripts"


def test_a_script_that_the_packument_hides_runs_in_a_rebuild(node: Node, npm_registry: NpmRegistry) -> None:
    """Which reads the package's own manifest, once npm's notes of the packuments are gone."""
    node.install("nconfused")
    (node.modules / ".package-lock.json").unlink()
    (node.root / "package-lock.json").unlink()
    node.npm("rebuild")
    assert npm_registry.markers.ran("nconfused")


def test_npm_builds_by_a_file_without_any_script(node: Node) -> None:
    """It starts `node-gyp`, which has no compiler's headers here: that it is started is what counts."""
    assert "node-gyp" in node.install("ngyp", fails=True)


def test_a_package_is_hidden_in_another(node: Node, npm_registry: NpmRegistry) -> None:
    """The registry is never asked for it."""
    node.install("nbundler")
    assert node.code("console.log(require('nbundler'))") == "bundled\n"
    assert [path for path in npm_registry.paths if "ndenied" in path] == []


def test_a_shrinkwrap_pins_another_version(node: Node) -> None:
    """Also one that the command line's own rule would pass over."""
    node.install("--min-release-age=10", "nshrinkwrap")
    assert node.version("nshrinkwrap/node_modules/nlib") == "1.3.0"


@pytest.mark.parametrize("name", ["nalias", "noptional", "npeer", "nchain-a"])
def test_what_is_denied_is_brought_by_another(name: str, node: Node, npm_registry: NpmRegistry) -> None:
    """By another name, as optional, as a peer, down a chain."""
    node.install(name)
    assert "GET /ndenied/-/ndenied-1.0.0.tgz" in npm_registry.paths


def test_npm_follows_a_dependency_to_another_host(node: Node, npm_registry: NpmRegistry) -> None:
    """For a tarball, and for a repository."""
    node.install("nremote")
    assert node.version("nlib") == "6.6.6"
    node.install("ngit", fails=True)
    assert "GET /nlib-6.6.6.tgz" in npm_registry.paths
    assert any("/nlib.git/info/refs" in path for path in npm_registry.paths)
    node.install("noffsite")
    assert "GET /noffsite-1.0.0.tgz" in npm_registry.paths


def test_npm_compares_the_hash(node: Node) -> None:
    """So it is a lie indeed."""
    assert "EINTEGRITY" in node.install("nhash-liar", fails=True)


def test_a_tarball_can_be_another_package(node: Node) -> None:
    """npm takes what it gets."""
    node.install("nname-liar")
    assert json.loads((node.modules / "nname-liar" / "package.json").read_text())["name"] == "ndenied"


@pytest.mark.parametrize("name", ["nmissing-need", "nlib@1.0.0 nquarrel", "nwindows-only", "nobody-has-this"])
def test_what_npm_cannot_have_is_no_policys_doing(name: str, node: Node) -> None:
    """A plain client without any policy gets none of these either."""
    node.install(*name.split(), fails=True)


@pytest.mark.parametrize("name", ["nfresh", "nnewborn", "nvulnerable", "nmalicious", "lodahs", "@acme/x", "nengine"])
def test_what_a_policy_refuses_npm_gets_without_one(name: str, node: Node) -> None:
    """So that a refusal is the policy's doing."""
    node.install(name)
    assert node.version(name)


@pytest.mark.parametrize("name", ["nescape-dots", "nescape-absolute", "nescape-symlink"])
def test_a_tarball_has_members_that_lead_out(name: str, npm_registry: NpmRegistry, tmp_path: Path) -> None:
    """Unpacked as they say, they write where nobody has said."""
    markers = npm_registry.markers
    root = tmp_path / "a" / "b"
    root.mkdir(parents=True)
    with tarfile.open(fileobj=BytesIO(npm_registry.packages.tarball(name, "1.0.0"))) as archive:
        archive.extractall(root, filter="fully_trusted")
    outside = [*markers.below(markers.directory), *markers.below(tmp_path)]
    assert [path.name for path in outside] == [markers.name(name)]
    assert not outside[0].resolve().is_relative_to(root)


def test_a_tarball_has_members_that_are_no_files(npm_registry: NpmRegistry) -> None:
    """A hard link to a file of the system, a device, a pipe."""
    kinds: dict[str, tuple[bool, bool, bool]] = {}
    for name in ("nescape-hardlink", "nescape-device"):
        with tarfile.open(fileobj=BytesIO(npm_registry.packages.tarball(name, "1.0.0"))) as archive:
            kinds |= {member.name: (member.islnk(), member.ischr(), member.isfifo()) for member in archive}
    assert kinds["package/x"] == (True, False, False)
    assert kinds["package/null"] == (False, True, False)
    assert kinds["package/pipe"] == (False, False, True)


# The makers


def test_the_same_words_make_the_same_bytes(tmp_path: Path) -> None:
    """Archives have no clock in them, so a hash in a test's expectation stays right."""
    large = {"zip-bomb", "many-files", "nbomb", "nmany-files"}  # by the same makers, and slow
    now = datetime.fromisoformat("2020-01-01T00:00:00Z")

    def made() -> list[str]:
        markers = Markers(tmp_path, "nonce")
        python, node = PypiIndex(now), NpmIndex(now)
        fill_pypi(python, markers, "https://rogue.test")
        fill_npm(node, markers, "https://rogue.test")
        hashes = [one.sha256 for name in python.names if name not in large for one in python.find(name)]
        packages = [node.package(name) for name in node.names if name not in large]
        return hashes + [about["dist"]["integrity"] for one in packages if one for about in one.versions.values()]

    first = made()
    assert first == made()
    assert len(first) > 100


def test_a_source_distribution_is_one_directory() -> None:
    with tarfile.open(fileobj=BytesIO(sdist("one-two", "1.0", {"setup.py": ""}).data)) as archive:
        assert archive.getnames() == ["one_two-1.0/PKG-INFO", "one_two-1.0/setup.py"]


def test_advisories_name_packages_of_the_cast(tmp_path: Path, pypi_registry: PypiRegistry, npm_registry) -> None:
    """So none is about nothing."""
    records = [json.loads(path.read_text()) for path in sorted(write_advisories(tmp_path).glob("*/*.json"))]
    named = {record["affected"][0]["package"]["name"] for record in records}
    assert named == {"vulnerable", "nvulnerable", "malicious", "nmalicious", "pardoned", "scratched"}
    assert named <= {*pypi_registry.packages.names, *npm_registry.packages.names}
