"""`regraft-server admin`: organizations, projects, keys, limits, usage, the audit log and lowered memory sizes."""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, TypeVar

from pydantic import ValidationError
from sqlalchemy import select
from sqlalchemy.orm import Session

from core.database import audit
from core.database.audit import operator_of
from core.database.engine import Database, Work
from core.database.tables import ApiKey, MemoryLimit, Organization, Project, now
from core.errors import InvalidRequest, ServiceError
from core.jobs import memory_limits
from core.service.archiving import archive_project
from core.settings import Settings
from core.tenancy import keys, tenants
from core.tenancy.keys import NewKey
from core.tenancy.limits import Limits
from worker.cli.service import configured, prepare

T = TypeVar("T")
Row = Mapping[str, Any]
Command = Callable[[Work, argparse.Namespace, Settings], Row | Sequence[Row]]


def main(args: argparse.Namespace) -> int:
    settings = configured()
    prepare(settings)
    return run(args, settings)


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Run one command and print its result. Returns 1 if it was refused, with the reason on stderr."""
    command = COMMANDS[" ".join(filter(None, (args.noun, getattr(args, "verb", None))))]
    database = Database(settings.database)
    try:
        with database.write() as session:
            result = command(Work(session), args, settings)
    except ServiceError as refused:
        print(refused.message, file=sys.stderr)
        return 1
    finally:
        database.close()
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        _print(result)
    return 0


def _org_create(work: Work, args: argparse.Namespace, settings: Settings) -> Row:
    return _organization(tenants.create_organization(work, args.name))


def _org_list(work: Work, args: argparse.Namespace, settings: Settings) -> Sequence[Row]:
    return [_organization(one) for one in tenants.organizations(work.session)]


def _org_rename(work: Work, args: argparse.Namespace, settings: Settings) -> Row:
    organization = tenants.get_organization(work.session, args.id)
    tenants.rename_organization(work, organization, args.name)
    return _organization(organization)


def _project_create(work: Work, args: argparse.Namespace, settings: Settings) -> Row:
    if args.org is None:
        organization = _only(tenants.organizations(work.session), "--org")
    else:
        organization = tenants.get_organization(work.session, args.org)
    return _project(tenants.create_project(work, organization, args.name))


def _project_list(work: Work, args: argparse.Namespace, settings: Settings) -> Sequence[Row]:
    if args.org is not None:
        tenants.get_organization(work.session, args.org)
    return [_project(one) for one in tenants.projects(work.session, args.org)]


def _project_rename(work: Work, args: argparse.Namespace, settings: Settings) -> Row:
    project = tenants.get_project(work.session, args.id)
    tenants.rename_project(_on(work, project), project, args.name)
    return _project(project)


def _project_archive(work: Work, args: argparse.Namespace, settings: Settings) -> Row:
    project = tenants.get_project(work.session, args.id)
    archive_project(_on(work, project), project)
    return _project(project)


def _project_limits(work: Work, args: argparse.Namespace, settings: Settings) -> Row:
    project = tenants.get_project(work.session, args.id)
    if args.set or args.unset:
        changed = (
            tenants.own_limits(project).set_limits() | _assignments(args.set) | dict.fromkeys(args.unset)
        )
        try:
            limits = Limits.model_validate(changed)
        except ValidationError as invalid:
            first = invalid.errors()[0]
            known = ", ".join(Limits.model_fields)
            raise InvalidRequest(f"{first['loc'][0]}: {first['msg']}. The limits are {known}.") from None
        tenants.set_limits(_on(work, project), project, limits)
    return tenants.limits(project, settings.default_limits).model_dump()


def _project_kueue(work: Work, args: argparse.Namespace, settings: Settings) -> Row:
    project = tenants.get_project(work.session, args.id)
    given = {"queue": args.queue, "priority_class": args.priority_class}
    if any(value is not None for value in given.values()):
        tenants.set_kueue(
            _on(work, project), project, {key: value for key, value in given.items() if value is not None}
        )
    return {name: (project.kueue or {}).get(name) for name in given}


def _key_create(work: Work, args: argparse.Namespace, settings: Settings) -> Row:
    project = _chosen(work.session, args)
    days = args.expires_in_days
    made = keys.create_key(
        _on(work, project),
        project,
        args.name,
        scope=args.scope,
        owner=args.owner,
        expires_at=None if days is None else now() + days * tenants.DAY,
    )
    return _new_key(made)


def _key_list(work: Work, args: argparse.Namespace, settings: Settings) -> Sequence[Row]:
    return [_key(key) for key in keys.of_project(work.session, _chosen(work.session, args).id)]


def _key_rotate(work: Work, args: argparse.Namespace, settings: Settings) -> Row:
    key = keys.get(work.session, args.id)
    project = tenants.get_project(work.session, key.project_id)
    return _new_key(keys.rotate(_on(work, project), key, grace_hours=args.grace_hours))


def _key_revoke(work: Work, args: argparse.Namespace, settings: Settings) -> Row:
    key = keys.get(work.session, args.id)
    keys.revoke(_on(work, tenants.get_project(work.session, key.project_id)), key)
    return _key(key)


def _usage(work: Work, args: argparse.Namespace, settings: Settings) -> Sequence[Row]:
    project = _chosen(work.session, args)
    limits = tenants.limits(project, settings.default_limits).model_dump()
    used = tenants.in_use(work.session, project.id)
    return [{"limit": name, "used": amount, "maximum": limits[name]} for name, amount in used.items()]


def _audit(work: Work, args: argparse.Namespace, settings: Settings) -> Sequence[Row]:
    if args.project is not None:
        tenants.get_project(work.session, args.project)
    page = audit.page(work.session, args.project, limit=max(1, args.limit))
    columns = ("created_at", "actor", "action", "target", "project_id", "request_id", "data")
    return [{name: getattr(entry, name) for name in columns} for entry in page.items]


def _memory_list(work: Work, args: argparse.Namespace, settings: Settings) -> Sequence[Row]:
    return [_memory_limit(one) for one in memory_limits.valid_ones(work.session)]


def _memory_forget(work: Work, args: argparse.Namespace, settings: Settings) -> Sequence[Row]:
    forgotten = memory_limits.forget(work.session, args.model, args.device)
    if not forgotten:
        where = "" if args.device is None else f" on {args.device}"
        raise InvalidRequest(f"No lowered memory sizes of the model {args.model}{where}.")
    return [_memory_limit(one) for one in forgotten]


def _on(work: Work, project: Project) -> Work:
    """Return the same work with this project's operator as actor, for its audit log."""
    return replace(work, actor=operator_of(project))


