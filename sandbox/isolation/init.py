"""Pid 1 of every sandbox: starts the program, outlives it, and reports how it ended.

Run from bytecode as `python -I -S -B -u init.pyc STATUS CONTROL PAYLOAD STDOUT STDERR [ENTRANCE...]`, where each is the
number of a descriptor, and for a language other than Python `-- NAME=VALUE... -- RUNTIME...` after them:

    STATUS   to the launcher: `U` when up; `S` when the program is about to start; at the end `E`, the program's wait
             status, CPU seconds and peak bytes
    CONTROL  from the launcher: `P` when every limit holds, and a runtime may be started, to wait at its gate;
             `R` releases the program; end of file means the launcher has gone
    PAYLOAD  what to run: marshalled (main file, code, arguments, environment, path to append or None, place or None);
             the place, where that is not the directory at the start, is the working directory with its device and
             inode, the most bytes of a file or None, and whether the code is written there
    STDOUT, STDERR  the program's output
    ENTRANCE  `tasks` of the control groups that pid 1 enters

Descriptor 2 is bubblewrap's own error pipe until the program's takes its place, so that the two never mix.

Trusted code beside hostile code of the same uid. The program is a child: a fork of this process or, after `execve`,
the runtime that was given. It has neither STATUS nor any other descriptor of pid 1's; pid 1 is undumpable, so its
memory and descriptors cannot be opened, has no signal handler, so no signal from inside reaches it, and reaps all that
is orphaned. When it exits, the kernel ends the namespace.

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

TYPE_CHECKING = False  # as `typing` has it, which would take too long
if TYPE_CHECKING:
    from typing import Any, NoReturn

_PR_SET_DUMPABLE = 4
_FIRST_FREE_FD = 3
_CLOSE_RANGE = 436  # on every architecture
_LAST_FD = 0x7FFF_FFFF


def call_libc(name: str, *arguments: int) -> None:
    import _ctypes

    function = _ctypes.dlsym(_ctypes.dlopen(None, 2), name)  # type: ignore[arg-type]  # the stubs know no None
    if _ctypes.call_function(function, arguments) != 0:
        raise OSError(f"{name}{arguments} failed")


def set_dumpable(value: int) -> None:
    call_libc("prctl", _PR_SET_DUMPABLE, value, 0, 0, 0)


def close_range(first: int, last: int) -> None:
    """Not by `posix.closerange`: a Python that was built for an old C library closes a billion numbers one by one."""
    if first <= last:
        call_libc("syscall", _CLOSE_RANGE, first, last, 0)


def write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[posix.write(fd, data) :]


def become_program(stdout: int, stderr: int, kept: tuple[int, ...] = ()) -> None:
    """What sets the child apart from pid 1."""
    posix.dup2(stdout, 1)
    posix.dup2(stderr, 2)
    first = _FIRST_FREE_FD
    for fd in sorted(kept):
        close_range(first, fd - 1)
        first = fd + 1
    close_range(first, _LAST_FD)
    set_dumpable(1)
    adjust = posix.open("/proc/self/oom_score_adj", posix.O_WRONLY | posix.O_CLOEXEC)
    posix.write(adjust, b"1000")  # before pid 1, whose report is the evidence, and before anything of the host
    posix.close(adjust)


def set_environment(environment: dict[str, str]) -> None:
    for name, value in environment.items():
        key, text = name.encode(), value.encode()
        posix.putenv(key, text)
        posix.environ[key] = text  # where `os` will take `os.environ` from


def watch_user_site() -> None:
    """Let the program import what it installs itself (`pip install`), as its child Pythons can.

    After the standard library, and read by no `site`: nothing there can shadow or run at the start. The finder is made
    here, since the import system takes a directory that is not there yet for one that never will be.
    """
    import _frozen_importlib_external as external

    major, minor = sys.version_info[:2]
    path = f"{posix.environ[b'HOME'].decode()}/.local/lib/python{major}.{minor}/site-packages"
    loaders = external._get_supported_file_loaders()  # type: ignore[attr-defined]  # the stubs do not know it
    sys.path_importer_cache[path] = external.FileFinder(path, *loaders)
    sys.path.append(path)


def run(file: str, code: bytes, arguments: tuple[str, ...], packages: str | None) -> None:
    """Run the program as Python runs a script: a `__main__` of its own, and tracebacks that start in its file."""
    import _frozen_importlib_external
    import builtins

    for name in ("exit", "quit"):
        setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D (i.e. EOF)"))
    builtins.help = _sitebuiltins._Helper()
    main = type(sys)("__main__")
    main.__file__ = file
    main.__loader__ = _frozen_importlib_external.SourceFileLoader("__main__", file)
    main.__builtins__ = builtins  # type: ignore[attr-defined]
    vars(main)["__annotations__"] = {}
    vars(main)["__cached__"] = None
    sys.modules["__main__"] = main
    sys.argv = [file, *arguments]
    sys.path.insert(0, posix.getcwd())
    watch_user_site()
    if packages is not None:
        sys.path.append(packages)
    try:
        exec(compile(code, file, "exec", dont_inherit=True), vars(main))  # noqa: S102 - the purpose of all this
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


def enter(directory: str, device: int, inode: int) -> None:
    """Make the working directory of the call the current one: that which was looked at on the host, and no other."""
    try:
        posix.chdir(directory)
        found = posix.stat(".")
    except OSError as error:
        give_up(f"the working directory `{directory}` could not be entered: {error.strerror}")
    if (found.st_dev, found.st_ino) != (device, inode):
        give_up(f"the working directory `{directory}` was replaced while the call started")


def write_main(file: str, code: bytes) -> None:
    """Into the current directory, where there must be none of that name."""
    try:
        main = posix.open(
            file.rpartition("/")[2], posix.O_WRONLY | posix.O_CREAT | posix.O_EXCL | posix.O_CLOEXEC, 0o644
        )
        write_all(main, code)
    except OSError as error:
        give_up(f"the code could not be written to `{file}`: {error.strerror}")
    posix.close(main)


def give_up(message: str) -> NoReturn:
    """Say why where the launcher reads it, and end."""
    write_all(2, message.encode(errors="surrogateescape"))
    posix._exit(1)


class Runtime:
    """A runtime other than Python, started ahead of its call. See `gate.cjs` for what it says and hears."""

    def __init__(self, program: list[str], environment: dict[str, str], stdout: int, stderr: int) -> None:
        call, self._call = posix.pipe()
        self._up, up = posix.pipe()
        self._name = program[0]
        self.pid = posix.fork()
        if self.pid == 0:
            try:
                for number in (_signal.SIGPIPE, _signal.SIGXFSZ):  # Python ignores them, and a program would inherit it
                    _signal.signal(number, _signal.SIG_DFL)
                for fd in (call, up):
                    posix.set_inheritable(fd, True)
                become_program(stdout, stderr, (call, up))
                posix.execve(self._name, [*program, str(call), str(up)], environment)
            finally:
                posix._exit(127)
        posix.close(call)
        posix.close(up)

    def require_up(self) -> None:
        """Wait until it stands at its gate. If it cannot, say so where the launcher reads it, and end."""
        if posix.read(self._up, 1) != b"U":
            _, status = posix.waitpid(self.pid, 0)
            give_up(f"`{self._name}` did not start (wait status {status})")
        posix.close(self._up)

    def open_gate(self, main: str, arguments: tuple[str, ...], environment: dict[str, str]) -> None:
        texts = [main, str(len(arguments)), *arguments, *(f"{name}={value}" for name, value in environment.items())]
        try:
            write_all(self._call, "".join(text + "\0" for text in texts).encode(errors="surrogateescape"))
        except BrokenPipeError:
            pass  # it was killed; its wait status tells
        posix.close(self._call)


def limit_files(resource: Any, max_bytes: int) -> None:
    """The longest file that a child may make, beside the limit that it has. `resource` is the module."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    value = max_bytes if hard == resource.RLIM_INFINITY else min(max_bytes, hard)
    resource.setrlimit(resource.RLIMIT_FSIZE, (value, value))


