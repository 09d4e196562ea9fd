"""JSON schemas of items and of the arguments of calls.

These functions run in the hazard pool only: a schema of a user may take long to apply.
"""

import json
import re
from typing import Any

MAX_PROBLEM = 300  # characters


def schema_problem(schema: str) -> str:
    """The reason why this JSON text is not a JSON schema; "" if it is one."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError

    try:
        Draft202012Validator.check_schema(json.loads(schema))
    except SchemaError as invalid:
        return _cut(f"{_path(invalid.absolute_path)}{invalid.message}")
    except RecursionError:
        return "the schema is nested too deep"
    return ""


def item_problems(schema: str, items: str) -> list[str]:
    """For each item of a JSON array the first violation of the schema, or ""."""
    import referencing
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import UnknownType, best_match
    from referencing.exceptions import Unresolvable

    # An empty registry: a reference to another document is an error instead of a download.
    registry: referencing.Registry[Any] = referencing.Registry()
    validator = Draft202012Validator(json.loads(schema), registry=registry)
    problems = []
    for item in json.loads(items):
        try:
            violation = best_match(validator.iter_errors(item))
        except Unresolvable as missing:
            problems.append(_cut(f"the schema refers to {missing.ref!r}, which is not in it"))
            continue
        except RecursionError:
            problems.append("the item is nested too deep, or the schema refers to itself without end")
            continue
        except UnknownType as unknown:
            problems.append(
                _cut(f"the schema cannot be applied: {unknown.type!r} is no type of JSON schemas")
            )
            continue
        except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, re.error) as cause:
            # A reference to a value that is not a schema, a number that cannot be divided, or an invalid pattern.
            problems.append(_cut(f"the schema cannot be applied: {type(cause).__name__}: {cause}"))
            continue
        problems.append(
            "" if violation is None else _cut(f"{_path(violation.absolute_path)}{violation.message}")
        )
    return problems


def _path(steps: Any) -> str:
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
    return f"{path.removeprefix('.')}: " if path else ""


def _cut(text: str) -> str:
    return text if len(text) <= MAX_PROBLEM else f"{text[:MAX_PROBLEM]}…"
