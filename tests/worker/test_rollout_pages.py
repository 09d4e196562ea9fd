"""What is stored of the samples of a run, and how much of it."""

import asyncio
import io
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow.parquet as pq
import pytest

from core.database.tables import RolloutPage
from core.jobs.hyperparameters import Hyperparameters, Resolved, resolve
from core.results import rollouts
from core.results.rollout_filters import Wanted
from graders.types import ErrorKind, Grade, Sample, StepScore
from tests.fakes import EveryFourthFails, Halves, SameForAll, Skill
from tests.hyperparameters import in_groups
from tests.present import present
from tests.worker.conftest import Bench
from worker.recording.recorder import Quota
from worker.recording.rollouts import rows_of
from worker.training import contributions, grpo
from worker.training.contributions import contribution_of, divisors
from worker.types import Call, FinishReason, GradedStep, Group, ParsedAnswer, Prompt, Rollout


def stored(
    bench: Bench, step: int | None = None, split: str | None = None
) -> tuple[Sequence[RolloutPage], list[dict[str, Any]]]:
    """The pages of the job and all that is in them."""
    with bench.database.read() as session:
        pages = rollouts.pages(session, bench.claim.job_id, first_step=step, last_step=step, split=split)
    return pages, list(rollouts.find(bench.blobs, pages, Wanted()))


def settings(**advanced: Any) -> Resolved:
    asked = {"batch_size": 2, "advanced": in_groups({"group_size": 4} | advanced)}
    return resolve(Hyperparameters.model_validate(asked), rows=8, parameters=1000, context=128)


def group(
    *grades: Grade, line: int = 1, text: str = "one. two.", finish_reason: FinishReason = "stop"
) -> Group:
    rollout = Rollout((5, 6, 7), (-0.1, -0.2, -0.3), text, finish_reason)
    prompt = Prompt(line, (1, 2), {"messages": [{"role": "user", "content": "?"}], "answer": "4"})
    return Group(prompt, (rollout,) * len(grades), grades)


def scored(*scores: float) -> Group:
    return group(*(Grade(score) for score in scores))


def columns(groups: list[Any], settings: Resolved | None, *names: str) -> list[Any]:
    signals_PG = None if settings is None else contributions.answer_signals(groups, settings)
    rows = [row for rows in rows_of(1, GradedStep("train", groups, signals_PG)) for row in rows]
    return [tuple(row[name] for name in names) for row in rows]


def test_every_sample_of_a_step_is_stored_with_all_that_is_known_of_it(bench: Bench) -> None:
    bench.train()

    [page], rows = stored(bench, 1, "train")
    assert len(rows) == page.samples == page.total == 8
    assert rows[0].keys() == {"id", *rollouts.SCHEMA.names}
    assert [(row["group"], row["member"]) for row in rows] == [(g, m) for g in (0, 1) for m in range(4)]
    assert rows[0]["item"].keys() == {"answer"}
    assert rows[0]["finish_reason"] == "stop"


@pytest.mark.slow
def test_a_page_is_a_parquet_file_that_other_tools_read(bench: Bench) -> None:
    bench.train()

    [page], _ = stored(bench, 2, "valid")
    data = bench.blobs.read(page.blob_key)
    table = pq.read_table(io.BytesIO(data))
    assert page.blob_key.endswith("valid-000002.parquet")
    assert table.schema == rollouts.SCHEMA
    assert (table.num_rows, page.bytes) == (4, len(data))
    assert pq.read_metadata(io.BytesIO(data)).metadata[b"total"] == b"4"


def test_the_thought_of_an_answer_is_stored_apart(bench: Bench) -> None:
    rollout = Rollout(
        (5, 6, 7), (-0.1,) * 3, "4", "stop", reasoning="2+2", reasoning_tokens=2, grammar_start=2
    )
    prompt = Prompt(1, (1, 2), {"messages": []})
    [row] = columns(
        [Group(prompt, (rollout,), (Grade(1.0),))],
        settings(),
        "output_text",
        "output_reasoning",
        "completion_tokens",
        "reasoning_tokens",
        "grammar_start",
    )

    assert row == ("4", "2+2", 3, 2, 2)


def test_the_calls_of_an_answer_are_stored_apart(bench: Bench) -> None:
    plain = Rollout((5,), (-0.1,), "4", "stop")
    called = replace(plain, parsed=ParsedAnswer("Hm.", (Call("time", "{}"),)))
    broken = replace(plain, text="<tool_call>", parsed=ParsedAnswer("<tool_call>", error="no JSON"))
    answers = (plain, called, broken)
    prompt = Prompt(1, (1, 2), {"messages": []})

    rows = columns(
        [Group(prompt, answers, (Grade(1.0),) * 3)], None, "output_text", "output_tools", "output_tools_error"
    )

    assert rows == [
        ("4", None, None),
        ("Hm.", json.dumps(called.tool_calls), None),
        ("<tool_call>", "[]", "no JSON"),
    ]


