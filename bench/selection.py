"""How optimistic a verdict is, because the delivered checkpoint was chosen on the rows that it is compared on.

Simulated validations of 10 checkpoints that are no better than the base model: a fifth of the rows
goes from wrong to right or back, for each checkpoint on its own (`independent`), or the checkpoints are one policy that
drifts (`drifting`: a tenth of the rows changes from one validation to the next). The best is delivered.
`optimism` is its mean difference to the base, which is 0 in truth; `improved` the share of verdicts that say so.
"""

import random
import statistics

from bench.report import report
from bench.sizes import sized
from worker.recording.verdict import compare

CHECKPOINTS, JOBS = 10, sized(200, 4)
ROWS = sized((16, 50, 200, 1000), (16,))


def main() -> None:
    figures = {}
    for rows in ROWS:
        for name, validations in (("independent", independent), ("drifting", drifting)):
            draw = random.Random(rows)
            found = [
                compare(*job(draw, rows, validations)) for _ in range(JOBS if rows < 1000 else JOBS // 4)
            ]
            figures[f"optimism_{name}_{rows}"] = statistics.fmean(one.difference for one in found if one)
            figures[f"improved_{name}_{rows}"] = sum(one.outcome == "improved" for one in found if one) / len(
                found
            )
    report("selection", figures)


def job(draw, rows, validations):
    """The scores of the base and of the delivered checkpoint."""
    base = [float(draw.random() < 0.5) for _ in range(rows)]
    return base, max(validations(draw, base), key=statistics.fmean)


def independent(draw, base):
    return [[changed(draw, score, 0.2) for score in base] for _ in range(CHECKPOINTS)]


def drifting(draw, base):
    scores, listed = base, []
    for _ in range(CHECKPOINTS):
        scores = [changed(draw, score, 0.1) for score in scores]
        listed.append(scores)
    return listed


def changed(draw, score, chance):
    """Right becomes wrong and wrong becomes right, each with this chance: the mean stays one half."""
    return 1.0 - score if draw.random() < chance else score


if __name__ == "__main__":
    main()
