"""The control group of python graders: made where it can be, and otherwise a layer that is missing, with the reason."""

import errno
import os
from pathlib import Path

import pytest

from graders.sandbox import cgroup
from graders.sandbox.pool import Pool, SandboxLimits

ONE = "def grade(sample, item): return 1"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A hierarchy of v2, with the files that the kernel would put there."""
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids\n")
    (tmp_path / "cgroup.subtree_control").write_text("memory\n")
    return tmp_path


def test_of_v2_the_group_gets_half_the_usual_weight(tree: Path) -> None:
    folder, why = cgroup.make("0::/\n", f"cgroup2 {tree} cgroup2 rw,relatime 0 0\n")

    assert (folder, why) == (tree / cgroup.NAME, "")
    assert (tree / "cgroup.subtree_control").read_text() == "+cpu"
    assert folder is not None
    assert (folder / "cpu.weight").read_text() == "50"


def test_of_v2_a_hierarchy_without_the_controller_is_no_place(tree: Path) -> None:
    (tree / "cgroup.controllers").write_text("memory pids\n")

    folder, why = cgroup.make("0::/\n", f"cgroup2 {tree} cgroup2 rw 0 0\n")

    assert (folder, why) == (None, "no control group for processor time is mounted")
    assert not (tree / cgroup.NAME).exists()


def test_of_v1_the_group_of_the_service_gets_one_below_it(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    memberships = "9:name=systemd:/x\n4:cpu,cpuacct:/a/b\n1:memory:/c\n0::/\n"
    mounts = f"cgroup /nowhere cgroup rw,memory 0 0\ncgroup {tmp_path} cgroup rw,relatime,cpu,cpuacct 0 0\n"

    folder, why = cgroup.make(memberships, mounts)

    assert (folder, why) == (tmp_path / "a" / "b" / cgroup.NAME, "")
    assert folder is not None
    assert (folder / "cpu.shares").read_text() == "512"


def test_where_nothing_is_mounted_the_layer_is_missing() -> None:
    assert cgroup.make("0::/\n", "proc /proc proc rw 0 0\n") == (
        None,
        "no control group for processor time is mounted",
    )


def test_a_group_that_cannot_be_made_says_why_and_leaves_nothing(tree: Path) -> None:
    (tree / "cgroup.subtree_control").unlink()
    (
        tree / "cgroup.subtree_control"
    ).mkdir()  # refuses to be written, as the kernel does where processes are in it

    folder, why = cgroup.make("0::/\n", f"cgroup2 {tree} cgroup2 rw 0 0\n")

    assert (folder, why) == (None, os.strerror(errno.EISDIR))
    assert not (tree / cgroup.NAME).exists()


def test_a_group_of_a_service_above_which_systemd_delegated_nothing_is_left_alone(tree: Path) -> None:
    own = tree / "service"
    own.mkdir()
    (own / "cgroup.controllers").write_text("")

    assert cgroup.make("0::/service\n", f"cgroup2 {tree} cgroup2 rw 0 0\n")[0] is None
    assert not (tree / cgroup.NAME).exists()


@pytest.mark.slow
def test_graders_are_in_the_group_of_this_host() -> None:
    pool = Pool(SandboxLimits(wall_s=60), size=1)
    try:
        if why := pool.layers()["cgroup"]:
            pytest.skip(f"no control group can be made here: {why}")
        pool.submit(ONE, {}, {}).result()
        (zygote,) = pool.zygotes

        assert f"/{cgroup.NAME}\n" in Path(f"/proc/{zygote.process.pid}/cgroup").read_text()
    finally:
        pool.close()


def test_a_host_without_proc_has_no_group_and_says_why(tmp_path: Path) -> None:
    assert cgroup.group(tmp_path) == (None, f"{tmp_path} cannot be read: No such file or directory")


def test_a_group_that_could_not_be_made_is_tried_again(tmp_path: Path, tree: Path) -> None:
    proc = tmp_path / "proc"
    assert cgroup.group(proc)[0] is None

    proc.mkdir()
    (proc / "cgroup").write_text("0::/\n")
    (proc / "mounts").write_text(f"cgroup2 {tree} cgroup2 rw,relatime 0 0\n")

    assert cgroup.group(proc) == (tree / cgroup.NAME, "")
