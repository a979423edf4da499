"""A plan is a value, and bubblewrap's arguments follow from it alone."""

from __future__ import annotations

import json
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from sandbox.isolation.plan import (
    Descriptors,
    LaunchPlan,
    ReadOnly,
    Rlimits,
    Tmpfs,
    bwrap_argv,
    plan_from_message,
)

PLAN = LaunchPlan(
    argv=("/opt/python/bin/python3.13", "-I", "/run/init.pyc"),
    environment={"PATH": "/usr/bin", "HOME": "/workspace"},
    main="/workspace/main.py",
    read_only=(ReadOnly("/host/python", "/opt/python"),),
    memory_bytes=1 << 28,
    packages="/host/packages",
    tmpfs=(Tmpfs("/workspace", 4096, 10), Tmpfs("/tmp", 8192, 20)),
)
DESCRIPTORS = Descriptors(info=5, seccomp=6, for_init=(7, 8, 9))


def argv(plan: LaunchPlan = PLAN) -> list[str]:
    return bwrap_argv(
        plan,
        root="/skeleton",
        system_mounts=(ReadOnly("/usr", "/usr"),),
        descriptors=DESCRIPTORS,
        locate=lambda p: "/at" + p,
    )


def test_the_whole_command_is_as_agreed() -> None:
    """In bubblewrap's order: what comes later is mounted over what came before."""
    assert (
        argv()
        == (
            "--unshare-user --unshare-ipc --unshare-pid --unshare-net --unshare-uts --unshare-cgroup "
            "--uid 1000 --gid 1000 --hostname sandbox --disable-userns --cap-drop ALL --new-session --die-with-parent "
            "--as-pid-1 --ro-bind /skeleton / --ro-bind /at/usr /usr --ro-bind /at/host/python /opt/python "
            "--ro-bind /at/host/packages /opt/packages --proc /proc --ro-bind /proc/sys /proc/sys --dev /dev "
            "--perms 0755 --size 4096 --tmpfs /workspace --perms 1777 --size 8192 --tmpfs /tmp --remount-ro /dev "
            "--chdir /workspace --clearenv --setenv PATH /usr/bin --setenv HOME /workspace --seccomp 6 --info-fd 5 -- "
            "/opt/python/bin/python3.13 -I /run/init.pyc 7 8 9"
        ).split()
    )


def test_a_runtime_and_its_environment_follow_the_descriptors() -> None:
    """Pid 1 starts it; bubblewrap and pid 1 have none of its environment."""
    plan = replace(PLAN, program=("/opt/node/bin/node", "--", "gate"), start_environment={"PATH": "/opt", "A": "b=c"})
    assert argv(plan) == [*argv(), "--", "PATH=/opt", "A=b=c", "--", "/opt/node/bin/node", "--", "gate"]


def test_what_the_call_gave_is_in_no_argument() -> None:
    """Its environment and arguments reach the program alone."""
    plan = replace(PLAN, call_environment={"TOKEN": "s3cret"}, arguments=("s3cret",))
    assert argv(plan) == argv()


def test_nothing_of_the_host_is_mounted_writable() -> None:
    """There is no --bind and no --dev-bind, and user namespaces can neither be had inside."""
    words = set(argv())
    assert not words & {"--bind", "--dev-bind", "--bind-try", "--share-net", "--unshare-user-try"}
    assert {"--disable-userns", "--die-with-parent"} <= words


names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
numbers = st.integers(1, 1 << 40)


@given(
    st.builds(
        LaunchPlan,
        argv=st.lists(names).map(tuple),
        environment=st.dictionaries(names, names),
        read_only=st.lists(st.builds(ReadOnly, names, names)).map(tuple),
        memory_bytes=numbers,
        pids=numbers,
        call_environment=st.dictionaries(names, names),
        arguments=st.lists(names).map(tuple),
        packages=st.none() | names,
        tmpfs=st.lists(st.builds(Tmpfs, names, numbers, numbers)).map(tuple),
        rlimits=st.builds(Rlimits, numbers, numbers, numbers, st.none() | numbers),
        hostname=names,
    )
)
def test_a_plan_survives_the_way_to_the_launcher(plan: LaunchPlan) -> None:
    """As JSON, there and back."""
    assert plan_from_message(json.loads(json.dumps(plan.as_message()))) == plan
