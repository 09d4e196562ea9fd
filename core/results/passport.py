"""The statement of a passport: what the service knows about a tuned model (docs/howto/passports.md).

Everything in it is read from the job, its events and its stored answers, so that the same state gives the same bytes.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from core.database.tables import Checkpoint, File, Job, RolloutPage
from core.errors import NoPassportKey
from core.jobs import events, usage
from core.jobs.budgets import Price
from core.passports import TYPE, VERSION, Signer, digest
from core.results import grader_audits, ledger, rollouts
from core.results.lineage import Parent
from core.results.prompt_histories import last_message_text
from core.results.rollout_filters import Wanted
from core.results.rollouts import Matches, OpenPage, Row, SamplePosition
from core.settings import Settings
from core.storage.store import BlobStore
from core.stored_graders import behavior_of
from core.text import storable_json

SAMPLES = 20
SHOWN_CHARACTERS = 2_000
KEY_FILE = "passport_key"
MAX_ANCESTORS = 100
UNUSABLE = "The passport key in the service's data folder cannot be used"


@dataclass(frozen=True)
class Issuer:
    """The key of the deployment, and the price by which a statement gives costs."""

    signer: Signer
    price: Price

    @classmethod
    def of(cls, settings: Settings) -> "Issuer | None":
        """None: the deployment has no key."""
        signer = signer_of(settings)
        return None if signer is None else cls(signer, Price.of(settings))


def signer_of(settings: Settings) -> Signer | None:
    """The key in REGRAFT_PASSPORT_KEY, or else in the file of the data folder that `regraft-server up` creates.

    Raises:
        NoPassportKey: the file is there and holds no key.
    """
    if settings.passport_key:
        return Signer.parse(settings.passport_key)
    path = key_file(settings)
    try:
        return Signer.parse(path.read_text())
    except FileNotFoundError:
        return None
    except OSError as cause:  # whose own text has the path of the file
        raise NoPassportKey(f"{UNUSABLE}: {cause.strerror}") from cause
    except ValueError as cause:
        raise NoPassportKey(f"{UNUSABLE}: {cause}") from cause


def key_file(settings: Settings) -> Path:
    return settings.data_dir / KEY_FILE


def described(
    session: Session, issuer: Issuer, job: Job, checkpoint: Checkpoint, name: str, recipe: Mapping[str, Any]
) -> dict[str, Any]:
    """The statement without its samples and its export.

    Args:
        recipe: reproduce.json of this checkpoint.
    """
    used = usage.render(job, issuer.price) or {}
    request = recipe["request"]["method"][job.method]
    return {
        "type": TYPE,
        "version": VERSION,
        "regraft": recipe["regraft"],
        "model": name,
        "job": job.id,
        "checkpoint": recipe["checkpoint"],
        "base_model": recipe["base_model"],
        "data": recipe["data"],
        "graders": {role: digest(request[role]) for role in ("grader", "shadow_grader") if role in request},
        "lineage": ancestors(session, job),
        "settings": {
            "method": job.method,
            "seed": job.seed,
            "hyperparameters": request["hyperparameters"],
            "resolved_hyperparameters": job.resolved,
        },
        "verdict": recipe["verdict"],
        "alarms": alarms(session, job, checkpoint.step),
        "audit": audit_of(session, job, recipe["data"]["training_file"]["sha256"]),
        "usage": {key: value for key, value in used.items() if key != "cost"},
        "cost": used.get("cost"),
        "ledger": ledger_of(session, job),
    }


def ledger_of(session: Session, job: Job) -> dict[str, Any]:
    """The sums of the job's ledger by bucket (docs/howto/ledger.md). Buckets without an amount are absent."""
    sums = ledger.of_job(session, job)
    return {
        "tokens": {bucket: count for bucket, count in sums.tokens.items() if count},
        "gpu_seconds": {bucket: ledger.seconds_of(time) for bucket, time in sums.gpu_time.items() if time},
    }


def ancestors(session: Session, job: Job) -> list[dict[str, Any]]:
    """The tuned models that the job's model comes from, the nearest first. Of another project's, the nearest alone."""
    found: list[dict[str, Any]] = []
    current: Job | None = job
    while current is not None and (parent := Parent.of(current)) and len(found) < MAX_ANCESTORS:
        mine = select(Job).where(Job.id == parent.job_id, Job.project_id == job.project_id)
        current = session.scalar(mine)
        data = None if current is None else _sha256(session, current)
        found.append(parent.as_data() | {"training_file_sha256": data})
    return found


def _sha256(session: Session, job: Job) -> str | None:
    mine = File.id == job.training_file, File.project_id == job.project_id
    return session.scalar(select(File.sha256).where(*mine))


def alarms(session: Session, job: Job, step: int) -> list[dict[str, Any]]:
    """The warnings and alarms of the run up to a step, oldest first."""
    return [
        {"rule": event.data["rule"], "step": event.step, "message": event.message}
        for event in events.warnings(session, job.id)
        if event.step is None or event.step <= step
    ]


def audit_of(session: Session, job: Job, training_sha256: str | None) -> dict[str, Any] | None:
    """The main numbers of the newest audit of the job's grader on its training file; None: there is none."""
    grader = job.body.get("grader")
    if grader is None or training_sha256 is None:
        return None
    behavior = behavior_of(grader)
    audit = grader_audits.newest(session, job.project_id, behavior, training_sha256)
    return None if audit is None else grader_audits.summary(audit)


def samples(blobs: BlobStore, page: RolloutPage | None, checkpoint_id: str) -> list[dict[str, Any]]:
    """Up to SAMPLES answers of a validation, in the order of the page; none without a page.

    They are the first by a hash of the checkpoint's id and of theirs, so they are not chosen. Long texts are cut;
    `sha256` is that of the whole prompt, row, answer and score.
    """
    if page is None:
        return []

    def read(opened: OpenPage, matches: Matches) -> list[Row]:
        places = [
            (hashlib.sha256(f"{checkpoint_id} {place.id}".encode()).digest(), number, index)
            for number, _ in matches
            for index, place in enumerate(_places(opened, number))
        ]
        drawn = sorted(place[1:] for place in sorted(places)[:SAMPLES])
        return [row for number, index in drawn for row in rollouts.records(opened.take(number, [index]))]

    return [_sample(row) for rows in rollouts.map_pages(blobs, [page], Wanted(), read) for row in rows]


def _places(opened: OpenPage, number: int) -> Sequence[SamplePosition]:
    return [
        SamplePosition.of(row)
        for row in opened.part(number, ["step", "split", "group", "member"]).to_pylist()
    ]


def _sample(row: Row) -> dict[str, Any]:
    prompt, answer = last_message_text(row["messages"], SHOWN_CHARACTERS), row["output_text"] or ""
    whole = {name: row[name] for name in ("messages", "item", "output_text", "score")}
    return {
        "id": row["id"],
        "line": row["line"],
        "prompt": prompt,
        "answer": answer[:SHOWN_CHARACTERS],
        "score": row["score"],
        "sha256": digest(plain(whole)),
    }


def plain(value: Any) -> Any:
    """The value as JSON can carry it everywhere: storable texts, and null in place of numbers that are not finite.

    The API would change other values on the way, and their signature would no longer match.
    """
    return json.loads(json.dumps(storable_json(value)), parse_constant=lambda constant: None)
