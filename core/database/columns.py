"""Types of text columns. JSON columns have the serializer of the engine (core/database/engine.py)."""

import sqlalchemy
from sqlalchemy import Dialect
from sqlalchemy.types import TypeDecorator

from core.text import storable


class StorableString(TypeDecorator[str]):
    """A string of limited length; values and operands of comparisons are made storable first."""

    impl = sqlalchemy.String
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else storable(value)


class StorableText(StorableString):
    """A string of any length."""

    impl = sqlalchemy.Text
    cache_ok = True
