"""What code in a sandbox may not see, change or use. Each probe is proved able: unconfined it finds what it looks for.

A probe reports `leaked`, the list of what it got hold of. Inside it must be empty, unconfined it must have `control`.
"""

from __future__ import annotations

import asyncio
import os
import platform
import re
import secrets
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from proxy.network import Reason
from sandbox import Executor, Settings
from sandbox.contract import CodeCall, ToolResult
from tests.escape.conftest import Confined
from tests.lab import BLOCK, NAMED, OPEN, PRELUDE, STRANGER, Lab, Outside, named, parse_seen, unconfined

ROOT = os.getuid() == 0


@pytest.fixture
def canary() -> Iterator[Path]:
    """A file of the host's that anybody may read, with a secret in it."""
    with tempfile.TemporaryDirectory(prefix="sg-") as directory:
        os.chmod(directory, 0o755)
        path = Path(directory) / "canary.txt"
        path.write_text(f"canary-{secrets.token_hex(8)}")
        path.chmod(0o644)
        yield path


def prove(confined: Confined, probe: str, control: str, call: dict[str, object] | None = None, setup: str = "") -> None:
    """The probe leaks nothing inside; unconfined, after `setup`, it leaks something that matches `control`."""
    run = confined(probe, call or BLOCK)
    assert run.result.status == "success", run.result.stderr
    assert run.only["leaked"] == []
    outside = unconfined(setup + probe)
    assert any(re.search(control, str(one)) for one in outside[-1]["leaked"]), outside


def test_host_files_are_not_there(confined: Confined, canary: Path) -> None:
    """A readable file of the host's cannot be read by its name, by any way to the root, or by a link to it."""
    probe = f"""
leaked = []
os.chdir("/tmp")
try:
    os.symlink("{canary}", "/tmp/link-{canary.parent.name}")
except OSError:
    pass
ways = ["{canary}", "/proc/self/root{canary}", "/proc/1/root{canary}", "/proc/self/cwd/../../../..{canary}",
        "/../../..{canary}", "/tmp/link-{canary.parent.name}", "/proc/1/cwd/..{canary}", "/oldroot{canary}", "/newroot{canary}"]
for way in ways:
    try:
        leaked.append(open(way).read())
    except OSError:
        pass
try:
    os.unlink("/tmp/link-{canary.parent.name}")
except OSError:
    pass
report(leaked=leaked)
"""
    prove(confined, probe, re.escape(canary.read_text()))


def test_shadow_is_not_there(confined: Confined) -> None:
    """The host's password hashes, identity and directories are not there, also for an executor started by root."""
    probe = f"""
leaked = []
for path in ("/etc/shadow", "/etc/gshadow", "/etc/machine-id", "/etc/ssh", "/root", "/home", "/var/log", "/var/lib/dpkg",
             "/boot", "/mnt", "/srv", "/opt", "/run", "/sys"):
    try:
        names = os.listdir(path) if os.path.isdir(path) else ["is there"] if os.path.exists(path) else []
        leaked += [f"{{path}}/{{name}}" for name in names]
    except OSError:
        pass
if socket.gethostname() == "{socket.gethostname()}":
    leaked.append("the host's name")
# What we put there ourselves: the runtimes, the packages, our first process, the gate, pip, and
# links to Node's commands.
ours = ("/opt/python", "/opt/node", "/opt/packages", "/opt/uv", "/run/init.pyc", "/run/gate.cjs", "/run/bin", "/run/python")
report(leaked=[name for name in leaked if name not in ours])
"""
    prove(confined, probe, "^/(var/lib/dpkg|sys|run)/")


def test_accounts_are_made_up(confined: Confined) -> None:
    """The accounts inside are two or three made-up ones, and the code is the unprivileged one of them."""
    run = confined(
        "import pwd\nreport(uid=os.getuid(), gid=os.getgid(), groups=os.getgroups(), names=[p.pw_name for p in pwd.getpwall()])"
    )
    assert run.only["uid"] == 1000
    assert run.only["gid"] == 1000
    assert set(run.only["groups"]) <= {1000, 65534}
    assert len(run.only["names"]) <= 4
    assert not ROOT or pwd_count() > 4


