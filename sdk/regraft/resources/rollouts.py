"""client.rollouts: every answer that was sampled, and what the graders said of it."""

from typing import TYPE_CHECKING, Any, Literal

from regraft.types import Rollout

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

Split = Literal["train", "valid"]


class Rollouts:
    def __init__(self, client: "OpenAI") -> None:
        self._client = client

    def list(self, job_id: str, *, step: int, split: Split = "train") -> list[Rollout]:
        """The answers of one step. Step 0 is the base model's validation, and has no "train"."""
        return _rollouts(self._client.get(_path(job_id), cast_to=object, options=_asking(step, split)))


class AsyncRollouts:
    def __init__(self, client: "AsyncOpenAI") -> None:
        self._client = client

    async def list(self, job_id: str, *, step: int, split: Split = "train") -> list[Rollout]:
        """As Rollouts.list."""
        return _rollouts(await self._client.get(_path(job_id), cast_to=object, options=_asking(step, split)))


def _path(job_id: str) -> str:
    return f"/regraft/jobs/{job_id}/rollouts"


def _asking(step: int, split: Split) -> Any:
    return {"params": {"step": step, "split": split}}


def _rollouts(listed: Any) -> list[Rollout]:
    return [Rollout.construct(**one) for one in listed["data"]]
