"""Every package of the tests by name, well-behaved and hostile, on both registries. `server.py` fills them in.

Python, well-behaved: good (submodule, data), with-tool (entry point `with-tool`), app -> libx, libx (1.0 1.1 1.2, 1.2.5
yanked, 1.3 two days old), Foo.Bar_Baz, with-extra[more] -> libx, attested, requests, pre (2.0rc1), local (1.0+evil).
Python, hostile; `RAN …` is what `Markers` sees if the code has run:
    runs when built       setup-py (sdist), backend-py (sdist, in-tree backend), mixed (1.0 wheel, 2.0 sdist)
    runs at start         pth-hook, data-pth, sitecustom, usercustom
    shadows               json-shadow (`import json` -> RAN json-shadow), python-shadow (a script named `python`)
    is not what is said   hash-liar, metadata-hash, liar-name, liar-version, hidden-need, page-liar, offsite
    archive               zip-bomb (4 GiB), many-files (70,000), escape-dots, escape-absolute, escape-symlink, escape-data,
                          case-collision, clash-file + clash-directory, clash-one + clash-two
    age, state            fresh (2.0 now), newborn (only now), no-time, late-file, all-yanked, quarantined
    advisories            vulnerable (1.0; 1.1 is mended), malicious, pardoned (withdrawn), scratched (low)
    names                 denied, requestss, acme-utils
    needs                 chain-a -> chain-b -> chain-c -> denied, url-need, quarrel, missing-need
    does not fit          windows-only, future-python

npm, well-behaved: cjs-lib, esm-lib, dual-lib, @scope/thing, with-bin, napp -> nlib, nlib (1.0.0 1.1.0 1.2.0, 1.3.0 two
days old), lodash, ntags (`next`), deprecated-lib.
npm, hostile:
    runs when installed   npreinstall, ninstall, npostinstall, ngyp (binding.gyp), nconfused (the packument hides it)
    hides packages        nbundler (ndenied inside), nshrinkwrap (nlib 1.3.0), nalias -> ndenied, noptional, npeer
    from elsewhere        nremote, ngit, nfile, noffsite
    is not what is said   nhash-liar, nname-liar
    archive               nbomb (4 GiB), nmany-files, nescape-dots, nescape-absolute, nescape-symlink, nescape-hardlink,
                          nescape-device, ncase-collision
    age, state            nfresh, nnewborn, nvulnerable, nmalicious
    names                 ndenied, lodahs, @acme/x
    needs                 nchain-a -> nchain-b -> nchain-c -> ndenied, nmissing-need, nquarrel (beside nlib@1.0.0)
    does not fit          nwindows-only, nengine

`write_advisories(directory)` makes the OSV directory that names the vulnerable and malicious ones.

Owns: the names and what stands in them. Must not: open a socket.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from tests.registry.build import ZEROS, Entry, Markers, npm_tarball, sdist, tar_bomb, wheel
from tests.registry.npm import NpmIndex
from tests.registry.pypi import PypiIndex

MANY = 70_000
BOMB_PIECES = 256  # of 16 MiB each: 4 GiB
GOOD_DATA = "data beside the code\n"

# How the backends below make a wheel: one module, and metadata.
_MAKE_WHEEL = """\
import os, zipfile

def make_wheel(directory, name, version):
    module = name.replace("-", "_")
    info, filename = f"{module}-{version}.dist-info", f"{module}-{version}-py3-none-any.whl"
    files = {
        f"{module}.py": "BUILT = True\\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
    }
    with zipfile.ZipFile(os.path.join(directory, filename), "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{path},,\\n" for path in [*files, f"{info}/RECORD"]))
    return filename
"""

# What stands for setuptools, so that a client that builds finds its backend without any other index: it runs the
# project's setup.py, as the real one does.
_SETUPTOOLS = """\
import runpy, sys

arguments = {}

def setup(**given):
    arguments.update(given)

