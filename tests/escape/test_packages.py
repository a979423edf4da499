"""What a package, or a call that brings packages, tries against the preparation, the store and other attempts.

Each has its control: the same thing gets through where it is allowed, or unconfined.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.contract import Cause, Status
from tests.conftest import MakeLab
from tests.lab import Lab, Outside, Run, named
from tests.package_lab import NAMES, Registries, preparation, reasons, store_of
from tests.registry.build import wheel
from tests.registry.server import NpmRegistry, PypiRegistry
from tests.servers import PATIENCE

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def both(
    outside: Outside, _pypi: PypiRegistry, _npm: NpmRegistry, tmp_path_factory: pytest.TempPathFactory
) -> Registries:
    return Registries(outside, _pypi, _npm, tmp_path_factory.mktemp("osv"))


@pytest.fixture(scope="module")
def lax(open_lab: MakeLab, both: Registries) -> Iterator[Lab]:
    """An executor whose operator lets packages bring what others would refuse."""
    policy = both.policy(
        names={**NAMES, "stdlib": "allow"}, artifacts={"startup_hooks": "strip", "bundled": "allow", "install_scripts": "allow"}
    )  # fmt: skip
    with open_lab(policy) as lab:
        yield lab


@pytest.fixture
def registries(both: Registries) -> Registries:
    both.forget()
    return both


def run(lab: Lab, code: str, *packages: str, language: str = "python", **more: object) -> Run:
    return lab.run(code, {"language": language}, prelude=False, packages=list(packages), **more)


def said(done: Run) -> str:
    assert done.result.status is Status.SUCCESS, f"{done.result.error}\n{done.result.stdout}{done.result.stderr}"
    return done.result.stdout


def test_a_snapshot_cannot_take_the_place_of_the_standard_library(lax: Lab, registries: Registries) -> None:
    """In the program and its child Pythons. The control: put first on the path by the program itself, it does."""
    code = (
        "import subprocess, sys\n"
        "import json_shadow, json\n"
        "print(json_shadow.__file__, json.__file__)\n"
        "subprocess.run([sys.executable, '-c', 'import json'], check=True)\n"
        "print('so far', file=sys.stderr, flush=True)\n"
        "del sys.modules['json']\nsys.path.insert(0, '/opt/packages')\n"
        "import json\n"
    )
    done = run(lax, code, "json-shadow==")
    ours, theirs = said(done).split()
    assert ours.startswith("/opt/packages/")
    assert not theirs.startswith("/opt/packages/")
    assert done.result.stderr.splitlines() == ["so far", registries.pypi.markers.name("json-shadow")]


def test_no_command_of_a_package_is_found_before_the_systems(lax: Lab, registries: Registries) -> None:
    """Nor at all, by its name alone. The control: where it lies, it is what it says."""
    code = (
        "import shutil, subprocess\n"
        "print(shutil.which('python'), shutil.which('with-tool'))\n"
        "print(subprocess.run(['/bin/sh', '/opt/packages/bin/python'], stdout=-1, text=True, check=True).stdout)\n"
    )
    lines = said(run(lax, code, "python-shadow==", "with-tool==")).splitlines()
    assert "/opt/packages" not in lines[0]
    assert lines[0].endswith(" None")
    assert lines[1] == "shadowed"


@pytest.mark.parametrize("name", ["pth-hook", "data-pth", "sitecustom", "usercustom"])
def test_nothing_of_a_snapshot_runs_at_a_start(lax: Lab, registries: Registries, name: str) -> None:
    """Where the policy has them stripped, such files are not there, for no Python that the program starts.

    The control: the file as it was published, where a Python reads such files, runs.
    """
    module = name.replace("-", "_")
    code = (
        f"import os, subprocess, sys, {module}\n"
        "environment = dict(os.environ, PYTHONPATH='/opt/packages')\n"
        "code = 'import site; site.addsitedir(\"/opt/packages\")'\n"
        "subprocess.run([sys.executable, '-c', code], env=environment, check=True)\n"
        "hooks = {'sitecustomize', 'usercustomize', 'pth'}\n"
        "print(*[one for one in os.listdir('/opt/packages') if hooks & set(one.split('.'))])\n"
    )
    done = run(lax, code, f"{name}==")
    assert said(done) == "\n"
    assert "RAN-" not in done.result.stderr
    published = registries.pypi.packages.find(name, "1.0")[0].artifact.data
    assert published is not None
    control = (
        "import os, subprocess, sys, zipfile\n"
        f"open('it.whl', 'wb').write({published!r})\nzipfile.ZipFile('it.whl').extractall('tree')\n"
        "roots = ['tree', *(os.path.join(at, 'purelib') for at, inside, _ in os.walk('tree') if 'purelib' in inside)]\n"
        "environment = dict(os.environ, PYTHONPATH=':'.join(roots))\n"
        "code = f'import site; [site.addsitedir(one) for one in {roots}]'\n"
        "subprocess.run([sys.executable, '-c', code], env=environment, check=True)\n"
    )
    assert registries.pypi.markers.name(name) in run(lax, control).result.stderr


@pytest.mark.parametrize("name", ["npreinstall", "ninstall", "npostinstall", "nconfused"])
def test_an_install_script_is_never_run(lax: Lab, registries: Registries, name: str) -> None:
    """Also where the policy lets its package be installed: the package is there, and its script has not run.

    The control: run by the program itself, it leaves its trace.
    """
    code = f"require('{name}'); console.error('so far'); require('{name}/mark.js')"
    done = run(lax, code, f"{name}@", language="javascript")
    said(done)
    assert done.result.stderr.splitlines() == ["so far", registries.npm.markers.name(name)]
    for place in (registries.npm.markers.directory, lax.policy.parent):
        assert registries.npm.markers.below(place) == []


def test_nothing_is_built(lax: Lab, registries: Registries) -> None:
    """Neither source of Python's, nor what npm would build because of a file that lies there."""
    for package in ("setup-py==", "backend-py==", "mixed==2.0"):
        result = run(lax, "1", package).result
        assert set(reasons(result).values()) == {"no_wheel"}
    said(run(lax, "require('ngyp')", "ngyp@", language="javascript"))
    for registry in (registries.pypi, registries.npm):
        for place in (registry.markers.directory, lax.policy.parent):
            assert registry.markers.below(place) == []


