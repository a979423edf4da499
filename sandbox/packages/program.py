"""The text of the program that a preparation sandbox runs: our own modules, and the job.

The sandbox has Python and its standard library, and no file of ours. So the few modules that it needs travel in the
program, as text. What it imports besides is of the standard library, which nobody inside can write: the directory that
it works in is not on its module path, since whoever takes over an archive's parser can put a module there.
Owns: which those are. Must not: put anything of a call's into code: a job is data, in JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

_OPERATIONS = {  # the modules that each needs, in the order of their imports: reading them takes longer than the rest
    "resolve": ("outlet", "inside", "inside_resolve"),
    "facts": ("outlet", "inside", "inside_client", "inside_facts"),
    "fetch": ("outlet", "paths", "unpack", "inside", "inside_client", "inside_fetch"),
}
_START = """\
import sys
sys.path[:] = [one for one in sys.path if one.startswith((sys.base_prefix + "/lib", sys.base_exec_prefix + "/lib"))]
sys.path_importer_cache.clear()
import json, types
for name in ("sandbox", "sandbox.packages"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = []
sys.modules["sandbox"].packages = sys.modules["sandbox.packages"]
def load(name, text):
    module = types.ModuleType("sandbox.packages." + name)
    sys.modules[module.__name__] = module
    setattr(sys.modules["sandbox.packages"], name, module)
    exec(compile(text, "<" + name + ">", "exec", dont_inherit=True), vars(module))
"""


def program(job: Mapping[str, object]) -> bytes:
    """The program that does the job; its `op` is the operation."""
    operation, text = str(job["op"]), json.dumps(job, ensure_ascii=True)
    return (
        modules(operation)
        + f"from sandbox.packages import inside, inside_{operation}\n"
        + f"inside.main(json.loads({text!r}), inside_{operation}.{operation})\n"
    ).encode()


@cache
def modules(operation: str) -> str:
    """The program's first part, which loads what the operation needs, and does nothing."""
    directory = Path(__file__).parent
    texts = ((name, (directory / f"{name}.py").read_text(encoding="utf-8")) for name in _OPERATIONS[operation])
    return _START + "".join(f"load({name!r}, {text!r})\n" for name, text in texts)