def pwd_count() -> int:
    return Path("/etc/passwd").read_text().count("\n")


def test_the_code_is_never_host_root(lab: Lab, outside: Outside) -> None:
    """The process that runs the code has, seen from the host, an unprivileged uid, and no mapping of uid 0."""

    def look() -> tuple[set[int], set[str]]:
        try:
            lab.held()
            inside = [p for p in psutil.Process(lab.launcher_pid).children(recursive=True) if p.status() != "zombie"]
            uids = {uid for process in inside for uid in process.uids()}
            maps = {Path(f"/proc/{process.pid}/uid_map").read_text() for process in inside}
            return uids, maps
        finally:
            outside.local.release()

    outside.forget()
    run, (uids, maps) = lab.during(f'report(held=fetch("{lab.hold_url}")["status"])', look, named("local.test"))
    assert run.only["held"] == 200
    assert uids
    assert 0 not in uids
    inside = [line.split() for text in maps for line in text.splitlines()]
    assert any(line[0] == "1000" for line in inside)
    assert all(line[1] != "0" or (line[0] == "0" and int(line[2]) > 1000) for line in inside), (
        "uid 0 of the host is mapped"
    )


def test_host_processes_are_not_seen(confined: Confined) -> None:
    """No process of the host's is in /proc, can be signalled, or read."""
    marker = f"marker-{secrets.token_hex(8)}"
    with subprocess.Popen(["sleep", "600"], env={"MARKER": marker}) as process:
        try:
            probe = f"""
leaked = []
for pid in os.listdir("/proc"):
    if pid.isdigit():
        try:
            if "{marker}" in open(f"/proc/{{pid}}/environ").read() and int(pid) != os.getpid():
                leaked.append("seen " + pid)
        except OSError:
            pass
for pid in ({process.pid}, {os.getpid()}):
    try:
        os.kill(pid, 0)
        leaked.append(f"signalled {{pid}}")
    except OSError:
        pass
report(leaked=leaked)
"""
            prove(confined, probe, f"seen {process.pid}")
        finally:
            process.kill()


