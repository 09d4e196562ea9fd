"""Long answers: what the trainer computes for them beyond what is necessary, and what it keeps.

`flop_overhead_FORWARD_TOKENS`: executed over necessary FLOPs of a group of 8 answers to a prompt of 256 tokens, Llama 3
8B in bfloat16, in micro-batches as a GPU has them. `saved_bytes_per_token_TOKENS`: what autograd keeps of a token.
`seconds_bound_MODEL` and `peak_share_MODEL`: the least time of one micro-batch of 2,048 tokens on an H100 SXM at its
published peaks, and the share of the peak that the necessary FLOPs have in that time. `expected_share_MODEL`: the same
share at the rates that bench/roofline.py assumes of kernels. `squared_tensors`: tensors with as many elements as a
micro-batch of one answer of 32,768 tokens has pairs. Nothing here ran on a GPU: see bench/roofline.py.
"""

from collections.abc import Iterable

from bench.report import report
from bench.roofline import MODELS, PUBLISHED, Counted, count, necessary, trainer
from bench.sizes import sized
from core.units import GIB
from worker.model.batch import micro_batches, row_width
from worker.training.policy_loss import PolicyLoss
from worker.types import Pack, TrainingSequence

PROMPT, GROUP = 256, 8
LENGTHS = sized((2048, 8192, 32_768), (256,))
BUDGET = 8192  # tokens of a micro-batch, unless one answer has more
FORWARDS = ("packed", "rows")


def group(length: int, answers: int = GROUP, prompt: int = PROMPT) -> Pack:
    answer = TrainingSequence((5,) * length, (0.0,) * length, (1.0,) * length, 1.0)
    return Pack((5,) * prompt, (answer,) * answers)


def count_all(gradient: PolicyLoss, batches: Iterable[list[Pack]]) -> Counted:
    """Counts each shape of a micro-batch once."""
    total, of_shape = Counted(), dict[tuple[tuple[int, int], ...], Counted]()
    for packs in batches:
        shape = tuple((pack.tokens, len(pack.sequences)) for pack in packs)
        if shape not in of_shape:
            of_shape[shape] = Counted()
            count(gradient, packs, of_shape[shape])
        found = of_shape[shape]
        total.flops.update(found.flops)
        total.seconds += found.seconds
        total.tokens += found.tokens
        total.saved = max(total.saved, found.saved)
        total.largest = max(total.largest, found.largest)
        total.squared += found.squared
    return total


def main() -> None:
    figures: dict[str, float] = {}
    for forward in FORWARDS:
        gradient = trainer(MODELS["8b"], forward)
        for length in LENGTHS:
            whole = group(length)
            budget = max(BUDGET, row_width(PROMPT + length, "meta"))
            counted = count_all(gradient, micro_batches([whole], budget, "meta", rows=forward == "rows"))
            least = necessary(gradient, PROMPT, [length] * GROUP)
            figures[f"flop_overhead_{forward}_{length}"] = counted.total / least
            if forward == "packed":
                one = Counted()
                count(gradient, [group(length, answers=1)], one)
                figures[f"saved_bytes_per_token_{length}"] = one.saved / one.tokens
                figures["squared_tensors"] = (
                    one.squared
                )  # of the longest: only there is the square the larger
    for name, config in MODELS.items():
        gradient = trainer(config, "packed")
        one = Counted()
        answers = [224] * 8
        count(gradient, [group(225, answers=8)], one)
        figures[f"seconds_bound_{name}"] = one.seconds
        least = necessary(gradient, PROMPT, answers)
        figures[f"peak_share_{name}"] = least / one.seconds / PUBLISHED.bf16
        figures[f"expected_share_{name}"] = least / one.expected_seconds / PUBLISHED.bf16
        figures[f"saved_gib_{name}"] = one.saved / GIB
    report("long", figures)


if __name__ == "__main__":
    main()
