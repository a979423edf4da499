"""What a Python attempt is started with, from facts about the interpreter."""

from __future__ import annotations

import pytest

from sandbox.contract import RESERVED_ENV
from sandbox.isolation.plan import ReadOnly
from sandbox.runtimes import python
from sandbox.runtimes.python import Interpreter

ELSEWHERE = Interpreter("/home/someone/pythons/3.13", (3, 13), shared=True)
SYSTEM = Interpreter("/usr", (3, 12))
LOCAL = Interpreter("/usr/local", (3, 13), shared=True)


@pytest.mark.parametrize(
    ("interpreter", "executable", "mounts"),
    [
        (ELSEWHERE, "/opt/python/bin/python3.13", (ReadOnly("/home/someone/pythons/3.13", "/opt/python"),)),
        (SYSTEM, "/usr/bin/python3.12", ()),
        (LOCAL, "/usr/local/bin/python3.13", ()),
        (Interpreter("/usrlocal", (3, 12)), "/opt/python/bin/python3.12", (ReadOnly("/usrlocal", "/opt/python"),)),
    ],
)
def test_an_interpreter_outside_usr_is_mounted_at_a_fixed_place(
    interpreter: Interpreter, executable: str, mounts: tuple[ReadOnly, ...]
) -> None:
    """And one inside it is there already."""
    assert python.argv(interpreter)[0] == executable
    assert python.mounts(interpreter) == mounts


def test_no_path_of_the_host_is_in_arguments_or_environment() -> None:
    """Only mounts have them."""
    plan = python.plan(ELSEWHERE, call_id="c", attempt=1, memory_bytes=1)
    assert "someone" not in repr((plan.argv, plan.environment))


@pytest.mark.parametrize(
    ("interpreter", "path", "library_path"),
    [
        (ELSEWHERE, "/run/python:/opt/python/bin:/usr/local/bin:/usr/bin:/bin", "/opt/python/lib"),
        (SYSTEM, "/run/python:/usr/bin:/usr/local/bin:/bin", None),
        (LOCAL, "/run/python:/usr/local/bin:/usr/bin:/bin", None),
    ],
)
def test_pip_and_the_interpreter_are_the_first_on_the_path(
    interpreter: Interpreter, path: str, library_path: str | None
) -> None:
    """Each directory once; a library path only where the run path of a shared library is the host's."""
    environment = python.environment(interpreter)
    assert environment["PATH"] == path
    assert environment.get("LD_LIBRARY_PATH") == library_path


def test_the_environment_is_complete_and_all_of_it_is_made_here() -> None:
    """The whole of it, as a table."""
    environment = python.environment(SYSTEM, threads=3)
    proxy, bundle = "http://127.0.0.1:3128", "/etc/ssl/certs/ca-certificates.crt"
    threads = {name for name in environment if name.endswith(("_NUM_THREADS", "_MAXIMUM_THREADS", "_MAX_THREADS"))}
    assert {environment.pop(name) for name in threads} == {"3"}
    assert {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"} <= threads
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        assert environment.pop(name) == environment.pop(name.lower()) == proxy
    assert environment.pop("NO_PROXY") == environment.pop("no_proxy") == "localhost,127.0.0.1,::1"
    for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "PIP_CERT", "NPM_CONFIG_CAFILE"):
        assert environment.pop(name) == bundle
    assert environment == {
        "PATH": "/run/python:/usr/bin:/usr/local/bin:/bin",
        "HOME": "/workspace",
        "TMPDIR": "/tmp",
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "USER": "sandbox",
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "NODE_EXTRA_CA_CERTS": "/etc/ssl/certs/sluicegate-ca.pem",
        "NODE_USE_ENV_PROXY": "1",
        "UV_THREADPOOL_SIZE": "3",
        "MPLCONFIGDIR": "/tmp/matplotlib",
    }


def test_the_calls_own_names_are_set_after_what_it_gave() -> None:
    """It cannot pass for another call."""
    given = {"SLUICEGATE_CALL_ID": "other", "GREETING": "hello"}
    plan = python.plan(SYSTEM, call_id="call-7", attempt=2, memory_bytes=1, call_environment=given)
    assert plan.call_environment == {"GREETING": "hello", "SLUICEGATE_CALL_ID": "call-7", "SLUICEGATE_ATTEMPT": "2"}


def test_a_call_cannot_give_what_leads_traffic_or_trust() -> None:
    """The names that confine are reserved by the contract, in whatever case they are set here."""
    environment = python.environment(SYSTEM)
    sensitive = {name for name in environment if "PROXY" in name.upper() or "CERT" in name or "CA" in name.split("_")}
    assert {name.upper() for name in sensitive} <= RESERVED_ENV
