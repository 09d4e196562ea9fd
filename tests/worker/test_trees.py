"""Episodes with branches: a tree of tokens teaches what its paths teach, each in a row of its own."""

import copy
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MistralConfig, MistralForCausalLM
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from core.jobs.hyperparameters import Resolved
from core.registry import BaseModelEntry
from graders.types import Grade, StepScore
from tests.tiny import WORDS, tiny_tokenizer
from tests.worker.test_training import asked, packed_gradients, relative_difference
from worker.model import batch, tree
from worker.model.attention import Layout, block_mask, visible
from worker.model.batch import Tensors, answers_of, in_rows, micro_batches, tensors_of
from worker.model.policy import Policy, Route, load_base
from worker.training import grpo
from worker.training.contributions import contribution_of, divisors, training_rewards
from worker.training.importance import weight
from worker.training.loss import Batch, KeptValues, StepValues
from worker.training.objective import Tokens, token_loss
from worker.training.objectives.registry import OBJECTIVES
from worker.training.policy_loss import PolicyLoss
from worker.training.teacher import PolicyTeacher
from worker.types import NEW_ROOT, NO_ANSWER, Group, Node, Pack, Prompt, Rollout, TrainingSequence

MakePolicy = Callable[..., Policy]


def answer(*ids: int, **fields: Any) -> Rollout:
    return Rollout(ids, tuple(-0.1 * number for number in range(1, 1 + len(ids))), "", "stop", **fields)


# Vector 1 of the design: A and D answer the prompt, B continues A behind context.
PROMPT = (10, 11, 12)
FORKED = Rollout.of_nodes([Node(None, (), answer(20, 21, 22)), Node(0, (30, 31), answer(40, 41))])
ALONE = answer(50, 51)
VECTOR = Group(Prompt(1, PROMPT, {}), (FORKED, ALONE), (Grade(1.0), Grade(0.0)))


def pack_of(group: Group, settings: Resolved) -> Pack:
    contribution = contribution_of(group, settings, str)
    assert contribution.pack is not None
    return contribution.pack


def branched(*, is_truncated: bool = False) -> Rollout:
    """A answers the prompt; B and E continue A, F continues E; D answers the prompt too."""
    return Rollout.of_nodes(
        [
            Node(None, (), answer(20, 21, 22, grammar_start=2, forced=1)),
            Node(0, (30, 31), answer(40, 41)),
            Node(None, (32,), answer(50, 51)),
            Node(0, (33, 34, 35), answer(42, 43, 44)),
            Node(3, (36,), answer(45, 46)),
        ],
        is_truncated=is_truncated,
    )


def shared_context() -> Rollout:
    """Two calls after one tool result, and a conversation with another prompt."""
    return Rollout.of_nodes(
        [
            Node(None, (), answer(20, 21)),
            Node(0, (30, 31), NO_ANSWER),
            Node(1, (), answer(40, 41, 42)),
            Node(1, (), answer(43, 44)),
            Node(NEW_ROOT, (13, 14, 15, 16), answer(45, 46)),
            Node(4, (37,), answer(47, 48)),
        ]
    )


def chain() -> Rollout:
    nodes = [Node(None, (), answer(20, 21, 22))]
    nodes += [
        Node(turn, (30 + turn, 31, 32), answer(40 + turn, 41, 42, grammar_start=1, forced=turn % 2))
        for turn in range(5)
    ]
    return Rollout.of_nodes(nodes)


def groups() -> list[Group]:
    rollouts = (branched(), shared_context(), chain(), answer(52, 53, 54, 55), branched(is_truncated=True))
    other = (chain(), branched(), ALONE, shared_context())
    return [
        with_gap(Group(Prompt(1, PROMPT, {}), rollouts, tuple(map(Grade, (1.0, 0.25, 0.5, 0.0, 0.75))))),
        with_gap(Group(Prompt(2, (*PROMPT, 13, 14), {}), other, tuple(map(Grade, (0.0, 1.0, 0.3, 0.6))))),
    ]


