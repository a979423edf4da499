"""Facts about the interpreter that runs this process, which is also the one that attempts run on."""

from __future__ import annotations

import os
import sys
import sysconfig

from sandbox.runtimes.python import Interpreter


def this_interpreter() -> Interpreter:
    """The base installation behind this process: an attempt sees nothing of a virtual environment."""
    return Interpreter(
        base_prefix=os.path.realpath(sys.base_prefix),
        version=(sys.version_info.major, sys.version_info.minor),
        shared=bool(sysconfig.get_config_var("Py_ENABLE_SHARED")),
    )
