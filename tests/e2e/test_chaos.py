"""The small form of bench/chaos.py: every kind of work, and every fault that all kinds of work meet."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers import SeaweedFS

ROOT = Path(__file__).parents[2]
NONE_OF = (
    "lost",
    "unequal_adapters",
    "duplicate_steps",
    "ran_twice_at_once",
    "orphans",
    "created_twice",
    "pipelines_failed",
    "pipelines_with_wrong_rows",
    "eval_runs_failed",
    "eval_items_lost",
    "eval_items_twice",
    "regrades_failed",
    "batches_failed",
    "batch_answers_lost",
    "batch_answers_twice",
    "previews_failed",
    "audits_failed",
)


@pytest.mark.slow
@pytest.mark.thorough  # test_failover.py, core/test_outages.py and the tests of each part are always run
@pytest.mark.timeout(1800)  # two minutes on an idle machine
@pytest.mark.skipif(SeaweedFS.find() is None, reason="SeaweedFS is not installed")
def test_no_work_is_lost_or_done_twice_or_failed_by_outages_and_kills() -> None:
    chaos = subprocess.run(
        [sys.executable, "-m", "bench.chaos", "--small"], cwd=ROOT, capture_output=True, text=True
    )

    assert chaos.returncode == 0, chaos.stderr[-5000:]
    figures = json.loads(chaos.stdout.splitlines()[-1])["figures"]
    assert {name: figures[name] for name in NONE_OF} == dict.fromkeys(NONE_OF, 0)
    assert figures["pipelines"] == figures["eval_runs"] == figures["regrades"] == figures["batches"] > 0
    assert figures["previews"] == figures["audits"] == figures["pipelines"]
    assert figures["kills_in_validation"] > 0
    assert (
        sum(count for name, count in figures.items() if name.startswith("kills_in_"))
        > figures["kills_in_validation"]
    )