def test_a_sample_that_could_not_be_graded_says_why_and_was_not_learned_from(bench: Bench) -> None:
    bench.train(EveryFourthFails(), skill=Skill(0.5))

    _, rows = stored(bench, split="train")
    ungraded = [row for row in rows if row["score"] is None]
    assert len(ungraded) == len(rows) / 4
    assert {(row["error"], row["trained"], row["advantage"]) for row in ungraded} == {
        ("other_error", False, None)
    }
    assert all("the judge is asleep" in row["reason"] for row in ungraded)


def test_validations_are_not_learned_from(bench: Bench) -> None:
    bench.train(skill=Skill(0.5))

    _, rows = stored(bench, split="valid")
    assert len(rows) == 12
    assert {(row["trained"], row["advantage"]) for row in rows} == {(False, None)}


def test_prompts_drawn_in_place_of_silent_ones_are_marked(bench: Bench) -> None:
    bench.train(SameForAll(0.5), advanced={"group_size": 4, "resample_prompts": 2})

    _, rows = stored(bench, 1, "train")
    assert [row["replacement"] for row in rows] == [False] * 8 + [True] * 8


# Of 1, 0, 0.5 and 0, whose mean is 0.375.
BATCH_STD = 0.171875**0.5


class TestAdvantages:
    @pytest.mark.parametrize(
        ("scale", "expected"),
        [
            ("none", [0.5, -0.5, 0.25, -0.25]),
            ("group", [1.0, -1.0, 1.0, -1.0]),
            ("batch", [0.5 / BATCH_STD, -0.5 / BATCH_STD, 0.25 / BATCH_STD, -0.25 / BATCH_STD]),
        ],
    )
    def test_they_are_scaled_as_the_job_says(self, scale: str, expected: list[float]) -> None:
        std = None if scale == "none" else "population"
        chosen = settings().model_copy(update={"advantage_scale": scale, "std": std, "kl": 0.0})

        shown = columns([scored(1.0, 0.0), scored(0.5, 0.0)], chosen, "advantage")

        assert [value for (value,) in shown] == pytest.approx(expected, rel=1e-6)

    def test_a_group_that_agrees_was_not_learned_from_unless_a_penalty_pulls_on_it(self) -> None:
        free, held = settings(kl=0.0), settings(kl=0.1)

        assert columns([scored(1.0, 1.0)], free, "trained", "advantage") == [(False, None)] * 2
        assert columns([scored(1.0, 1.0)], held, "trained", "advantage") == [(True, 0.0)] * 2

    def test_a_masked_answer_was_not_learned_from(self) -> None:
        cut = replace(scored(1.0, 0.0).rollouts_G[0], finish_reason="length")
        one = replace(scored(1.0, 0.0), rollouts_G=(cut, scored(1.0).rollouts_G[0]))

        assert [trained for (trained,) in columns([one], settings(overlong="mask"), "trained")] == [
            False,
            True,
        ]

    @pytest.mark.parametrize("scale", ["none", "group", "batch"])
    @pytest.mark.parametrize("supervision", ["outcome", "process"])
    def test_they_are_what_the_trainer_computes_with(self, scale: str, supervision: str) -> None:
        """Told twice, once for the trainer and once for people: both have to say the same."""
        std = None if scale == "none" else "sample"
        chosen = settings().model_copy(
            update={"advantage_scale": scale, "std": std, "supervision": supervision}
        )
        steps = [
            (StepScore(a, 4), StepScore(b, 9)) for a, b in ((1.0, 0.5), (0.0, 1.0), (0.25, 0.0), (1.0, 1.0))
        ]
        graded = [Grade(sum(s.score for s in pair), steps=pair) for pair in steps]
        groups = [group(*graded[:2]), group(*graded[2:])]
        shares = [contribution_of(one, chosen, lambda ids: "one. two."[: 4 * len(ids)]) for one in groups]
        _, deviation = divisors(shares, chosen)

        shown = [
            lesson.advantage
            for answer_signals in contributions.answer_signals(groups, chosen)
            for lesson in answer_signals
        ]

        computed = [
            answer.advantages_T[0] / deviation for share in shares for answer in present(share.pack).sequences
        ]
        assert shown == pytest.approx(computed)
        assert any(shown)

    def test_the_steps_of_an_answer_have_theirs(self) -> None:
        chosen = settings().model_copy(
            update={"supervision": "process", "advantage_scale": "none", "std": None, "kl": 0.0}
        )
        good = Grade(1.0, steps=(StepScore(1.0, 4), StepScore(1.0, 9)))
        bad = Grade(0.0, steps=(StepScore(1.0, 4), StepScore(0.0, 9)))

        [(first,), (second,)] = columns([group(good, bad)], chosen, "steps")

        # The mean of the four step scores is 0.75; what comes later counts for what came before.
        assert [step["advantage"] for step in first] == [0.5, 0.25]
        assert [step["advantage"] for step in second] == [-0.5, -0.75]


