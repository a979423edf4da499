"""Where code_exec runs: in somebody's own directory, and nowhere else, whatever `working_dir` says."""

from __future__ import annotations

import os
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.contract.code_exec.driver import Answer, Driver, Refused, Who
from tests.contract.code_exec.programs import WAIT, WHERE, files_with, marked, started, together
from tests.remote_executor import until

LISTING = "import os\nprint(sorted(os.listdir()))"


def places(driver: Driver, who: Who, *working_dirs: str | None) -> dict[str | None, tuple[Any, ...]]:
    """Where a run in each of them was, as the program saw it and as the report has it."""
    calls = [{"code": WHERE, "working_dir": name} for name in working_dirs]
    return {
        name: (answer.output.strip(), answer.working_dir["used"], answer.working_dir["replaced"])
        for name, answer in zip(working_dirs, together(driver, who, *calls), strict=True)
    }


def refusal(driver: Driver, who: Who, working_dir: str) -> str:
    with pytest.raises(Refused) as caught:
        driver.code_exec(who, code="open('it-ran', 'w')", working_dir=working_dir)
    return str(caught.value)


IN_ROOT = ("here-root", ".", False)
REPLACED = ("here-root", ".", True)


def test_an_ordinary_user_works_in_a_directory_of_user_data(driver: Driver, user: Who) -> None:
    """It is `user_data/<user_id>/`, on the host, and what a program writes is there."""
    answer = driver.code_exec(user, code="open('made.txt', 'w').write('by a run')")
    assert answer.success, answer.output
    directory = driver.files(user)
    assert directory.parts[-2:] == ("user_data", user.user)
    assert (directory / "made.txt").read_text() == "by a run"
    assert [path.name for path in directory.iterdir()] == ["made.txt"]


def test_files_persist_for_their_user(driver: Driver, who: Who) -> None:
    """State doesn't persist, files do: a later call reads, changes and removes them."""
    driver.put(who, **{"kept/deep.txt": "1"})
    assert driver.code_exec(who, code="print(open('kept/deep.txt').read())").output == "1\n"
    assert driver.code_exec(who, code="open('kept/deep.txt', 'a').write('2')").success
    assert driver.code_exec(who, code="print(open('kept/deep.txt').read())").output == "12\n"
    assert driver.code_exec(who, code="import shutil\nshutil.rmtree('kept')").success
    assert list(driver.files(who).iterdir()) == []


def test_files_are_nobody_elses(driver: Driver, user: Who, other: Who, single_user: Who) -> None:
    """No other user sees them: not by listing, not by a path, not as a working directory."""
    secret = secrets.token_hex(8)
    driver.put(user, **{"secret.txt": secret})
    theirs = driver.files(user)
    reach = f"""
import os
for path in ({str(theirs)!r}, '../{user.user}', '/workspace/../{user.user}', '/proc/1/root{theirs}'):
    for way in (lambda: os.listdir(path), lambda: open(path + '/secret.txt').read(), lambda: open(path + '/x', 'w')):
        try:
            print('reached', path, way())
        except OSError as error:
            pass
print(sorted(name for name in os.listdir() if not name.endswith('.py')))
"""
    for stranger in (other, single_user):
        assert driver.code_exec(stranger, code=reach).output == "[]\n"
        for place in (str(theirs), f"../{user.user}"):
            answer = driver.code_exec(
                stranger, code="import os\nprint(os.path.exists('secret.txt'))", working_dir=place
            )
            assert (answer.output, answer.working_dir["replaced"]) == ("False\n", True)
    assert [path.name for path in theirs.iterdir()] == ["secret.txt"]
    assert driver.code_exec(user, code="print(open('secret.txt').read())").output == secret + "\n"  # the control


def test_an_absolute_directory_outside_is_replaced_by_the_root(driver: Driver, user: Who, other: Who) -> None:
    """Whatever it is, and whether it exists or not."""
    marked(driver, user, "sub")
    driver.put(other, **{"theirs.txt": ""})
    outside = [
        "/",
        "//",
        "/etc",
        "/tmp",
        "/home/user/project",
        "/nowhere/at/all",
        "/proc/self/root",
        "/proc/self/cwd",
        "/proc/self/cwd/sub",
        "/workspace/..",
        "/workspace/../etc",
        str(driver.user_data),
        str(driver.files(user).parent / "."),
        str(driver.files(other)),
        f"{driver.files(user)}/../{other.user}",
        f"{driver.files(user)}-more",
        str(driver.root),
    ]
    assert places(driver, user, *outside) == dict.fromkeys(outside, REPLACED)


