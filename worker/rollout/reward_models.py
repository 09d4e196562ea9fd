"""Score the answers of a step by reward models: adapters on the policy's base that take its place for a while."""

import asyncio
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

from core.results.lineage import Parent
from core.storage.manifests import Damaged
from core.storage.offline_rows import step_ends
from graders.types import MAX_STEPS, StepScore
from worker.learn.batch import tensors_of
from worker.learn.offline_gradient import whole_batches
from worker.model import reward_head
from worker.model.parent import Adapters
from worker.model.policy import REWARD_HEAD, Policy
from worker.model.reward_head import RewardHead, Scale
from worker.offline.rows import ChatTemplate, answers_pack, scored_at_steps, scored_at_the_end
from worker.refusals import ChatTemplateFailed, InvalidModel, UserMistake
from worker.sharing.turns import TURNS
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

    Must not be used while the policy samples or learns.
    """

    policy: Policy
    models: Sequence[LoadedRewardModel]
    token_budget: int
    beat: Callable[[], None] = lambda: None

    async def score(self, answers_P: Sequence[tuple[Prompt, Sequence[str]]]) -> list[list[Scores]]:
        return await asyncio.to_thread(self._score, answers_P)

    @TURNS
    def _score(self, answers_P: Sequence[tuple[Prompt, Sequence[str]]]) -> list[list[Scores]]:
        by_model = {model.name: self._of_model(model, answers_P) for model in self.models}
        return [
            [{name: scores_PG[p][g] for name, scores_PG in by_model.items()} for g in range(len(texts_G))]
            for p, (_, texts_G) in enumerate(answers_P)
        ]

    @torch.no_grad()
    def _of_model(
        self, model: LoadedRewardModel, answers_P: Sequence[tuple[Prompt, Sequence[str]]]
    ) -> list[list[Score]]:
        scores_PG: list[list[Score]] = [["" for _ in texts_G] for _, texts_G in answers_P]
        packs: list[Pack] = []
        places: dict[int, tuple[int, int, str]] = {}  # of a sequence, by its identity: where and what it is
        for p, (prompt, texts_G) in enumerate(answers_P):
            for g, text in enumerate(texts_G):
                try:
                    pack = self._pack(model, prompt, text)
                except ChatTemplateFailed as cause:
                    scores_PG[p][g] = str(cause)
                    continue
                if pack.tokens > self.policy.context:
                    scores_PG[p][g] = (
                        f"the conversation has {pack.tokens} tokens, more than the model's context of "
                        f"{self.policy.context}"
                    )
                    continue
                packs.append(pack)
                places[id(pack.sequences[0])] = p, g, text
        rows = self.policy.route.forward == "rows"
        with self.policy.wearing(model.weights):
            for part in whole_batches(packs, self.token_budget, self.policy.device, rows=rows):
                rewards_N = reward_head.rewards(self.policy, model.head, tensors_of(part, self.policy.device))
                left = rewards_N.tolist()
                for [one] in (pack.sequences for pack in part):
                    p, g, text = places[id(one)]
                    own, left = left[: sum(one.learned_T)], left[sum(one.learned_T) :]
                    scores_PG[p][g] = model.scores(own, text)
                self.beat()
                TURNS.offer()
        return scores_PG

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
        weights = policy.fitted(tensors, parent.settings["lora_alpha"] / parent.settings["lora_rank"])
    except InvalidModel as cause:
        raise _unusable(parent, str(cause)) from cause
    of_steps = parent.reward_kind == "steps"
    return LoadedRewardModel(parent.model, weights, head, scale, template, of_steps)


def sigmoid(reward: float) -> float:
    return 1 / (1 + math.exp(-reward)) if reward >= 0 else 1 - sigmoid(-reward)


def _unusable(parent: Parent, why: str) -> UserMistake:
    return UserMistake(
        "model_not_available", f"The reward model '{parent.model}' {why}.", "method.reinforcement.grader"
    )
