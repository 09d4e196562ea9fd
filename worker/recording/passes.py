"""How often a row is solved by one of several answers, and by the answer that most of them give. Pure functions."""

import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from graders import final_answers
from worker.types import Group


def pass_at(answers: int, passing: int, k: int) -> float:
    """The probability that one of `k` of the answers passes, drawn without replacement.

    The unbiased estimator of pass@k: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374, eq. 1).
    """
    return 1.0 - math.comb(answers - passing, k) / math.comb(answers, k)


def final_answer(text: str, *, numeric: bool = False) -> str:
    r"""The result of an answer: its last \boxed{...}, else its last <answer>, else the line after ####, or all.

    With `numeric` the last number takes the place of all. White space and case do not count.
    """
    found = final_answers.marked_answer(text)
    if found is None and "####" in text:
        found = text.rpartition("####")[2].partition("\n")[0]
    if found is None and numeric:
        found = final_answers.final_answer(text)
    return " ".join((text if found is None else found).split()).casefold()


def majority(texts: Sequence[str], passes: Sequence[bool], *, numeric: bool = False) -> float:
    """Whether the commonest final answer passes: the share of its answers that do. With a tie, the mean of those."""
    finals = [final_answer(text, numeric=numeric) for text in texts]
    counts = Counter(finals)
    most = max(counts.values())
    return fmean(passed for final, passed in zip(finals, passes, strict=True) if counts[final] == most)


def of_validation(groups_P: Sequence[Group], pass_score: float, *, numeric: bool = False) -> dict[str, float]:
    """The metrics of a validation with several answers to each row; empty with one.

    `numeric`: a grader compares final answers as mathematics (`final_answer`).

    Rows with an answer that could not be graded are left out, because it is neither a pass nor a failure.
    """
    k = max((len(group.rollouts_G) for group in groups_P), default=0)
    if k < 2:
        return {}
    pass_1, pass_k, maj_k = [], [], []
    for group in groups_P:
        rewards_G = group.rewards_G
        if any(reward is None for reward in rewards_G):
            continue
        passes = [reward is not None and reward >= pass_score for reward in rewards_G]
        pass_1.append(pass_at(k, sum(passes), 1))
        pass_k.append(pass_at(k, sum(passes), k))
        maj_k.append(majority([one.text for one in group.rollouts_G], passes, numeric=numeric))
    if not pass_1:
        return {}
    return {
        "full_valid_pass_at_1": fmean(pass_1),
        "full_valid_pass_at_k": fmean(pass_k),
        "full_valid_maj_at_k": fmean(maj_k),
    }
