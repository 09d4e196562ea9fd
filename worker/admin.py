"""`regraft-server admin`: organisations, projects, keys, limits, usage and the audit log, for the operator."""

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

from core import audit, keys, tenants
from core.audit import operator_of
from core.db import Database, Work
from core.errors import InvalidRequest, ServiceError
from core.keys import NewKey
from core.limits import Limits
from core.models import ApiKey, Organization, Project, now
from core.settings import Settings

T = TypeVar("T")
Row = Mapping[str, Any]
Command = Callable[[Work, argparse.Namespace, Settings], Row | Sequence[Row]]


def add_commands(commands: Any) -> None:
    """`admin` and all below it, added to the subparsers of `regraft-server`."""
    admin = commands.add_parser("admin", help="organisations, projects, API keys, limits, usage, audit log")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="for programs")
    one_project = argparse.ArgumentParser(add_help=False)
    one_project.add_argument("--project", metavar="ID", help="not needed where there is only one")
    nouns = admin.add_subparsers(dest="noun", required=True)

    def verbs(noun: str, help: str) -> Callable[..., argparse.ArgumentParser]:
        parsers = nouns.add_parser(noun, help=help).add_subparsers(dest="verb", required=True)

        def add(
            name: str, do: Command, help: str, *parents: argparse.ArgumentParser
        ) -> argparse.ArgumentParser:
            parser: argparse.ArgumentParser = parsers.add_parser(name, help=help, parents=[common, *parents])
            parser.set_defaults(do=do)
            return parser

        return add

    org = verbs("org", "organisations")
    org("create", _org_create, "make an organisation").add_argument("name")
    org("list", _org_list, "all organisations")
    rename = org("rename", _org_rename, "from now on; models keep the name they were given")
    rename.add_argument("id")
    rename.add_argument("name")

    project = verbs("project", "projects of organisations")
    create = project("create", _project_create, "make a project")
    create.add_argument("name")
    create.add_argument("--org", metavar="ID", help="not needed where there is only one")
    project("list", _project_list, "all projects").add_argument("--org", metavar="ID")
    rename = project("rename", _project_rename, "give a project another name")
    rename.add_argument("id")
    rename.add_argument("name")
    project("archive", _project_archive, "refuse its keys and cancel its jobs").add_argument("id")
    limits = project("limits", _project_limits, "show what a project may use at most, or change it")
    limits.add_argument("id")
    known = ", ".join(Limits.model_fields)
    limits.add_argument("--set", metavar="NAME=VALUE", nargs="+", default=[], help=f"one of {known}")
    limits.add_argument("--unset", metavar="NAME", nargs="+", default=[], help="the default holds again")

    key = verbs("key", "API keys of projects")
    create = key("create", _key_create, "make a key, and print it this once", one_project)
    create.add_argument("--name", default="cli")
    create.add_argument("--scope", choices=keys.SCOPES, default="admin")
    create.add_argument("--owner", default="", help="the person it is made for")
    create.add_argument("--expires-in-days", type=_days, metavar="DAYS")
    key("list", _key_list, "a project's keys, the dead ones too", one_project)
    rotate = key("rotate", _key_rotate, "make a new key in the place of an old one")
    rotate.add_argument("id")
    rotate.add_argument("--grace-hours", type=float, default=0, metavar="HOURS", help="the old one lives on")
    key("revoke", _key_revoke, "refuse a key from now on").add_argument("id")

    usage = nouns.add_parser("usage", help="what a project uses of its limits", parents=[common, one_project])
    usage.set_defaults(do=_usage)
    log = nouns.add_parser("audit", help="who changed what, newest first", parents=[common])
    log.add_argument("--project", metavar="ID", help="of this project only")
    log.add_argument("--limit", type=int, default=50)
    log.set_defaults(do=_audit)


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Do one command and print what came of it. 1: it was refused, and stderr says why."""
    database = Database(settings.database)
    try:
        with database.write() as session:
            result = args.do(Work(session), args, settings)
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
    tenants.archive_project(_on(work, project), project)
    return _project(project)


def _project_limits(work: Work, args: argparse.Namespace, settings: Settings) -> Row:
    project = tenants.get_project(work.session, args.id)
    if args.set or args.unset:
        changed = tenants.own_limits(project).given() | _assignments(args.set) | dict.fromkeys(args.unset)
        try:
            limits = Limits.model_validate(changed)
        except ValidationError as invalid:
            first = invalid.errors()[0]
            known = ", ".join(Limits.model_fields)
            raise InvalidRequest(f"{first['loc'][0]}: {first['msg']}. The limits are {known}.") from None
        tenants.set_limits(_on(work, project), project, limits)
    return tenants.limits(project, settings.default_limits).model_dump()


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


# What they share.


def _days(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of days, from 1")
    return int(text)


def _on(work: Work, project: Project) -> Work:
    """The same work, which the log of this project will show."""
    return replace(work, actor=operator_of(project))


def _chosen(session: Session, args: argparse.Namespace) -> Project:
    if args.project is not None:
        return tenants.get_project(session, args.project)
    living = select(Project).where(Project.archived_at.is_(None)).limit(2)
    return _only(session.scalars(living).all(), "--project")


def _only(found: Sequence[T], option: str) -> T:
    if len(found) != 1:
        raise InvalidRequest(f"There is not exactly one to choose: say which with {option}.")
    return found[0]


def _assignments(given: Sequence[str]) -> dict[str, str]:
    pairs = [one.partition("=") for one in given]
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


def _new_key(made: NewKey) -> Row:
    return {**_key(made.key), "key": made.token}


def _print(result: Row | Sequence[Row]) -> None:
    """One row as lines of name and value, several as a table."""
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