def test_the_replacement_is_silent_and_reported(driver: Driver, user: Who) -> None:
    """The run is an ordinary success, with no word of it in the output; the structured result tells it, and why."""
    answer = driver.code_exec(user, code="print('ran')", working_dir="/home/user/project")
    assert (answer.success, answer.error, answer.output) == (True, None, "ran\n")
    report = answer.working_dir
    assert (report["requested"], report["used"], report["replaced"]) == ("/home/user/project", ".", True)
    assert report["reason"]
    kept = driver.code_exec(user, code="print('ran')").working_dir
    assert (kept["requested"], kept["used"], kept["replaced"], kept["reason"]) == (None, ".", False, None)


def test_relative_directories_are_resolved_inside(driver: Driver, who: Who) -> None:
    """And the report says which it was, relative to the root."""
    marked(driver, who, "sub", "sub/deeper", "~", "with space", "-", "...")
    inside = {
        None: IN_ROOT,
        "": IN_ROOT,
        ".": IN_ROOT,
        "./": IN_ROOT,
        "sub": ("here-sub", "sub", False),
        "sub/": ("here-sub", "sub", False),
        "./sub": ("here-sub", "sub", False),
        "sub/.": ("here-sub", "sub", False),
        "sub//deeper": ("here-sub-deeper", "sub/deeper", False),
        "sub/../sub/deeper": ("here-sub-deeper", "sub/deeper", False),
        "sub/..": IN_ROOT,
        "~": ("here-~", "~", False),
        "with space": ("here-with space", "with space", False),
        "-": ("here--", "-", False),
        "...": ("here-...", "...", False),
    }
    assert places(driver, who, *inside) == inside


def test_absolute_directories_inside_are_what_they_are(driver: Driver, who: Who) -> None:
    """By their path on the host, and by the path that a program sees."""
    marked(driver, who, "sub", "sub/deeper")
    seen = driver.code_exec(who, code="import os\nprint(os.getcwd())", working_dir="sub").output.strip()
    root = driver.files(who)
    inside = {
        str(root): IN_ROOT,
        f"{root}/": IN_ROOT,
        f"{root}/sub": ("here-sub", "sub", False),
        f"{root}/sub/../sub/deeper": ("here-sub-deeper", "sub/deeper", False),
        seen: ("here-sub", "sub", False),
        os.path.dirname(seen): IN_ROOT,
        "/workspace": IN_ROOT,
        "/workspace/sub/deeper": ("here-sub-deeper", "sub/deeper", False),
    }
    assert places(driver, who, *inside) == inside


def test_dots_do_not_leave_the_root(driver: Driver, anyone: Who, other: Who) -> None:
    """However many, and wherever they stand; and whether there is something tells nobody."""
    marked(driver, anyone, "sub")
    driver.put(other, **{"theirs.txt": ""})
    leaving = ["..", "../", "../..", "../../../../../../etc", "sub/../..", "sub/../../sub", "./../"]
    leaving += [f"../{other.user}", f"sub/../../{other.user}", "../nobody-is-called-so", "/workspace/sub/../.."]
    assert places(driver, anyone, *leaving) == dict.fromkeys(leaving, REPLACED)


