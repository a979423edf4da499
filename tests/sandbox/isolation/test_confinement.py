"""What a sandbox consists of, seen from inside and from the host."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from sandbox.isolation.client import KillReason
from sandbox.isolation.plan import MIB, Rlimits, Tmpfs
from tests.sandbox.isolation.conftest import Outcome, Rig, finish, make_plan

type Run = Callable[..., Outcome]
NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")


def seen(outcome: Outcome) -> dict[str, object]:
    assert outcome.stderr == ""
    values = json.loads(outcome.stdout)
    assert isinstance(values, dict)
    return values


def test_identity_and_privileges(run: Run) -> None:
    """uid and gid 1000, no capability in any set, no_new_privs, a filter, no supplementary group."""
    values = seen(
        run(
            "import json, os\n"
            "status = dict(line.split(':', 1) for line in open('/proc/self/status'))\n"
            "print(json.dumps({k: v.split() for k, v in status.items()} | {'host': os.uname().nodename,\n"
            "    'ids': [*os.getresuid(), *os.getresgid()], 'user': __import__('pwd').getpwuid(1000).pw_name}))"
        )
    )
    assert values["ids"] == [1000] * 6
    assert [values[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")] == [["0" * 16]] * 5
    assert (values["NoNewPrivs"], values["Seccomp"]) == (["1"], ["2"])
    assert (values["host"], values["user"]) == ("sandbox", "sandbox")
    assert values["Groups"] in ([], ["65534"])  # an unprivileged starter's own group cannot be dropped, only unmapped


def test_every_namespace_is_its_own(rig: Rig) -> None:
    """None is shared with the host, or with another sandbox."""
    code = f"import os\nfor n in {NAMESPACES!r}: print(os.readlink('/proc/self/ns/' + n))"
    first, second = rig.run(code).stdout.split(), rig.run(code).stdout.split()
    host = [os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES]
    assert len(set(first) | set(host)) == 2 * len(NAMESPACES)
    assert first != second


def test_on_the_host_it_is_an_unprivileged_uid_of_its_own(rig: Rig) -> None:
    """Never the host's root, not even mapped; started as root, a uid that no account has."""

    async def scenario() -> tuple[str, str]:
        async with rig.prepared("pass") as sandbox:
            pids = [pid for pid in _descendants(rig.launcher.pid) if _name(pid).startswith("python")]
            status, uid_map = (Path(f"/proc/{max(pids)}/{name}").read_text() for name in ("status", "uid_map"))
            await finish(sandbox)
            return status, uid_map

    status, uid_map = rig.do(scenario())
    uids = {int(uid) for uid in next(line for line in status.splitlines() if line.startswith("Uid:")).split()[1:]}
    assert len(uids) == 1
    uid = uids.pop()
    assert uid == os.getuid() or uid >= 0x7000_0000
    assert uid != 0
    assert len(uid_map.splitlines()) == 1


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _descendants(pid: int) -> list[int]:
    found = [pid]
    for one in found:
        try:
            for task in os.listdir(f"/proc/{one}/task"):
                found += map(int, Path(f"/proc/{one}/task/{task}/children").read_text().split())
        except OSError:
            continue
    return found[1:]


def test_the_hosts_files_are_not_there(rig: Rig, tmp_path: Path) -> None:
    """Neither accounts, nor homes, nor the state of others; the same paths exist on the host."""
    (tmp_path / "canary").write_text("host")
    paths = ["/etc/shadow", "/var", "/home", "/sys", str(Path(__file__)), str(tmp_path / "canary"), str(rig.state_dir)]
    assert [path for path in paths if not os.path.exists(path)] == []
    outcome = rig.run(f"import os\nprint([p for p in {paths!r} if os.path.lexists(p)])\nprint(sorted(os.listdir('/')))")
    hidden, root = outcome.stdout.splitlines()
    assert hidden == "[]"
    assert set(json.loads(root.replace("'", '"'))) <= {
        "bin", "dev", "etc", "lib", "lib32", "lib64", "libx32", "node_modules", "opt", "proc", "run", "sbin", "tmp",
        "usr", "workspace",
    }  # fmt: skip


