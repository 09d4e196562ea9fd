"""An agent in the user's own process trains a model, through the official client and a live server."""

import openai
import pytest
import regraft
from regraft.agents import Episode

from tests.e2e.conftest import Server
from tests.e2e.test_openai_client import HYPERPARAMETERS, TRAIN, VALID, upload

GRADER = {
    "type": "python",
    "name": "none",
    "source": "def grade(sample, item):\n    raise ValueError('the agent gives the rewards')",
}


def job_of(client: openai.OpenAI, **settings: object) -> str:
    method = {
        "type": "reinforcement",
        "reinforcement": {
            "grader": GRADER,
            "hyperparameters": HYPERPARAMETERS | {"n_epochs": 4, "eval_interval": 8},
            "environment": {"type": "client"},
        },
    }
    return client.fine_tuning.jobs.create(
        model="tiny",
        training_file=upload(client).id,
        validation_file=upload(client, VALID, "valid.jsonl").id,
        method=method,  # type: ignore[arg-type]
        seed=1,
        **settings,  # type: ignore[arg-type]
    ).id


def play(episode: Episode) -> float:
    """Asks once, and once more after a wrong answer. What counts is the last one."""
    client = episode.openai()
    messages = list(episode.messages)
    answer = client.chat.completions.create(model="any", messages=messages)  # type: ignore[arg-type]
    if answer.choices[0].message.content == "yes":
        return 1.0
    messages += [answer.choices[0].message.to_dict(), {"role": "user", "content": "tell me now"}]
    pieces = client.chat.completions.create(model="any", messages=messages, stream=True)  # type: ignore[call-overload]
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    return 0.5 if text == "yes" else 0.0


@pytest.mark.slow
def test_a_model_learns_what_the_users_agent_rewards(server: Server) -> None:
    client = regraft.Regraft(base_url=server.base_url, api_key=server.key)
    job = job_of(client)

    played = regraft.agents.run(job, play, 16, client=client)

    assert (played.job_status, played.failed) == ("succeeded", 0)
    validated = client.jobs.metrics(job)["full_valid_mean_reward"].dropna()
    print(validated, client.jobs.metrics(job)[["train_mean_reward", "episode_turns_mean"]])
    assert validated.iloc[-1] > validated.iloc[0] + 0.5