def with_gap(group: Group) -> Group:
    """As if a sampler had other probabilities: so that ratios differ from token to token."""
    draw = random.Random(group.prompt.line)

    def other(rollout: Rollout) -> Rollout:
        changed = replace(rollout, logprobs_T=tuple(-4.2 + draw.gauss(0, 0.4) for _ in rollout.logprobs_T))
        if not rollout.nodes:
            return changed
        values = iter(changed.logprobs_T)
        nodes = [
            replace(
                node,
                answer=replace(node.answer, logprobs_T=tuple(next(values) for _ in node.answer.logprobs_T)),
            )
            for node in rollout.nodes
        ]
        return Rollout.of_nodes(nodes, is_truncated=rollout.is_truncated)

    return replace(group, rollouts_G=tuple(map(other, group.rollouts_G)))


def seen_by(tensors: Tensors, rule: Any = causal_mask_function) -> Tensor:
    """bool [T, T] of a micro-batch of one row."""
    layout = Layout.of_rows(tensors.position_ids, tensors.segment, seen_until=tensors.seen_until)
    return visible(layout, rule)[0, 0]


class TestLayout:
    def test_each_token_is_there_once_and_is_predicted_by_the_token_before_it_on_its_path(self) -> None:
        tensors = tensors_of([pack_of(VECTOR, asked({"advantage_scale": "none"}))])

        assert tensors.input_ids[0].tolist() == [10, 11, 12, 20, 21, 22, 30, 31, 40, 50]
        assert tensors.position_ids[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 3]
        assert tensors.column_M.tolist() == [2, 3, 4, 7, 8, 2, 9]
        assert tensors.target_M.tolist() == [20, 21, 22, 40, 41, 50, 51]
        assert tensors.answer_M.tolist() == [0, 0, 0, 0, 0, 1, 1]

    def test_a_token_sees_its_path_only(self) -> None:
        seen = seen_by(tensors_of([pack_of(VECTOR, asked({"advantage_scale": "none"}))]))

        assert seen[5].nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 5]
        assert seen[8].nonzero().flatten().tolist() == list(range(9))
        assert seen[9].nonzero().flatten().tolist() == [0, 1, 2, 9]
        assert seen.sum() == 49

    @pytest.mark.parametrize("make", [branched, shared_context, chain])
    @pytest.mark.parametrize(
        "rule", [causal_mask_function, sliding_window_causal_mask_function(4)], ids=["full", "window"]
    )
    def test_a_token_sees_what_it_sees_in_the_row_of_its_path(
        self, make: Callable[[], Rollout], rule: Any
    ) -> None:
        """What a trained token's predictor sees, by ids and positions, equals a plain row's."""
        sequence = tree.sequence_of(make(), make().logprobs_T, 1.0)
        whole = Pack(PROMPT, (sequence,))

        expected: dict[int, Any] = {}
        for row in in_rows(whole):
            expected |= visible_ids(row, rule)
        assert visible_ids(whole, rule) == expected
        assert len(expected) == sequence.trained_tokens

    @pytest.mark.parametrize(
        "rule", [causal_mask_function, sliding_window_causal_mask_function(64)], ids=["full", "window"]
    )
    def test_block_masks_equal_the_dense_mask(self, rule: Any) -> None:
        long = Rollout.of_nodes(
            [
                Node(None, (), answer(*range(5, 155))),
                Node(0, tuple(range(5, 65)), answer(*range(5, 105))),
                Node(0, tuple(range(5, 45)), answer(*range(5, 95))),
                Node(NEW_ROOT, tuple(range(5, 45)), answer(*range(5, 35))),
            ]
        )
        sequence = tree.sequence_of(long, long.logprobs_T, 1.0)
        tensors = tensors_of([Pack((6,) * 130, (sequence, sequence)), Pack((6,) * 50, (sequence,))])
        layout = Layout.of_rows(
            tensors.position_ids, tensors.segment, blocks=True, seen_until=tensors.seen_until
        )

        mask = block_mask(layout, rule)

        place = torch.arange(mask.seq_lengths[0])
        seen = mask.mask_mod(torch.tensor(0), torch.tensor(0), place[:, None], place)
        width = tensors.input_ids.shape[1]
        stride = width + -width % 128
        for row, alone in enumerate(visible(layout, rule)[:, 0]):
            own = slice(row * stride, row * stride + width)
            assert torch.equal(seen[own, own], alone)
        skipped = ~torch.kron(mask.to_dense()[0, 0].bool(), torch.ones(128, 128, dtype=torch.bool))
        assert not (seen & skipped).any()

    def test_ten_turns_need_a_sixth_of_the_tokens_of_one_sample_for_each(self) -> None:
        nodes = [Node(None, (), answer(*(5,) * 200))]
        nodes += [Node(turn, (6,) * 400, answer(*(5,) * 200)) for turn in range(9)]
        episode = Rollout.of_nodes(nodes)
        pack = Pack((7,) * 1000, (tree.sequence_of(episode, episode.logprobs_T, 1.0),) * 8)

        by_turn = sum(1000 + 200 + turn * 600 for turn in range(10)) * 8
        assert pack.tokens == 1000 + 8 * (10 * 200 + 9 * 400 - 1)
        assert by_turn / pack.tokens > 6