def test_only_three_places_can_be_written(run: Run) -> None:
    """Every directory is tried: those that take a file are /workspace, /tmp, /dev/shm, each a tmpfs."""
    outcome = run(
        textwrap.dedent("""
            import os
            writable = []
            for directory, names, _ in os.walk("/"):
                if directory.startswith(("/proc", "/usr/share", "/usr/lib", "/usr/include")):
                    names.clear()
                    continue
                path = os.path.join(directory, "probe")
                try:
                    open(path, "w").close()
                except OSError:
                    continue
                os.unlink(path)
                writable.append(directory)
            print(sorted(writable))
        """)
    )
    assert outcome.stdout == "['/dev/shm', '/tmp', '/workspace']\n"


@pytest.mark.parametrize(
    "path",
    ["/proc/sys/kernel/core_pattern", "/proc/sys/net/ipv4/ip_forward", "/proc/sys/kernel/hostname"],
)
def test_the_kernels_settings_cannot_be_written(run: Run, path: str) -> None:
    """Not even opened for writing; they can be read, or at least are there."""
    outcome = run(f"import os\nprint(os.path.exists({path!r}))\nopen({path!r}, 'w')")
    assert outcome.stdout == "True\n"
    assert outcome.stderr.splitlines()[-1].startswith(("OSError: [Errno 30]", "PermissionError"))


def test_only_its_own_processes_are_to_be_seen(run: Run) -> None:
    """Pid 1 and the program."""
    assert run("import os; print([n for n in os.listdir('/proc') if n.isdigit()])").stdout == "['1', '2']\n"


