"""Whose directory is where, what may be one, and what is left of a script."""

from __future__ import annotations

import asyncio
import ctypes
import os
import stat
import threading
from pathlib import Path

import pytest

from sandbox.contract import InvalidCall
from sandbox.isolation import syscalls
from sandbox.isolation.client import IsolationUnavailable
from sandbox.isolation.plan import MIB, Filter
from sandbox.owners import InvalidUser, Owner
from sandbox.protected import Place
from sandbox.state import InvalidSettings
from sandbox.workdir import USER_DATA_UID, Placed, Quota, WorkingDirectories, remove_stale
from tests import world

ROOT = os.getuid() == 0
QUOTA = Quota(MIB, 100)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    state = tmp_path / "state"
    state.mkdir()
    return state


@pytest.fixture
def directories(state: Path, tmp_path: Path) -> WorkingDirectories:
    kept = tmp_path / "kept"
    kept.mkdir()
    for name in ("policy.yaml", "audit.jsonl"):
        (kept / name).touch()
    ours = [Place(kept / name) for name in ("policy.yaml", "audit.jsonl", "service.sock")]
    return WorkingDirectories(state, lambda: ours)


def placed_at(directories: WorkingDirectories, root: Path, working_dir: str | None = None) -> Placed:
    return directories.place(root, working_dir, quota=QUOTA, client=False)


class TestUsersRoots:
    def test_each_user_of_each_tenant_has_one_of_its_own(self, directories: WorkingDirectories, state: Path) -> None:
        """Closed to everybody else, above all the way from the state directory on."""
        owners = [Owner("", "alice"), Owner("acme", "alice"), Owner("acme", "bob"), Owner("user_data", "alice")]
        roots = [directories.user_root(owner) for owner in owners]
        assert roots[:2] == [state / "user_data/alice", state / "tenants/acme/user_data/alice"]
        assert len(set(roots)) == len(owners)
        for root in roots:
            for path in (root, *root.parents):
                if path == state:
                    break
                assert stat.S_IMODE(path.stat().st_mode) == 0o700, path

    def test_it_is_the_same_again_and_keeps_what_is_in_it(self, directories: WorkingDirectories) -> None:
        root = directories.user_root(Owner("", "alice"))
        (root / "file").touch()
        assert directories.user_root(Owner("", "alice")) == root
        assert (root / "file").exists()

    def test_it_never_belongs_to_root(self, directories: WorkingDirectories) -> None:
        """Started as root, it is a user id's that nobody has; else whoever runs the service's."""
        status = directories.user_root(Owner("", "alice")).stat()
        assert status.st_uid == status.st_gid == USER_DATA_UID if ROOT else status.st_uid == os.getuid()

    @pytest.mark.parametrize("user", ["", ".", "..", "a/b", "../b", "/etc", "a\0", "ä", "a b", "a" * 129, "-a", "~"])
    def test_no_name_that_could_lead_elsewhere_is_a_users(self, directories: WorkingDirectories, user: str) -> None:
        with pytest.raises(InvalidUser):
            directories.user_root(Owner("", user))

    @pytest.mark.parametrize("tenant", [".", "..", "a/b", "A", "a" * 65, "a\n", " "])
    def test_nor_a_tenants(self, directories: WorkingDirectories, tenant: str) -> None:
        with pytest.raises(InvalidUser):
            directories.user_root(Owner(tenant, "alice"))

    def test_a_link_in_its_place_is_refused(self, directories: WorkingDirectories, state: Path, tmp_path: Path) -> None:
        (state / "user_data").mkdir()
        (tmp_path / "elsewhere").mkdir()
        (state / "user_data/alice").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(InvalidSettings, match="hint:"):
            directories.user_root(Owner("", "alice"))


