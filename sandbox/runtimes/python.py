"""How Python programs are run: interpreter, environment, mounts. Pure: facts in, values out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sandbox.isolation.netns import EXPLICIT_PORT
from sandbox.isolation.plan import INIT, WORKSPACE, LaunchPlan, ReadOnly

RUNTIME = "/opt/python"
CA_BUNDLE = "/etc/ssl/certs/ca-certificates.crt"  # the public roots and our authority
CA_OWN = "/etc/ssl/certs/sluicegate-ca.pem"  # our authority alone, for clients that add it to built-in roots

_THREAD_CAPS = (
    "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS", "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS", "RAYON_NUM_THREADS", "POLARS_MAX_THREADS",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Interpreter:
    """Of the host: where it is installed, its version, and whether its library is a shared object beside it."""

    base_prefix: str
    version: tuple[int, int]
    shared: bool = False

    @property
    def in_usr(self) -> bool:
        return self.base_prefix == "/usr" or self.base_prefix.startswith("/usr/")

    @property
    def prefix(self) -> str:
        """Where it stands in the sandbox."""
        return self.base_prefix if self.in_usr else RUNTIME

    @property
    def executable(self) -> str:
        major, minor = self.version
        return f"{self.prefix}/bin/python{major}.{minor}"


def mounts(interpreter: Interpreter) -> tuple[ReadOnly, ...]:
    """/usr is mounted in any case. Another prefix gets a fixed place, so that no path of the host is in messages."""
    return () if interpreter.in_usr else (ReadOnly(interpreter.base_prefix, RUNTIME),)


def argv(interpreter: Interpreter) -> tuple[str, ...]:
    """Isolated, no site-packages of the host's interpreter, no bytecode written, output unbuffered.

    Unbuffered, so that what was printed before a kill is not lost.
    """
    return (interpreter.executable, "-I", "-S", "-B", "-u", INIT)


def environment(interpreter: Interpreter, *, threads: int = 1) -> dict[str, str]:
    """The environment that every call has, from nothing; a call's own is added in its program's process.

    NO_PROXY names loopback: a server of the program's own is then reached directly by urllib and its like, and the
    host's loopback cannot be reached from the sandbox's network namespace in any case.
    """
    proxy = f"http://127.0.0.1:{EXPLICIT_PORT}"
    no_proxy = "localhost,127.0.0.1,::1"  # not `[::1]`, which urllib would want and httpx refuses to start with
    path = ["/usr/local/bin", "/usr/bin", "/bin"]
    own = f"{interpreter.prefix}/bin"
    values = {
        "PATH": ":".join([own, *(directory for directory in path if directory != own)]),
        "HOME": WORKSPACE,
        "TMPDIR": "/tmp",  # noqa: S108 - inside the sandbox
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "USER": "sandbox",
        "PYTHONUNBUFFERED": "1",  # for the Pythons that the program starts
        "PYTHONDONTWRITEBYTECODE": "1",
        "HTTP_PROXY": proxy,
        "HTTPS_PROXY": proxy,
        "ALL_PROXY": proxy,
        "NO_PROXY": no_proxy,
        "http_proxy": proxy,
        "https_proxy": proxy,
        "all_proxy": proxy,
        "no_proxy": no_proxy,
        "SSL_CERT_FILE": CA_BUNDLE,
        "REQUESTS_CA_BUNDLE": CA_BUNDLE,
        "CURL_CA_BUNDLE": CA_BUNDLE,
        "PIP_CERT": CA_BUNDLE,
        "NPM_CONFIG_CAFILE": CA_BUNDLE,
        "NODE_EXTRA_CA_CERTS": CA_OWN,
        "NODE_USE_ENV_PROXY": "1",
        "MPLCONFIGDIR": "/tmp/matplotlib",  # noqa: S108
    }
    values.update(dict.fromkeys(_THREAD_CAPS, str(threads)))
    if interpreter.shared and not interpreter.in_usr:
        # Its run path, if it has one, is that of the host.
        values["LD_LIBRARY_PATH"] = f"{interpreter.prefix}/lib"
    return values


def plan(
    interpreter: Interpreter,
    *,
    call_id: str,
    attempt: int | str,
    memory_bytes: int,
    pids: int = 128,
    call_environment: Mapping[str, str] | None = None,
    packages: str | None = None,
    threads: int = 1,
) -> LaunchPlan:
    """The sandbox of one attempt at a Python call."""
    return LaunchPlan(
        argv=argv(interpreter),
        environment=environment(interpreter, threads=threads),
        read_only=mounts(interpreter),
        memory_bytes=memory_bytes,
        pids=pids,
        call_environment={
            **(call_environment or {}),
            "SLUICEGATE_CALL_ID": call_id,
            "SLUICEGATE_ATTEMPT": str(attempt),
        },
        packages=packages,
    )