def test_links_do_not_leave_the_root(driver: Driver, anyone: Who, other: Who) -> None:
    """Not by an absolute path, not by dots, not by another link, and not half-way; links inside are followed."""
    marked(driver, anyone, "sub", "sub/deeper")
    driver.put(other, **{"theirs.txt": ""})
    links = {
        "to-etc": "/etc",
        "to-root": "/",
        "to-up": "..",
        "to-other": f"../{other.user}",
        "to-theirs": str(driver.files(other)),
        "to-nowhere": "/nowhere/at/all",
        "to-proc": "/proc/self/root",
        "to-cwd": "/proc/self/cwd",
        "to-link": "to-up",
        "sub/to-up": "../..",
    }
    made = "import os\n" + "".join(f"os.symlink({target!r}, {name!r})\n" for name, target in links.items())
    assert driver.code_exec(
        anyone, code=made + "os.symlink('sub', 'to-sub')\nos.symlink('../sub', 'sub/again')"
    ).success
    leaving = [*links, "to-root/etc", "to-etc/ssl", "to-up/" + other.user, "sub/to-up/etc"]
    assert places(driver, anyone, *leaving) == dict.fromkeys(leaving, REPLACED)
    found = places(driver, anyone, "to-sub", "to-sub/deeper", "sub/again")
    assert {name: (seen, replaced) for name, (seen, _, replaced) in found.items()} == {
        "to-sub": ("here-sub", False),
        "to-sub/deeper": ("here-sub-deeper", False),
        "sub/again": ("here-sub", False),
    }


def test_a_loop_of_links_leads_nowhere(driver: Driver, user: Who) -> None:
    """It is no directory, which is told, and the next call is answered."""
    marked(driver, user)
    assert driver.code_exec(user, code="import os\nos.symlink('b', 'a')\nos.symlink('a', 'b')").success
    assert "working_dir" in refusal(driver, user, "a")
    assert places(driver, user, None) == {None: IN_ROOT}


def test_a_link_that_is_swapped_meanwhile_does_not_leave_the_root(driver: Driver, user: Who, other: Who) -> None:
    """While a program keeps changing a directory into a link to somebody else's, each run is in the root or below it."""
    driver.put(other, **{"theirs.txt": ""})
    driver.put(user, **{"real/here": ""})
    swap = f"""
import os
open('started', 'w').close()
number = 0
while not os.path.exists('go'):
    number += 1
    os.symlink(['../{other.user}', '/', '/proc/self/root', {str(driver.files(other))!r}][number % 4], 'link')
    os.rename('real', 'aside'); os.rename('link', 'real'); os.unlink('real'); os.rename('aside', 'real')
"""
    pending = driver.begin(user, {"code": swap, "timeout": 100})
    directory = driver.files(user)
    started(directory)
    ran = 0
    try:
        for _ in range(4):
            calls = [{"code": "open('ran-' + __file__.rpartition('/')[2], 'x')", "working_dir": "real"}] * 4
            for one in [driver.begin(user, call) for call in calls]:
                try:
                    answer = one.answer()
                except Refused:
                    continue  # it was not there at that moment
                assert answer.success or answer.exit_code is None, answer.output  # moved away while it was begun
                ran += bool(answer.success)
    finally:
        (directory / "go").touch()
    assert pending.answer().success
    assert sum(path.name.startswith("ran-") for path in directory.rglob("*")) == ran
    assert [path.name for path in driver.files(other).iterdir()] == ["theirs.txt"]


def test_names_of_every_script_are_names(driver: Driver, user: Who) -> None:
    """They are taken as they are: no other form of the same letters, and no look-alike of a dot or a slash, is meant."""
    names = ["données", "ünïcode ☃ 目录", "e\u0301", "\u202ereversed", "．．", "a∕b", "new\nline", "\U0001f600"]
    marked(driver, user, *names)
    assert places(driver, user, *names) == {name: (f"here-{name}".strip(), name, False) for name in names}
    assert "working_dir" in refusal(driver, user, "\u00e9")  # the composed form of one that is there


def test_names_are_as_long_as_the_host_has_them(driver: Driver, user: Who) -> None:
    """255 bytes, and paths of many; longer ones are told, and nothing is run."""
    longest, wide = "x" * 255, "ä" * 127
    deep = "/".join(["d" * 200] * 15)
    code = f"import os\nfor name in {[longest, wide, deep]!r}:\n    os.makedirs(name); print(len(os.listdir(name)))"
    assert driver.code_exec(user, code=code).output == "0\n0\n0\n"
    for name in (longest, wide, deep):
        answer = driver.code_exec(user, code="import os\nopen('ran', 'w')", working_dir=name)
        assert (answer.success, answer.working_dir["used"]) == (True, name), answer.output
        assert (driver.files(user) / name / "ran").exists()
    for name in ("x" * 256, "ä" * 128, "/".join(["d"] * 5000), "d" * 100_000):
        assert "working_dir" in refusal(driver, user, name)