class TestClientsRoots:
    @pytest.mark.parametrize(
        "where",
        ["/", "/usr", "/usr/local/lib", "/etc", "/proc", "/proc/self", "/sys", "/dev/shm", "/run", "/boot", "/var", "/var/lib", "/bin"],
    )  # fmt: skip
    def test_the_systems_directories_are_none(self, directories: WorkingDirectories, where: str) -> None:
        if Path(where).is_dir():
            with pytest.raises(InvalidSettings, match="it is the system's"):
                directories.check_client_root(Path(where))

    @pytest.mark.parametrize(
        "where", ["state", "state/user_data/alice", ".", "kept", "link", "state/../state", "above/.."]
    )
    def test_what_has_something_of_ours_or_is_in_it_is_none(
        self, directories: WorkingDirectories, tmp_path: Path, where: str
    ) -> None:
        """By any name, and also where the file is not there yet."""
        (tmp_path / "state/user_data/alice").mkdir(parents=True)
        (tmp_path / "above").mkdir()
        (tmp_path / "link").symlink_to("state/user_data")
        with pytest.raises(InvalidSettings, match="hint: name a directory"):
            directories.check_client_root(tmp_path / where)
        with pytest.raises(InvalidSettings):
            directories.place(tmp_path / where, None, quota=None, client=True)

    def test_nor_under_the_name_that_a_mount_gives_it(
        self, directories: WorkingDirectories, tmp_path: Path, state: Path
    ) -> None:
        if not ROOT:
            pytest.skip("only root can mount")
        project = tmp_path / "project"
        project.mkdir()
        for source in (state, tmp_path / "kept"):
            syscalls.mount(str(source), str(project), None, syscalls.MS_BIND)
            try:
                with pytest.raises(InvalidSettings, match="is in it, or it is in that"):
                    directories.check_client_root(project)
            finally:
                syscalls.unmount_lazily(str(project))

    def test_a_project_is_one_and_is_told_without_links(self, directories: WorkingDirectories, tmp_path: Path) -> None:
        (tmp_path / "project/sub").mkdir(parents=True)
        (tmp_path / "link").symlink_to("project")
        assert directories.check_client_root(tmp_path / "link") == tmp_path / "project"
        with directories.place(tmp_path / "project", str(tmp_path / "project/sub"), quota=None, client=True) as placed:
            assert (placed.used, placed.replaced) == ("sub", False)
            assert placed.workdir.root == tmp_path / "project"
            asyncio.run(placed.require_room())
            assert placed.full is None
            assert placed.workdir.filter is Filter.NO_UNIX_SOCKETS

    def test_no_link_is_followed_to_one_that_was_looked_at_before(
        self, directories: WorkingDirectories, tmp_path: Path
    ) -> None:
        """Neither in its place, nor on the way to it: what was looked at once is not resolved again."""
        (tmp_path / "above/project").mkdir(parents=True)
        (tmp_path / "elsewhere/project").mkdir(parents=True)
        root = directories.check_client_root(tmp_path / "above/project")
        (tmp_path / "above").rename(tmp_path / "moved")
        (tmp_path / "above").symlink_to("elsewhere")
        with pytest.raises(InvalidSettings, match="cannot be a working directory"):
            directories.place(root, None, quota=None, client=True)

    def test_one_that_is_not_there_is_refused_with_a_hint(
        self, directories: WorkingDirectories, tmp_path: Path
    ) -> None:
        (tmp_path / "file").touch()
        for name in ("missing", "file"):
            with pytest.raises(InvalidSettings, match="hint:"):
                directories.check_client_root(tmp_path / name)


class TestToldDirectories:
    """Those that a client tells, below the allowed ones."""

    @pytest.fixture
    def allowed(self, tmp_path: Path) -> Path:
        (tmp_path / "projects/one/sub").mkdir(parents=True)
        (tmp_path / "victim").mkdir()
        return tmp_path / "projects"

    @pytest.mark.parametrize(
        "way", ["projects/one", "projects//./one/", "projects/one/../one", "projects/near", "by-link/one"]
    )
    def test_one_below_an_allowed_one_is_had(
        self, directories: WorkingDirectories, allowed: Path, tmp_path: Path, way: str
    ) -> None:
        """By the name that the policy has for the allowed one, and by its own; also by a link that stays inside."""
        (allowed / "near").symlink_to("one")
        (tmp_path / "by-link").symlink_to("projects")
        placed = directories.place_below([tmp_path / "missing", tmp_path / "by-link"], tmp_path / way, "sub")
        assert placed is not None
        with placed:
            assert placed.workdir.root == allowed / "one"
            assert (placed.used, placed.replaced) == ("sub", False)

    @pytest.mark.parametrize(
        "way", ["victim", "projects/../victim", "projects/out", "projects/far", "projects/one/up", "projectsx"]
    )
    def test_no_other_is(self, directories: WorkingDirectories, allowed: Path, tmp_path: Path, way: str) -> None:
        """Not by `..`, nor by a link that code has made there."""
        (allowed / "out").symlink_to("../victim")
        (allowed / "far").symlink_to(tmp_path / "victim")
        (allowed / "one/up").symlink_to("../../victim")
        assert directories.place_below([allowed], tmp_path / way, None) is None

    def test_one_that_is_swapped_while_it_is_opened_leads_nowhere(
        self, directories: WorkingDirectories, allowed: Path, tmp_path: Path
    ) -> None:
        """A directory and a link change places without rest: what is had is never where the link leads."""
        (allowed / "link").symlink_to(tmp_path / "victim")
        (allowed / "dir").mkdir()
        over = threading.Event()

        def swap() -> None:
            while not over.is_set():
                exchange(allowed / "dir", allowed / "link")

        swapping = threading.Thread(target=swap)
        swapping.start()
        victim = (tmp_path / "victim").stat().st_ino
        had = refused = 0
        try:
            while had < 200 or refused < 200:
                try:
                    placed = directories.place_below([allowed], allowed / "dir", None)
                except InvalidCall:  # it was swapped when it had been opened
                    continue
                if placed is None:
                    refused += 1
                    continue
                with placed:
                    had += 1
                    assert os.fstat(placed.workdir.root_fd).st_ino != victim
                    assert os.fstat(placed.workdir.directory_fd).st_ino != victim
        finally:
            over.set()
            swapping.join()

    def test_code_in_one_cannot_lead_another_elsewhere(
        self, directories: WorkingDirectories, allowed: Path, tmp_path: Path
    ) -> None:
        """An allowed directory below an allowed one, which code has replaced by a link."""
        (allowed / "two").symlink_to(tmp_path / "victim")
        with pytest.raises(InvalidSettings, match="lies where code may write"):
            directories.place_below([tmp_path / "missing", allowed / "two", allowed], allowed / "two", None)

    def test_one_with_something_of_ours_is_refused(
        self, directories: WorkingDirectories, allowed: Path, tmp_path: Path
    ) -> None:
        """Also where the allowed one has it, and what is told does not."""
        for told in (tmp_path, tmp_path / "kept", tmp_path / "state"):
            with pytest.raises(InvalidSettings, match="is in it, or it is in that"):
                directories.place_below([tmp_path], told, None)
        placed = directories.place_below([tmp_path], allowed / "one", None)
        assert placed is not None
        placed.close()

    def test_every_descriptor_is_given_back(
        self, directories: WorkingDirectories, allowed: Path, tmp_path: Path
    ) -> None:
        (allowed / "out").symlink_to("../victim")
        before = len(os.listdir("/proc/self/fd"))
        for way in ("one", "out", "missing", ".."):
            try:
                placed = directories.place_below([allowed], allowed / way, None)
            except InvalidSettings:
                continue
            if placed is not None:
                placed.close()
        assert len(os.listdir("/proc/self/fd")) == before


