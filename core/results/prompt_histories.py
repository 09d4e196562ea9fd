"""Rewards of each prompt over the steps of a job: what was learned, forgotten, or stays unsolved.

An aggregate of line x step: clients need not load the samples themselves. "Forgotten" is used as in
Toneva et al. 2019, "An Empirical Study of Example Forgetting during Deep Neural Network Learning": solved before, and
not any more.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from core.database.tables import RolloutPage
from core.results import rollouts
from core.results.rollout_filters import Wanted
from core.results.rollouts import Matches, OpenPage
from core.rewards import equal
from core.storage.store import BlobStore

Outcome = Literal["learned", "kept", "forgotten", "stuck", "ungraded"]
OUTCOMES: tuple[Outcome, ...] = ("learned", "kept", "forgotten", "stuck", "ungraded")
Reason = Literal["cut", "no_signal", "rising"]
SortKey = Literal["line", "change", "last_mean"]
SHOWN_CHARACTERS = 200
_CELLS = pa.schema(
    [
        ("line", pa.int32()),
        ("step", pa.int32()),
        ("mean", pa.float64()),
        ("samples", pa.int64()),
        ("lowest", pa.float64()),
        ("highest", pa.float64()),
        ("graded", pa.int64()),
        ("cut", pa.int64()),
    ]
)
Cell = tuple[int, int, float | None, int, float | None, float | None, int, int]


@dataclass(frozen=True)
class PromptHistory:
    """One line of the dataset file: of each step with samples of it, the mean reward (None: all ungraded)."""

    line: int
    steps: Sequence[int]
    means: Sequence[float | None]
    samples: Sequence[int]
    outcome: Outcome
    reason: Reason | None = None  # why it is not solved, as far as the answers say
    counted_step: int | None = (
        None  # the last step that `outcome`, `last_mean` and `change` count; None: all steps
    )

    @property
    def first_mean(self) -> float | None:
        return next((mean for mean in self.means if mean is not None), None)

    @property
    def last_mean(self) -> float | None:
        counted = reversed(_counted(self.steps, self.means, self.counted_step))
        return next((mean for mean in counted if mean is not None), None)

    @property
    def change(self) -> float | None:
        """The last mean minus the first."""
        first, last = self.first_mean, self.last_mean
        return None if first is None or last is None else last - first


def _counted(
    steps: Sequence[int], means: Sequence[float | None], last_step: int | None
) -> Sequence[float | None]:
    """The means of the steps up to `last_step`."""
    return [mean for step, mean in zip(steps, means, strict=True) if last_step is None or step <= last_step]


def outcome_of(means: Iterable[float | None], threshold: float) -> Outcome:
    """Classify a prompt by the steps whose mean reward is at least `threshold`.

    learned: the last one is, the first is not. kept: the last and the first are. forgotten: the last is not, an earlier
    one is. stuck: none is. ungraded: no sample has a score.
    """
    solved = [mean >= threshold for mean in means if mean is not None]
    if not solved:
        return "ungraded"
    if solved[-1]:
        return "kept" if solved[0] else "learned"
    return "forgotten" if any(solved) else "stuck"


def reason_of(cells: Sequence[Cell], outcome: Outcome) -> Reason | None:
    """The reason for stuck or forgotten, as far as the answers say: the first of these that holds.

    cut: at least half of its answers at the last step ended at the token limit. no_signal: it had several graded
    answers at some step, and at no step answers of different scores. rising: it is stuck, and the last mean reward is
    above the first.
    """
    if outcome not in ("stuck", "forgotten"):
        return None
    *_, samples, _, _, _, cut = cells[-1]
    if 2 * cut >= samples:
        return "cut"
    ranges = [(low, high) for *_, low, high, graded, _ in cells if graded > 1]
    if ranges and all(equal(low or 0.0, high or 0.0) for low, high in ranges):
        return "no_signal"
    if outcome != "stuck":
        return None
    means = [mean for _, _, mean, *_ in cells if mean is not None]
    return "rising" if means[-1] > means[0] and not equal(means[-1], means[0]) else None


def histories(
    blobs: BlobStore,
    pages: Sequence[RolloutPage],
    threshold: float,
    *,
    line: int | None = None,
    counted_step: int | None = None,
) -> list[PromptHistory]:
    """The history of every line or of one, by line. Only three columns of the samples are read.

    Steps after `counted_step` are in the history, and do not change its outcome.
    """
    cells = [_CELLS.empty_table(), *rollouts.map_pages(blobs, pages, Wanted(line=line), _cells)]
    whole = pa.concat_tables(cells)
    whole = whole.take(pc.sort_indices(whole, sort_keys=[("line", "ascending"), ("step", "ascending")]))
    columns = zip(*(whole[name].to_pylist() for name in _CELLS.names), strict=True)
    return [
        _history(line, list(of_line), threshold, counted_step)
        for line, of_line in groupby(columns, lambda cell: cell[0])
    ]


def _cells(opened: OpenPage, matches: Matches) -> pa.Table:
    """The cells of a step: one for each line with samples."""
    if not matches:
        return _CELLS.empty_table()
    parts = [(opened.part(number, ["line", "score", "finish_reason"]), mask) for number, mask in matches]
    samples = pa.concat_tables(table if mask is None else table.filter(mask) for table, mask in parts)
    samples = samples.append_column("cut", pc.equal(samples["finish_reason"], "length").cast(pa.int64()))
    scores = [("score", of) for of in ("mean", "min", "max", "count")]
    table = samples.group_by("line", use_threads=False).aggregate(
        [*scores, ([], "count_all"), ("cut", "sum")]
    )
    table = table.rename_columns(
        {
            "score_mean": "mean",
            "score_min": "lowest",
            "score_max": "highest",
            "score_count": "graded",
            "count_all": "samples",
            "cut_sum": "cut",
        }
    )
    table = table.append_column("step", pa.repeat(pa.scalar(opened.page.step, pa.int32()), table.num_rows))
    return table.select(_CELLS.names).cast(_CELLS)


def _history(
    line: int,
    cells: Sequence[Cell],
    threshold: float,
    counted_step: int | None,
) -> PromptHistory:
    steps, means, samples = zip(*(cell[1:4] for cell in cells), strict=True)
    outcome = outcome_of(_counted(steps, means, counted_step), threshold)
    counted = [cell for cell in cells if counted_step is None or cell[1] <= counted_step]
    return PromptHistory(line, steps, means, samples, outcome, reason_of(counted, outcome), counted_step)


def outcomes(found: Iterable[PromptHistory]) -> dict[Outcome, int]:
    """The number of prompts by outcome."""
    counts = Counter(history.outcome for history in found)
    return {outcome: counts[outcome] for outcome in OUTCOMES}


def ordered(found: Iterable[PromptHistory], by: SortKey, *, descending: bool) -> list[PromptHistory]:
    """Sorted by a key and then by line; prompts without a graded sample come last."""
    known = [history for history in found if getattr(history, by) is not None]
    unknown = [history for history in found if getattr(history, by) is None]
    known.sort(key=lambda history: getattr(history, by), reverse=descending)
    return known + unknown


def texts(
    blobs: BlobStore, pages: Sequence[RolloutPage], wanted: Mapping[int, int]
) -> Mapping[int, str | None]:
    """The first characters of the last message of each prompt, by line.

    Args:
        wanted: a step with answers to the prompt, by its line.
    """
    lines: dict[int, set[int]] = {}
    for line, step in wanted.items():
        lines.setdefault(step, set()).add(line)

    def read(opened: OpenPage, matches: Matches) -> dict[int, str | None]:
        found: dict[int, str | None] = {}
        for number, _ in matches:
            table = opened.part(number, ["line", "messages"])
            mask = pc.is_in(table["line"], pa.array(sorted(lines[opened.page.step]), pa.int32()))
            for row in table.filter(mask).to_pylist():
                if row["line"] not in found:
                    found[row["line"]] = _last_message_text(row["messages"])
        return found

    first = [page for page in pages if page.step in lines]
    return {
        line: text
        for found in rollouts.map_pages(blobs, first, Wanted(), read)
        for line, text in found.items()
    }


def _last_message_text(messages: str | None) -> str | None:
    return last_message_text(json.loads(messages) if messages else None, SHOWN_CHARACTERS)


def last_message_text(messages: Any, most: int) -> str | None:
    """The first `most` characters of the text of the last message; None without one."""
    if not messages:
        return None
    content = messages[-1].get("content")
    if isinstance(content, list):
        content = " ".join(part["text"] for part in content if isinstance(part.get("text"), str))
    return content[:most] if isinstance(content, str) else None
