"""The user's agent and the run of its job: where the run answers, and the keys of episodes.

An agent talks to the API only. While a run samples, it listens at an address that its row has, and the API forwards
what belongs to an episode. The key of an episode is computed from the job's secret and the episode's id, so it is good
for one episode, stays known after a restart, and is stored nowhere.
"""

import hmac
import re
import secrets
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from core.database.states import JOB
from core.database.tables import EpisodeServer, Job

KEY_PREFIX = "episode-key-"
_ID = re.compile(r"episode_(ftjob-[A-Za-z0-9]{1,58})_[0-9]{1,9}_[0-9]{1,9}")


@dataclass(frozen=True)
class EpisodeRun:
    """A run that plays episodes."""

    url: str  # without a slash at the end; "": it does not sample now, or there is none
    secret: str  # the bearer token of requests to it


def episode_id(job_id: str, epoch: int, number: int) -> str:
    """The id of the `number`th lease of a run, which no other lease has."""
    return f"episode_{job_id}_{epoch}_{number}"


def job_of(episode: str) -> str | None:
    """The id of an episode's job; None: the text is not the id of an episode."""
    found = _ID.fullmatch(episode)
    return None if found is None else found[1]


def key_of(secret: str, episode: str) -> str:
    return KEY_PREFIX + hmac.new(secret.encode(), episode.encode(), "sha256").hexdigest()


def publish(session: Session, job: Job, url: str) -> str:
    """Note where the run that holds the job listens, and return the job's secret."""
    row = session.get(EpisodeServer, job.id)
    if row is None:
        row = EpisodeServer(job_id=job.id, secret=secrets.token_hex(32), epoch=job.epoch, url=url)
        session.add(row)
    row.epoch, row.url = job.epoch, url
    return row.secret


def of_job(session: Session, job: Job) -> EpisodeRun | None:
    """The run of a job; None: it has never sampled."""
    row = session.get(EpisodeServer, job.id)
    return None if row is None else _run(row, job)


def _run(row: EpisodeServer, job: Job) -> EpisodeRun:
    is_there = job.status in JOB.running and row.epoch == job.epoch
    return EpisodeRun(row.url if is_there else "", row.secret)


def of_episode(session: Session, episode: str, key: str) -> tuple[Job, EpisodeRun] | None:
    """The job of an episode and its run, if the key is that of the episode."""
    job_id = job_of(episode)
    row = None if job_id is None else session.get(EpisodeServer, job_id)
    # Without a row a key is compared too, so that the time of the answer does not show it.
    expected = key_of("" if row is None else row.secret, episode)
    is_right = hmac.compare_digest(expected.encode(), key.encode(errors="replace"))
    job = session.scalar(select(Job).where(Job.id == job_id)) if row is not None and is_right else None
    return None if row is None or job is None else (job, _run(row, job))