def _chosen(session: Session, args: argparse.Namespace) -> Project:
    if args.project is not None:
        return tenants.get_project(session, args.project)
    living = select(Project).where(Project.archived_at.is_(None)).limit(2)
    return _only(session.scalars(living).all(), "--project")


def _only(found: Sequence[T], option: str) -> T:
    if len(found) != 1:
        raise InvalidRequest(f"Cannot choose a default, because there is not exactly one: set {option}.")
    return found[0]


def _assignments(arguments: Sequence[str]) -> dict[str, str]:
    pairs = [one.partition("=") for one in arguments]
    return {name: value for name, _, value in pairs}


def _organization(organization: Organization) -> Row:
    return {"id": organization.id, "name": organization.name, "created_at": organization.created_at}


def _project(project: Project) -> Row:
    columns = ("id", "name", "organization_id", "created_at", "archived_at", "limits")
    return {name: getattr(project, name) for name in columns}


def _key(key: ApiKey) -> Row:
    columns = ("id", "name", "scope", "owner", "created_at", "expires_at", "last_used_at")
    shown = {name: getattr(key, name) for name in columns}
    return shown | {"ends_in": key.last4, "state": keys.state(key)}


def _memory_limit(limit: MemoryLimit) -> Row:
    lowered = {name: size for name, size in limit.sizes.items() if size}
    return {
        "model": limit.model,
        "device": limit.device,
        "workload": limit.workload,
        "lowered": lowered,
        "expires_at": limit.updated_at + memory_limits.VALID_SECONDS,
    }


def _new_key(key: NewKey) -> Row:
    return {**_key(key.key), "key": key.token}


def _print(result: Row | Sequence[Row]) -> None:
    """Print one row as lines of name and value, several rows as a table."""
    if isinstance(result, Mapping):
        width = max(map(len, result))
        for name, value in result.items():
            print(f"{name:{width}}  {_text(name, value)}")
        return
    if not result:
        print("none")
        return
    cells = [list(result[0]), *([_text(name, value) for name, value in row.items()] for row in result)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _text(name: str, value: Any) -> str:
    if value is None or value in ("", {}):
        return "-"
    if name.endswith("_at"):
        return datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    return (
        json.dumps(value)
        if isinstance(value, dict)
        else f"{value:,}"
        if isinstance(value, int)
        else str(value)
    )


COMMANDS: Mapping[str, Command] = {
    "org create": _org_create,
    "org list": _org_list,
    "org rename": _org_rename,
    "project create": _project_create,
    "project list": _project_list,
    "project rename": _project_rename,
    "project archive": _project_archive,
    "project limits": _project_limits,
    "project kueue": _project_kueue,
    "key create": _key_create,
    "key list": _key_list,
    "key rotate": _key_rotate,
    "key revoke": _key_revoke,
    "usage": _usage,
    "audit": _audit,
    "memory list": _memory_list,
    "memory forget": _memory_forget,
}