def hear(control: int, word: bytes) -> None:
    """Wait for the launcher's next word; end without it."""
    if posix.read(control, 1) != word:
        posix._exit(0)


def split(arguments: list[str]) -> tuple[list[int], dict[str, str], list[str]]:
    """Descriptors, and the environment and argv of a runtime, from what stands on the command line."""
    parts: list[list[str]] = [[], [], []]
    place = 0
    for text in arguments:
        if text == "--" and place < 2:  # the runtime's own may have another
            place += 1
        else:
            parts[place].append(text)
    variables = [text.partition("=") for text in parts[1]]
    return [int(fd) for fd in parts[0]], {name: value for name, _, value in variables}, parts[2]


def start() -> None:
    descriptors, start_environment, runtime_argv = split(sys.argv[1:])
    status, control, payload, stdout, stderr, *entrances = descriptors
    for entrance in entrances:
        posix.write(entrance, b"0")
    posix.write(status, b"U")
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)  # the only handler that Python installs
    set_dumpable(1)  # as it is: this only loads what the call needs
    import resource  # `wait4` would, at its first success

    gc.freeze()  # what is here now is not collected in the child, which would copy each of its pages (2 ms)
    hear(control, b"P")  # not before: the limits of this process are what a child inherits
    runtime = Runtime(runtime_argv, start_environment, stdout, stderr) if runtime_argv else None
    hear(control, b"R")
    # Only now is there something to run: a sandbox may have waited for its call.
    size = posix.fstat(payload).st_size
    file, code, arguments, environment, packages, place = marshal.loads(posix.pread(payload, size, 0))  # noqa: S302 - ours
    max_file_bytes, written = None, True
    if place is not None:
        directory, device, inode, max_file_bytes, written = place
        enter(directory, device, inode)
    if written:
        write_main(file, code)
    if max_file_bytes is not None:
        limit_files(resource, max_file_bytes)
    if runtime is not None:
        runtime.require_up()
    set_dumpable(0)  # only now: until the release, the launcher opens this process's namespaces
    posix.write(status, b"S")
    if runtime is not None:
        runtime.open_gate(file, arguments, environment)
        program = runtime.pid
    else:
        program = posix.fork()
        if program == 0:
            become_program(stdout, stderr)
            _signal.signal(_signal.SIGINT, _signal.default_int_handler)
            set_environment(environment)
            run(file, code, arguments, packages)
            return
    for fd in (control, payload, stdout, stderr, *entrances):
        posix.close(fd)
    reap(program, status)


if __name__ == "__main__":
    start()