def test_a_snapshot_cannot_be_written_from_inside(lax: Lab, registries: Registries) -> None:
    """Not its files, its directories, their modes, nor by a mount. The control: the workspace can."""
    code = """
import os
def outcome(act):
    try:
        act()
    except OSError as error:
        return error.strerror
    return "done"
for root, file in (("/opt/packages", "/opt/packages/libx/__init__.py"), ("/workspace", "/workspace/main.py")):
    print(*sorted({
        outcome(lambda: open(file, "a")), outcome(lambda: open(root + "/new", "w")), outcome(lambda: os.chmod(file, 0o777)),
        outcome(lambda: os.utime(file)), outcome(lambda: os.rename(file, file + "x")) and outcome(lambda: os.mkdir(root + "/d")),
        outcome(lambda: os.symlink("/etc", root + "/link")), outcome(lambda: os.truncate(root + "/new", 0)),
    }), sep="|")
"""
    inside, control = said(run(lax, code, "libx==1.2")).splitlines()
    assert set(inside.split("|")) <= {
        "Read-only file system",
        "Operation not permitted",
        "Permission denied",
        "No such file or directory",
    }
    assert "Read-only file system" in inside
    assert "done" in control.split("|")
    script = """
const fs = require('fs');
for (const act of [() => fs.writeFileSync('/node_modules/nlib/index.js', ''), () => fs.mkdirSync('/node_modules/x'),
                   () => fs.chmodSync('/node_modules/nlib', 0o777), () => fs.writeFileSync('/workspace/x', '')])
  try { act(); console.log('done') } catch (error) { console.log(error.code) }
"""
    assert said(run(lax, script, "nlib@1.2.0", language="javascript")).split() == ["EROFS", "EROFS", "EROFS", "done"]


