"""Single sign-on: the project and the scope of a user that a trusted proxy has authenticated.

Each user has a key in each project that a rule gives; its text is random and not kept. Sessions stand for it as for any
other key, so that the audit log and the list of keys name the user.
"""

import secrets
from collections.abc import Collection, Sequence
from dataclasses import replace
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Annotated, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError
from sqlalchemy import select
from sqlalchemy.orm import Session

from core.database.audit import operator_of
from core.database.engine import Work
from core.database.tables import ApiKey, Project
from core.errors import InvalidApiKey
from core.tenancy import keys
from core.tenancy.keys import Scope

KEY_NAME = "single sign-on"
MAX_USER = 128
Network = IPv4Network | IPv6Network


def _network(text: object) -> Network:
    """A network or an address that a proxy may have."""
    try:
        network = ip_network(str(text))
    except ValueError as invalid:
        raise PydanticCustomError("network", "{why}", {"why": str(invalid)}) from None
    if network.prefixlen == 0:
        raise PydanticCustomError("network", "every address is in it, so that each client would be trusted")
    if isinstance(network, IPv6Network) and network.network_address.ipv4_mapped is not None:
        raise PydanticCustomError("network", "write the IPv4 address itself")
    return network


TrustedNetwork = Annotated[Network, BeforeValidator(_network)]


class Rule(BaseModel):
    """The access of a user, or of each member of a group, to a project."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    user: str | None = Field(default=None, min_length=1, max_length=MAX_USER)  # "*": every user of the proxy
    group: str | None = Field(default=None, min_length=1, max_length=MAX_USER)
    project: str
    scope: Scope

    @model_validator(mode="after")
    def _has_one_subject(self) -> Self:
        if (self.user is None) == (self.group is None):
            raise ValueError("a rule has either a user or a group")
        return self

    def applies_to(self, user: str, groups: Collection[str]) -> bool:
        return self.group in groups if self.user is None else self.user in ("*", user)


def rule_for(rules: Sequence[Rule], user: str, groups: Collection[str]) -> Rule | None:
    """Return the first rule that applies to the user or to one of the groups."""
    return next((rule for rule in rules if rule.applies_to(user, groups)), None)


def is_trusted(peer: str | None, networks: Sequence[Network]) -> bool:
    """Whether a connection comes from one of these networks. None: it has no address, as of a Unix socket."""
    if peer is None:
        return False
    try:
        address: IPv4Address | IPv6Address = ip_address(peer)
    except ValueError:
        return False
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped  # of an IPv4 connection to a socket for both
    return any(address in network for network in networks)


def project_of(session: Session, rule: Rule) -> Project:
    """The project of the rule.

    Raises:
        InvalidApiKey: it does not exist, or is archived.
    """
    project = session.get(Project, rule.project)
    if project is None or project.archived_at is not None:
        raise InvalidApiKey(
            f"The project {rule.project} of your single sign-on does not exist or is archived."
        )
    return project


def key_of(work: Work, user: str, rule: Rule) -> ApiKey:
    """The user's key in the project of the rule, created at the first login. Raises as `project_of` does."""
    project = project_of(work.session, rule)
    mine = (
        select(ApiKey)
        .where(ApiKey.project_id == project.id, ApiKey.sso_user == user, ApiKey.scope == rule.scope)
        .where(ApiKey.revoked_at.is_(None))
        .order_by(ApiKey.created_at, ApiKey.id)
    )
    key = work.session.scalars(mine).first()
    if key is None:
        # The text is random and forgotten here.
        key = keys.create_key(
            replace(work, actor=operator_of(project)),
            project,
            KEY_NAME,
            scope=rule.scope,
            owner=user,
            token=secrets.token_urlsafe(48),
            sso_user=user,
        ).key
    return key
