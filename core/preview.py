"""What a few answers of the base model say about a job, before it is paid for. Pure: graded answers in, a report out.

The samples of one prompt are not independent of each other, so prompts are what is counted: intervals are over them,
and shares of groups are means over them. docs/preview.md says how to read it.
"""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from core.estimates import Range, quantile
from core.statistics import student

GROUP_SIZES = (2, 4, 8, 16, 32)
EQUAL = 1e-8  # rewards this close are equal to the trainer, too
# Shares of groups with signal, of the job's own size: below the one a job is mostly waste, from the other on worth it.
HARDLY, ENOUGH = 0.1, 0.3
# Pass rates beyond which a lack of signal is one of difficulty.
NEVER, ALWAYS = 0.1, 0.9
OFTEN_CUT_OFF = 0.1
REASONS, SHOWN_LETTERS = 3, 500

Verdict = Literal[
    "good", "little_signal", "too_hard", "too_easy", "uneven", "cut_off", "grader_fails", "does_not_fit"
]


@dataclass(frozen=True)
class Answer:
    """One graded answer. `taught` is what its group compares: its score, or those of its steps; () without a grade."""

    text: str
    tokens: int  # the stop token included, as the trainer counts
    cut_off: bool
    score: float | None
    reason: str = ""
    grading_seconds: float = 0.0
    taught: tuple[float, ...] = ()


@dataclass(frozen=True)
class Prompt:
    """A row and its answers, equally many for every row."""

    line: int
    tokens: int
    answers: tuple[Answer, ...]


@dataclass(frozen=True)
class ShownPrompt:
    """A row as the report shows it: the rewards (null: not graded), and the first answer, cut at 500 characters."""

    line: int
    tokens: int
    rewards: list[float | None]
    answer: str


@dataclass(frozen=True)
class Signal:
    """The share of groups of one size whose rewards would not all be equal.

    `at_least`: there were fewer samples than members, so the share is that of groups as large as there were samples.
    """

    group_size: int
    share: Range
    at_least: bool


@dataclass(frozen=True)
class Spread:
    """Of numbers, such as tokens or seconds."""

    mean: float
    p90: float
    max: float


@dataclass(frozen=True)
class Grading:
    """How the grader did. Seconds are of one grade among others under way, as in a job."""

    failed: int
    reasons: list[str]  # the commonest first, three at most
    seconds: Spread
    tokens: int  # that judges read and wrote


@dataclass(frozen=True)
class Sampling:
    """How fast the inference server answered, without loading the model."""

    seconds: float
    tokens_per_second: float


@dataclass(frozen=True)
class Report:
    """Shares are from 0 to 1, ranges have 95 % of what is plausible between `low` and `high`."""

    prompts: list[ShownPrompt]
    answers: int
    passed: int
    pass_threshold: float
    pass_rate: Range | None  # of the graded answers; None: there is none
    mean_reward: float | None
    signal: list[Signal]
    prompt_tokens: Spread
    completion_tokens: Spread
    cut_off: int
    grading: Grading
    sampling: Sampling
    verdict: Verdict
    recommendation: str