def test_a_multi_graders_parts_keep_their_scores_and_reasons() -> None:
    parts = {
        "close": Grade(0.5, "half"),
        "tests": Grade(None, "crashed", ErrorKind.other_error, output="boom"),
    }
    whole = Grade(None, "tests could not be judged", ErrorKind.other_error, parts)

    [row] = columns([group(whole)], None, "sub_scores", "sub_reasons", "sub_errors", "sub_outputs")

    assert row == (
        {"close": 0.5, "tests": None},
        {"close": "half", "tests": "crashed"},
        {"tests": "other_error"},
        {"tests": "boom"},
    )


def test_half_a_surrogate_pair_from_a_grader_can_be_stored() -> None:
    [[row]] = rows_of(0, GradedStep("valid", [group(Grade(1.0, "\ud83d", output="\udc00"))]))

    stored = pq.read_table(io.BytesIO(rollouts.encode([row], 1)))

    assert stored.select(["reason", "output"]).to_pylist() == [{"reason": "\ufffd", "output": "\ufffd"}]


class RamblingGrader(Halves):
    """Gives reasons that cannot be compressed."""

    async def grade(self, sample: Sample, item: Mapping[str, Any]) -> Grade:
        grade = await super().grade(sample, item)
        return Grade(grade.score, random.Random(self.seen).randbytes(300).hex())


def limited(bench: Bench, quota: Quota, grader: RamblingGrader | None = None, **options: Any) -> None:
    run = bench.run(grader, **options)
    run.recorder.quota = quota
    asyncio.run(run.train())


class TestQuota:
    def test_of_a_large_step_whole_groups_are_stored_and_the_total_is_told(self, bench: Bench) -> None:
        limited(bench, Quota(samples_per_page=9), batch_size=4)

        [page], rows = stored(bench, 1, "train")
        assert (page.samples, page.total) == (8, 16)
        assert len({row["group"] for row in rows}) == 2
        assert [row["member"] for row in rows] == [0, 1, 2, 3] * 2

    @pytest.mark.slow
    def test_the_same_validation_prompts_are_stored_each_time_and_training_draws_anew(
        self, bench: Bench
    ) -> None:
        limited(bench, Quota(samples_per_page=2), n_epochs=4, advanced={"group_size": 2})

        _, valid = stored(bench, split="valid")
        _, train = stored(bench, split="train")
        assert len({row["line"] for row in valid}) == 2
        assert {row["group"] for row in train} == {0, 1}

    def test_the_job_stays_within_its_bytes_and_its_last_step_is_shown_too(self, bench: Bench) -> None:
        quota = 7 * 7000  # a page with one of its two groups takes about 6,000 bytes

        limited(bench, Quota(bytes_per_job=quota), RamblingGrader())

        pages, rows = stored(bench)
        assert len(pages) == 7
        assert sum(page.bytes for page in pages) <= quota
        assert sum(page.samples for page in pages) < sum(page.total for page in pages)
        assert {row["step"] for row in rows} == {0, 1, 2, 3, 4}

    def test_a_page_shrinks_until_it_fits(self) -> None:
        noise = random.Random(1)
        groups = [
            rows_of(1, GradedStep("train", [group(Grade(1.0, noise.randbytes(100).hex()))]))[0]
            for _ in range(40)
        ]
        whole = rollouts.fitted(groups, most_samples=99, most_bytes=1 << 20, seed="a")
        half = rollouts.fitted(groups, most_samples=99, most_bytes=len(whole.data) - 500, seed="a")
        none = rollouts.fitted(groups, most_samples=99, most_bytes=0, seed="a")

        assert (whole.samples, none.samples) == (40, 0)
        assert 0 < half.samples < 40
        assert len(whole.data) - 1000 < len(half.data) <= len(whole.data) - 500
        assert whole.total == half.total == none.total == 40


def test_what_a_validation_comes_to_is_counted_before_anything_is_left_out(bench: Bench) -> None:
    limited(bench, Quota(samples_per_page=0))

    [page], rows = stored(bench, 0, "valid")
    assert rows == []
    assert page.summary is not None
    assert page.summary["counts"]["total"] == page.total == 4
    assert page.summary["criteria"].keys() == {"exact"}
    assert json.dumps(page.summary)


def test_centered_rewards_are_the_graders(bench: Bench) -> None:
    rewards = (1.0, 0.0, None, 0.5)
    one = group(*(Grade(r) if r is not None else Grade(None, "no", ErrorKind.other_error) for r in rewards))

    assert [value for (value,) in columns([one], settings(), "centered_reward")] == grpo.centred(rewards)