def test_what_is_no_directory_is_told(driver: Driver, user: Who) -> None:
    """A name inside that is not there, or is no directory, is named and nothing is run: it is not silently replaced."""
    made = "import os\nopen('file.txt', 'w')\nos.mkdir('sub')\nos.symlink('file.txt', 'to-file')\nos.mkfifo('fifo')"
    assert driver.code_exec(user, code=made).success
    for name in ("missing", "sub/missing", "file.txt", "file.txt/x", "nul\0byte", "to-file", "fifo"):
        assert "working_dir" in refusal(driver, user, name), name
    assert not list(driver.files(user).rglob("it-ran"))


def test_a_single_user_run_is_in_the_clients_directory(driver: Driver, single_user: Who) -> None:
    """The client's own files are there to read and to change, and new ones are as much its own as the directory."""
    driver.put(single_user, **{"given.txt": "from the client"})
    code = "print(open('given.txt').read())\nopen('made.txt', 'w').write('for the client')"
    assert driver.code_exec(single_user, code=code).output == "from the client\n"
    made = driver.client_directory / "made.txt"
    assert made.read_text() == "for the client"
    assert made.stat().st_uid == driver.client_directory.stat().st_uid


def test_an_admin_works_in_the_clients_directory(driver: Driver, single_user: Who, user: Who) -> None:
    """As a single-user run does, and by the same rules."""
    admin = replace(user, admin=True)
    marked(driver, single_user, "sub")
    assert driver.code_exec(admin, code="open('made.txt', 'w').write('by an admin')").success
    assert (driver.client_directory / "made.txt").read_text() == "by an admin"
    found = places(driver, admin, None, "sub", f"{driver.client_directory}/sub", "/etc", "..")
    driver.forget(admin)
    assert list(found.values()) == [IN_ROOT, ("here-sub", "sub", False), ("here-sub", "sub", False), REPLACED, REPLACED]


def test_an_ordinary_user_cannot_claim_the_clients_directory(driver: Driver, single_user: Who, user: Who) -> None:
    """Whoever is no admin stays in the user's own, whatever directory the client says it works in."""
    driver.put(single_user, **{"clients.txt": ""})
    claiming = replace(user, claims_directory=True)
    answer = driver.code_exec(claiming, code="import os\nopen('made.txt', 'w')\nprint(os.path.exists('clients.txt'))")
    driver.forget(claiming)
    assert answer.output == "False\n"
    assert (driver.files(user) / "made.txt").exists()
    assert [path.name for path in driver.client_directory.iterdir()] == ["clients.txt"]


def test_a_single_user_run_stays_in_the_clients_directory(driver: Driver, single_user: Who) -> None:
    """A directory that is outside does not take its place."""
    marked(driver, single_user)
    outside = ["/", "/etc", "/home/user/project", str(driver.root), str(driver.client_directory.parent), ".."]
    assert places(driver, single_user, *outside) == dict.fromkeys(outside, REPLACED)


def test_what_is_written_outside_is_not_on_the_host(driver: Driver, who: Who) -> None:
    """A file that is written elsewhere is not where it was expected: not on the host, and not in the next call."""
    name = f"mark-{secrets.token_hex(8)}"
    targets = [
        f"{top}/{name}"
        for top in ("/tmp", "/home", "/etc", "/usr", "/var/tmp", "/", str(driver.root), "..", "/dev/shm")
    ]
    code = f"""
for path in {targets!r}:
    try:
        open(path, 'w').write('x')
        print('wrote', path)
    except OSError:
        pass
"""
    answer = driver.code_exec(who, code=code)
    assert f"wrote /tmp/{name}\n" in answer.output
    assert list(driver.files(who).iterdir()) == []
    for path in targets:
        assert not (driver.files(who) / path).exists(), path
    look = f"import os\nprint([path for path in {targets!r} if os.path.exists(path)])"
    assert driver.code_exec(who, code=look).output == "[]\n"