class Legacy:
    def _run(self):
        sys.path.insert(0, os.getcwd())
        runpy.run_path("setup.py", run_name="__main__")

    def get_requires_for_build_wheel(self, config_settings=None):
        self._run()
        return []

    def build_wheel(self, wheel_directory, config_settings=None, metadata_directory=None):
        self._run()
        return make_wheel(wheel_directory, arguments["name"], arguments["version"])
"""

_OWN_BACKEND = """\
def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    return make_wheel(wheel_directory, "backend-py", "1.0")
"""


def fill_pypi(index: PypiIndex, markers: Markers, rogue_url: str) -> None:
    """Put the cast into a Python index. `rogue_url` is a host that is no registry, and has `libx` 6.6."""
    _python_good(index)
    _python_code(index, markers)
    _python_lies(index, rogue_url)
    _python_archives(index, markers)
    _python_states(index)
    _python_needs(index, rogue_url)


def _python_good(index: PypiIndex) -> None:
    files = {
        "good/__init__.py": "VERSION = '1.0'\n",
        "good/sub/__init__.py": "",
        "good/sub/value.py": "VALUE = 42\n",
        "good/data.txt": GOOD_DATA,
    }
    index.add(wheel("good", "1.0", files=files))
    code = {"with_tool/__init__.py": "def main():\n    print('with-tool ran')\n"}
    index.add(wheel("with-tool", "1.0", files=code, entry_points={"with-tool": "with_tool:main"}))
    index.add(wheel("app", "1.0", requires=["libx>=1"]))
    for version, age in {"1.0": 200, "1.1": 60, "1.2": 30, "1.3": 2}.items():
        index.add(wheel("libx", version), age_days=age)
    index.add(wheel("libx", "1.2.5"), age_days=20, yanked="broken")
    index.add(wheel("Foo.Bar_Baz", "1.0"))
    index.add(wheel("with-extra", "1.0", requires=["libx; extra == 'more'"]))
    index.add(wheel("attested", "1.0"), attested=True)
    index.add(wheel("requests", "2.32.3"), age_days=300)
    index.add(wheel("pre", "1.0"))
    index.add(wheel("pre", "2.0rc1"), age_days=90)
    index.add(wheel("local", "1.0+evil"))
    backend = {
        "setuptools/__init__.py": _MAKE_WHEEL + _SETUPTOOLS,
        "setuptools/build_meta.py": "from setuptools import Legacy\n__legacy__ = Legacy()\n",
    }
    index.add(wheel("setuptools", "99.0", files=backend), age_days=300)


def _python_code(index: PypiIndex, markers: Markers) -> None:
    """Code that runs where nobody has asked for it."""

    def setup(name: str, version: str) -> dict[str, str | bytes]:
        code = f"from setuptools import setup\nsetup(name={name!r}, version={version!r})\n"
        return {"setup.py": markers.python(name) + code}

    index.add(sdist("setup-py", "1.0", setup("setup-py", "1.0")))
    index.add(wheel("mixed", "1.0"))
    index.add(sdist("mixed", "2.0", setup("mixed", "2.0")), age_days=50)
    project = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    backend = markers.python("backend-py") + _MAKE_WHEEL + _OWN_BACKEND
    index.add(sdist("backend-py", "1.0", {"pyproject.toml": project, "backend.py": backend}))
    hooks = {
        "pth-hook": "pth_hook.pth",
        "data-pth": "data_pth-1.0.data/purelib/data_pth.pth",
        "sitecustom": "sitecustomize.py",
        "usercustom": "usercustomize.py",
        "json-shadow": "json/__init__.py",
    }
    for name, path in hooks.items():
        module = f"{name.replace('-', '_')}/__init__.py"
        index.add(wheel(name, "1.0", files={module: "", path: markers.python(name)}))
    script = "#!/bin/sh\necho shadowed\n"
    files = {"python_shadow/__init__.py": "", "python_shadow-1.0.data/scripts/python": script}
    index.add(wheel("python-shadow", "1.0", files=files))


def _python_lies(index: PypiIndex, rogue_url: str) -> None:
    """What the index says, and what is so, differ."""
    index.add(wheel("hash-liar", "1.0"), said_sha256="0" * 64)
    index.add(wheel("metadata-hash", "1.0"), said_metadata_sha256="0" * 64)
    index.add(wheel("liar-name", "1.0", says_name="libx"))
    index.add(wheel("liar-version", "1.0", says_version="9.9"))
    innocent = wheel("hidden-need", "1.0").metadata
    index.add(wheel("hidden-need", "1.0", requires=["denied"]), said_metadata=innocent)
    index.add(dataclasses.replace(wheel("libx", "9.9"), name="page-liar"))
    index.add(wheel("offsite", "1.0"), said_url=f"{rogue_url}/offsite-1.0-py3-none-any.whl")


def _python_archives(index: PypiIndex, markers: Markers) -> None:
    """Archives that harm who unpacks them."""

    def bomb() -> None:
        pieces = [Entry(f"zip_bomb/{place}.bin", ZEROS) for place in range(BOMB_PIECES)]
        index.add(wheel("zip-bomb", "1.0", extra=pieces))

    def many() -> None:
        files = [Entry(f"many_files/{place // 1000}/{place}.py") for place in range(MANY)]
        index.add(wheel("many-files", "1.0", extra=files))

    index.lazily("zip-bomb", bomb)
    index.lazily("many-files", many)
    index.add(wheel("escape-dots", "1.0", extra=[Entry(f"../../{markers.name('escape-dots')}")]))
    absolute = str(markers.directory / markers.name("escape-absolute"))
    index.add(wheel("escape-absolute", "1.0", extra=[Entry(absolute)]))
    link = Entry("escape_symlink/out", kind="symlink", target=str(markers.directory), mode=0o777)
    through = Entry(f"escape_symlink/out/{markers.name('escape-symlink')}")
    index.add(wheel("escape-symlink", "1.0", extra=[link, through]))
    data = Entry(f"escape_data-1.0.data/data/../../../{markers.name('escape-data')}")
    index.add(wheel("escape-data", "1.0", extra=[data]))
    cases = {"case_collision/__init__.py": "CASE = 'lower'\n", "Case_Collision/__init__.py": "CASE = 'upper'\n"}
    index.add(wheel("case-collision", "1.0", files=cases))
    index.add(wheel("clash-file", "1.0", files={"clash_shared": "a file\n"}))
    index.add(wheel("clash-directory", "1.0", files={"clash_shared/__init__.py": "WHO = 'directory'\n"}))
    for name in ("clash-one", "clash-two"):
        index.add(wheel(name, "1.0", files={"clash_same/__init__.py": f"WHO = {name!r}\n"}))


def _python_states(index: PypiIndex) -> None:
    """What a policy refuses by age, state, advisory or name."""
    index.add(wheel("fresh", "1.0"))
    index.add(wheel("fresh", "2.0"), age_days=0)
    index.add(wheel("newborn", "1.0"), age_days=0)
    index.add(wheel("no-time", "1.0"), upload_time=False)
    index.add(sdist("late-file", "1.0", {"setup.py": "raise SystemExit('built')\n"}))
    index.add(wheel("late-file", "1.0"), age_days=0)
    index.add(wheel("all-yanked", "1.0"), yanked=True)
    index.project("quarantined").status = "quarantined"
    index.add(wheel("vulnerable", "1.0"))
    index.add(wheel("vulnerable", "1.1"), age_days=50)
    for name in ("malicious", "pardoned", "scratched", "denied", "requestss", "acme-utils"):
        index.add(wheel(name, "1.0"))
    index.add(wheel("windows-only", "1.0", tag="cp313-cp313-win_amd64"))
    index.add(wheel("future-python", "1.0", requires_python=">=3.99"))


def _python_needs(index: PypiIndex, rogue_url: str) -> None:
    """What is wrong with what they need."""
    for name, need in {"chain-a": "chain-b>=1", "chain-b": "chain-c>=1", "chain-c": "denied"}.items():
        index.add(wheel(name, "1.0", requires=[need]))
    index.add(wheel("url-need", "1.0", requires=[f"libx @ {rogue_url}/libx-6.6-py3-none-any.whl"]))
    index.add(wheel("quarrel", "1.0", requires=["libx==1.0", "quarrel-other"]))
    index.add(wheel("quarrel-other", "1.0", requires=["libx==1.1"]))
    index.add(wheel("missing-need", "1.0", requires=["nobody-has-this>=1"]))


def fill_npm(index: NpmIndex, markers: Markers, rogue_url: str) -> None:
    """Put the cast into an npm registry. `rogue_url` is a host that is no registry, and has `/nlib-6.6.6.tgz`."""
    _npm_good(index)
    _npm_code(index, markers)
    _npm_needs(index, rogue_url)
    _npm_lies(index, rogue_url)
    _npm_archives(index, markers)
    _npm_states(index)


def _named(name: str, version: str = "1.0.0", **more: Any) -> dict[str, Any]:
    return {"name": name, "version": version, "main": "index.js", **more}


def _npm_good(index: NpmIndex) -> None:
    index.add(_named("cjs-lib"), files={"index.js": "exports.kind = 'cjs'\n", "lib/sub.js": "exports.value = 42\n"})
    index.add(_named("esm-lib", type="module"), files={"index.js": "export const kind = 'esm'\n"})
    exports = {".": {"import": "./index.mjs", "require": "./index.cjs"}, "./sub": "./sub.cjs"}
    files = {
        "index.mjs": "export const kind = 'esm'\n",
        "index.cjs": "exports.kind = 'cjs'\n",
        "sub.cjs": "exports.value = 42\n",
    }
    index.add({"name": "dual-lib", "version": "1.0.0", "exports": exports}, files=files)
    index.add(_named("@scope/thing"), files={"index.js": "exports.kind = 'scoped'\n"})
    tool = {"tool.js": "#!/usr/bin/env node\nconsole.log('with-bin ran')\n"}
    index.add(_named("with-bin", bin={"with-bin": "tool.js"}), files=tool)
    index.add(_named("napp", dependencies={"nlib": "^1.0.0"}))
    for version, age in {"1.0.0": 200, "1.1.0": 60, "1.2.0": 30, "1.3.0": 2}.items():
        index.add(_named("nlib", version), age_days=age)
    index.add(_named("lodash", "4.17.21"), age_days=300)
    index.add(_named("ntags"))
    index.add(_named("ntags", "2.0.0-rc.1"), age_days=90, tag="next")
    index.add(_named("deprecated-lib", deprecated="use something else"))


def _npm_code(index: NpmIndex, markers: Markers) -> None:
    """Code that runs when it is installed."""
    for script in ("preinstall", "install", "postinstall"):
        name = f"n{script}"
        files = {"index.js": "", "mark.js": markers.node(name)}
        index.add(_named(name, scripts={script: "node mark.js"}), files=files)
    # npm runs `node-gyp rebuild` for it, without any script in the manifest; gyp runs what stands in `<!( )`.
    gyp = {"variables": {"x": f"<!(touch {markers.directory}/{markers.name('ngyp')})"}, "targets": []}
    index.add(_named("ngyp"), files={"index.js": "", "binding.gyp": json.dumps(gyp)})
    files = {"index.js": "", "mark.js": markers.node("nconfused")}
    confused = _named("nconfused", scripts={"postinstall": "node mark.js"}, dependencies={"ndenied": "1.0.0"})
    index.add(confused, files=files, said={"scripts": {}, "dependencies": {}, "hasInstallScript": False})


def _npm_needs(index: NpmIndex, rogue_url: str) -> None:
    """What is wrong with what they need, or bring along."""
    inside: dict[str, str | bytes] = {
        "index.js": "module.exports = require('ndenied')\n",
        "node_modules/ndenied/package.json": json.dumps(_named("ndenied")),
        "node_modules/ndenied/index.js": "module.exports = 'bundled'\n",
    }
    need = {"ndenied": "1.0.0"}
    bundled: dict[str, Any] = {"bundleDependencies": ["ndenied"], "bundledDependencies": ["ndenied"]}
    index.add(_named("nbundler", dependencies=need, **bundled), files=inside)
    index.add(_named("nalias", dependencies={"harmless": "npm:ndenied@1.0.0"}))
    index.add(_named("noptional", optionalDependencies=need))
    index.add(_named("npeer", peerDependencies=need))
    index.add(_named("nremote", dependencies={"nlib": f"{rogue_url}/nlib-6.6.6.tgz"}))
    index.add(_named("ngit", dependencies={"nlib": f"git+{rogue_url}/nlib.git"}))
    index.add(_named("nfile", dependencies={"nlib": "file:./inside"}), files={"inside/package.json": json.dumps(_named("nlib"))})  # fmt: skip
    pinned = index.package("nlib")
    assert pinned is not None
    dist = pinned.versions["1.3.0"]["dist"]
    wants = {"nlib": "^1.0.0"}
    lock = {
        "name": "nshrinkwrap",
        "version": "1.0.0",
        "lockfileVersion": 3,
        "requires": True,
        "packages": {
            "": _named("nshrinkwrap", dependencies=wants),
            "node_modules/nlib": {"version": "1.3.0", "resolved": dist["tarball"], "integrity": dist["integrity"]},
        },
    }
    files = {"index.js": "", "npm-shrinkwrap.json": json.dumps(lock)}
    index.add(_named("nshrinkwrap", dependencies=wants), files=files)
    for name, other in {"nchain-a": "nchain-b", "nchain-b": "nchain-c", "nchain-c": "ndenied"}.items():
        index.add(_named(name, dependencies={other: "^1.0.0"}))
    index.add(_named("nmissing-need", dependencies={"nobody-has-this": "^1.0.0"}))
    index.add(_named("nquarrel", peerDependencies={"nlib": "1.1.0"}))


def _npm_lies(index: NpmIndex, rogue_url: str) -> None:
    """What the packument says, and what is so, differ."""
    index.add(_named("nhash-liar"), said_dist={"integrity": "sha512-" + "A" * 86 + "==", "shasum": "0" * 40})
    other = npm_tarball(_named("ndenied", "6.6.6"))
    index.add(_named("nname-liar"), tarball=other)
    index.add(_named("noffsite"), said_dist={"tarball": f"{rogue_url}/noffsite-1.0.0.tgz"})


def _npm_archives(index: NpmIndex, markers: Markers) -> None:
    """Archives that harm who unpacks them."""
    manifest = Entry("package/package.json", json.dumps(_named("nbomb")).encode())
    index.lazily(
        "nbomb",
        lambda: index.add(_named("nbomb"), tarball=tar_bomb([manifest], "package/zeros.bin", BOMB_PIECES)),
    )
    files = (Entry(f"package/{place // 1000}/{place}.js") for place in range(MANY))
    index.lazily("nmany-files", lambda: index.add(_named("nmany-files"), extra=tuple(files)))
    mark = {name: markers.name(name) for name in ("nescape-dots", "nescape-absolute", "nescape-symlink")}
    index.add(_named("nescape-dots"), extra=(Entry(f"package/../../../{mark['nescape-dots']}"),))
    index.add(_named("nescape-absolute"), extra=(Entry(f"{markers.directory}/{mark['nescape-absolute']}"),))
    link = Entry("package/out", kind="symlink", target=str(markers.directory), mode=0o777)
    index.add(_named("nescape-symlink"), extra=(link, Entry(f"package/out/{mark['nescape-symlink']}")))
    index.add(_named("nescape-hardlink"), extra=(Entry("package/x", kind="hardlink", target="/etc/passwd"),))
    nodes = (Entry("package/null", kind="device", mode=0o666), Entry("package/pipe", kind="fifo"))
    index.add(_named("nescape-device"), extra=nodes)
    cases = {"index.js": "", "Readme.js": "exports.x = 'upper'\n", "readme.js": "exports.x = 'lower'\n"}
    index.add(_named("ncase-collision"), files=cases)


def _npm_states(index: NpmIndex) -> None:
    """What a policy refuses by age, state, advisory or name."""
    index.add(_named("nfresh"))
    index.add(_named("nfresh", "2.0.0"), age_days=0)
    index.add(_named("nnewborn"), age_days=0)
    index.add(_named("nvulnerable"))
    index.add(_named("nvulnerable", "1.1.0"), age_days=50)
    for name in ("nmalicious", "ndenied", "lodahs", "@acme/x"):
        index.add(_named(name))
    index.add(_named("nwindows-only", os=["win32"]))
    index.add(_named("nengine", engines={"node": ">=999"}))
    index.advisories["nvulnerable"] = [
        {"id": 1, "title": "a test", "severity": "critical", "vulnerable_versions": "<1.1.0", "url": "", "cwe": []}
    ]


_CRITICAL = "CVSS:3.1/AV:N/AC:L/PR:N/UI:N/S:U/C:H/I:H/A:H"  # 9.8
_LOW = "CVSS:3.1/AV:L/AC:H/PR:H/UI:R/S:U/C:L/I:N/A:N"  # 1.8
VULNERABLE_IDS = {"vulnerable": "GHSA-aaaa-aaaa-aaaa", "nvulnerable": "GHSA-bbbb-bbbb-bbbb"}
MALICIOUS_IDS = {"malicious": "MAL-2020-1", "nmalicious": "MAL-2020-2"}
_WHEN = "2020-01-01T00:00:00Z"


def write_advisories(directory: Path, modified: str = _WHEN) -> Path:
    """An OSV directory, one file an advisory, below its ecosystem's name: `PyPI/<id>.json`, `npm/<id>.json`."""
    records = [
        _advisory("PyPI", "vulnerable", VULNERABLE_IDS["vulnerable"], modified, fixed="1.1", score=_CRITICAL),
        _advisory("npm", "nvulnerable", VULNERABLE_IDS["nvulnerable"], modified, fixed="1.1.0", score=_CRITICAL),
        _advisory("PyPI", "malicious", MALICIOUS_IDS["malicious"], modified),
        _advisory("npm", "nmalicious", MALICIOUS_IDS["nmalicious"], modified),
        {**_advisory("PyPI", "pardoned", "MAL-2020-3", modified), "withdrawn": _WHEN},
        _advisory("PyPI", "scratched", "GHSA-cccc-cccc-cccc", modified, score=_LOW),
    ]
    for record in records:
        place = directory / record["affected"][0]["package"]["ecosystem"]
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{record['id']}.json").write_text(json.dumps(record, indent=1))
    return directory


def _advisory(
    ecosystem: str, name: str, ident: str, modified: str, *, fixed: str | None = None, score: str | None = None
) -> dict[str, Any]:
    """One OSV record. A malicious package has no severity, and no version that is mended."""
    events = [{"introduced": "0"}, *([{"fixed": fixed}] if fixed else [])]
    kind = "ECOSYSTEM" if ecosystem == "PyPI" else "SEMVER"
    package = {"ecosystem": ecosystem, "name": name, "purl": f"pkg:{ecosystem.lower()}/{name}"}
    return {
        "schema_version": "1.6.0",
        "id": ident,
        "summary": "a test",
        "published": _WHEN,
        "modified": modified,
        "affected": [{"package": package, "ranges": [{"type": kind, "events": events}]}],
        **({"severity": [{"type": "CVSS_V3", "score": score}]} if score else {}),
    }
