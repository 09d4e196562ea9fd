"""Score the answers of a step by reward models: adapters on the policy's base that take its place for a while."""

import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from core.jobs.params import GRADER_PARAM
from core.results.lineage import Parent
from core.storage.manifests import Damaged
from core.storage.offline_rows import step_ends
from graders.types import MAX_STEPS, StepScore
from worker.device_work import DEVICE_WORK
from worker.model import reward_head
from worker.model.batch import micro_batches, tensors_of
from worker.model.parent import Adapters
from worker.model.policy import REWARD_HEAD, Policy
from worker.model.reward_head import RewardHead, Scale
from worker.offline.rows import ChatTemplate, answers_pack, scored_at_steps, scored_at_the_end
from worker.refusals import ChatTemplateFailed, InvalidModel, UserMistake
from worker.types import Pack, Prompt

# Of one answer, by the name of the model; a text says why there is none.
Score = float | tuple[StepScore, ...] | str
Scores = Mapping[str, Score]


class AnswerScores(Protocol):
    async def score(self, answers_P: Sequence[tuple[Prompt, Sequence[str]]]) -> list[list[Scores]]:
        """The scores of each answer to each prompt."""
        ...


@dataclass(frozen=True)
class LoadedRewardModel:
    name: str
    weights: Sequence[Tensor]  # one for each of the policy's `trainable`
    head: RewardHead
    scale: Scale
    template: ChatTemplate  # of the answers that it learned from
    of_steps: bool = False  # a process reward model: the scores are probabilities that steps are right

    def scores(self, rewards_J: Sequence[float], text: str) -> Score:
        """The score of an answer from its rewards: one, or one for each of its steps."""
        if not self.of_steps:
            return self.scale.score(rewards_J[0])
        ends = step_ends(text)
        if len(ends) > MAX_STEPS:
            return f"the answer has {len(ends)} steps, more than {MAX_STEPS}"
        if len(ends) != len(rewards_J):
            return "two steps of the answer end within one token"
        return tuple(StepScore(sigmoid(reward), end) for reward, end in zip(rewards_J, ends, strict=True))


@dataclass
class PolicyScores:
    """Implements AnswerScores by the policy under the weights of the reward models.

    Equal answers to equal conversations are computed once: in batches of other widths their scores would differ by
    rounding, and a group of equal answers would have a signal.

    Must not be used while the policy samples or learns.
    """

    policy: Policy
    models: Sequence[LoadedRewardModel]
    token_budget: int
    beat: Callable[[], None] = lambda: None

    async def score(self, answers_P: Sequence[tuple[Prompt, Sequence[str]]]) -> list[list[Scores]]:
        return await DEVICE_WORK.run(self._score, answers_P)

    def _score(self, answers_P: Sequence[tuple[Prompt, Sequence[str]]]) -> list[list[Scores]]:
        different: dict[tuple[str, str], int] = {}  # its number by conversation and text
        answers_N: list[tuple[Prompt, str]] = []
        numbers_PG: list[list[int]] = []
        for prompt, texts_G in answers_P:
            conversation = json.dumps(prompt.item["messages"])
            for text in texts_G:
                if (conversation, text) not in different:
                    different[conversation, text] = len(answers_N)
                    answers_N.append((prompt, text))
            numbers_PG.append([different[conversation, text] for text in texts_G])
        by_model = {model.name: self._of_model(model, answers_N) for model in self.models}
        return [
            [{name: scores_N[number] for name, scores_N in by_model.items()} for number in numbers_G]
            for numbers_G in numbers_PG
        ]

    @torch.no_grad()
    def _of_model(self, model: LoadedRewardModel, answers_N: Sequence[tuple[Prompt, str]]) -> list[Score]:
        scores_N: list[Score] = [""] * len(answers_N)
        packs: list[Pack] = []
        numbers: dict[int, int] = {}  # of an answer, by the identity of its sequence
        for number, (prompt, text) in enumerate(answers_N):
            try:
                pack = self._pack(model, prompt, text)
            except ChatTemplateFailed as cause:
                scores_N[number] = str(cause)
                continue
            if pack.tokens > self.policy.context:
                scores_N[number] = (
                    f"the conversation has {pack.tokens} tokens, more than the model's context of {self.policy.context}"
                )
                continue
            packs.append(pack)
            numbers[id(pack.sequences[0])] = number
        rows = self.policy.route.forward == "rows"
        with self.policy.with_weights(model.weights):
            for part in micro_batches(
                packs, self.token_budget, self.policy.device, rows=rows, couples_answers=True
            ):
                rewards_N = reward_head.rewards(self.policy, model.head, tensors_of(part, self.policy.device))
                left = rewards_N.tolist()
                for [one] in (pack.sequences for pack in part):
                    number = numbers[id(one)]
                    own, left = left[: one.trained_tokens], left[one.trained_tokens :]
                    scores_N[number] = model.scores(own, answers_N[number][1])
                self.beat()
        return scores_N

    @staticmethod
    def _pack(model: LoadedRewardModel, prompt: Prompt, text: str) -> Pack:
        answer = {"role": "assistant", "content": text}
        pack = answers_pack(prompt.item["messages"], [answer], [], model.template)
        return scored_at_steps(pack, text, model.template) if model.of_steps else scored_at_the_end(pack)


def read_reward_model(
    parent: Parent,
    policy: Policy,
    tokenizer: PreTrainedTokenizerBase,
    template: ChatTemplate,
    adapters: Adapters,
) -> LoadedRewardModel:
    """Read the files of a reward model on the policy's base. Its adapter may have another rank than the policy's.

    Raises:
        UserMistake: they were deleted or are damaged, the registry's chat template has changed since its training, or
            its adapter is on layers that the policy's does not have.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        try:
            adapters.download(parent.blob_prefix, path)
        except Damaged as damage:
            raise _unusable(parent, f"cannot be read: {damage}") from damage
        head = reward_head.read_head(path, policy.device)
        scale, trained_with = reward_head.read_scale(path)
        tensors = load_file(path / "adapter_model.safetensors", device=str(policy.device))
    del tensors[REWARD_HEAD]
    if reward_head.template_hash(tokenizer) != trained_with:
        raise _unusable(parent, "learned with another chat template than the model's entry has now")
    try:
        settings = parent.settings
        weights = policy.fitted(tensors, rank=settings["lora_rank"], alpha=settings["lora_alpha"])
    except InvalidModel as cause:
        raise _unusable(parent, str(cause)) from cause
    of_steps = parent.reward_kind == "steps"
    return LoadedRewardModel(parent.model, weights, head, scale, template, of_steps)


def sigmoid(reward: float) -> float:
    return 1 / (1 + math.exp(-reward)) if reward >= 0 else 1 - sigmoid(-reward)


def _unusable(parent: Parent, why: str) -> UserMistake:
    return UserMistake("model_not_available", f"The reward model '{parent.model}' {why}.", GRADER_PARAM)