def report(
    prompts: Sequence[Prompt],
    *,
    group_size: int,
    max_completion_tokens: int,
    context: int,
    pass_threshold: float,
    sampling_seconds: float,
    grader_tokens: int = 0,
) -> Report:
    """Sum up. `group_size` and `max_completion_tokens` are the job's, `context` the model's, in tokens."""
    answers = [answer for prompt in prompts for answer in prompt.answers]
    scores_P = [[one.score for one in prompt.answers if one.score is not None] for prompt in prompts]
    scores = [score for scores_N in scores_P for score in scores_N]
    passed_P = [sum(score >= pass_threshold for score in scores_N) for scores_N in scores_P]
    reasons = Counter(answer.reason for answer in answers if answer.score is None)
    made = Report(
        prompts=[_shown(prompt) for prompt in prompts],
        answers=len(answers),
        passed=sum(passed_P),
        pass_threshold=pass_threshold,
        pass_rate=interval(passed_P, list(map(len, scores_P))) if scores else None,
        mean_reward=statistics.fmean(scores) if scores else None,
        signal=[signal(prompts, size) for size in sorted({*GROUP_SIZES, group_size})],
        prompt_tokens=spread([prompt.tokens for prompt in prompts]),
        completion_tokens=spread([answer.tokens for answer in answers]),
        cut_off=sum(answer.cut_off for answer in answers),
        grading=Grading(
            failed=reasons.total(),
            reasons=[reason for reason, _ in reasons.most_common(REASONS)],
            seconds=spread([answer.grading_seconds for answer in answers]),
            tokens=grader_tokens,
        ),
        sampling=Sampling(
            seconds=sampling_seconds,
            tokens_per_second=sum(answer.tokens for answer in answers) / max(sampling_seconds, 1e-9),
        ),
        verdict="good",
        recommendation="",
    )
    verdict, advice = advise(made, group_size, max_completion_tokens, context - max_completion_tokens)
    return replace(made, verdict=verdict, recommendation=advice)


def advise(made: Report, group_size: int, longest: int, room: int) -> tuple[Verdict, str]:
    """What to do about a job with groups of `group_size`; answers may have `longest` tokens, prompts `room`."""
    too_long = [prompt for prompt in made.prompts if prompt.tokens > room]
    if too_long:
        return "does_not_fit", (
            f"{len(too_long)} of {len(made.prompts)} prompts leave no room for an answer of {longest} tokens (line "
            f"{too_long[0].line} has {too_long[0].tokens}, {room} fit), so the job would fail. Lower "
            "max_completion_tokens or shorten these prompts."
        )
    failed = made.grading.failed
    if failed > made.answers / 2:
        return "grader_fails", (
            f"{failed} of {made.answers} answers could not be graded, most often: {made.grading.reasons[0]} Make the "
            "grader take such answers first."
        )
    [mine] = [one for one in made.signal if one.group_size == group_size]
    verdict, advice = _by_signal(made, mine)
    notes = []
    if made.cut_off > OFTEN_CUT_OFF * made.answers:
        notes.append(f"{made.cut_off} answers are cut off at {longest} tokens.")
    if failed:
        notes.append(f"{failed} answers could not be graded: {made.grading.reasons[0]}")
    share = f"{_percent(mine.share['expected'])} of the groups of {group_size}"
    found = (
        f"{made.passed} of {made.answers} answers pass, and {'at least ' * mine.at_least}{share} have signal"
    )
    return verdict, " ".join([f"{found}: {advice}", *notes])


def _by_signal(made: Report, mine: Signal) -> tuple[Verdict, str]:
    share = mine.share["expected"]
    if share >= ENOUGH:
        return "good", "there is something to learn."
    kind, advice = _by_difficulty(made)
    if share < HARDLY:
        return kind, f"there is next to nothing to learn. {advice}"
    largest = max((one for one in made.signal if not one.at_least), key=lambda one: one.share["expected"])
    larger = f"In groups of {largest.group_size} it would be {_percent(largest.share['expected'])}. "
    return "little_signal", (
        "most of the job would be spent on answers that teach nothing. "
        + (larger if largest.share["expected"] > share else "")
        + advice
    )


def _by_difficulty(made: Report) -> tuple[Verdict, str]:
    """Why the answers to a prompt are worth the same, and what to do about it."""
    passing = made.passed / (made.answers - made.grading.failed)
    if passing >= ALWAYS:
        return "too_easy", "Take harder prompts, or a stricter grader."
    if made.cut_off > made.answers / 2:
        return "cut_off", "Raise max_completion_tokens, or ask for shorter answers in the prompt."
    if passing <= NEVER:
        return "too_hard", (
            "Make the task easier, put an example into the prompt, let the grader give credit for parts of an answer, "
            "or take a larger model."
        )
    return "uneven", (
        "Prompts are solved always or never: take those in between, or let the grader tell better answers from worse "
        "ones."
    )


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def signal(prompts: Sequence[Prompt], group_size: int) -> Signal:
    """The expected share of groups with signal, over prompts."""
    samples = len(prompts[0].answers)
    size = min(group_size, samples)
    shares_P = [with_signal([answer.taught for answer in prompt.answers], size) for prompt in prompts]
    return Signal(group_size, interval(shares_P, [1] * len(prompts)), at_least=group_size > samples)