def visible_ids(pack: Pack, rule: Any) -> dict[int, tuple[int, list[tuple[int, int]]]]:
    """By place of a trained token in its answer: its id, and the ids and positions that its predictor sees."""
    tensors = tensors_of([pack])
    seen = seen_by(tensors, rule)
    [one] = answers_of([pack])
    places = range(one.tokens) if one.places is None else one.places
    return {
        place: (
            int(target),
            sorted(
                (int(tensors.position_ids[0, key]), int(tensors.input_ids[0, key]))
                for key in seen[column].nonzero().flatten()
            ),
        )
        for place, column, target in zip(places, tensors.column_M, tensors.target_M, strict=True)
    }


class TestRows:
    def test_a_sampled_token_is_learned_in_one_row(self) -> None:
        fork = Rollout.of_nodes(
            [
                Node(None, (), answer(20)),
                Node(0, (30,), answer(40, 41)),
                Node(0, (31,), answer(42)),
            ]
        )
        rows = in_rows(Pack(PROMPT, (tree.sequence_of(fork, fork.logprobs_T, 1.0),)))

        assert [row.sequences[0].output_ids_T for row in rows] == [(20, 30, 40, 41), (20, 31, 42)]
        assert [row.sequences[0].learned_T for row in rows] == [
            (True, False, True, True),
            (False, False, True),
        ]

    def test_a_conversation_with_another_prompt_has_a_row_without_the_prompt(self) -> None:
        episode = shared_context()
        *_, last = in_rows(Pack(PROMPT, (tree.sequence_of(episode, episode.logprobs_T, 1.0),)))

        assert last.prompt_ids == ()
        assert last.sequences[0].output_ids_T == (13, 14, 15, 16, 45, 46, 37, 47, 48)

    def test_the_rows_of_an_episode_share_a_micro_batch_only_if_the_loss_couples_them(self) -> None:
        packs = [pack_of(group, asked({"advantage_scale": "none"})) for group in groups()]

        coupled = list(micro_batches(packs, 8, rows=True))
        divided = list(micro_batches(packs, 8, rows=True, couples_calls=False))

        assert all(one.places is None or one.tokens == one.undivided.trained_tokens for one in held(coupled))
        assert all(len(rows) == 1 for rows in divided)
        assert learned(coupled) == learned(divided) == learned([packs])


def held(batches: Sequence[Sequence[Pack]]) -> Iterator[batch.TrainedAnswer]:
    for packs in batches:
        yield from answers_of(packs)


def learned(batches: Sequence[Sequence[Pack]]) -> list[tuple[int, int]]:
    """Each trained token: the answer, and its place among the answer's trained tokens."""
    return sorted(
        (one.undivided.key, place)
        for one in held(batches)
        for place in (range(one.tokens) if one.places is None else one.places)
    )


