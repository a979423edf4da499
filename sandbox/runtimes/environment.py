"""The environment that attempts of every language have, from nothing. Pure.

Owns: where programs of any kind find the proxy, our authority, their home and their share of the processors.
"""

from __future__ import annotations

from sandbox.isolation.netns import EXPLICIT_PORT
from sandbox.isolation.plan import WORKSPACE

CA_BUNDLE = "/etc/ssl/certs/ca-certificates.crt"  # the public roots and our authority
CA_OWN = "/etc/ssl/certs/sluicegate-ca.pem"  # our authority alone, for clients that add it to built-in roots

_PATH = ("/usr/local/bin", "/usr/bin", "/bin")
_THREAD_CAPS = (
    "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS", "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS", "RAYON_NUM_THREADS", "POLARS_MAX_THREADS",
)  # fmt: skip
_UV_THREADS = (2, 4)  # with one, a slow look-up of a name would hold up every file; four are libuv's own choice


def environment(*own_bins: str, threads: int) -> dict[str, str]:
    """`own_bins` are the directories of the language's own commands, first on the path.

    NO_PROXY names loopback: a server of the program's own is then reached directly by urllib and its like, and the
    host's loopback cannot be reached from the sandbox's network namespace in any case.
    """
    proxy = f"http://127.0.0.1:{EXPLICIT_PORT}"
    no_proxy = "localhost,127.0.0.1,::1"  # not `[::1]`, which urllib would want and httpx refuses to start with
    least, most = _UV_THREADS
    values = {
        "PATH": ":".join(dict.fromkeys((*own_bins, *_PATH))),
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
        "UV_THREADPOOL_SIZE": str(min(max(threads, least), most)),
        "MPLCONFIGDIR": "/tmp/matplotlib",  # noqa: S108
    }
    values.update(dict.fromkeys(_THREAD_CAPS, str(threads)))
    return values
