"""Decoding with a model's own cache: rows that have ended leave it, and prompts are computed once."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from core.registry import BaseModelEntry
from core.settings import Settings
from core.units import GIB
from tests.families.zoo import CONTEXT, FAMILIES
from tests.present import untyped
from worker.model import memory, sizing
from worker.model.architecture import without_weights
from worker.model.decoding import CopiedDecoding
from worker.model.policy import Policy, Route, load_base
from worker.sampling import Sampling, choice, grouped
from worker.sampling.transformers import TransformersSampler
from worker.types import Prompt

# Gated delta rule, Mamba 2 with attention in each layer, convolutions, a sparse index, a cache class of its own, plain.
HYBRIDS = ["Qwen 3.5", "Falcon-H1", "LFM 2", "DeepSeek V3.2", "MiniMax-Text-01", "BLOOM"]
PROMPTS = [tuple(range(3, 3 + length)) for length in (20, 9)]


def policy_of(title: str, folder: Path) -> Policy:
    [family] = [one for one in FAMILIES if one.title == title]
    entry = BaseModelEntry(path=family.save(folder), dtype="float32", context=CONTEXT)
    return Policy(load_base(title, entry, folder, "cpu"), rank=4, alpha=8, seed=0)


def plan_of(shape: sizing.Shape) -> sizing.MemoryPlan:
    """Two prompts of 20 tokens with four answers of 8 each."""
    work = sizing.workload(
        rank=4, prompt=20, completion=8, batch=2, group=4, valid_rows=1, eval_samples=1, copied=True
    )
    return sizing.plan("m", shape, work, sizing.Machine("cpu", 8 * GIB, "transformers"))


class TestForked:
    @pytest.mark.parametrize("title", HYBRIDS)
    @pytest.mark.slow
    def test_rows_that_have_ended_leave_and_the_rest_is_the_same(self, title: str, tmp_path: Path) -> None:
        policy = policy_of(title, tmp_path)
        # Which rows continue after each step, as indices into those that are left.
        leaving = [[0, 1, 2, 3, 4, 5], [0, 2, 3, 5], [1, 2, 3], [2]]
        found, widths = {}, {}
        for decode in ("forked", "padded"):
            policy.use(Route("rows", decode))
            computed: list[Any] = []
            embeddings = policy.model.get_base_model().get_input_embeddings()
            handle = embeddings.register_forward_hook(
                lambda module, args, output, computed=computed: computed.append(tuple(args[0].shape))
            )
            with torch.inference_mode():
                decoding = policy.decoding(PROMPTS, 3)
                hidden = [decoding.start()]
                for n, rows in enumerate(leaving):
                    decoding.keep(torch.tensor(rows))
                    hidden.append(decoding.next(torch.tensor([(5 + n + row) % 60 for row in rows])))
            handle.remove()
            found[decode], widths[decode] = hidden, computed

        for ours, kept in zip(found["forked"], found["padded"], strict=True):
            torch.testing.assert_close(ours, kept, atol=1e-4, rtol=1e-4)
        assert widths["forked"] == [(2, 20), (6, 1), (4, 1), (3, 1), (1, 1)]
        assert widths["padded"] == [(6, 20), (6, 1), (6, 1), (6, 1), (6, 1)]

    @pytest.mark.parametrize("title", ["Qwen 3.5", "BLOOM"])
    @pytest.mark.slow
    def test_waves_of_parts_of_a_group_give_what_one_batch_gives(self, title: str, tmp_path: Path) -> None:
        policy = policy_of(title, tmp_path)
        policy.use(Route("rows", "forked"))
        prompts = [Prompt(line, ids, {}) for line, ids in enumerate(PROMPTS)]
        how = Sampling(group_size=4, temperature=1.0, max_completion_tokens=8, job_seed=0, step=0)

        together, apart = (
            grouped(TransformersSampler(policy, **bounds).answers(prompts, how), 2, 4)
            for bounds in ({}, {"max_tokens_in_flight": 60})
        )

        assert [[r.output_ids_T for r in group] for group in together] == [
            [r.output_ids_T for r in group] for group in apart
        ]


class TestRowsThatJoin:
    """Keys and values of the prompt apart from the answer's, and in one tensor with latent attention."""

    @pytest.mark.parametrize(
        ("title", "joined"),
        [("Llama 2, 3", False), ("DeepSeek V3, R1", True), ("Falcon", True)],
    )
    def test_a_row_is_computed_as_if_it_were_alone(self, title: str, joined: bool, tmp_path: Path) -> None:
        """The second prompt has two answers; row 3 joins after two tokens, rows leave, others change places."""
        policy = policy_of(title, tmp_path)
        answers = [tuple(range(5 + row, 29 + row)) for row in range(4)]
        prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[1], tuple(range(30, 54))]
        found: list[dict[int, torch.Tensor]] = []

        with torch.inference_mode():
            decoding = CopiedDecoding(policy.text_decoder, PROMPTS, [0, 1, 1], policy.device, joined)
            found.append(dict(enumerate(decoding.start())))
            written = {0: 0, 1: 0, 2: 0}

            def write(times: int) -> None:
                for _ in range(times):
                    tokens = [answers[row][at] for row, at in written.items()]
                    hidden = decoding.next(torch.tensor(tokens))
                    written.update({row: at + 1 for row, at in written.items()})
                    found.append(dict(zip(written, hidden, strict=True)))

            write(2)
            other = CopiedDecoding(policy.text_decoder, [prompts[3]], [0], policy.device, joined)
            found.append({3: other.start()[0]})
            decoding.join(other)
            written[3] = 0
            write(3)
            decoding.keep(torch.tensor([3, 1]))
            written = {row: written[row] for row in (3, 1)}
            write(4)
            decoding.keep(torch.tensor([0]))
            del written[1]
            write(15)

            for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
                ours = torch.stack([step[row] for step in found if row in step])
                alone = CopiedDecoding(policy.text_decoder, [prompt], [0], policy.device, joined)
                expected = [alone.start()[0], *(alone.next(torch.tensor([id]))[0] for id in answer)]
                torch.testing.assert_close(ours, torch.stack(expected[: len(ours)]), atol=1e-4, rtol=1e-4)
                whole = policy.text_decoder(
                    input_ids=torch.tensor([[*prompt, *answer[: len(ours) - 1]]]), use_cache=False
                )
                torch.testing.assert_close(
                    ours, whole.last_hidden_state[0, -len(ours) :], atol=1e-4, rtol=1e-4
                )

    def test_columns_that_no_row_reads_are_dropped(self, tmp_path: Path) -> None:
        """A server may never be without a row, and its cache must not grow for as long as it runs."""
        policy = policy_of("Llama 2, 3", tmp_path)

        def begun() -> CopiedDecoding:
            decoding = CopiedDecoding(policy.text_decoder, [PROMPTS[1]], [0], policy.device, False)
            decoding.start()
            return decoding

        with torch.inference_mode():
            decoding = begun()
            for _ in range(12):
                for _ in range(3):
                    decoding.next(torch.zeros(len(decoding.cache.lengths_P), dtype=torch.int64))
                decoding.join(begun())
                decoding.keep(torch.tensor([1]))

        assert decoding.cache.length == 0
        assert decoding.cache.get_seq_length() < len(PROMPTS[1]) + 3


