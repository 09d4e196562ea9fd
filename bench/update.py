"""Count what the update of a micro-batch writes and reads on a GPU: the head, one layer with adapters, the model.

A micro-batch of 2,048 tokens of Llama 3 8B in bfloat16 with an adapter of rank 16: a prompt and 8 answers. The pass
runs on tensors without data (bench/roofline.py), forward and backward. `PART_written_gib` and `PART_read_gib` are the
bytes that its operations write and read; `PART_operations` how many a GPU launches; `PART_teraflops` their products and
attention; `PART_seconds` their time at the rates that bench/roofline.py assumes of kernels. The parts: `head`, from
hidden states to log-probabilities and entropy; `layer`, one inside the model; `update`, the whole model.
"""

from dataclasses import dataclass

from bench.long import group
from bench.report import report
from bench.roofline import MODELS, Counted, count, count_head, llama, trainer
from bench.sizes import sized
from core.units import GIB

ANSWER = sized(225, 17)
CONFIG = sized(MODELS["8b"], llama(1000, 256, 512, layers=2, heads=4, key_heads=2))


@dataclass(frozen=True)
class Sums:
    written: float  # bytes
    read: float  # bytes
    operations: float
    flops: float
    seconds: float

    @classmethod
    def of(cls, counted: Counted) -> "Sums":
        return cls(counted.written, counted.read, counted.operations, counted.total, counted.expected_seconds)

    def plus(self, other: "Sums", times: float) -> "Sums":
        return Sums(
            self.written + times * other.written,
            self.read + times * other.read,
            self.operations + times * other.operations,
            self.flops + times * other.flops,
            self.seconds + times * other.seconds,
        )

    def figures(self, part: str) -> dict[str, float]:
        return {
            f"{part}_written_gib": self.written / GIB,
            f"{part}_read_gib": self.read / GIB,
            f"{part}_operations": self.operations,
            f"{part}_teraflops": self.flops / 1e12,
            f"{part}_seconds": self.seconds,
        }


def with_layers(layers: int) -> Sums:
    """Of the model with this many layers."""
    config = type(CONFIG)(**CONFIG.to_dict() | {"num_hidden_layers": layers})
    counted = Counted()
    count(trainer(config, "packed"), [group(ANSWER)], counted)
    return Sums.of(counted)


def head() -> Sums:
    config = type(CONFIG)(**CONFIG.to_dict() | {"num_hidden_layers": 1})
    counted = Counted()
    count_head(trainer(config, "packed"), [group(ANSWER)], counted)
    return Sums.of(counted)


def main() -> None:
    first, second = with_layers(1), with_layers(2)
    layer = second.plus(first, -1)
    update = first.plus(layer, CONFIG.num_hidden_layers - 1)
    report("update", head().figures("head") | layer.figures("layer") | update.figures("update"))


if __name__ == "__main__":
    main()