def with_signal(taught_N: Sequence[Sequence[float]], group_size: int) -> float:
    """The chance that the rewards of a group of `group_size` answers to one prompt are not all equal, unbiased.

    It is the share of those among all groups that can be drawn out of the N samples without putting one back: an
    average over groups of that very size, so its expectation is the chance itself. For k of N samples right it is
    1 - (C(k, G) + C(N - k, G)) / C(N, G); 1 - p^G - (1 - p)^G with k / N for p is too low. No such average exists for
    groups larger than N.

    An answer teaches the values in `taught_N`: its reward, several rewards if it was judged by steps, none without a
    grade. A group without signal holds any answers that teach nothing, and beside them only one and the same value.
    """
    values = Counter(_alike([value for taught in taught_N if (value := _only_value(taught)) is not None]))
    nothing = sum(not taught for taught in taught_N)
    silent = math.comb(nothing, group_size) + sum(
        math.comb(count + nothing, group_size) - math.comb(nothing, group_size) for count in values.values()
    )
    return 1.0 - silent / math.comb(len(taught_N), group_size)


def interval(hits_P: Sequence[float], trials_P: Sequence[int]) -> Range:
    """Wilson's interval (1927) for the share of hits among trials that come in clusters, one for each prompt.

    The variance is that of a ratio between clusters (Cochran 1977, eq. 6.13), and becomes the number of independent
    trials with the same variance (Kish 1965): never more than there were trials, nor fewer than there were prompts.
    Where all trials agree, nothing tells how alike those of a prompt are, so only prompts count. The quantile is
    Student's, as there are few of them.
    """
    clusters = [(hits, trials) for hits, trials in zip(hits_P, trials_P, strict=True) if trials]
    trials, prompts = sum(trials for _, trials in clusters), len(clusters)
    share = sum(hits for hits, _ in clusters) / trials
    effective = float(prompts)
    if prompts > 1 and 0 < share < 1:
        squares = sum((hits - share * trials) ** 2 for hits, trials in clusters)
        variance = prompts / (prompts - 1) * squares / trials**2
        independent = share * (1 - share) / variance if variance else math.inf
        effective = min(float(trials), max(effective, independent))
    z = student(max(1, prompts - 1))
    middle = (share + z * z / (2 * effective)) / (1 + z * z / effective)
    half = (
        z / (1 + z * z / effective) * math.sqrt(share * (1 - share) / effective + (z / (2 * effective)) ** 2)
    )
    return {"low": max(0.0, middle - half), "expected": share, "high": min(1.0, middle + half)}


def spread(values: Sequence[float]) -> Spread:
    return Spread(mean=statistics.fmean(values), p90=quantile(values, 0.9), max=max(values))


def mean_lengths(prompts: Sequence[Prompt]) -> list[float]:
    """Tokens of an answer, by prompt."""
    return [statistics.fmean(answer.tokens for answer in prompt.answers) for prompt in prompts]


def _only_value(taught: Sequence[float]) -> float | None:
    """The one value that an answer teaches; None if there are several, or none."""
    return taught[0] if taught and max(taught) - min(taught) <= EQUAL else None


def _alike(values: Sequence[float]) -> list[float]:
    """The values, those that are equal but for rounding as the smallest of them."""
    alike: list[float] = []
    for value in sorted(values):
        alike.append(alike[-1] if alike and value - alike[-1] <= EQUAL else value)
    return alike


def _shown(prompt: Prompt) -> ShownPrompt:
    rewards = [answer.score for answer in prompt.answers]
    return ShownPrompt(prompt.line, prompt.tokens, rewards, prompt.answers[0].text[:SHOWN_LETTERS])
