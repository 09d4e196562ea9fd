"""Statistics of runs, the comparison of two, and gates."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError, OpenAI
from openai.types.evals.run_create_response import RunCreateResponse
from regraft.resources.evals import InvalidGate
from regraft.sync.evals import Evals

from core.evals import summary
from tests.evals.conftest import EXACT, House, completions, row


def item(question: str, passed: bool | None, score: float | None = None) -> dict[str, Any]:
    status = {True: "pass", False: "fail", None: "error"}[passed]
    value = score if score is not None else None if passed is None else float(passed)
    return {
        "datasource_item": {"question": question},
        "status": status,
        "results": [{"name": "exact", "passed": bool(passed), "score": value}],
    }


def test_the_standard_error_of_a_rate() -> None:
    assert summary.rate(3, 4)["standard_error"] == pytest.approx(math.sqrt(0.75 * 0.25 / 3))
    assert summary.rate(1, 1) == {"pass_rate": 1.0, "standard_error": None}
    assert summary.rate(0, 0) == {"pass_rate": None, "standard_error": None}


def test_a_summary_counts_scores_and_tokens() -> None:
    counts = summary.empty(["exact"])
    for one in (item("a", True, 1.0), item("b", False, 0.0), item("c", None)):
        summary.add_item(counts, one)
    summary.add_usage(counts, "judge", {"prompt_tokens": 3, "completion_tokens": 2}, judge=True)

    [result] = summary.criteria_results(counts)
    assert summary.result_counts(counts) == {"total": 3, "passed": 1, "failed": 1, "errored": 1}
    assert (result["mean_score"], result["errored"]) == (0.5, 1)
    assert result["mean_score_standard_error"] == pytest.approx(0.5)
    assert counts["models"]["judge"]["total_tokens"] == 5


def test_rows_pair_by_their_content_and_not_by_their_order() -> None:
    first = [item("a", False), item("b", False), item("c", True), item("only here", True)]
    second = [item("c", True), item("b", True), item("a", False)]

    compared = summary.compare(first, second)

    passed = compared["passed"]
    assert (compared["rows"], compared["unpaired"]) == (3, 1)
    assert (passed["wins"], passed["losses"], passed["ties"]) == (1, 0, 2)
    assert passed["difference"] == pytest.approx(1 / 3)
    # t(0.975, 2) = 4.303, and the standard error of (0, 1, 0) is 1/3.
    assert passed["ci_high"] == pytest.approx(1 / 3 + 4.3027 / 3, abs=1e-3)


def test_what_cannot_be_graded_is_left_out() -> None:
    compared = summary.compare([item("a", True), item("b", True)], [item("a", None), item("b", False)])

    assert compared["passed"]["ungraded"] == 1
    assert compared["passed"]["difference"] == -1.0
    assert compared["passed"]["ci_low"] is None


def two_runs(client: OpenAI, new_eval: Callable[..., Any], house: House) -> tuple[Any, ...]:
    made = new_eval(EXACT)
    runs = []
    for wrong in (5, 0):
        content = [row(number, "x" if number < wrong else None) for number in range(20)]
        # The answer is in the row, so both runs have the same rows only where they agree.
        sampled = [
            {
                "item": {"question": f"q{n}", "answer": "yes"},
                "sample": {"output_text": "no" if n < wrong else "yes"},
            }
            for n, _ in enumerate(content)
        ]
        source: Any = {"type": "jsonl", "source": {"type": "file_content", "content": sampled}}
        runs.append(client.evals.runs.create(made.id, data_source=source).id)
    house.work()
    return made.id, *runs


def test_two_runs_are_compared(client: OpenAI, new_eval: Callable[..., Any], house: House) -> None:
    eval_id, first, second = two_runs(client, new_eval, house)

    compared: Any = client.get(f"/regraft/evals/{eval_id}/compare?runs={first},{second}", cast_to=object)

    passed = compared["passed"]
    assert (compared["rows"], passed["first"], passed["second"]) == (20, 0.75, 1.0)
    assert (passed["wins"], passed["losses"], passed["ties"]) == (5, 0, 15)
    assert passed["ci_low"] > 0
    assert compared["criteria"]["exact"]["difference"] == 0.25


def test_runs_of_different_evals_cannot_be_compared(
    client: OpenAI, new_eval: Callable[..., Any], house: House
) -> None:
    eval_id, first, _ = two_runs(client, new_eval, house)
    other = new_eval()
    foreign = client.evals.runs.create(other.id, data_source=completions(1)).id

    with pytest.raises(
        BadRequestError, match=f"{foreign} is a run of {other.id}, not of {eval_id}"
    ) as refused:
        client.get(f"/regraft/evals/{eval_id}/compare?runs={first},{foreign}", cast_to=object)
    assert refused.value.param == "runs"
    with pytest.raises(NotFoundError) as unknown:
        client.get(f"/regraft/evals/{eval_id}/compare?runs={first},evalrun_none", cast_to=object)
    assert unknown.value.param == "runs"
    with pytest.raises(BadRequestError, match="two run ids"):
        client.get(f"/regraft/evals/{eval_id}/compare?runs={first}", cast_to=object)


def test_a_gate_passes_a_good_run_and_names_why_another_fails(
    client: OpenAI, new_eval: Callable[..., Any], house: House
) -> None:
    eval_id, worse, better = two_runs(client, new_eval, house)
    evals = Evals(client)

    assert evals.gate(eval_id, better, min_pass_rate=0.9, baseline=worse).passed
    failed = evals.gate(eval_id, worse, min_pass_rate=0.9, baseline=better)
    assert not failed.passed
    assert len(failed.reasons) == 2
    assert "0.750" in failed.reasons[0]
    assert evals.gate(eval_id, worse, baseline=better, max_drop=0.3).passed


def test_a_gate_fails_a_run_without_a_grade_and_one_with_too_many_errors(
    client: OpenAI, new_eval: Callable[..., Any], house: House
) -> None:
    made = new_eval()
    house.foreign.fails.update(["q0", "q1"])
    none, some = (
        client.evals.runs.create(made.id, data_source=completions(count, model="gpt-foreign")).id
        for count in (2, 4)
    )
    house.work()
    evals = Evals(client)

    assert evals.gate(made.id, none, allow_errors=2).reasons == ["no item is graded"]
    assert evals.gate(made.id, some).reasons == ["2 items could not be sampled or graded"]
    assert evals.gate(made.id, some, allow_errors=2).passed


def test_a_run_in_progress_does_not_pass(client: OpenAI, new_eval: Callable[..., Any], house: House) -> None:
    run = client.evals.runs.create(new_eval().id, data_source=completions(2))

    assert evals_reasons(client, run) == ["the run is queued", "no item is graded"]
    client.evals.runs.cancel(run.id, eval_id=run.eval_id)
    assert evals_reasons(client, run) == ["the run is canceled", "no item is graded"]


def evals_reasons(client: OpenAI, run: RunCreateResponse) -> list[str]:
    return Evals(client).gate(run.eval_id, run.id).reasons


@pytest.mark.parametrize(
    "wrong",
    [{"min_pass_rate": 80}, {"min_pass_rate": math.nan}, {"max_drop": 0.1}, {"allow_errors": -1}],
    ids=str,
)
def test_a_gate_that_decides_nothing_is_refused(client: OpenAI, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidGate):
        Evals(client).gate("eval_1", "evalrun_1", **wrong)