def test_a_snapshot_is_read_only_outside_and_its_store_is_closed(lax: Lab, registries: Registries) -> None:
    """No file or directory of it has a bit for writing; who is not the executor's user sees nothing but snapshots."""
    said(run(lax, "1", "libx==1.2"))
    said(run(lax, "1", "napp@", language="javascript"))
    store = store_of(lax)
    found = [
        path
        for tree in [*(store / "snapshots").glob("*/tree"), *(store / "artifacts").glob("*/tree")]
        for path in (tree, *tree.rglob("*"))
    ]
    assert len(found) > 10
    assert [path for path in found if path.lstat().st_mode & 0o222] == []
    assert [path for path in found if path.is_symlink()] == []
    closed = [part for part in ("artifacts", "requests", "tmp", "locks") if (store / part).stat().st_mode & 0o077]
    assert closed == []


def test_what_is_prepared_for_one_call_is_not_there_for_another(lax: Lab, registries: Registries) -> None:
    """A call sees its own set, and one without packages none: nothing of the store but one tree is in an attempt."""
    said(run(lax, "1", "libx==1.2"))
    code = "import os; print('libx' in os.listdir('/opt/packages'), os.path.exists('/opt/packages/good'))"
    assert said(run(lax, code, "good==")) == "False True\n"
    code = "import os, importlib.util; print(importlib.util.find_spec('libx'))"
    assert said(run(lax, code)) == "None\n"
    said(run(lax, "1", "nlib@1.2.0", language="javascript"))
    code = "console.log(require('fs').readdirSync('/node_modules').length)"
    assert said(run(lax, code, language="javascript")) == "0\n"


def test_a_call_cannot_lead_its_preparation_elsewhere(lax: Lab, registries: Registries) -> None:
    """Its environment is its code's alone: another index, options and secrets in it are not seen. The code sees them."""
    rogue = registries.pypi.rogue.url
    env = {
        "PIP_INDEX_URL": rogue, "UV_INDEX_URL": rogue, "UV_DEFAULT_INDEX": rogue, "UV_EXTRA_INDEX_URL": rogue, "UV_INDEX": rogue,
        "UV_CONFIG_FILE": "/tmp/x", "npm_config_registry": rogue, "NPM_CONFIG_REGISTRY": rogue, "NPM_CONFIG_USERCONFIG": "/tmp/x",
        "PIP_CONFIG_FILE": "/tmp/x", "UV_HTTP_BASIC": "SECRET", "npm_config__auth": "SECRET", "SECRET": "SECRET",
    }  # fmt: skip
    registries.pypi.packages.add(wheel("led", "1.0"))
    registries.npm.packages.add({"name": "nled", "version": "1.0.0"}, files={"index.js": "exports.x = 1"})
    code = "import os, led; print(os.environ['SECRET'], os.environ['UV_INDEX'])"
    assert said(run(lax, code, "led==", env=env)).split() == ["SECRET", rogue]
    code = "require('nled'); console.log(process.env.SECRET)"
    assert said(run(lax, code, "nled@", language="javascript", env=env)) == "SECRET\n"
    sites = [*registries.pypi.sites, *registries.npm.sites]
    seen = [one for site in sites for one in site.journal.requests]
    assert {one.target.partition("-")[0].rstrip("/").rpartition("/")[2] for one in seen} >= {"led", "nled"}
    assert not [one for one in seen if "SECRET" in repr(one)]
    assert registries.pypi.rogue.untouched
    assert registries.npm.rogue.untouched