def exchange(one: Path, other: Path) -> None:
    libc = ctypes.CDLL(None)
    assert libc.renameat2(-100, os.fsencode(one), -100, os.fsencode(other), 2) == 0


class TestPlacing:
    def test_without_a_word_it_is_the_root(self, directories: WorkingDirectories) -> None:
        root = directories.user_root(Owner("", "alice"))
        for nothing in (None, "", ".", "./", "././.", "/workspace", "/workspace/"):
            with placed_at(directories, root, nothing) as placed:
                assert (placed.used, placed.replaced, placed.reason) == (".", False, None)
                assert placed.workdir.main == f"/workspace/{placed.workdir.script}"

    def test_a_replacement_says_what_and_why(self, directories: WorkingDirectories) -> None:
        """In printable words, whatever the call's were."""
        root = directories.user_root(Owner("", "alice"))
        for way in ("/srv/x\x1b[2J", "../\x1b[2J/.."):
            with placed_at(directories, root, way) as placed:
                assert placed.replaced
                assert placed.reason is not None
                assert placed.reason.isprintable()
                assert way[:3] in placed.reason

    def test_one_that_does_not_exist_says_how_to_make_it(self, directories: WorkingDirectories) -> None:
        with pytest.raises(InvalidCall, match=r"`a/b` does not exist; .*os\.makedirs\('a/b'\)"):
            placed_at(directories, directories.user_root(Owner("", "alice")), "a/b")

    def test_one_that_cannot_be_written_is_refused_before_the_start(self, directories: WorkingDirectories) -> None:
        root = directories.user_root(Owner("", "alice"))
        (root / "sub").mkdir(mode=0o555)
        with pytest.raises(InvalidCall, match="chmod u"):
            placed_at(directories, root, "sub")

    def test_names_that_are_no_unicode_are_told_in_escapes(self, directories: WorkingDirectories) -> None:
        """What is told of a directory is text, also where a link leads to one whose name is none."""
        root = directories.user_root(Owner("", "alice"))
        os.mkdir(os.fsencode(root) + b"/\xff")
        os.symlink(b"\xff", os.fsencode(root) + b"/link")
        with placed_at(directories, root, "link") as placed:
            assert placed.used == "\\udcff"
            assert placed.workdir.directory == "\udcff"

    def test_every_descriptor_is_given_back(self, directories: WorkingDirectories) -> None:
        root = directories.user_root(Owner("", "alice"))
        (root / "sub").mkdir()
        with placed_at(directories, root) as placed:
            asyncio.run(placed.require_room())
        before = len(os.listdir("/proc/self/fd"))
        for way in (None, "sub", "..", "/etc", "missing", "a" * 300, "\0"):
            try:
                with placed_at(directories, root, way) as placed:
                    asyncio.run(placed.require_room())
                    placed.close()
            except InvalidCall:
                pass
        assert len(os.listdir("/proc/self/fd")) == before

    def test_a_full_directory_is_one_to_remove_from_and_says_so(self, directories: WorkingDirectories) -> None:
        """With the numbers and the key; once there is room it is as any other."""
        root = directories.user_root(Owner("", "alice"))
        (root / "big").write_bytes(bytes(2 * MIB))
        with placed_at(directories, root) as placed:
            asyncio.run(placed.require_room())
            assert placed.full is not None
            assert placed.full.startswith("user_data_full: ")
            assert "more than 1 MiB (`code_exec.user_data.max_mib`)" in placed.full
            assert placed.workdir.filter is Filter.NO_GROWTH
            assert placed.workdir.max_file_bytes == 0
        (root / "big").unlink()
        with placed_at(directories, root) as placed:
            asyncio.run(placed.require_room())
            assert placed.full is None
            assert placed.workdir.filter is Filter.COMMON

    def test_no_file_is_made_longer_than_what_there_is_room_for(self, directories: WorkingDirectories) -> None:
        """At least 1 MiB, for what any program needs."""
        root = directories.user_root(Owner("", "alice"))
        (root / "some").write_bytes(bytes(3 * MIB))
        for limit, wanted in ((10 * MIB, range(6 * MIB, 7 * MIB + 1)), (3 * MIB + 65536, range(MIB, MIB + 1))):
            with directories.place(root, None, quota=Quota(limit, 100), client=False) as placed:
                asyncio.run(placed.require_room())
                assert placed.workdir.max_file_bytes in wanted

    def test_a_host_without_space_is_not_the_users_fault(self, directories: WorkingDirectories) -> None:
        root = directories.user_root(Owner("", "alice"))
        with world.small_filesystem(root, 20 * MIB):
            (root / "big").write_bytes(bytes(18 * MIB))
            with placed_at(directories, root) as placed, pytest.raises(IsolationUnavailable, match="left on the host"):
                asyncio.run(placed.require_room())


