"""What code may not do with the working directory that it has, nor with the names that lead to one.

Every test runs as the user who runs the tests, and all of them once more as an unprivileged one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest

from sandbox import Executor, Settings
from sandbox.calls import RunningCall, Terms
from sandbox.contract import CodeCall, InvalidCall, ToolResult
from sandbox.isolation import syscalls
from sandbox.isolation.plan import MIB
from sandbox.owners import Owner
from sandbox.workdir import USER_DATA_UID, Placed, Quota, WorkingDirectories
from tests.remote_executor import until
from tests.unprivileged import unprivileged_command

ROOT = os.getuid() == 0
POLICY = "version: 1\nname: working-directories\nattempts: {max: 1}\nnetwork: {modes: [block-all]}\n"
PATIENCE = 100.0
SECRET = "the-other-users-secret"


@dataclass(frozen=True)
class Ran:
    """What became of one call. `seen` is the JSON that its code printed."""

    result: ToolResult
    used: str
    replaced: bool
    script: str

    @property
    def seen(self) -> Any:
        assert self.result.stdout, self.result
        return json.loads(self.result.stdout)


class Desk:
    """One executor, and the users' directories of its state; an event loop in a thread of its own."""

    def __init__(self, state: Path) -> None:
        self.directories = WorkingDirectories(state)
        policy = state / "policy.yaml"
        policy.write_text(POLICY)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.executor = Executor(policy, settings=Settings(state_dir=state, audit_log=state / "audit.jsonl"))
        self.do(self.executor.__aenter__())

    def do[T](self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE)

    def root(self, user: str = "alice") -> Path:
        return self.directories.user_root(Owner("", user))

    @contextlib.contextmanager
    def started(
        self, code: str, working_dir: str | None = None, *, root: Path | None = None, quota: Quota | None = None,
        timeout: float = 60, language: Literal["python", "javascript"] = "python",
    ) -> Iterator[tuple[Callable[[], Ran], Placed, Callable[[str], None]]]:  # fmt: skip
        """The way to wait for the end of a call that runs, where it was placed, and the way to wait for its words."""
        output, heard = bytearray(), threading.Condition()

        def sink(data: bytes) -> None:
            with heard:
                output.extend(data)
                heard.notify_all()

        def says(text: str) -> None:
            with heard:
                assert heard.wait_for(lambda: text.encode() in output, PATIENCE), bytes(output)

        with self.directories.place(
            root or self.root(), working_dir, quota=quota or Quota(1024 * MIB, 100_000), client=root is not None
        ) as placed:
            self.do(placed.require_room())

            async def submit() -> RunningCall:
                call = CodeCall(language=language, code=code, timeout=timeout)
                return self.executor.submit(call, sink, terms=Terms(placed=placed))

            running = self.do(submit())

            def end() -> Ran:
                return Ran(self.do(running.result()), placed.used, placed.replaced, placed.workdir.script)

            try:
                yield end, placed, says
            finally:
                running_settled = running.settled.wait()
                self._loop.call_soon_threadsafe(running.cancel)
                self.do(running_settled)

    def run(self, code: str, working_dir: str | None = None, **more: Any) -> Ran:
        with self.started(code, working_dir, **more) as (end, _, _):
            return end()

    def close(self) -> None:
        self.do(self.executor.__aexit__(None, None, None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()


@pytest.fixture(scope="module")
def desk() -> Iterator[Desk]:
    with tempfile.TemporaryDirectory(prefix="sg-") as directory:
        desk = Desk(Path(directory))
        yield desk
        desk.close()


@pytest.fixture(autouse=True)
def users(request: pytest.FixtureRequest) -> Iterator[None]:
    """Both users' directories, each with a file of its own, as they are before any call."""
    if "desk" not in request.fixturenames:
        yield
        return
    desk: Desk = request.getfixturevalue("desk")
    for user, text in (("alice", "own"), ("bob", SECRET)):
        (desk.root(user) / "file").write_text(text)
        give(desk.root(user) / "file").chmod(0o644)
    yield
    for user in ("alice", "bob"):
        for _, names, _, above in os.fwalk(desk.root(user)):
            for name in names:
                if not stat.S_ISLNK(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode):
                    os.chmod(name, 0o700, dir_fd=above)
        subprocess.run(["rm", "-rf", str(desk.root(user))], check=True)


def give(path: Path) -> Path:
    """A file or directory that the test made becomes the user's, as if its code had made it."""
    if ROOT:
        os.chown(path, USER_DATA_UID, USER_DATA_UID, follow_symlinks=False)
    return path


def scripts(root: Path) -> list[str]:
    return [str(path) for path in root.rglob("code_exec_*.py")]


def mounts_of(root: Path) -> list[str]:
    return [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(root) in line]


LOOK = "import json, os; print(json.dumps([os.getcwd(), sorted(os.listdir('.')), open('/workspace/file').read()]))"


@pytest.mark.parametrize(
    "way",
    [
        "..", "../bob", "../../user_data/bob", "sub/../../bob", "./sub/./../../bob", "link", "link/sub", "absolute", "chain",
        "{bob}", "{state}", "/", "//", "/etc", "/proc/self/root{bob}", "/proc/self/cwd", "/proc/1/root", "/workspace/../etc",
        "{alice}/../bob", "{alice}x", "/workspace/link",
    ],
)  # fmt: skip
def test_no_way_leads_to_another_directory(desk: Desk, way: str) -> None:
    """Not by `..`, by a link, or by an absolute path of the host's: the code is run in the user's own, and told so."""
    alice, bob = desk.root(), desk.root("bob")
    give_directory(alice / "sub")
    give_directory(bob / "sub")
    for name, target in (("link", "../bob"), ("absolute", str(bob)), ("chain", "link/../bob")):
        os.symlink(target, alice / name)
    way = way.format(alice=alice, bob=bob, state=alice.parent.parent)
    ran = desk.run(LOOK, way)
    assert ran.replaced
    assert ran.used == "."
    assert ran.seen[0] == "/workspace"
    assert ran.seen[2] == "own"
    if way in ("../bob", "link", "absolute", "sub/../../bob"):  # the control: on the host the same words lead there
        assert (alice / way / "file").read_text() == SECRET


def give_directory(path: Path) -> Path:
    path.mkdir()
    return give(path)


@pytest.mark.parametrize(
    "way", ["sub", "./sub/", "sub/../sub", "inner", "/workspace/sub", "//workspace//sub", "{alice}/sub", "sub/."]
)
def test_every_way_inside_is_the_way_that_it_names(desk: Desk, way: str) -> None:
    """Also by a link that stays inside, and by the name that the code or the host has for it."""
    alice = desk.root()
    give_directory(alice / "sub")
    os.symlink("sub", alice / "inner")
    ran = desk.run(LOOK, way.format(alice=alice))
    assert not ran.replaced
    assert ran.used == "sub"
    assert ran.seen == ["/workspace/sub", [ran.script], "own"]


@pytest.mark.parametrize(
    "name", ["․․", "‥", "．．", "..\u200b", "%2e%2e", "..\\bob", "～", "~", "$HOME", "sub\n", "ⅱ/‥"]
)
def test_what_only_looks_like_a_way_out_is_a_plain_name(desk: Desk, name: str) -> None:
    """It is taken as it stands: it does not exist, and once the code has made it, the code is run there."""
    with pytest.raises(InvalidCall, match="does not exist"):
        desk.run(LOOK, name)
    made = desk.run(f"import os; os.makedirs({name!r})")
    assert made.result.status == "success", made.result
    ran = desk.run(LOOK, name)
    assert not ran.replaced
    assert ran.seen[0] == f"/workspace/{name}"


@pytest.mark.parametrize(
    ("way", "problem"),
    [
        ("a\0b", "NUL"), ("x" * 256, "longer"), ("é" * 128, "longer"), ("a/" * 2048, "bytes"), ("a" * 5000, "bytes"),
        ("\udc80", "surrogate"), ("file", "not a directory"), ("file/x", "not a directory"), ("pipe", "not a directory"),
        ("circle", "links without end"), ("missing", "does not exist"), ("missing/deep", "does not exist"),
    ],
)  # fmt: skip
def test_a_name_that_is_none_is_refused_and_says_why(desk: Desk, way: str, problem: str) -> None:
    """Before anything is run."""
    alice = desk.root()
    os.mkfifo(alice / "pipe")
    os.symlink("circle", alice / "circle")
    with pytest.raises(InvalidCall, match=problem) as caught:
        desk.run(LOOK, way)
    assert str(caught.value).startswith("working_dir: ")
    assert len(str(caught.value)) < 700


def test_the_longest_names_work(desk: Desk) -> None:
    """A name of 255 bytes, and a way as long as a path may be."""
    made = desk.run(
        "import os\nos.mkdir('n' * 255)\n"
        "for _ in range(15): os.mkdir('d' * 250); os.chdir('d' * 250)\n"
        "os.mkdir('e' * 255); os.chdir('e' * 255); os.mkdir('f' * 50)\n"
    )
    assert made.result.status == "success", made.result
    assert desk.run(LOOK, "n" * 255).seen[0] == "/workspace/" + "n" * 255
    deep = "/".join(["d" * 250] * 15)
    assert desk.run(LOOK, deep).seen[0] == f"/workspace/{deep}"
    with pytest.raises(InvalidCall, match="more than 4095 bytes"):
        desk.run(LOOK, f"{deep}/{'e' * 255}/{'f' * 50}")


OTHERS = """
import json, os
leaked = []
bob = {bob!r}
ways = [bob, "/proc/self/root" + bob, "/proc/1/root" + bob, "/workspace/../bob", "../bob", "/workspace/../" + bob, "out"]
for pid in os.listdir("/proc"):
    if pid.isdigit():
        ways += [f"/proc/{{pid}}/cwd/../bob", f"/proc/{{pid}}/root{{bob}}"]
        try:
            ways += [f"/proc/{{pid}}/fd/{{fd}}" for fd in os.listdir(f"/proc/{{pid}}/fd")]
        except OSError:
            pass
for line in open("/proc/self/mountinfo"):
    ways += [line.split()[4], line.split()[4] + "/" + line.split()[3] + "/../bob"]
try:
    os.symlink(bob, "out")
except OSError:
    pass
up = os.open(".", os.O_PATH)
for _ in range(20):
    up = os.open("..", os.O_PATH, dir_fd=up)
    ways.append(f"/proc/self/fd/{{up}}" + bob)
    ways.append(f"/proc/self/fd/{{up}}/bob")
for way in ways:
    for path in (way, way + "/file"):
        try:
            if os.path.isfile(path) and {secret!r} in open(path, errors="replace").read():
                leaked.append(path)
        except OSError:
            pass
    for act in (lambda: os.link(way + "/file", "linked"), lambda: os.rename(way + "/file", "moved"), lambda: os.mkdir(way + "/made")):
        try:
            act()
        except OSError:
            continue
        if way.endswith("bob") or way == "out":
            leaked.append("changed by " + way)
try:
    os.unlink("out")
except OSError:
    pass
print(json.dumps(leaked))
"""


def test_another_users_directory_is_not_reached_from_inside(desk: Desk, tmp_path: Path) -> None:
    """By no name, link, descriptor, hard link or rename; the same program finds it outside."""
    bob = desk.root("bob")
    code = OTHERS.format(bob=str(bob), secret=SECRET)
    give_directory(desk.root() / "sub")
    for way in (None, "sub"):
        assert desk.run(code, way).seen == []
    assert (bob / "file").read_text() == SECRET
    assert sorted(path.name for path in bob.iterdir()) == ["file"]
    outside = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert str(bob / "file") in json.loads(outside.stdout or "[]"), f"the control: {outside.stderr}"


def test_names_that_change_while_calls_start_lead_nowhere_else(desk: Desk) -> None:
    """Two hundred calls that start, while another call of the same user's turns the directory into links and back without rest.

    Each is run where it was told that it would be, or not at all, with the reason; no script is left anywhere.
    """
    alice, bob = desk.root(), desk.root("bob")
    (alice / "sub").mkdir()
    give(alice / "sub")
    swap = f"""
import os, random, time
targets = ["../bob", {str(bob)!r}, "/workspace/../bob", "/etc", "..", "other"]
os.makedirs("other", exist_ok=True)
print("swapping", flush=True)
number = 0
while True:
    number += 1
    os.rename("sub", "kept")
    os.symlink(targets[number % len(targets)], "sub")
    time.sleep(random.random() * 0.004)
    os.unlink("sub")
    if number % 3:
        os.mkdir("sub"); time.sleep(random.random() * 0.004); os.rename("sub", f"gone{{number}}")
    os.rename("kept", "sub")
    time.sleep(random.random() * 0.03)
"""
    look = (
        "import json, os, pathlib\n"
        "found = [str(p) for p in ('file', '../file', '../bob/file') if os.path.isfile(p) and open(p).read() == SECRET]\n"
        "print(json.dumps([os.path.basename(__file__) in os.listdir('.'), found]))\n"
    ).replace("SECRET", repr(SECRET))
    counts = {"ran": 0, "refused": 0, "failed": 0}
    with desk.started(swap, timeout=250) as (end, _, says):
        says("swapping")
        while counts["ran"] + counts["failed"] < 200:
            try:
                ran = desk.run(look, "sub")
            except InvalidCall:
                counts["refused"] += 1
                continue
            if ran.result.status == "success":
                assert ran.seen[1] == []
                counts["ran"] += 1
            else:
                assert ran.result.error is not None
                assert ran.result.error.code == "isolation_failed", ran.result
                assert re.search("replaced while|could not be entered", ran.result.error.message), ran.result
                counts["failed"] += 1
    swapped = end().result
    assert swapped.cause == "cancelled", f"the control: it was swapping all the time: {swapped}"
    assert counts["ran"] > 0
    assert counts["failed"] > 0, "the control: names did change under calls"
    assert scripts(alice) == []
    assert sorted(path.name for path in bob.iterdir()) == ["file"]


PRIVILEGE = """
import ctypes, json, os, stat, struct
libc = ctypes.CDLL(None, use_errno=True)
made = []
def attempt(name, act):
    try:
        act()
        made.append(name)
    except OSError:
        pass
def call_libc(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "")
def call(number, *arguments):
    call_libc(libc.syscall(number, *arguments))
open("plain", "w").close()
os.mkdir("dir")
for bit in (0o4000, 0o2000, 0o6000):
    attempt("chmod", lambda: os.chmod("plain", 0o755 | bit))
    attempt("fchmod", lambda: os.fchmod(os.open("plain", os.O_RDWR), 0o755 | bit))
    attempt("fchmodat", lambda: os.chmod("plain", 0o755 | bit, dir_fd=os.open(".", os.O_RDONLY)))
    attempt("fchmodat2", lambda: call(452, -100, b"plain", 0o755 | bit, 0))
    attempt("open", lambda: os.open(f"open{bit}", os.O_CREAT | os.O_WRONLY, 0o755 | bit))
    attempt("creat", lambda: call_libc(libc.creat(b"creat%d" % bit, 0o755 | bit)))
    attempt("tmpfile", lambda: call_libc(libc.linkat(-100, b"/proc/self/fd/%d" % os.open(".", os.O_TMPFILE | os.O_RDWR, 0o755 | bit), -100, b"tmp%d" % bit, 0x400)))
    attempt("openat2", lambda: call(437, -100, b"openat2%d" % bit, struct.pack("=QQQ", os.O_CREAT | os.O_WRONLY, 0o755 | bit, 0), 24))
    attempt("mknod", lambda: os.mknod(f"mknod{bit}", stat.S_IFREG | 0o755 | bit))
    attempt("chmod a directory", lambda: os.chmod("dir", 0o755 | bit))
for kind, name in ((stat.S_IFCHR, "char"), (stat.S_IFBLK, "block")):
    attempt(name, lambda: os.mknod(name, kind | 0o666, os.makedev(1, 3)))
attempt("chown", lambda: os.chown("plain", 0, 0))
attempt("capability", lambda: os.setxattr("plain", "security.capability", bytes.fromhex("0100000200200000000000000000000000000000")))
print(json.dumps(made))
"""


def test_nothing_is_left_that_gives_anybody_a_privilege(desk: Desk, tmp_path: Path) -> None:
    """No set-user-id or set-group-id bit by any call that makes or changes a file, no device, owner or capability."""
    assert desk.run(PRIVILEGE).seen == []
    for path in desk.root().rglob("*"):
        status = path.lstat()
        assert not status.st_mode & (stat.S_ISUID | stat.S_ISGID), path
        assert stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode), path
        assert status.st_uid == (USER_DATA_UID if ROOT else os.getuid())
    outside = subprocess.run(
        [sys.executable, "-c", PRIVILEGE], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert {"chmod", "fchmod", "open", "tmpfile", "openat2", "mknod"} <= set(json.loads(outside.stdout)), "the control"


def test_what_is_in_the_directory_has_no_power_there(desk: Desk) -> None:
    """A set-user-id program and a device that the host put there are without effect: the mount has neither."""
    code = (
        "import json\n"
        "(line,) = [l.split() for l in open('/proc/self/mountinfo') if l.split()[4] == '/workspace' and ' tmpfs ' not in l]\n"
        "print(json.dumps(line[5].split(',')))"
    )
    assert {"nosuid", "nodev"} <= set(desk.run(code).seen)


def test_files_belong_to_the_directorys_owner_and_others_files_stay_theirs(desk: Desk) -> None:
    """On the disk, new ones are the owner's; one of the host's that stands there is not the code's to read or change."""
    alice = desk.root()
    if ROOT:
        (alice / "roots").write_text("root's")
        (alice / "roots").chmod(0o600)
    code = """
import json, os
done = []
for name, act in (("read", lambda: open("roots").read()), ("write", lambda: open("roots", "w")), ("chmod", lambda: os.chmod("roots", 0o777)),
                  ("own", lambda: open("file", "a").write("!"))):
    try:
        act(); done.append(name)
    except OSError:
        pass
os.makedirs("made/deep"); open("made/deep/file", "w").close()
print(json.dumps([done, os.stat("file").st_uid, os.getuid()]))
"""
    ran = desk.run(code)
    assert ran.seen[1:] == [1000, 1000]
    if ROOT:
        assert ran.seen[0] == ["own"]
        assert (alice / "roots").read_text() == "root's"
    owner = (alice / "made/deep/file").stat()
    assert owner.st_uid == alice.stat().st_uid == (USER_DATA_UID if ROOT else os.getuid())
    assert owner.st_uid != 0


@pytest.mark.parametrize("kind", ["link", "directory", "pipe", "socket", "gone", "dangling"])
def test_a_script_that_is_replaced_takes_nothing_with_it(desk: Desk, kind: str) -> None:
    """What has its name goes, but for a directory; what a link names stays; nothing waits for a pipe."""
    alice, bob = desk.root(), desk.root("bob")
    code = """
import os, socket
os.unlink(__file__)
kind = {kind!r}
if kind == "link": os.symlink({target!r}, __file__)
if kind == "dangling": os.symlink("nowhere", __file__)
if kind == "directory": os.mkdir(__file__); open(__file__ + "/kept", "w").close()
if kind == "pipe": os.mkfifo(__file__)
if kind == "socket": socket.socket(socket.AF_UNIX).bind(os.path.basename(__file__))
""".format(kind=kind, target=str(bob / "file"))
    ran = desk.run(code)
    assert ran.result.status == "success", ran.result
    assert (bob / "file").read_text() == SECRET
    left = [path.name for path in alice.iterdir() if path.name.startswith("code_exec_")]
    assert left == ([ran.script] if kind == "directory" else [])
    if kind == "directory":
        assert (alice / ran.script / "kept").exists()


@pytest.mark.parametrize("change", ["renamed", "removed", "emptied", "closed", "replaced"])
def test_a_directory_that_changes_under_its_program_leaves_no_script(desk: Desk, change: str) -> None:
    """It is renamed, removed, closed to its owner, or another takes its name: the script is found and goes."""
    give_directory(desk.root() / "sub")
    code = f"""
import os
change = {change!r}
if change == "renamed": os.makedirs("/workspace/far/away"); os.rename("/workspace/sub", "/workspace/far/away/sub")
if change == "removed": os.unlink(__file__); os.rmdir("/workspace/sub")
if change == "emptied": os.unlink(__file__)
if change == "closed": os.chmod("/workspace/sub", 0)
if change == "replaced": os.rename("/workspace/sub", "/workspace/old"); os.mkdir("/workspace/sub"); open(__file__, "w").close()
"""
    ran = desk.run(code, "sub")
    assert ran.result.status == "success", ran.result
    left = scripts(desk.root())
    assert left == ([str(desk.root() / "sub" / ran.script)] if change == "replaced" else []), "only what the code made"


def test_a_root_that_its_code_has_closed_is_opened_again(desk: Desk) -> None:
    """Else no call could undo it."""
    assert desk.run("import os; os.chmod('/workspace', 0)").result.status == "success"
    assert desk.run(LOOK).seen[0] == "/workspace"


def test_pipes_and_sockets_that_are_left_hold_nothing_up(desk: Desk) -> None:
    """Neither the count before the next call nor the call."""
    code = "import os, socket\nos.mkfifo('pipe')\nsocket.socket(socket.AF_UNIX).bind('socket')\nos.mkdir('d'); os.mkfifo('d/pipe')"
    assert desk.run(code).result.status == "success"
    with desk.directories.place(desk.root(), None, quota=Quota(MIB, 100), client=False) as placed:
        desk.do(placed.require_room())
        assert placed.full is None
    assert desk.run(LOOK).result.status == "success"


FILLS = {
    "files that are closed": ("n = 0\nwhile True:\n    n += 1\n    open(f'f{n}', 'wb').write(bytes(1 << 20))", "bytes"),
    "a closed directory": (
        (
            "os.mkdir('d'); files = [open(f'd/{n}', 'wb', 0) for n in range(9)]; os.chmod('d', 0)\n"
            "while True: [file.write(bytes(1 << 20)) for file in files]"
        ),
        "bytes",
    ),
    "many files": ("n = 0\nwhile True:\n    n += 1\n    open(f'f{n}', 'w').close()", "inodes"),
    "names of one file": (
        "n = 0\nwhile True:\n    n += 1; os.link('file', f'f{n}')\n    if n % 999 == 0: os.unlink('file'); open('file', 'w').close()",
        "inodes",
    ),
    "deep directories": ("while True: os.mkdir('d'); os.chdir('d'); open('f', 'w').close()", "inodes"),
    "holes that a mapping fills": (
        (
            "import mmap\nwhile True:\n    f = open(os.urandom(8).hex(), 'w+b'); f.truncate(4 << 20)\n"
            "    m = mmap.mmap(f.fileno(), 4 << 20)\n    for place in range(0, 4 << 20, 4096): m[place] = 1"
        ),
        "bytes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FILLS)
def test_who_fills_the_directory_is_ended_and_the_next_can_only_make_room(desk: Desk, name: str) -> None:
    """By bytes or by files, in whatever form; the result says which limit, and the policy's key for it.

    With what is removed, all is as before.
    """
    code, exhausted = FILLS[name]
    quota = Quota(32 * MIB, 2000)
    ran = desk.run(f"import os\nos.nice(10)\n{code}", quota=quota, timeout=100)
    assert (ran.result.status, ran.result.cause) in (("killed", "disk"), ("error", "disk")), ran.result
    (full,) = (one for one in ran.result.attempts[0].evidence.full_disks if one.path == "/workspace")
    assert full.exhausted == exhausted
    assert ran.result.error is not None
    assert re.search("code_exec.user_data.max_(mib|files)", ran.result.error.message)
    with desk.started("open('more', 'w')", quota=quota) as (end, placed, _):
        assert placed.full is not None
        assert placed.full.startswith("user_data_full: ")
        failed = end().result
    assert (failed.status, failed.cause) == ("error", "exit")
    assert "Disk quota exceeded" in failed.stderr
    empty = (
        "import subprocess\nsubprocess.run(['chmod', '-R', 'u+rwx', '/workspace'])\n"
        "print(subprocess.run(['find', '/workspace', '-mindepth', '1', '-delete']).returncode)"
    )
    freed = desk.run(empty, quota=quota)
    assert freed.seen == 0
    assert list(desk.root().iterdir()) == []
    with desk.started("open('more', 'w').write('again')", quota=quota) as (end, placed, _):
        assert placed.full is None
        assert end().result.status == "success"


GROW = """
import ctypes, fcntl, json, mmap, os, socket, struct
libc = ctypes.CDLL(None, use_errno=True)
grown = []
def attempt(name, act):
    try:
        act()
    except OSError:
        return
    grown.append(name)
def call(number, *arguments):
    if libc.syscall(number, *arguments) < 0:
        raise OSError(ctypes.get_errno(), "")
def check(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "")
def fill(flags=mmap.MAP_SHARED):
    with mmap.mmap(os.open("hole", os.O_RDWR), 1 << 20, flags=flags) as mapped:
        mapped[:] = b"x" * (1 << 20)
def upgrade():
    libc.mmap.restype = ctypes.c_void_p
    place = libc.mmap(None, 1 << 20, 1, 1, os.open("hole", os.O_RDWR), 0)
    if place in (None, ctypes.c_void_p(-1).value) or libc.mprotect(ctypes.c_void_p(place), 1 << 20, 3):
        raise OSError(ctypes.get_errno(), "")
    ctypes.memset(place, 1, 1 << 20)
def reserve(request):
    fcntl.ioctl(os.open("hole", os.O_RDWR), request, struct.pack("=hhxxxxqqiI16x", 0, 0, 0, 1 << 20, 0, 0))
os.chdir("/workspace")
attempt("make", lambda: os.close(os.open("made", os.O_CREAT | os.O_WRONLY)))
attempt("make elsewhere", lambda: os.close(os.open("/tmp/made", os.O_CREAT | os.O_WRONLY)))
attempt("creat", lambda: check(libc.creat(b"creat", 0o600)))
attempt("tmpfile", lambda: os.open(".", os.O_TMPFILE | os.O_RDWR))
attempt("mkdir", lambda: os.mkdir("directory"))
attempt("mkfifo", lambda: os.mkfifo("pipe"))
attempt("symlink", lambda: os.symlink("x", "link"))
attempt("link", lambda: os.link("file", "linked"))
attempt("rename", lambda: os.rename("other", "a-longer-name-than-the-one-before"))
attempt("socket", lambda: socket.socket(socket.AF_UNIX).bind("socket"))
attempt("xattr", lambda: os.setxattr("file", "user.x", b"x" * 2000))
attempt("write", lambda: os.write(os.open("file", os.O_WRONLY), b"x"))
attempt("append", lambda: os.write(os.open("file", os.O_WRONLY | os.O_APPEND), b"x"))
attempt("write into a hole", lambda: os.pwrite(os.open("hole", os.O_WRONLY), b"x", 4096))
attempt("lengthen", lambda: os.truncate("file", 1 << 20))
attempt("copy", lambda: os.copy_file_range(os.open("file", os.O_RDONLY), os.open("hole", os.O_WRONLY), 10))
attempt("sendfile", lambda: os.sendfile(os.open("hole", os.O_WRONLY), os.open("file", os.O_RDONLY), 0, 10))
attempt("map", fill)
attempt("map, and then write", upgrade)
attempt("fallocate", lambda: call(285, os.open("hole", os.O_RDWR), 0, ctypes.c_long(0), ctypes.c_long(1 << 20)))
attempt("posix_fallocate", lambda: os.posix_fallocate(os.open("hole", os.O_RDWR), 0, 1 << 20))
for request in (0x40305828, 0x4030582A, 0x40305839):
    attempt("reserve", lambda: reserve(request))
read = open("file").read(3)
os.truncate("file", 0); os.rmdir("empty")
if os.path.exists("other"): os.unlink("other")
print(json.dumps([grown, read, sorted(os.listdir("."))]))
"""
GROWING = {
    "make", "creat", "mkdir", "mkfifo", "symlink", "link", "rename", "socket", "write", "append", "write into a hole",
    "lengthen", "sendfile", "map", "map, and then write",
}  # fmt: skip


def test_in_a_full_directory_nothing_can_grow_and_all_can_be_removed(desk: Desk) -> None:
    """Not by a name, a longer file, a hole or an attribute; and the same program, where there is room, does all of it."""
    alice = desk.root()

    def prepare() -> None:
        subprocess.run(["find", str(alice), "-mindepth", "1", "-delete"], check=True)
        for name in ("file", "other", "big"):
            (alice / name).write_text("own")
            give(alice / name)
        with open(give(alice / "big"), "wb") as file:
            file.write(bytes(2 * MIB))
        with open(alice / "hole", "wb") as file:
            file.truncate(1 << 20)
        give(alice / "hole")
        give_directory(alice / "empty")

    prepare()
    with desk.started(GROW, quota=Quota(MIB, 1000)) as (end, placed, _):
        assert placed.full is not None
        ran = end()
        assert ran.result.status == "success", ran.result.stderr
        assert ran.seen == [[], "own", ["big", "file", "hole"]]
    assert (alice / "hole").stat().st_blocks == 0
    prepare()
    grown, read, _ = desk.run(GROW, quota=Quota(100 * MIB, 1000)).seen
    assert read[:2] == "xw"
    assert set(grown) >= GROWING, "the control"
    assert not {"fallocate", "reserve"} & set(grown), "which no sandbox may"


def test_a_deep_tree_can_be_removed_by_its_own_code(desk: Desk) -> None:
    """One of 3,000 levels, longer than any path may be, in a directory that it has filled."""
    quota = Quota(1024 * MIB, 2000)
    made = desk.run("import os\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')", quota=quota)
    assert made.result.cause == "disk"
    removed = desk.run(
        "import subprocess; print(subprocess.run(['rm', '-rf', '/workspace/d']).returncode)", quota=quota
    )
    assert removed.seen == 0
    assert desk.run(LOOK, quota=quota).seen[2] == "own"


def test_room_that_is_taken_at_once_is_found_at_the_end(desk: Desk) -> None:
    """A program that has ended before anybody looked: its output is kept, and the result says that it left too much."""
    code = "import os\nfor n in range(3): open(f'f{n}', 'wb').write(bytes(9 << 20))\nprint('written')\nos._exit(0)"
    ran = desk.run(code, quota=Quota(16 * MIB, 100))
    assert (ran.result.status, ran.result.cause) in (("error", "disk"), ("killed", "disk"))
    assert [one.path for one in ran.result.attempts[0].evidence.full_disks] == ["/workspace"]
    if ran.result.status == "error":
        assert ran.result.exit_code == 0
        assert ran.result.stdout == "written\n"
        assert ran.result.error is not None
        assert "exited with 0, and the working directory holds more than 16 MiB" in ran.result.error.message


def test_no_room_is_taken_without_writing_it_nor_in_one_file_more_than_there_is(desk: Desk) -> None:
    """`fallocate` is refused in every sandbox, so that the C library writes instead; a file ends where the room does."""
    code = """
import errno, json, os
f = os.open("big", os.O_CREAT | os.O_RDWR)
try:
    os.posix_fallocate(f, 0, 1 << 30)
    told = "taken"
except OSError as error:
    told = errno.errorcode[error.errno]
size = os.fstat(f).st_size
os.ftruncate(f, 0)
os.posix_fallocate(f, 0, 1 << 20)
few = os.fstat(f).st_blocks * 512
try:
    os.truncate("big", 65 << 20)
except OSError as error:
    print(json.dumps([told, size <= 64 << 20, few, errno.errorcode[error.errno]]))
"""
    told, little, few, longer = desk.run(code, quota=Quota(64 * MIB, 100)).seen
    assert (told, longer) == ("EFBIG", "EFBIG")
    assert little
    assert few >= MIB, "the control: what there is room for is had"


def test_a_runtime_that_was_started_before_its_call_has_no_working_directory(desk: Desk) -> None:
    """It would be in another one, which the call's lies over."""
    result = desk.run("console.log(1)", language="javascript").result
    assert result.error is not None
    assert "a call in a working directory is one in Python" in result.error.message
    assert sorted(path.name for path in desk.root().iterdir()) == ["file"]


def test_programs_that_ask_for_room_beforehand_work_without_it(desk: Desk) -> None:
    """Databases, temporary files and memory that is shared among processes."""
    code = """
import json, multiprocessing, shutil, sqlite3, tempfile
one = sqlite3.connect("one.db")
one.execute("pragma journal_mode=wal"); one.execute("pragma mmap_size=1000000")
one.execute("create table t (x)"); one.executemany("insert into t values (?)", [(str(n) * 9,) for n in range(9999)])
one.commit()
with tempfile.TemporaryFile() as file:
    file.write(bytes(1 << 20))
shutil.copy("one.db", "two.db")
value = multiprocessing.Value("i", 0)
def add(): value.value = 7
process = multiprocessing.get_context("fork").Process(target=add); process.start(); process.join()
print(json.dumps([one.execute("select count(*) from t").fetchone(), value.value]))
"""
    assert desk.run(code).seen == [[9999], 7]


CONNECT = """
import json, socket
found = []
def attempt(name, act):
    try:
        act()
        found.append(name)
    except OSError:
        pass
def dial(kind, make):
    one = make()
    one.connect("listening" if kind == socket.SOCK_STREAM else "datagrams")
    one.send(name.encode())
for name, kind, make in (
    ("stream", socket.SOCK_STREAM, lambda: socket.socket(socket.AF_UNIX)),
    ("datagram", socket.SOCK_DGRAM, lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)),
    ("of a pair", socket.SOCK_DGRAM, lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0]),
    ("raw, of a pair", socket.SOCK_DGRAM, lambda: socket.socketpair(socket.AF_UNIX, 3)[0]),
):
    attempt(name, lambda: dial(kind, make))
attempt("bind", lambda: socket.socket(socket.AF_UNIX).bind("bound"))
import asyncio, subprocess
async def work():
    process = await asyncio.create_subprocess_exec("echo", "works", stdout=subprocess.PIPE)
    return (await process.communicate())[0].decode()
print(json.dumps([found, asyncio.run(work())]))
"""


@pytest.mark.parametrize("client", [True, False])
def test_no_socket_of_the_hosts_is_reached_in_a_clients_directory(desk: Desk, client: bool) -> None:
    """Where a program of the host's listens. In a user's own directory there is none of the host's, and code may."""
    with tempfile.TemporaryDirectory(prefix="sg-") as directory, contextlib.ExitStack() as stack:
        project = Path(directory).resolve() if client else desk.root()
        names = {"listening": socket.SOCK_STREAM, "datagrams": socket.SOCK_DGRAM}
        listeners = {}
        for name, kind in names.items():
            (project / name).unlink(missing_ok=True)
            listeners[name] = stack.enter_context(socket.socket(socket.AF_UNIX, kind))
            listeners[name].bind(str(project / name))
            give(project / name) if not client else None
            (project / name).chmod(0o777)
        listeners["listening"].listen()
        found, works = desk.run(CONNECT, root=project if client else None).seen
        assert works == "works\n"
        listeners["datagrams"].settimeout(0)
        if client:
            assert found == []
            with pytest.raises(BlockingIOError):
                listeners["datagrams"].recv(100)
            assert not (project / "bound").exists()
        else:
            assert found == ["stream", "datagram", "of a pair", "raw, of a pair", "bind"], "the control"
            assert listeners["datagrams"].recv(100)


def test_holes_in_files_take_no_room(desk: Desk) -> None:
    """Sparse files of a gigabyte are what they hold on the disk."""
    code = "import time\nfor n in range(50): open(f'sparse{n}', 'wb').truncate(20 << 20)\ntime.sleep(2.5)"
    assert desk.run(code, quota=Quota(32 * MIB, 100)).result.status == "success"


def test_two_calls_at_once_share_their_directory_and_not_their_scripts(desk: Desk) -> None:
    """Each sees what the other wrote, and each runs its own code."""
    code = (
        "import os, time\nprint('here', flush=True)\nopen(f'mark-{NAME}', 'w').close()\n"
        "while not os.path.exists(f'mark-{3 - NAME}'): time.sleep(0.01)\nprint(os.path.basename(__file__))"
    )
    with desk.started(code.replace("NAME", "1")) as (end_one, one, _):
        with desk.started(code.replace("NAME", "2")) as (end_two, two, _):
            assert end_one().result.stdout.split() == ["here", one.workdir.script]
            assert end_two().result.stdout.split() == ["here", two.workdir.script]
    assert one.workdir.script != two.workdir.script
    assert scripts(desk.root()) == []


def test_no_mount_of_it_is_seen_on_the_host(desk: Desk) -> None:
    """Not while it is used, and not after; and the directory can then be removed."""
    root = desk.root("carol")
    with desk.started("print('up', flush=True)\nwhile True: pass", root=None) as (_, placed, says):
        says("up")
        assert mounts_of(placed.workdir.root) == []
    assert mounts_of(desk.root()) == []
    os.rmdir(root)


@pytest.mark.parametrize("who", ["executor", "launcher", "sandbox"])
def test_nothing_survives_a_kill(tmp_path: Path, who: str) -> None:
    """Of the executor, of the launcher, of the sandbox itself: no process and no mount, and the directory can go."""
    with subprocess.Popen(
        [sys.executable, "-c", f"from {__name__} import hold; hold({str(tmp_path)!r})"],
        cwd=Path(__file__).parents[2], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            told = json.loads(process.stdout.readline())
            launcher = psutil.Process(told["launcher"])
            started = [*psutil.Process(process.pid).children(recursive=True)]
            sandboxes = [one for one in launcher.children(recursive=True) if one.name() != "bwrap"]
            assert sandboxes
            if who == "sandbox":
                for one in sandboxes:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        one.kill()
            else:
                os.kill(process.pid if who == "executor" else launcher.pid, signal.SIGKILL)
            watched = started if who == "executor" else sandboxes
            until(lambda: not any(is_alive(one) for one in watched), "processes are left", 30)
            root = Path(told["root"])
            assert mounts_of(root) == []
            for path in root.iterdir():
                path.unlink()
            os.rmdir(root)
        finally:
            process.kill()


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def hold(directory: str) -> None:
    """In a process of its own: a call that runs in a user's directory until it is ended."""
    desk = Desk(Path(directory))
    with desk.started("print('up', flush=True)\nwhile True: pass", timeout=100) as (_, placed, says):
        says("up")
        print(json.dumps({"launcher": desk.executor.launcher_pid, "root": str(placed.workdir.root)}), flush=True)
        time.sleep(PATIENCE)


@pytest.mark.skipif(not ROOT, reason="only root can mount")
def test_what_is_mounted_below_is_not_there(desk: Desk) -> None:
    """Neither to be run in nor to be read: a mount is not the user's to have because of where it is."""
    alice = desk.root()
    give_directory(alice / "sub")
    syscalls.mount("none", str(alice / "sub"), "tmpfs", 0, "size=1m")
    try:
        (alice / "sub" / "mounted").write_text(SECRET)
        ran = desk.run("import json, os; print(json.dumps([os.getcwd(), os.listdir('/workspace/sub')]))", "sub")
    finally:
        syscalls.unmount_lazily(str(alice / "sub"))
    assert ran.replaced
    assert ran.seen == ["/workspace", []]


@pytest.mark.skipif(not ROOT, reason="only root maps owners")
def test_a_file_system_that_cannot_be_mapped_is_refused_with_the_remedy(desk: Desk) -> None:
    """There is no weaker mode."""
    alice = desk.root()
    (alice / "file").unlink()
    syscalls.mount("none", str(alice), "ramfs", 0)
    try:
        give(alice)
        result = desk.run(LOOK).result
    finally:
        syscalls.unmount_lazily(str(alice))
    assert result.error is not None
    assert result.error.code == "isolation_failed"
    assert "hint: keep the directory on a file system" in result.error.message


@pytest.mark.timeout(400)
@pytest.mark.skipif(not ROOT, reason="the tests already run as an ordinary user")
def test_all_of_this_holds_for_an_ordinary_user() -> None:
    """The same tests, and those of the parts, in a process of an unprivileged uid."""
    files = [
        __file__,
        *(
            str(Path(__file__).parents[1] / "sandbox" / f"test_{name}.py")
            for name in ("workdir", "quota", "tally", "protected")
        ),
    ]
    environment = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
    with unprivileged_command() as prefix:
        answer = subprocess.run(
            [*prefix, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", *files],
            cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True,
        )  # fmt: skip
    assert answer.returncode == 0, answer.stdout[-8000:] + answer.stderr[-2000:]