def test_nothing_of_the_hosts_environment_is_inside(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A canary of the starting process is in no environment that can be read inside."""
    monkeypatch.setenv("CANARY_SECRET", "a9c31")

    async def scenario() -> Outcome:
        async with rig.another() as launcher:
            return await rig.run_async(
                "import os, glob\n"
                "text = repr(os.environ)\n"
                "for path in glob.glob('/proc/[0-9]*/environ'):\n"
                "    try: text += open(path).read()\n"
                "    except PermissionError: pass\n"
                "print('a9c31' in text, sorted(set(os.environ) - {'LD_LIBRARY_PATH'}))",
                launcher=launcher,
            )

    outcome = rig.do(scenario())
    found, names = outcome.stdout.split(maxsplit=1)
    assert found == "False"
    wanted = {*make_plan().environment, *make_plan().call_environment, "PWD"}
    assert set(json.loads(names.replace("'", '"'))) == wanted - {"LD_LIBRARY_PATH"}


def test_the_command_line_on_the_host_shows_nothing_of_the_call(rig: Rig) -> None:
    """Anyone on the host can read it: values and code travel by descriptor."""

    async def scenario() -> list[str]:
        async with rig.prepared("print('c0de')", call_environment={"TOKEN": "s3cret"}):
            return [Path(f"/proc/{pid}/cmdline").read_text() for pid in _descendants(rig.launcher.pid)]

    lines = rig.do(scenario())
    assert any("bwrap" in line for line in lines)
    assert not any("s3cret" in line or "c0de" in line or "TOKEN" in line for line in lines)


@pytest.mark.parametrize("place", ["/workspace", "/tmp", "/dev/shm"])
def test_a_full_file_system_is_enospc(run: Run, place: str) -> None:
    """For its size, and for its number of files; the program lives."""
    limits = tuple(Tmpfs(target, 8 * MIB, 200) for target in ("/workspace", "/tmp", "/dev/shm"))
    outcome = run(
        textwrap.dedent(f"""
            import errno, os
            try:
                with open("{place}/big", "wb") as file:
                    for _ in range(64):
                        file.write(bytes(1 << 20))
            except OSError as error:
                print(errno.errorcode[error.errno], os.path.getsize("{place}/big") >> 20)
            os.unlink("{place}/big")
            try:
                for n in range(1000):
                    open(f"{place}/{{n}}", "w").close()
            except OSError as error:
                print(errno.errorcode[error.errno], 150 < n <= 200)
        """),
        tmpfs=limits,
    )
    size, files = outcome.stdout.splitlines()
    assert size.split()[0] == "ENOSPC"
    assert int(size.split()[1]) in (7, 8)
    assert files == "ENOSPC True"
    assert outcome.ending.exit_code == 0


def test_the_limits_of_a_process_are_in_force(run: Run) -> None:
    """Open files, processes, file size, core dumps, locked memory; soft and hard alike."""
    outcome = run(
        "import resource as r\n"
        "print([r.getrlimit(getattr(r, 'RLIMIT_' + n)) for n in ('NOFILE', 'NPROC', 'FSIZE', 'CORE', 'MEMLOCK')])",
        rlimits=Rlimits(nofile=99, nproc=50, fsize_bytes=3 * MIB),
    )
    assert outcome.stdout == f"[(99, 99), (50, 50), ({3 * MIB}, {3 * MIB}), (0, 0), (0, 0)]\n"


def test_certificates_stand_at_the_usual_places(rig: Rig, tmp_path: Path) -> None:
    """Our authority is in the bundle, after the public roots, wherever a client looks; alone in a file of its own."""
    pem = "-----BEGIN CERTIFICATE-----\nMIIBcanary\n-----END CERTIFICATE-----"
    (tmp_path / "ca.pem").write_text(pem)

    async def scenario() -> Outcome:
        async with rig.another(authority_certificate=tmp_path / "ca.pem") as launcher:
            return await rig.run_async(
                "import os\n"
                "paths = ['/etc/ssl/certs/ca-certificates.crt', '/etc/ssl/cert.pem', '/etc/pki/tls/certs/ca-bundle.crt',\n"
                "         os.environ['SSL_CERT_FILE'], os.environ['NODE_EXTRA_CA_CERTS']]\n"
                "for path in paths: print('MIIBcanary' in open(path).read(), open(path).read().count('BEGIN') > 100)",
                launcher=launcher,
            )

    assert rig.do(scenario()).stdout.splitlines() == ["True True"] * 4 + ["True False"]


def test_a_server_of_the_programs_own_is_reached_without_the_proxy(run: Run) -> None:
    """urllib goes to 127.0.0.1 and localhost directly."""
    outcome = run(
        textwrap.dedent("""
            import http.server, threading, urllib.request
            server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
            threading.Thread(target=server.serve_forever, daemon=True).start()
            for name in ("127.0.0.1", "localhost"):
                print(urllib.request.urlopen(f"http://{name}:{server.server_port}/main.py").status)
        """)
    )
    assert outcome.stdout == "200\n200\n"


def test_interfaces_can_be_listed_and_there_is_one(run: Run) -> None:
    """getifaddrs works, over the one netlink family that is left."""
    outcome = run(
        "import ctypes, socket\n"
        "p = ctypes.c_void_p()\n"
        "print(ctypes.CDLL(None).getifaddrs(ctypes.byref(p)), bool(p), [n for _, n in socket.if_nameindex()])"
    )
    assert outcome.stdout == "0 True ['lo']\n"


def test_20_sandboxes_at_once_do_not_share_a_process_limit(rig: Rig) -> None:
    """Each may have as many threads as its own limit says."""
    import asyncio

    code = (
        "import threading\nstop = threading.Event()\n"
        "threads = [threading.Thread(target=stop.wait) for _ in range(40)]\n"
        "for t in threads: t.start()\nstop.set()\nfor t in threads: t.join()\nprint('ok')"
    )

    async def scenario() -> list[Outcome]:
        return await asyncio.gather(*(rig.run_async(code, rlimits=Rlimits(nproc=64)) for _ in range(20)))

    assert [outcome.stdout for outcome in rig.do(scenario())] == ["ok\n"] * 20


def test_a_path_that_the_launcher_was_not_told_of_is_refused(rig: Rig, tmp_path: Path) -> None:
    """As root it has no other host path; the refusal names it."""
    if os.getuid() != 0:
        pytest.skip("as an ordinary user the launcher sees what that user sees")
    from sandbox.isolation.client import IsolationUnavailable

    with pytest.raises(IsolationUnavailable, match=str(tmp_path)):
        rig.run("pass", packages=str(tmp_path))


def test_killing_needs_no_cooperation(rig: Rig) -> None:
    """A stopped program that ignores every signal is gone at once."""

    async def scenario() -> Outcome:
        code = (
            "import os, signal\n"
            "for n in range(1, 65):\n"
            "    try: signal.signal(n, signal.SIG_IGN)\n"
            "    except (OSError, ValueError): pass\n"
            "print('ready', flush=True)\nos.kill(os.getpid(), signal.SIGSTOP)"
        )
        async with rig.prepared(code) as sandbox:
            sandbox.close_listeners()
            await sandbox.release()
            await _first_bytes(sandbox.stdout)
            await sandbox.kill(KillReason.TIMEOUT)
            return Outcome(await sandbox.ended(), "", "", 0)

    ending = rig.do(scenario()).ending
    assert (ending.killed_by_us, ending.exit_code, ending.signal) == (KillReason.TIMEOUT, None, None)


async def _first_bytes(fd: int) -> bytes:
    import asyncio

    readable = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(fd, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(fd)
    return os.read(fd, 65536)