class TestDivision:
    @pytest.mark.parametrize("budget", [1, 12, 20, 35, 1000])
    def test_a_pack_above_the_budget_is_cut_at_subtrees_and_learns_each_token_once(self, budget: int) -> None:
        packs = [pack_of(group, asked({"advantage_scale": "none"})) for group in groups()]

        batches = list(micro_batches(packs, budget, couples_calls=False))

        assert learned(batches) == learned([packs])
        longest = max(row.tokens for pack in packs for row in in_rows(pack))
        assert all(part.tokens <= max(budget, longest) for parts in batches for part in parts)

    def test_a_loss_of_whole_episodes_keeps_them_whole(self) -> None:
        packs = [pack_of(group, asked({"advantage_scale": "none"})) for group in groups()]

        batches = list(micro_batches(packs, 1))

        assert all(one.places is None for one in held(batches))

    def test_values_of_tokens_survive_another_division(self) -> None:
        packs = [pack_of(group, asked({"advantage_scale": "none"})) for group in groups()]

        def divided(budget: int) -> list[Batch]:
            return [Batch(part) for part in micro_batches(packs, budget, couples_calls=False)]

        def value(one: Batch) -> Tensor:
            return tensors_of(one.packs).target_M.float()

        first, second = divided(1000), divided(12)
        for one in first:
            one.old_logp = value(one)
        KeptValues.of(first).restore(second)

        assert len(second) > len(first)
        for one in second:
            assert one.old_logp is not None
            assert torch.equal(one.old_logp, value(one))
        KeptValues.of(second[1:]).restore(third := divided(1000))
        assert any(one.old_logp is None for one in third)


LOSSES: list[dict[str, Any]] = [
    {"loss": "gspo", "importance": "none", "kl": 0.1},
    {"loss": "rloo", "importance": "none"},
    {"loss": "grpo", "updates_per_batch": 2},
    {"loss": {"type": "ppo"}},
    {"loss": "dapo", "importance_level": "answer", "importance_cap": 100.0},
]
SLOW_LOSSES: list[dict[str, Any]] = [
    *({"loss": name} for name in ("grpo", "dr_grpo", "bnpo", "dapo", "cispo", "gspo", "rloo")),
    {"loss": "dapo", "importance": "mask", "kl": 0.1, "kl_estimator": "k1"},
    {"loss": "grpo", "overlong": {"type": "mask"}},
    {"loss": {"type": "reinforce_plus_plus"}, "kl": 0.1},
]