class TestCacheOfARow:
    def test_keys_and_values_are_counted_by_token(self, tmp_path: Path) -> None:
        policy = policy_of("BLOOM", tmp_path)
        policy.use(Route("rows", "forked"))

        assert policy.row_bytes() == (2 * 2 * 64 * 4, 0)  # two layers, keys and values of 64 float32 numbers

    def test_recurrent_states_are_counted_beside_the_tokens(self, tmp_path: Path) -> None:
        policy = policy_of("Qwen 3.5", tmp_path)
        policy.use(Route("rows", "forked"))

        token, state = policy.row_bytes()

        shape = memory.shape_of(policy.model.get_base_model().config, torch.float32)
        assert (shape.layers, shape.recurrent_layers) == (2, 1)
        assert token == shape.own_token_bytes == shape.token_cache_bytes // 2
        # One layer: 4 heads of 16 x 16, and 4 inputs of the convolution over queries, keys (2 heads) and values.
        assert state == 4 * (4 * 16 * 16 + 4 * (2 * 32 + 64))

    @pytest.mark.parametrize("title", ["Qwen 3.5", "Falcon-H1", "LFM 2", "MiniMax-Text-01"])
    def test_the_shape_has_the_state_of_a_layer_at_most(self, title: str, tmp_path: Path) -> None:
        policy = policy_of(title, tmp_path)
        policy.use(Route("rows", "forked"))
        shape = memory.shape_of(policy.model.get_base_model().config, torch.float32)
        layers = shape.recurrent_layers or shape.layers

        _, states = policy.row_bytes()

        assert states / layers <= shape.state_bytes <= 4 * states / layers

    def test_the_sampler_keeps_to_the_bytes_of_the_plan(self, tmp_path: Path) -> None:
        policy = policy_of("Qwen 3.5", tmp_path)
        shape = memory.shape_of(policy.model.get_base_model().config, torch.float32)
        plan = plan_of(shape)
        policy.use(Route("rows", "forked"))
        token, state = policy.row_bytes()

        sampler = untyped(choice.build)(
            "transformers", policy, Settings(), None, shape=shape, plan=plan, store=None
        )

        assert plan.cache_bytes == 2 * 4 * 28 * token
        assert sampler.max_tokens_in_flight * token == plan.cache_bytes
        assert state <= sampler.row_tokens * token < state + token

    def test_without_a_cache_there_is_nothing(self, tmp_path: Path) -> None:
        policy = policy_of("BLOOM", tmp_path)
        policy.use(Route("rows", "recomputed"))

        assert policy.row_bytes() == (0, 0)
        shape = memory.shape_of(policy.model.get_base_model().config, torch.float32)
        plan = replace(plan_of(shape), cache_bytes=1 << 40)
        sampler = untyped(choice.build)(
            "transformers", policy, Settings(), None, shape=shape, plan=plan, store=None
        )
        assert sampler.max_tokens_in_flight == sizing.MAX_TOKENS_IN_FLIGHT


@pytest.mark.parametrize(
    ("title", "rows"),
    [
        ("Llama 2, 3", False),
        ("Gemma 3", False),
        ("DeepSeek V3, R1", False),
        *((title, True) for title in HYBRIDS),
    ],
)
def test_the_forward_is_expected_from_the_config(title: str, rows: bool) -> None:
    [family] = [one for one in FAMILIES if one.title == title]

    assert memory.expects_rows(family.config()) is rows
    assert without_weights(family.config()).get_input_embeddings().weight.is_meta