@pytest.mark.parametrize("place", [None, "sub"])
def test_the_script_is_in_the_directory_while_it_runs(driver: Driver, who: Who, place: str | None) -> None:
    """The temporary script is written inside that directory, where the program runs, and is gone when it has ended."""
    driver.put(who, **{"sub/": ""})
    mark = secrets.token_hex(8)
    directory = driver.files(who) / (place or "")
    code = f"import os\nmark = '{mark}'\nprint(os.path.samefile(os.path.dirname(os.path.abspath(__file__)), '.'))"
    pending = driver.begin(who, {"code": code + WAIT, "working_dir": place, "timeout": 60})
    started(directory)
    (script,) = files_with(driver.files(who), mark)
    assert script.parent == directory
    assert script.suffix == ".py"
    (directory / "go").touch()
    assert pending.answer().output == "True\n"
    assert [path.name for path in directory.iterdir() if path.name != "sub"] == ["go"]


ENDINGS = {
    "success": "pass",
    "exception": "raise ValueError",
    "exit": "import sys; sys.exit(5)",
    "no python": "def",
    "abort": "import os; os.abort()",
    "kill": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "timeout": "import time; time.sleep(250)",
    "unlinked": "import os; os.unlink(__file__)",
    "moved": "import os; os.mkdir('moved'); os.chdir('moved')",
    "linked": "import os; os.unlink(__file__); os.symlink('/etc/passwd', __file__)",
    "read-only": "import os; os.chmod(__file__, 0); os.chmod('.', 0o500)",
}


def test_the_script_is_gone_however_the_run_ends(driver: Driver, user: Who) -> None:
    """Deleted afterwards: on success, failure and timeout, and also where the program meddled with it."""
    driver.put(user, **{f"{ending}/": "" for ending in ENDINGS})
    calls = [
        {"code": code, "working_dir": ending, "timeout": 1 if ending == "timeout" else 60}
        for ending, code in ENDINGS.items()
    ]
    together(driver, user, *calls)
    left = {ending: [path.name for path in (driver.files(user) / ending).iterdir()] for ending in ENDINGS}
    assert {ending: names for ending, names in left.items() if names} == {"moved": ["moved"]}


def test_the_script_is_gone_however_a_single_user_run_ends(driver: Driver, single_user: Who) -> None:
    """In the client's directory too."""
    calls = [{"code": ENDINGS[name], "timeout": 1} for name in ("success", "exception", "no python", "kill", "timeout")]
    together(driver, single_user, *calls)
    assert list(driver.client_directory.iterdir()) == []


@pytest.mark.parametrize("way", ["the client leaves", "the task is cancelled"])
def test_the_script_is_gone_when_the_call_is_cancelled(driver: Driver, who: Who, way: str) -> None:
    """Whatever happens: also when the call is given up, or its task cancelled."""
    mark = secrets.token_hex(8)
    arguments: dict[str, Any] = {"code": f"mark = '{mark}'\n{WAIT}", "timeout": 100}
    directory = driver.files(who)
    if way == "the client leaves":
        pending = driver.begin(who, arguments)
        started(directory)
        assert len(files_with(directory, mark)) == 1
        pending.leave()
    else:
        task_id = driver.detach(who, **arguments)
        started(directory)
        assert len(files_with(directory, mark)) == 1
        driver.cancel_task(who, task_id)
    until(lambda: files_with(directory, mark) == [], "the end of the script", 20)
    assert [path.name for path in directory.iterdir()] == ["started"]


def test_runs_at_once_in_one_directory_have_scripts_of_their_own(driver: Driver, user: Who) -> None:
    """None reads another's, and each is deleted."""
    answers: list[Answer] = together(driver, user, *({"code": f"print({number})"} for number in range(8)))
    assert [answer.output for answer in answers] == [f"{number}\n" for number in range(8)]
    assert list(driver.files(user).iterdir()) == []


def test_the_directory_of_a_user_is_made_when_it_is_needed(driver: Driver, user: Who) -> None:
    """The first call of a user finds an empty one, in which it may write; nobody else on the host may enter it."""
    assert not driver.files(user).exists()
    assert (
        driver.code_exec(
            user, code=LISTING.replace("os.listdir()", "set(os.listdir()) - {__file__.split('/')[-1]}")
        ).output
        == "[]\n"
    )
    assert driver.files(user).is_dir()
    closed = [path for path in (driver.files(user), *driver.files(user).parents) if not path.stat().st_mode & 0o005]
    assert closed, "everybody may look into it"
    assert Path("/") not in closed