@pytest.fixture(scope="module")
def window_base(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model whose layers see the last eight tokens."""
    folder = tmp_path_factory.mktemp("window")
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        sliding_window=8,
        initializer_range=0.15,
    )
    MistralForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return load_base("window", BaseModelEntry(path=folder, dtype="float32", context=128), folder, "cpu")


@pytest.fixture(params=["full", "window"])
def policy(request: pytest.FixtureRequest, make_policy: MakePolicy, window_base: Any) -> Policy:
    if request.param == "full":
        return make_policy(moved=True)
    return moved(Policy(copy.deepcopy(window_base), rank=4, alpha=8, seed=0), 0.2)


def moved(policy: Policy, std: float) -> Policy:
    """With an adapter as if it had learned something."""
    torch.manual_seed(1)
    for parameter in policy.trainable:
        torch.nn.init.normal_(parameter, std=std)
    return policy


@pytest.mark.parametrize(
    "advanced",
    [*LOSSES, *(pytest.param(one, marks=pytest.mark.slow) for one in SLOW_LOSSES)],
    ids=lambda advanced: " ".join(map(str, advanced.values())),
)
def test_a_tree_teaches_what_its_rows_teach(make_policy: MakePolicy, advanced: dict[str, Any]) -> None:
    """Whole, cut at subtrees, and as rows that the model computes under its own rules."""
    found = []
    for budget, forward in ((4096, "packed"), (24, "packed"), (24, "rows")):
        policy = moved(make_policy(), 0.05)
        if forward == "rows":
            policy.use(Route("rows", "padded"))
        found.append(packed_gradients(policy, groups()[1:], asked(advanced), budget))

    # These multiply the ratios of an episode, and so their rounding errors.
    multiplies = advanced["loss"] == "rloo" or "importance_level" in advanced
    bound = 3e-6 if multiplies else 1e-6
    assert max(relative_difference(ours, found[0]) for ours in found[1:]) < bound


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "cispo", "gspo", "rloo"])
def test_a_tree_equals_its_rows_in_float64(policy: Policy, name: Any) -> None:
    settings = asked({"loss": name, "advantage_scale": "none"})
    exact(policy)
    packs = [pack_of(group, settings) for group in groups()]

    whole = gradients_in_float64(policy, packs, name)
    rows = gradients_in_float64(policy, [row for pack in packs for row in in_rows(pack)], name)
    policy.use(Route("rows", "padded"))
    plain = gradients_in_float64(policy, [row for pack in packs for row in in_rows(pack)], name)

    assert relative_difference(rows, whole) < 1e-12
    assert relative_difference(plain, whole) < 1e-12


def exact(policy: Policy) -> None:
    """Compute in float64, also where transformers computes in float32."""
    policy.model.double()
    for module in list(policy.model.modules()):
        for name, child in module.named_children():
            if type(child).__name__.endswith("RMSNorm"):
                norm = torch.nn.RMSNorm(len(child.weight), eps=child.variance_epsilon, dtype=torch.float64)
                norm.weight = child.weight
                setattr(module, name, norm)


def gradients_in_float64(policy: Policy, packs: list[Pack], name: Any) -> list[Tensor]:
    tensors = tensors_of(packs)
    hidden = policy.hidden(tensors.input_ids, tensors.position_ids, tensors.segment, tensors.seen_until)
    logits = policy.causal.get_output_embeddings()(hidden[tensors.row_M, tensors.column_M])
    logp = logits.log_softmax(-1).gather(-1, tensors.target_M[:, None])[:, 0]
    loss = token_loss(
        logp,
        tensors.sampled_logp_M.double(),
        tensors.advantage_M.double(),
        tensors.weight_M.double(),
        tensors.answer_M,
        objective=OBJECTIVES[name](0.5, 2.0),
    )
    return list(torch.autograd.grad(loss, policy.trainable))


def test_with_equal_weights_a_tree_is_one_sample_for_each_call(policy: Policy) -> None:
    exact(policy)
    episode = branched()
    sequence = tree.sequence_of(episode, (0.5,) * len(episode.output_ids_T), 0.1)
    calls = []
    for number, node in enumerate(episode.nodes):
        read: tuple[int, ...] = node.context_ids
        parent = node.parent
        while parent is not None:
            above = episode.nodes[parent]
            read, parent = (*above.context_ids, *above.answer.output_ids_T, *read), above.parent
        call = node.answer
        trained = TrainingSequence(
            call.output_ids_T,
            call.logprobs_T,
            (0.5,) * len(call.output_ids_T),
            0.1,
            call.grammar_start,
            call.forced,
            key=number,
        )
        calls.append(Pack((*PROMPT, *read), (trained,)))

    whole = gradients_in_float64(policy, [Pack(PROMPT, (sequence,))], "dapo")

    assert relative_difference(gradients_in_float64(policy, calls, "dapo"), whole) < 1e-12


@pytest.mark.parametrize("advanced", [{"loss": "dapo"}, {"loss": "gspo"}], ids=["dapo", "gspo"])
def test_an_episode_of_one_call_is_trained_bit_for_bit_as_an_answer(
    make_policy: MakePolicy, advanced: dict[str, Any]
) -> None:
    answers = (answer(20, 21, 22, 23, 24, grammar_start=2, forced=1), answer(25, 26), answer(27, 28, 29))
    grades = (Grade(1.0), Grade(0.0), Grade(0.5))
    episodes = tuple(Rollout.of_nodes([Node(None, (), one)]) for one in answers)
    found = [
        packed_gradients(
            make_policy(moved=True), [Group(Prompt(1, PROMPT, {}), one, grades)], asked(advanced), 4096
        )
        for one in (answers, episodes)
    ]

    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


class TestNormalization:
    @pytest.mark.parametrize(
        ("loss", "weights"),
        [
            ("grpo", [0.1] * 5 + [0.25] * 2),
            ("gspo", [0.1] * 5 + [0.25] * 2),
            ("dapo", [1 / 7] * 7),
            ("dr_grpo", [1 / 16] * 7),
        ],
    )
    def test_weights_are_of_episodes_and_not_of_calls(self, loss: str, weights: list[float]) -> None:
        settings = asked({"loss": loss, "advantage_scale": "none"})
        settings = settings.model_copy(update={"max_episode_tokens": 8})
        share = contribution_of(VECTOR, settings, str)
        whole, _ = divisors([share], settings)

        tensors = tensors_of([pack_of(VECTOR, settings)])

        assert tensors.advantage_M.tolist() == [0.5] * 5 + [-0.5] * 2
        assert (tensors.weight_M / whole).tolist() == pytest.approx(weights)

    def test_a_ratio_is_that_of_the_episode(self) -> None:
        log_ratio = torch.tensor([0.1, -0.2, 0.0, 0.3, 0.3])
        answer_M = torch.zeros(5, dtype=torch.int64)

        assert grpo.answer_mean(log_ratio, answer_M).exp().tolist() == pytest.approx([1.105171] * 5, abs=1e-6)
        assert grpo.answer_sum(log_ratio, answer_M).exp().tolist() == pytest.approx([1.648721] * 5, abs=1e-6)
        silenced = OBJECTIVES["gspo"](0.8, 1.2).clipped(
            Tokens(log_ratio, torch.zeros(5), torch.ones(5), answer_M)
        )
        assert not silenced.any()
        by_turn = torch.tensor([0, 0, 0, 1, 1])
        assert OBJECTIVES["gspo"](0.8, 1.2).clipped(
            Tokens(log_ratio, torch.zeros(5), torch.ones(5), by_turn)
        ).tolist() == [
            False,
            False,
            False,
            True,
            True,
        ]

    def test_the_correction_for_the_sampler_needs_no_version(self) -> None:
        old, sampled = torch.tensor([-0.9, -2.3]), torch.tensor([-1.0, -2.0])

        def weights(kind: Any, cap: float) -> list[float]:
            return [float(one) for one in weight(old - sampled, kind, cap, 1 / cap)]

        assert weights("truncate", 2.0) == pytest.approx([1.105171, 0.740818], abs=1e-6)
        assert weights("mask", 1.25) == pytest.approx([1.105171, 0.0], abs=1e-6)

    def test_the_kl_is_of_sampled_tokens(self) -> None:
        k3 = grpo.kl_k3(torch.tensor(-1.0), torch.tensor(-1.2)).item()

        assert k3 == pytest.approx(0.018731, abs=1e-6)
        assert tensors_of([pack_of(VECTOR, asked({"kl": 0.1}))]).target_M.tolist() == [
            20, 21, 22, 40, 41, 50, 51,
        ]  # fmt: skip

    def test_a_truncated_episode_is_masked_as_a_whole(self) -> None:
        cut = replace(VECTOR, rollouts_G=(replace(FORKED, finish_reason="length"), ALONE))

        share = contribution_of(cut, asked({"overlong": {"type": "mask"}, "advantage_scale": "none"}), str)

        assert share.lengths == (2,)
        assert share.pack is not None
        assert [one.key for one in share.pack.sequences] == [id(ALONE)]
        assert share.pack.sequences[0].advantages_T == (-0.5, -0.5)

    def test_the_soft_penalty_counts_the_tokens_of_the_episode(self) -> None:
        assert grpo.overlong_penalty(7, 8, 4) == -0.75
        settings = asked({"overlong": {"type": "soft", "buffer": 4}, "advantage_scale": "none"})
        settings = settings.model_copy(update={"max_episode_tokens": 6})

        share = contribution_of(VECTOR, settings, str)

        assert share.rewards_N == (1.0 - 0.75, 0.0)

    def test_the_soft_penalty_does_not_count_forced_tokens(self) -> None:
        settings = asked({"overlong": {"type": "soft", "buffer": 4}})
        settings = settings.model_copy(update={"max_episode_tokens": 8})
        forced = answer(20, 21, 22, grammar_start=2, forced=2)
        episode = Rollout.of_nodes([Node(None, (), forced), Node(0, (30,), answer(40, 41, 42, 43))])

        rewards_N = training_rewards(replace(VECTOR, rollouts_G=(episode, ALONE)), settings)

        assert rewards_N == [1.0 + grpo.overlong_penalty(5, 8, 4), 0.0]

    def test_steps_are_not_of_episodes(self) -> None:
        steps = (StepScore(end=1, score=1.0), StepScore(end=2, score=0.0))
        scored = replace(VECTOR, grades_G=(Grade(1.0, steps=steps), Grade(0.0, steps=steps)))

        with pytest.raises(ValueError, match="train episodes with supervision 'outcome'"):
            contribution_of(scored, asked({"supervision": "process"}), str)


@pytest.mark.parametrize("forward", ["packed", "rows"])
def test_the_advantages_of_an_episode_run_over_its_tokens_in_the_order_of_sampling(
    make_policy: MakePolicy, forward: Any
) -> None:
    policy = make_policy(moved=True)
    policy.use(Route(forward, "padded"))
    settings = asked({"loss": {"type": "ppo", "gamma": 0.9, "gae_lambda": 0.8}})
    loss = PolicyLoss(policy, settings)
    episode = branched()
    pack = pack_of(Group(VECTOR.prompt, (episode,), (Grade(1.0),)), settings)
    [packs] = micro_batches([pack], 1, rows=forward == "rows")
    one = Batch(packs)

    loss.remember(one)
    loss.reward_tokens([one], kl=0.0)

    sampled = [token for token, own in zip(episode.output_ids_T, episode.is_sampled_T, strict=True) if own]
    assert tensors_of(packs).target_M.tolist() == sampled
    assert one.old_value is not None
    assert one.advantage is not None
    values = [*one.old_value.tolist(), 0.0]
    deltas = [0.9 * after - value for value, after in itertools.pairwise(values)]
    deltas[-1] += 1.0
    expected = [
        sum(0.72**later * delta for later, delta in enumerate(deltas[at:])) for at in range(len(deltas))
    ]
    assert one.advantage.tolist() == pytest.approx(expected)


def test_the_watched_kl_is_of_all_paths_of_an_answer(make_policy: MakePolicy) -> None:
    settings = asked({"loss": "gspo", "kl": 0.1})
    pack = pack_of(Group(VECTOR.prompt, (branched(), ALONE), (Grade(1.0), Grade(0.0))), settings)
    pack = replace(pack, sequences=pack.sequences[:1])
    found = []
    for forward in ("packed", "rows"):
        policy = make_policy(moved=True)
        policy.use(Route(forward, "padded"))
        loss = PolicyLoss(policy, settings)
        batches = [Batch(packs) for packs in micro_batches([pack], 1, rows=forward == "rows")]
        for one in batches:
            loss.remember(one)
        found.append(loss.watched_kl(batches))

    assert found[0] == pytest.approx(found[1], rel=1e-3)


def test_reported_values_of_an_episode_are_those_of_all_its_pieces(make_policy: MakePolicy) -> None:
    settings = asked({"loss": "grpo"})
    episode = branched()
    pack = pack_of(Group(VECTOR.prompt, (episode, ALONE), (Grade(1.0), Grade(0.0))), settings)
    found = []
    for budget in (1000, 10):
        loss = PolicyLoss(make_policy(moved=True), settings)
        batches = [Batch(packs) for packs in micro_batches([pack], budget, couples_calls=False)]
        for one in batches:
            loss(one, StepValues())
        found.append((len(batches), loss.token_values(batches, 1.0)[id(episode)]))

    (_, whole), (count, divided) = found
    assert count > 2
    assert list(divided.logprobs_T) == pytest.approx(list(whole.logprobs_T), abs=1e-4)
    assert list(divided.advantages_T) == list(whole.advantages_T)


def test_a_teacher_reads_the_path_of_each_token(make_policy: MakePolicy) -> None:
    answers_P = [(group.prompt, group.rollouts_G) for group in groups()[1:]]
    found = []
    for route in (Route("packed"), Route("rows", "padded")):
        policy = make_policy(moved=True)
        policy.use(route)
        found.append(PolicyTeacher(policy, nullcontext, 4096).logprobs(answers_P, 1.0))

    [packed_G], [rows_G] = found
    assert [len(one) for one in packed_G] == [len(one.output_ids_T) for one in answers_P[0][1]]
    for packed, rows in zip(packed_G, rows_G, strict=True):
        assert packed == pytest.approx(rows, abs=1e-4)