def test_the_callers_environment_is_not_seen(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A secret in the environment of the executor is in no process's environment or arguments inside."""
    half, rest = "secret", secrets.token_hex(8)  # joined inside only, so that the probe does not find itself
    monkeypatch.setenv("CANARY_SECRET", half + rest)
    probe = f"""
leaked = []
secret = "{half}" + "{rest}"
for pid in [pid for pid in os.listdir("/proc") if pid.isdigit()] + ["self", "thread-self"]:
    for name in ("environ", "cmdline"):
        try:
            if secret in open(f"/proc/{{pid}}/{{name}}", errors="replace").read():
                leaked.append(f"{{pid}}/{{name}}")
        except OSError:
            pass
if secret in str(dict(os.environ)):
    leaked.append("environ")
report(leaked=leaked)
"""

    async def main() -> ToolResult:
        root = lab.log.parent
        settings = Settings(state_dir=root / "env", audit_log=root / "env.jsonl")
        async with Executor(lab.policy, settings=settings) as executor:
            return await executor.run(CodeCall(language="python", code=PRELUDE + probe))

    result = asyncio.run(main())
    assert parse_seen(result.stdout) == [{"leaked": []}], result.stderr
    assert "environ" in unconfined(probe)[-1]["leaked"]


@pytest.mark.parametrize("kind", ["path", "abstract"])
def test_host_sockets_are_not_reached(confined: Confined, kind: str) -> None:
    """No unix socket of the host's can be connected to, by path or by abstract name."""
    with tempfile.TemporaryDirectory(prefix="sg-") as directory, socket.socket(socket.AF_UNIX) as listener:
        os.chmod(directory, 0o755)
        name = f"{directory}/x.sock" if kind == "path" else f"\0{directory}"
        listener.bind(name)
        listener.listen()
        if kind == "path":
            os.chmod(name, 0o777)
        prove(
            confined,
            f"""
leaked = []
for name in ({name!r}, "/run/docker.sock", "/var/run/docker.sock", "/run/containerd/containerd.sock", "/run/dbus/system_bus_socket",
             "/run/systemd/private", "/run/user/0/bus", "/run/user/1000/bus", "/tmp/.X11-unix/X0", "\\0/tmp/.X11-unix/X0", "/run/nscd/socket"):
    for type in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
        with socket.socket(socket.AF_UNIX, type) as sock:
            try:
                sock.connect(name)
                leaked.append(name)
            except OSError:
                pass
report(leaked=leaked)
""",
            re.escape(repr(name)[1:-1]) if kind == "path" else re.escape(directory),
        )


def test_the_table_of_unix_sockets_is_its_own(confined: Confined) -> None:
    """The kernel's list of sockets inside names none of the host's."""
    with socket.socket(socket.AF_UNIX) as listener:
        name = f"host-{secrets.token_hex(6)}"
        listener.bind(f"\0{name}")
        prove(confined, f'report(leaked=[line for line in open("/proc/net/unix") if "{name}" in line])', name)


def test_the_metadata_service_is_not_reached(confined: Confined, outside: Outside) -> None:
    """Neither by a raw socket nor by the proxy, in any mode."""
    probe = """
leaked = []
for host, family in (("169.254.169.254", socket.AF_INET), ("fd00:ec2::254", socket.AF_INET6)):
    answer = exchange(host, 80, b"GET /latest/meta-data/ HTTP/1.0\\r\\n\\r\\n", family)["answer"]
    if "recorded" in answer:
        leaked.append(host)
if os.environ.get("HTTP_PROXY"):
    answer = through_proxy("GET http://169.254.169.254/ HTTP/1.1\\r\\nHost: 169.254.169.254\\r\\n\\r\\n")
    if answer["status"] == 200 or "recorded" in answer["body"]:
        leaked.append("by proxy")
report(leaked=leaked)
"""
    for call in (BLOCK, NAMED, OPEN):
        with outside.silence():
            run = confined(probe, call)
        assert run.only["leaked"] == []
        assert run.reasons
    assert "169.254.169.254" in unconfined(probe)[-1]["leaked"]


def test_there_is_no_capability(confined: Confined) -> None:
    """Every capability set is empty, privileges cannot be gained, and a system call filter is on."""
    probe = """
status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines() if ":" in line)
leaked = [f"{name}={status[name].strip()}" for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb") if int(status[name], 16)]
if status["NoNewPrivs"].strip() != "1": leaked.append("privileges can be gained")
if status["Seccomp"].strip() != "2": leaked.append("no filter")
report(leaked=leaked)
"""
    prove(confined, probe, "no filter|privileges|CapBnd")


def test_every_namespace_is_its_own(confined: Confined) -> None:
    """No namespace is shared with the host."""
    spaces = {
        name: os.readlink(f"/proc/self/ns/{name}") for name in ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup")
    }
    prove(
        confined,
        f"spaces = {spaces}\nreport(leaked=[n for n, link in spaces.items() if os.readlink(f'/proc/self/ns/{{n}}') == link])",
        "net",
    )


def test_no_namespace_can_be_made_or_joined(confined: Confined) -> None:
    """unshare, clone, setns and mount fail, as system calls and by the tools."""
    probe = """
import ctypes, subprocess
libc = ctypes.CDLL(None, use_errno=True)
leaked = []
for name in ("CLONE_NEWUSER", "CLONE_NEWNET", "CLONE_NEWNS", "CLONE_NEWPID", "CLONE_NEWUTS", "CLONE_NEWIPC", "CLONE_NEWCGROUP"):
    pid = os.fork()
    if pid == 0:
        try:
            os.unshare(getattr(os, name))
            os._exit(0)
        except OSError:
            os._exit(1)
    if os.waitpid(pid, 0)[1] == 0:
        leaked.append(name)
    SIGCHLD = 17
    stack_pid = libc.syscall(56 if os.uname().machine == "x86_64" else 220, getattr(os, name) | SIGCHLD, 0, 0, 0, 0)
    if stack_pid == 0:
        os._exit(0)
    if stack_pid > 0:
        os.waitpid(stack_pid, 0)
        leaked.append("clone " + name)
for space in ("net", "mnt", "pid", "user"):
    for pid in ("1", "self"):
        child = os.fork()
        if child == 0:
            try:
                os.setns(os.open(f"/proc/{pid}/ns/{space}", os.O_RDONLY))
                os._exit(0)
            except OSError:
                os._exit(1)
        if os.waitpid(child, 0)[1] == 0 and pid != "self":
            leaked.append("setns " + space)
if libc.mount(b"none", b"/tmp", b"tmpfs", 0, None) == 0:
    libc.umount2(b"/tmp", 2)
    leaked.append("mount")
for command in (["unshare", "-Un", "true"], ["unshare", "-r", "true"], ["nsenter", "-t", "1", "-n", "true"]):
    try:
        if subprocess.run(command, capture_output=True).returncode == 0:
            leaked.append(command[0])
    except OSError:
        pass
report(leaked=leaked)
"""
    prove(confined, probe, "CLONE_NEWUSER|CLONE_NEWNET")


def test_the_network_cannot_be_changed(confined: Confined, outside: Outside) -> None:
    """Routes, rules, addresses and interfaces stay as they are, and traffic stays captured after the attempt."""
    probe = """
import fcntl, subprocess
leaked = []
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
    for up in (0, 1):
        try:
            flags = struct.unpack("16sH22x", fcntl.ioctl(sock, 0x8913, struct.pack("16sH22x", b"lo", 0)))[1]
            fcntl.ioctl(sock, 0x8914, struct.pack("16sH22x", b"lo", (flags & ~1) | up))
            leaked.append("interface")
        except OSError:
            pass
    try:
        fcntl.ioctl(sock, 0x8916, struct.pack("16sHH4s8x", b"lo", socket.AF_INET, 0, socket.inet_aton("10.9.8.7")))
        leaked.append("address")
    except OSError:
        pass
def netlink(protocol, kind, body):
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol) as sock:
            sock.send(struct.pack("IHHII", 16 + len(body), kind, 5, 1, 0) + body)
            return struct.unpack_from("i", sock.recv(65536), 16)[0]
    except OSError as error:
        return error.errno
for kind in (24, 25):
    body = struct.pack("BBBBBBBBI", socket.AF_INET, 32, 0, 0, 254, 4, 253, 1, 0) + struct.pack("HH4s", 8, 1, socket.inet_aton("7.7.7.7"))
    body += struct.pack("HHi", 8, 4, 1)
    if netlink(0, kind, body) == 0:
        leaked.append("route")
for setting in ("net/ipv4/ip_forward", "net/ipv4/conf/all/route_localnet", "net/ipv4/ip_unprivileged_port_start"):
    try:
        open("/proc/sys/" + setting, "r+b").close()
        leaked.append(setting)
    except OSError:
        pass
for command in (["iptables", "-F"], ["nft", "flush", "ruleset"], ["ip", "route", "flush", "table", "all"], ["ip", "link", "set", "lo", "down"]):
    try:
        if subprocess.run(command, capture_output=True).returncode == 0:
            leaked.append(" ".join(command))
    except OSError:
        pass
"""
    prove(
        confined,
        probe + "report(leaked=leaked)",
        "interface|route",
        setup="os.unshare(os.CLONE_NEWNET if os.getuid() == 0 else os.CLONE_NEWUSER | os.CLONE_NEWNET)\n",
    )
    outside.forget()
    run = confined(
        probe
        + f"""
report(leaked=leaked, allowed=fetch("http://allowed.test/echo")["status"], denied=fetch("http://other.test/")["status"],
       raw=exchange("{STRANGER}", 8080)["answer"])
""",
        NAMED,
    )
    assert (run.only["allowed"], run.only["denied"]) == (200, 403)
    assert "recorded" not in run.only["raw"]
    assert all(peer.untouched for peer in outside.strangers)


SOCKETS = {
    "packet": (17, socket.SOCK_RAW, 3),
    "packet-datagram": (17, socket.SOCK_DGRAM, 0),
    "raw-icmp": (socket.AF_INET, socket.SOCK_RAW, 1),
    "raw-tcp": (socket.AF_INET, socket.SOCK_RAW, 6),
    "raw-v6": (socket.AF_INET6, socket.SOCK_RAW, 58),
    "ping": (socket.AF_INET, socket.SOCK_DGRAM, 1),
    "ping-v6": (socket.AF_INET6, socket.SOCK_DGRAM, 58),
    "vsock": (40, socket.SOCK_STREAM, 0),
    "alg": (38, socket.SOCK_SEQPACKET, 0),
    "netfilter": (16, socket.SOCK_RAW, 12),
    "generic-netlink": (16, socket.SOCK_RAW, 16),
    "audit": (16, socket.SOCK_RAW, 9),
    "connector": (16, socket.SOCK_DGRAM, 11),
    "tipc": (30, socket.SOCK_SEQPACKET, 0),
    "bluetooth": (31, socket.SOCK_RAW, 1),
    "can": (29, socket.SOCK_RAW, 1),
    "xdp": (44, socket.SOCK_RAW, 0),
    "mctp": (45, socket.SOCK_DGRAM, 0),
    "sctp": (socket.AF_INET, socket.SOCK_STREAM, 132),
    "udplite": (socket.AF_INET, socket.SOCK_DGRAM, 136),
    "dccp": (socket.AF_INET, 6, 33),
}


def test_only_common_sockets_can_be_made(confined: Confined) -> None:
    """Raw, packet, ping, vsock, crypto, netlink and rare transport sockets cannot be made."""
    probe = f"""
leaked = []
for name, (family, kind, protocol) in {{name: tuple(map(int, t)) for name, t in {SOCKETS!r}.items()}}.items():
    try:
        socket.socket(family, kind, protocol).close()
        leaked.append(name)
    except OSError:
        pass
report(leaked=leaked)
""".replace("<SocketKind.SOCK_RAW: 3>", "3")
    probe = re.sub(r"<\w+\.\w+: (\d+)>", r"\1", probe)
    prove(confined, probe, "alg|generic-netlink|audit" if not ROOT else "packet")


SYSCALLS = {
    "x86_64": {
        "ptrace": 101, "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "swapon": 167, "reboot": 169, "init_module": 175,
        "finit_module": 313, "delete_module": 176, "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250, "bpf": 321,
        "perf_event_open": 298, "userfaultfd": 323, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427,
        "settimeofday": 164, "clock_settime": 227, "clock_adjtime": 305, "adjtimex": 159, "sethostname": 170, "setdomainname": 171,
        "open_by_handle_at": 304, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "acct": 163, "quotactl": 179,
        "fsopen": 430, "fsmount": 432, "open_tree": 428, "move_mount": 429, "mount_setattr": 442, "syslog": 103, "iopl": 172, "setns": 308,
    },
    "aarch64": {
        "ptrace": 117, "mount": 40, "umount2": 39, "pivot_root": 41, "bpf": 280, "perf_event_open": 241, "userfaultfd": 282,
        "io_uring_setup": 425, "keyctl": 219, "add_key": 217, "setns": 268, "clock_settime": 112, "init_module": 105, "reboot": 142,
    },
}  # fmt: skip


def test_dangerous_system_calls_are_refused(confined: Confined) -> None:
    """Each is refused by the filter before it looks at its arguments."""
    numbers = SYSCALLS.get(platform.machine())
    if numbers is None:
        pytest.skip("the numbers of this machine's system calls are not listed")
    # Arguments with which each fails for itself: wherever the refusal is not EPERM or ENOSYS, the call was looked at.
    probe = f"""
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
leaked = []
for name, number in {numbers}.items():
    arguments = [-1, -1, -1, -1, -1, -1]
    ctypes.set_errno(0)
    result = libc.syscall(number, *(ctypes.c_long(a) for a in arguments))
    if result >= 0 or ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS):
        leaked.append(f"{{name}} {{result}} {{errno.errorcode.get(ctypes.get_errno())}}")
report(leaked=leaked)
"""
    prove(confined, probe, "^(process_vm_readv|ptrace|kcmp|io_uring_setup|add_key) ")


def test_no_descriptor_is_inherited(confined: Confined) -> None:
    """The code has its three streams and no other descriptor, and no process inside has one of the host's."""
    read, write = os.pipe()
    os.set_inheritable(write, True)
    try:
        run = confined(
            """
links = {}
for fd in os.listdir("/proc/self/fd"):
    try:
        links[fd] = os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        pass
others = []
for pid in os.listdir("/proc"):
    if pid.isdigit() and int(pid) != os.getpid():
        try:
            others += [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
        except OSError:
            pass
report(links=links, others=others)
"""
        )
    finally:
        os.close(read)
        os.close(write)
    links = run.only["links"]
    assert set(links) == {"0", "1", "2"}, links
    assert links["0"] == "/dev/null" or links["0"].startswith("pipe:")
    for link in [*links.values(), *run.only["others"]]:
        assert link.startswith(("pipe:", "/dev/null", "/proc", "anon_inode:", "/memfd:")), link
        assert not link.startswith("socket:")


def test_the_first_process_gives_nothing_away(confined: Confined, canary: Path) -> None:
    """What /proc/1 shows is of the sandbox: root, environment, arguments, maps."""
    run = confined(
        """
seen = {}
for name in ("environ", "cmdline", "maps", "mountinfo", "cgroup"):
    try:
        seen[name] = open(f"/proc/1/{name}").read()
    except OSError as error:
        seen[name] = ""
try:
    seen["root"] = sorted(os.listdir("/proc/1/root/"))
except OSError:
    seen["root"] = []
seen["own"] = sorted(os.listdir("/"))
report(**seen)
"""
    )
    seen = run.only
    assert seen["root"] in ([], seen["own"])
    for name in ("environ", "cmdline", "maps"):
        assert "sluicegate" not in seen[name].lower() or name == "cmdline"
        assert "/root/" not in seen[name]
        assert str(canary.parent) not in seen[name]
    for variable in os.environ.get("PATH", ""), os.environ.get("PYTEST_CURRENT_TEST", "?"):
        assert variable not in seen["environ"]


def test_kernel_settings_cannot_be_written(confined: Confined) -> None:
    """/proc/sys, /proc/sysrq-trigger, /sys and the core pattern cannot be opened for writing."""
    probe = """
leaked = []
for path in ("/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sys/kernel/hostname", "/proc/sys/vm/overcommit_memory",
             "/proc/sys/kernel/ns_last_pid", "/proc/sysrq-trigger", "/sys/kernel/uevent_helper",
             "/sys/fs/cgroup/memory/notify_on_release", "/proc/kcore", "/dev/mem", "/dev/kmsg"):
    try:
        os.close(os.open(path, os.O_WRONLY))
        leaked.append(path)
    except OSError:
        pass
report(leaked=leaked)
"""
    if ROOT:
        prove(confined, probe, "core_pattern|overcommit|sysrq|kmsg")
    else:
        assert confined(probe).only["leaked"] == []


def test_what_is_mounted_is_read_only_or_its_own(confined: Confined) -> None:
    """Nothing can be written outside the three directories; no mount honours set-user-id, none of ours devices."""
    run = confined(
        """
writable = []
for root, directories, files in os.walk("/"):
    if root in ("/proc", "/dev", "/tmp", "/workspace"):
        directories[:] = [] if root != "/" else directories
        if root != "/dev": continue
    if len(root.split("/")) > 5:
        directories[:] = []
    try:
        path = os.path.join(root, ".probe")
        open(path, "w").close()
        os.unlink(path)
        writable.append(root)
    except OSError:
        pass
mounts = [line.split(" - ")[0].split()[4:6] for line in open("/proc/self/mountinfo")]
try:
    os.mknod("/tmp/device", 0o20666, os.makedev(1, 3))
    device = open("/tmp/device", "rb").read(1) == b""
except OSError:
    device = False
report(writable=writable, mounts=mounts, device=device, dev=sorted(os.listdir("/dev")))
"""
    )
    assert set(run.only["writable"]) <= {"/", "/dev", "/dev/shm"}
    assert run.only["device"] is False
    for point, options in run.only["mounts"]:
        if not point.startswith(("/dev/", "/proc")):
            assert "nosuid" in options.split(","), (point, options)
    allowed = {
        "console",
        "core",
        "fd",
        "full",
        "null",
        "ptmx",
        "pts",
        "random",
        "shm",
        "stderr",
        "stdin",
        "stdout",
        "tty",
        "urandom",
        "zero",
    }
    assert set(run.only["dev"]) <= allowed
    assert len(os.listdir("/dev")) >= len(run.only["dev"])


def test_a_set_user_id_program_gains_nothing(confined: Confined) -> None:
    """No program that the host trusts raises the code's privileges."""
    run = confined(
        """
import subprocess
found, gained = [], []
for directory in ("/usr/bin", "/usr/sbin", "/usr/lib/openssh", "/usr/lib/dbus-1.0"):
    for name in os.listdir(directory) if os.path.isdir(directory) else []:
        path = f"{directory}/{name}"
        try:
            if os.stat(path).st_mode & 0o6000:
                found.append(path)
        except OSError:
            pass
for command in (["su", "-c", "id -u"], ["sudo", "-n", "id", "-u"], ["pkexec", "id", "-u"], ["newgrp"], ["mount", "-t", "tmpfs", "none", "/tmp"]):
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=20)
        if done.stdout.strip() == "0" or (command[0] == "mount" and done.returncode == 0):
            gained.append(command)
    except (OSError, subprocess.TimeoutExpired):
        pass
report(found=found, gained=gained, euid=os.geteuid())
"""
    )
    assert run.only["gained"] == []
    assert run.only["euid"] == 1000


def test_the_authoritys_key_is_not_there(lab: Lab, confined: Confined) -> None:
    """No private key is in any file that the code can read; the host's is for its owner only."""
    files = [path for path in (lab.log.parent / "state").rglob("*") if path.is_file() and not path.is_symlink()]
    keys = [path for path in files if b"PRIVATE KEY" in path.read_bytes()]
    assert keys, "the control: the key exists on the host"
    for key in keys:
        assert key.stat().st_mode & 0o077 == 0
        assert key.parent.stat().st_mode & 0o077 == 0
    run = confined(
        f"""
found, read = [], 0
needle = b"PRIVATE" + b" KEY-----"
for root, directories, files in os.walk("/"):
    if root == "/":
        directories[:] = [d for d in directories if d not in ("proc", "usr", "lib", "lib64", "bin", "sbin")]
    if root == "/opt/packages" or "/lib/python" in root:  # libraries that read keys have the words in their source
        directories[:] = []
        continue
    for name in files:
        path = os.path.join(root, name)
        try:
            if os.path.isfile(path) and os.path.getsize(path) < 4_000_000:
                data = open(path, "rb").read()
                read += 1
                if needle in data:
                    found.append(path)
        except OSError:
            pass
for path in {[str(key) for key in keys]}:
    try:
        open(path, "rb").close()
        found.append(path)
    except OSError:
        pass
report(found=found, read=read)
"""
    )
    assert run.only["found"] == []
    assert run.only["read"] > 0


def test_a_terminal_cannot_be_typed_into(confined: Confined) -> None:
    """There is no controlling terminal whose input could be forged."""
    run = confined(
        """
import fcntl
seen = []
for path in ("/dev/tty", "/dev/console", "/proc/self/fd/0"):
    try:
        fd = os.open(path, os.O_RDWR)
        fcntl.ioctl(fd, 0x5412, b"x")
        seen.append(path)
    except OSError:
        pass
report(seen=seen, session=os.getsid(0), pid=os.getpid())
"""
    )
    assert run.only["seen"] == []
    assert run.only["session"] != 0


def test_signals_end_at_the_namespace(confined: Confined) -> None:
    """Killing everything, and the first process, kills at most the sandbox. (fact: kill -1, kill 1)"""
    run = confined(
        """
import signal
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGSTOP, signal.SIGKILL):
    try:
        os.kill(1, number)
    except OSError:
        pass
report(alive=True)
os.kill(-1, signal.SIGKILL)
"""
    )
    assert {"alive": True} in run.seen or run.result.status != "success"
    assert run.result.status in ("success", "error", "killed")
    assert confined("report(again=True)").only["again"]


def test_attempts_do_not_see_one_another(lab: Lab) -> None:
    """Two attempts at once share no file, process, listener, abstract socket or shared memory."""
    server = """
import threading
open("/tmp/shared", "w").write("one"); open("/dev/shm/shared", "w").write("one"); open("/workspace/shared", "w").write("one")
tcp = socket.create_server(("127.0.0.1", 7777)); unix = socket.socket(socket.AF_UNIX); unix.bind("\\0shared"); unix.listen()
print("ready", flush=True)
tcp.settimeout(60)
report(done=fetch("HOLD")["status"])
"""
    client = """
seen = [path for path in ("/tmp/shared", "/dev/shm/shared", "/workspace/shared") if os.path.exists(path)]
if exchange("127.0.0.1", 7777)["error"] is None: seen.append("tcp")
with socket.socket(socket.AF_UNIX) as sock:
    try:
        sock.connect("\\0shared"); seen.append("unix")
    except OSError: pass
seen += [pid for pid in os.listdir("/proc") if pid.isdigit() and int(pid) > 60]
report(seen=seen)
"""
    outside = lab.outside
    server = server.replace("HOLD", lab.hold_url)
    outside.forget()

    async def main() -> tuple[ToolResult, ToolResult]:
        root = lab.log.parent
        async with Executor(
            lab.policy, settings=Settings(state_dir=root / "two", audit_log=root / "two.jsonl")
        ) as executor:
            first = asyncio.ensure_future(
                executor.run(
                    CodeCall(
                        language="python",
                        code=PRELUDE + server,
                        allow_network=True,
                        domains=["local.test"],
                        timeout=100,
                    )
                )
            )
            await asyncio.to_thread(lab.held)
            second = await executor.run(CodeCall(language="python", code=PRELUDE + client))
            outside.local.release()
            return await first, second

    first, second = asyncio.run(main())
    assert parse_seen(first.stdout) == [{"done": 200}], first.stderr
    assert parse_seen(second.stdout) == [{"seen": []}], second.stderr


def test_denials_inside_are_still_logged_for_an_unprivileged_user(confined: Confined, outside: Outside) -> None:
    """The proxy of either user allows, denies and writes its log."""
    with outside.silence():
        run = confined('report(seen=fetch("https://other.test/")["status"])', NAMED)
    assert run.only["seen"] == 403
    assert run.reasons == {Reason.HOST_NOT_ALLOWED}
    run = confined('report(seen=fetch("https://allowed.test/echo")["status"])', NAMED)
    assert run.only["seen"] == 200
