"""How uv is asked, inside the preparation sandbox, which wheels a set of packages needs. Pure.

Owns: the command, its environment (from nothing) and what it reads on standard input. Must not: run it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sandbox.isolation.plan import UV, WORKSPACE

HOME = f"{WORKSPACE}/home"
EMPTY = f"{WORKSPACE}/empty"  # the working directory: uv reads `uv.toml` and `pyproject.toml` of it


def uv_argv(*, index: str, interpreter: str, uv: str = UV) -> tuple[str, ...]:
    """`interpreter` is the path, in the sandbox, of the Python that the wheels are for. The packages come by stdin."""
    return (
        uv, "pip", "compile", "-",
        "--format", "pylock.toml",
        "--only-binary", ":all:",  # source would be built, which runs its code
        "--default-index", index,
        "--python", interpreter,
        "--no-python-downloads",
        "--no-config",
        "--no-sources",
        "--no-header", "--no-annotate", "--color", "never", "--no-progress",
        "--keyring-provider", "disabled",
        "--cache-dir", f"{WORKSPACE}/cache",
    )  # fmt: skip


def uv_environment(runtime: Mapping[str, str], *, authority: str) -> dict[str, str]:
    """All that uv has. `runtime` is an attempt's environment, which leads to the proxy.

    `authority` is what uv trusts: the proxy's own, which opens every connection of a preparation, and no other.
    """
    taken = ("HTTP_PROXY", "HTTPS_PROXY", "LANG", "LD_LIBRARY_PATH")
    return {
        **{name: runtime[name] for name in taken if name in runtime},
        "SSL_CERT_FILE": authority,
        "HOME": HOME,
        "PATH": "/usr/bin:/bin",
        "NO_PROXY": "",
    }


def uv_input(requirements: Sequence[str]) -> str:
    """What uv reads: one requirement a line, rebuilt from its parsed form."""
    return "".join(f"{requirement}\n" for requirement in requirements)