def test_a_call_has_no_more_network_for_being_prepared(lax: Lab, registries: Registries) -> None:
    """The preparation may read the registry; the code of a call without network may not, before or after."""
    code = f"""
import urllib.request
for url in ({registries.pypi.url + "libx/"!r}, {registries.pypi.files.url + "/"!r}):
    try:
        print(urllib.request.urlopen(url, timeout=20).status)
    except OSError as error:
        print(error)
"""
    done = run(lax, code, "libx==")
    assert said(done).count("network_off") == 2
    assert {one["decision"] for one in done.events if "decision" in one} == {"deny"}
    control = lax.run(code, {"allow_network": True}, prelude=False)
    assert said(control).splitlines()[0] == "200"


def test_a_snapshot_in_use_is_never_pruned(lax: Lab, registries: Registries, command: list[str]) -> None:
    """The program imports from it what it had not touched before. The control: once it has ended, the snapshot goes."""
    registries.pypi.packages.add(wheel("in-use", "1.0", files={"in_use/__init__.py": "", "in_use/later.py": "X = 42"}))
    tree = store_of(lax) / "snapshots"

    def prune() -> list[str]:
        done = subprocess.run(
            [*command, "packages", "prune", "--budget", "0", "--json"], cwd=ROOT, capture_output=True, text=True,
            env={**os.environ, "SLUICEGATE_STATE_DIR": str(lax.policy.parent / "state")}, timeout=PATIENCE, check=True,
        )  # fmt: skip
        removed = json.loads(done.stdout)["snapshots"]
        assert isinstance(removed, list)
        return removed

    def meanwhile() -> list[str]:
        lax.held()
        prune()
        left = [one.parent.parent.name for one in tree.glob("*/tree/in_use")]
        lax.outside.local.release()
        return left

    lax.outside.forget()
    code = f"import urllib.request, in_use\nurllib.request.urlopen({lax.hold_url!r})\nfrom in_use import later\nprint(later.X)\n"
    done, left = lax.during(code, meanwhile, named("local.test"), prelude=False, packages=["in-use=="])
    assert said(done) == "42\n"
    assert len(left) == 1
    assert left[0] in prune()
    assert list(tree.glob("*/tree/in_use")) == []


def test_a_preparation_runs_under_the_calls_name_and_for_reading_alone(lax: Lab, registries: Registries) -> None:
    """Each of its sandboxes has the registry and nothing else; what refers elsewhere leads nowhere."""
    result = run(lax, "1", "url-need==").result
    assert (result.cause, reasons(result)) == (Cause.POLICY_REFUSED, {"url-need": "non_registry_source"})
    result = run(lax, "1", "nremote@", language="javascript").result
    assert (result.cause, reasons(result)) == (Cause.POLICY_REFUSED, {"nremote": "non_registry_source"})
    lines = preparation(lax.log, result)
    assert lines, "the control: it was in the log"
    assert {one["mode"] for one in lines if one["event"] == "attempt" and one["phase"] == "start"} == {
        "registry-default"
    }
    assert {one["method"] for one in lines if one.get("method")} <= {"GET", "HEAD", "CONNECT"}
    assert registries.pypi.rogue.untouched
    assert registries.npm.rogue.untouched


def test_the_directory_of_an_attempts_own_installs_is_after_the_library(lax: Lab) -> None:
    """What stands there is found by the program, but never in the place of the standard library, nor run by `site`."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    code = f"""
import pathlib, subprocess, sys
site = pathlib.Path('/workspace/.local/lib/{version}/site-packages')
site.mkdir(parents=True)
(site / 'own.py').write_text('X = 1')
(site / 'colorsys.py').write_text('X = 1')
(site / 'hook.pth').write_text('import sys; print("hook")')
import own, colorsys
print(own.X, hasattr(colorsys, 'X'), flush=True)
subprocess.run([sys.executable, '-c', 'import own, colorsys; print(own.X, hasattr(colorsys, "X"))'], check=True)
"""
    assert said(run(lax, code)).splitlines() == ["1 False", "hook", "1 False"]
