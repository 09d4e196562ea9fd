"""Hostile graders: each tries something, something stops it, and the next grade is right."""

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from graders.sandbox.pool import Pool
from tests.graders.attacks import ATTACKS, ROOT, SECRET, Pools, run
from tests.graders.packages import USES

NOT_ROOT = os.geteuid() != 0
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is Linux's"),
]


def expected(outcome: dict[str, Any], name: str) -> None:
    attack = ATTACKS[name]
    assert outcome["kind"] in attack.kinds, outcome
    assert re.search(attack.says, outcome["reason"]), outcome["reason"]
    assert SECRET not in outcome["reason"] + outcome["output"]
    assert len(outcome["reason"]) < 5000
    printed, _, mark = outcome["output"].partition("\n... cut: ")
    assert len(printed) <= 16384
    assert len(mark) < 100


def skip_if_not_here(name: str) -> None:
    if "x32" in name and platform.machine() != "x86_64":
        pytest.skip("x32 is a thing of x86_64")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stands for where the service keeps its database. Any user may read it, so that nothing but us forbids it."""
    folder = tmp_path_factory.mktemp("service")
    folder.chmod(0o755)
    (folder / "regraft.db").write_text(SECRET)
    return folder


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    os.environ["REGRAFT_SECRET"] = SECRET
    pools = Pools()
    yield pools
    pools.close()
    del os.environ["REGRAFT_SECRET"]


@pytest.fixture(scope="module")
def pool(pools: Pools) -> Pool:
    return pools.long


@pytest.fixture(scope="module")
def ends_without_rights(folder: Path) -> Any:
    """How every attack ends if the service has no rights at all, as in a restricted pod."""
    if NOT_ROOT:
        pytest.skip("the other tests already run without rights")
    program = [sys.executable, "-m", "tests.graders.attacks", str(folder)]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_stopped_and_the_next_grade_is_right(name: str, pools: Pools, folder: Path) -> None:
    skip_if_not_here(name)
    attacked, honest = run(pools, ATTACKS[name], f"{folder}/regraft.db")

    expected(vars(attacked), name)
    assert (honest.kind, honest.score) == ("ok", 1.0)


@pytest.mark.parametrize("name", ATTACKS)
def test_a_service_without_rights_stops_it_too(name: str, ends_without_rights: dict[str, Any]) -> None:
    skip_if_not_here(name)
    attacked, honest = ends_without_rights[name]

    expected(attacked, name)
    assert (honest["kind"], honest["score"]) == ("ok", 1.0)


def test_a_service_without_rights_says_which_layers_it_has(ends_without_rights: dict[str, Any]) -> None:
    [layers] = ends_without_rights["layers"]

    held = {name for name, why_not in layers.items() if not why_not}
    assert held - {"signal_scope", "cgroup"} == {"no_new_privs", "landlock", "rlimits", "seccomp"}


def test_a_service_without_rights_leaves_no_scratch_folder_behind(
    ends_without_rights: dict[str, Any],
) -> None:
    assert ends_without_rights["left behind"] == []


@pytest.mark.parametrize("name", USES)
def test_a_service_without_rights_has_every_package(name: str, ends_without_rights: dict[str, Any]) -> None:
    [outcome] = ends_without_rights[name]

    assert (outcome["score"], outcome["reason"]) == (1.0, "")


def test_a_file_left_in_scratch_is_gone_for_the_next_grade(pool: Pool) -> None:
    source = (
        "import os\ndef grade(sample, item):\n    n = len(os.listdir('.'))\n    open('x', 'w').close()\n"
        "    os.mkdir('d', 0)\n    return n"
    )

    assert [pool.submit(source, {}, {}).result().score for _ in range(3)] == [0, 0, 0]


def test_two_sources_and_two_projects_never_share_a_process(pool: Pool) -> None:
    def serve(source: str, owner: str = "") -> set[int]:
        before = {zygote.process.pid: zygote.served for zygote in pool.zygotes}
        for _ in range(2):
            assert pool.submit(source, {}, {}, owner=owner).result().score == 1
        return {
            zygote.process.pid
            for zygote in pool.zygotes
            if zygote.served != before.get(zygote.process.pid, 0)
        }

    source = "def grade(sample, item):\n    return 1"
    mine, others, theirs = serve(source), serve(source + "\n"), serve(source, "another project")

    assert len(mine) == len(others) == len(theirs) == 1
    assert len(mine | others | theirs) == 3