class TestScripts:
    def test_it_goes_wherever_its_directory_is_by_then(self, directories: WorkingDirectories) -> None:
        root = directories.user_root(Owner("", "alice"))
        (root / "sub").mkdir()
        with placed_at(directories, root, "sub") as placed:
            (root / "sub" / placed.workdir.script).touch()
            (root / "sub").rename(root / "far")
            (root / "sub").mkdir()
            placed.remove_script()
            assert list((root / "far").iterdir()) == []
            (root / "far" / placed.workdir.script).touch()  # of another attempt
        assert list((root / "far").iterdir()) == []
        placed.remove_script()
        placed.close()

    def test_no_link_is_followed_and_no_directory_removed(
        self, directories: WorkingDirectories, tmp_path: Path
    ) -> None:
        root = directories.user_root(Owner("", "alice"))
        (tmp_path / "precious").touch()
        with placed_at(directories, root) as placed:
            (root / placed.workdir.script).symlink_to(tmp_path / "precious")
        assert (tmp_path / "precious").exists()
        assert list(root.iterdir()) == []
        with placed_at(directories, root) as placed:
            (root / placed.workdir.script).mkdir()
        assert [path.name for path in root.iterdir()] == [placed.workdir.script]

    def test_what_a_killed_executor_left_goes_and_nothing_else(
        self, directories: WorkingDirectories, tmp_path: Path
    ) -> None:
        """Only a regular file of a script's name, at the place that was written down, with no link on the way."""
        root = directories.user_root(Owner("", "alice"))
        name = "code_exec_0123456789abcdef.py"
        (root / "sub").mkdir()
        (root / "link").symlink_to("sub")
        outside = tmp_path / "outside"
        outside.mkdir()
        for directory in (root, root / "sub", outside):
            (directory / name).touch()
            (directory / "main.py").touch()
        for place, script in (
            ("", "main.py"), ("", "../main.py"), ("", "sub"), ("link", name), ("../../../outside", name), ("missing", name),
            (str(outside), name),
        ):  # fmt: skip
            remove_stale(root, place, script)
        remove_stale(tmp_path / "missing", "", name)
        assert all((directory / name).exists() for directory in (root, root / "sub", outside))
        remove_stale(root, "", name)
        remove_stale(root, "sub", name)
        assert not (root / name).exists()
        assert not (root / "sub" / name).exists()
        assert (outside / name).exists()
        for make in (lambda: (root / name).symlink_to(outside / name), lambda: os.mkfifo(root / name)):
            make()
            remove_stale(root, "", name)
            assert (root / name).is_symlink() or (root / name).is_fifo()
            (root / name).unlink()
