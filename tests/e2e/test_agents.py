"""An agent in the user's own process trains a model, through the official client and a live server."""

from difflib import SequenceMatcher
from typing import Any

import openai
import pytest
import regraft
from regraft.agents import Episode

from tests.e2e.conftest import Server
from tests.e2e.test_openai_client import HYPERPARAMETERS, QUESTIONS, VALID, upload

GRADER = {
    "type": "python",
    "name": "none",
    "source": "def grade(sample, item):\n    raise ValueError('the agent gives the rewards')",
}
TWICE = QUESTIONS[0]  # the question after whose answer there is another one


def job_of(client: openai.OpenAI) -> str:
    reinforcement = {
        "grader": GRADER,
        "hyperparameters": HYPERPARAMETERS | {"n_epochs": 5},
        "environment": {"type": "client"},
    }
    method: Any = {"type": "reinforcement", "reinforcement": reinforcement}
    created = client.fine_tuning.jobs.create(
        model="tiny",
        training_file=upload(client).id,
        validation_file=upload(client, VALID, "valid.jsonl").id,
        method=method,
        seed=1,
    )
    return created.id


def play(episode: Episode) -> float:
    """The reward of the first answer. One of the questions has a second one, whose answer is streamed."""
    client, messages = episode.openai(), list[Any](episode.messages)
    answer = client.chat.completions.create(model="any", messages=messages).choices[0].message
    text = answer.content or ""
    if episode.item["messages"][0]["content"] == TWICE:
        messages += [answer.to_dict(), {"role": "user", "content": "please"}]
        pieces = client.chat.completions.create(model="any", messages=messages, stream=True)
        assert [piece.choices[0].finish_reason for piece in pieces][-1] in ("stop", "length")
    return 0.5 * SequenceMatcher(a=text, b="yes").ratio() + 0.5 * (text == "yes")


@pytest.mark.slow
def test_a_model_learns_what_the_users_agent_rewards(server: Server) -> None:
    client = regraft.Regraft(base_url=server.base_url, api_key=server.key)
    job = job_of(client)

    played = regraft.agents.run(job, play, 16, client=client)

    assert (played.job_status, played.failed) == ("succeeded", 0)
    steps = client.jobs.metrics(job)
    rewards = steps["train_mean_reward"].dropna()
    assert rewards.tail(2).mean() > rewards.head(2).mean() + 0.2
    assert steps["episode_turns_mean"].max() > 1
