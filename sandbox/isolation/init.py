"""Pid 1 of every sandbox: starts the program, outlives it, and reports how it ended.

Run from bytecode as `python -I -S -B -u init.pyc STATUS CONTROL PAYLOAD STDOUT STDERR [ENTRANCE...]`, where each is the
number of a descriptor:

    STATUS   to the launcher: `U` when up; `S` when the program is about to start; at the end `E`, the program's wait
             status, CPU seconds and peak bytes
    CONTROL  from the launcher: `R` releases the program; end of file means the launcher has gone
    PAYLOAD  what to run: marshalled (code, arguments, environment, path to append or None)
    STDOUT, STDERR  the program's output
    ENTRANCE  `tasks` of the control groups that pid 1 enters

Descriptor 2 is bubblewrap's own error pipe until the program's takes its place, so that the two never mix.

Trusted code beside hostile code of the same uid. The program is a child: it has neither STATUS nor any other
descriptor of pid 1's; pid 1 is undumpable, so its memory and descriptors cannot be opened, has no signal handler, so
no signal from inside reaches it, and reaps all that is orphaned. When it exits, the kernel ends the namespace.

Everything imported here delays each attempt: builtin modules only, but for `_ctypes` and `resource`, which are loaded
while the launcher still works (`ctypes` itself would take 4 ms). Nothing is loaded once the program runs, which could
see to it that nothing can be.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # built in, and in no stubs
import _sitebuiltins
import gc
import marshal
import posix
import sys

MAIN = "/workspace/main.py"
_PR_SET_DUMPABLE = 4
_FIRST_FREE_FD = 3
_ALL_FDS = 1 << 30


def set_dumpable(value: int) -> None:
    import _ctypes

    prctl = _ctypes.dlsym(_ctypes.dlopen(None, 2), "prctl")  # type: ignore[arg-type]  # the stubs know no None
    if _ctypes.call_function(prctl, (_PR_SET_DUMPABLE, value, 0, 0, 0)) != 0:
        raise OSError("prctl(PR_SET_DUMPABLE) failed")


def write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[posix.write(fd, data) :]


def become_program(stdout: int, stderr: int, environment: dict[str, str]) -> None:
    """What sets the child apart from pid 1."""
    posix.dup2(stdout, 1)
    posix.dup2(stderr, 2)
    posix.closerange(_FIRST_FREE_FD, _ALL_FDS)
    set_dumpable(1)
    _signal.signal(_signal.SIGINT, _signal.default_int_handler)
    adjust = posix.open("/proc/self/oom_score_adj", posix.O_WRONLY | posix.O_CLOEXEC)
    posix.write(adjust, b"1000")  # before pid 1, whose report is the evidence, and before anything of the host
    posix.close(adjust)
    for name, value in environment.items():
        key, text = name.encode(), value.encode()
        posix.putenv(key, text)
        posix.environ[key] = text  # where `os` will take `os.environ` from


def run(code: bytes, arguments: tuple[str, ...], packages: str | None) -> None:
    """Run the program as Python runs a script: a `__main__` of its own, and tracebacks that start in its file."""
    import _frozen_importlib_external
    import builtins

    for name in ("exit", "quit"):
        setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D (i.e. EOF)"))
    builtins.help = _sitebuiltins._Helper()
    main = type(sys)("__main__")
    main.__file__ = MAIN
    main.__loader__ = _frozen_importlib_external.SourceFileLoader("__main__", MAIN)
    main.__builtins__ = builtins  # type: ignore[attr-defined]
    vars(main)["__annotations__"] = {}
    vars(main)["__cached__"] = None
    sys.modules["__main__"] = main
    sys.argv = [MAIN, *arguments]
    sys.path.insert(0, posix.getcwd())
    if packages is not None:
        sys.path.append(packages)
    try:
        exec(compile(code, MAIN, "exec", dont_inherit=True), vars(main))  # noqa: S102 - the purpose of all this
    except SystemExit:
        raise  # the interpreter's own handling gives the status
    except BaseException as error:  # noqa: BLE001 - as the interpreter does
        traceback = error.__traceback__.tb_next if error.__traceback__ else None  # without this frame
        show(error, traceback)
        if isinstance(error, KeyboardInterrupt):
            _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
            posix.kill(posix.getpid(), _signal.SIGINT)
        raise SystemExit(1) from None


def show(error: BaseException, traceback: object) -> None:
    error = error.with_traceback(traceback)  # type: ignore[arg-type]
    sys.last_exc, sys.last_type, sys.last_value = error, type(error), error
    sys.last_traceback = traceback  # type: ignore[assignment]
    try:
        sys.excepthook(type(error), error, traceback)  # type: ignore[arg-type]
    except SystemExit:
        raise
    except BaseException as second:  # noqa: BLE001
        sys.stderr.write("Error in sys.excepthook:\n")
        sys.__excepthook__(type(second), second, second.__traceback__ and second.__traceback__.tb_next)
        sys.stderr.write("\nOriginal exception was:\n")
        sys.__excepthook__(type(error), error, traceback)  # type: ignore[arg-type]


def reap(program: int, status: int) -> None:
    """Wait for the program, burying orphans on the way; report; end the namespace."""
    while True:
        pid, wait_status, usage = posix.wait4(-1, 0)
        if pid == program:
            break
    cpu_seconds = usage.ru_utime + usage.ru_stime
    write_all(status, b"E%d %.6f %d\n" % (wait_status, cpu_seconds, usage.ru_maxrss * 1024))
    posix._exit(0)


def start() -> None:
    status, control, payload, stdout, stderr, *entrances = map(int, sys.argv[1:])
    for entrance in entrances:
        posix.write(entrance, b"0")
    posix.write(status, b"U")
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)  # the only handler that Python installs
    set_dumpable(1)  # as it is: this only loads what the call needs
    import resource  # noqa: F401 - `wait4` would, at its first success

    gc.freeze()  # what is here now is not collected in the child, which would copy each of its pages (2 ms)
    if posix.read(control, 1) != b"R":
        posix._exit(0)
    # Only now is there something to run: a sandbox may have waited for its call.
    size = posix.fstat(payload).st_size
    code, arguments, environment, packages = marshal.loads(posix.pread(payload, size, 0))  # noqa: S302 - ours
    main = posix.open(MAIN, posix.O_WRONLY | posix.O_CREAT | posix.O_EXCL | posix.O_CLOEXEC, 0o644)
    write_all(main, code)
    posix.close(main)
    set_dumpable(0)  # only now: until the release, the launcher opens this process's namespaces
    posix.write(status, b"S")
    program = posix.fork()
    if program == 0:
        become_program(stdout, stderr, environment)
        run(code, arguments, packages)
        return
    for fd in (control, payload, stdout, stderr, *entrances):
        posix.close(fd)
    reap(program, status)


if __name__ == "__main__":
    start()
