"""How many answers of a group share a row on a CPU: as many as cost the fewest FLOPs."""

from collections.abc import Callable

import pytest
import torch

from core.jobs.hyperparameters import Hyperparameters, resolve
from graders.types import Grade
from tests.fakes import WatchedGradient, learn
from worker.model.batch import RowCost, cheapest_parts, micro_batches
from worker.model.policy import Policy, Route
from worker.training.row_cost import row_cost
from worker.training.trainer import PeftTrainer
from worker.types import Group, Pack, Prompt, Rollout, TrainingSequence

SETTINGS = resolve(
    Hyperparameters.model_validate({"advanced": {"optimizer": {"learning_rate": 0.01, "step_kl": 0}}}),
    rows=8,
    parameters=1000,
    context=128,
)
COST = RowCost(token=4, pair=1)


def pack(prompt: int, *answers: int) -> Pack:
    """Of lengths in tokens that are read: the last of an answer is not."""
    return Pack(
        (5,) * prompt,
        tuple(TrainingSequence((5,) * (n + 1), (0.0,) * (n + 1), (1.0,) * (n + 1), 1.0) for n in answers),
    )


def answers_in(parts: list[Pack]) -> list[int]:
    return [len(part.sequences) for part in parts]


class TestDivision:
    def test_a_row_costs_its_tokens_and_the_pairs_of_them(self) -> None:
        assert COST.flops(10) == 4 * 10 + 10 * 10

    def test_long_answers_to_a_short_prompt_have_a_row_each(self) -> None:
        """Together 10 tokens, 40 + 100; apart twice 6, 24 + 36 each."""
        assert answers_in(cheapest_parts(pack(2, 4, 4), 99, COST)) == [1, 1]

    def test_short_answers_to_a_long_prompt_share_it(self) -> None:
        """Together 12 tokens, 48 + 144; apart twice 11, 44 + 121 each."""
        assert answers_in(cheapest_parts(pack(10, 1, 1), 99, COST)) == [2]

    def test_some_answers_share_a_row_where_that_is_the_cheapest(self) -> None:
        """All four 20 tokens, 80 + 400; in pairs twice 12, 48 + 144 each; apart four times 8, 32 + 64 each."""
        assert [sum(COST.flops(n) for n in rows) for rows in ([20], [12] * 2, [8] * 4)] == [480, 384, 384]

        assert answers_in(cheapest_parts(pack(4, 4, 4, 4, 4), 99, COST)) == [2, 2]

    def test_the_answers_keep_their_order_and_the_budget_holds(self) -> None:
        whole = pack(10, 1, 2, 3, 4)

        parts = cheapest_parts(whole, 15, COST)

        assert [one for part in parts for one in part.sequences] == list(whole.sequences)
        assert all(part.tokens <= 15 for part in parts)
        assert answers_in(cheapest_parts(pack(10, 9), 15, COST)) == [1]

    def test_without_a_cost_only_the_budget_divides(self) -> None:
        [[part]] = micro_batches([pack(2, 40, 40)], 99)

        assert len(part.sequences) == 2


class TestCount:
    def test_the_cost_of_a_llama_is_that_of_its_weights_and_heads(
        self, make_policy: Callable[..., Policy]
    ) -> None:
        """Two layers of 64 with four heads of 16, two of keys, 128 inside, rank 4."""
        frozen = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128
        adapter = 4 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128))

        cost = row_cost(make_policy())

        assert cost == RowCost(2 * 2 * (2 * frozen + 3 * adapter), 2 * 7 * 64 * 2)

    def test_a_token_passes_some_of_the_experts(self, make_policy: Callable[..., Policy]) -> None:
        policy = make_policy()
        before = row_cost(policy)
        policy.layers[0].experts = torch.nn.Parameter(torch.zeros(4, 3, 5), requires_grad=False)
        policy.model.get_base_model().config.num_experts_per_tok = 2

        after = row_cost(policy)

        assert before is not None and after is not None
        assert after.token - before.token == 2 * 2 * (2 * 3 * 5)

    def test_rows_under_the_models_own_mask_are_not_divided_further(
        self, make_policy: Callable[..., Policy]
    ) -> None:
        policy = make_policy()
        policy.use(Route("rows"))

        assert row_cost(policy) is None


class PlainGradient(WatchedGradient):
    """Divides packs above the budget only, as on a GPU."""

    _cost = None


@pytest.mark.parametrize(("prompt", "answer", "rows"), [(4, 60, [1, 1, 1, 1]), (60, 6, [4])])
def test_a_step_in_cheap_rows_has_the_gradient_of_one_in_whole_packs(
    make_policy: Callable[..., Policy], prompt: int, answer: int, rows: list[int]
) -> None:
    def step(kind: type[WatchedGradient]) -> tuple[list[int], list[torch.Tensor]]:
        policy = make_policy(moved=True)
        trainer = PeftTrainer(policy, SETTINGS, token_budget=512)
        trainer.gradient = own = kind(policy, SETTINGS, token_budget=512)
        learn(trainer, [group(prompt, answer)])
        return own.rows, [parameter.detach().clone() for parameter in policy.trainable]

    (divided, moved), (whole, expected) = step(WatchedGradient), step(PlainGradient)

    assert (divided, whole) == (rows, [4])
    for ours, theirs in zip(moved, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def group(prompt: int, answer: int) -> Group:
    def rollout(member: int) -> Rollout:
        ids = tuple((3 + 7 * member + 5 * n) % 50 + 5 for n in range(answer))
        return Rollout(ids, (-4.0,) * answer, "", "length")

    return Group(
        Prompt(1, tuple(n % 50 + 5 for n in range(prompt)), {}),
        tuple(rollout(member) for member in range(4)),
        tuple(Grade(float(member % 2)) for member in range(4)),
    )
