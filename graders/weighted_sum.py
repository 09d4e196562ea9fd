"""The weights of a formula that is a weighted sum of its variables."""

from __future__ import annotations

from graders.formula import Chain, Expression, Formula, FormulaDomainError, Negative, Number, Variable
from graders.spec import GraderSpec, MultiSpec


def weights_of_parts(spec: GraderSpec) -> dict[str, float]:
    """Return the weight of each part of a multi grader whose score is a weighted sum; empty for any other grader."""
    if not isinstance(spec, MultiSpec):
        return {}
    return weights_of(Formula.parse(spec.calculate_output, spec.graders)) or {}


def weighted_parts(spec: GraderSpec) -> tuple[dict[str, float], float | None]:
    """Return the weight of each part of a multi grader, and the score of one that failed.

    Raises:
        ValueError: it is no multi grader, or its score is no weighted sum.
    """
    if not isinstance(spec, MultiSpec):
        raise ValueError(f"a grader of the type 'multi' is needed, and '{spec.type}' gives one score")
    weights = weights_of_parts(spec)
    if not weights:
        raise ValueError(
            "calculate_output must be a weighted sum of the parts, such as '0.7 * answer + 0.3 * format', and it is "
            f"'{spec.calculate_output}'"
        )
    return weights, spec.invalid_grade


def weights_of(formula: Formula) -> dict[str, float] | None:
    """Return the weight of each variable in a formula such as `0.7 * a + b / 2 - 0.1`; None: it is no weighted sum.

    A constant has no weight.
    """
    try:
        terms = _terms(formula.root)
    except FormulaDomainError:  # 1 / 0
        return None
    if terms is None:
        return None
    return {name: weight for name, weight in terms.items() if name}


# The weights of the variables, and at "" the constant.
_Terms = dict[str, float]


def _terms(node: Expression) -> _Terms | None:
    match node:
        case Number(number):
            return {"": number}
        case Variable(name):
            return {name: 1.0}
        case Negative(operand):
            return _scaled(_terms(operand), -1.0)
        case Chain(first, rest):
            total = _terms(first)
            for symbol, operand in rest:
                total = _combined(total, symbol, operand)
            return total
    return _constant(node)


def _combined(left: _Terms | None, symbol: str, operand: Expression) -> _Terms | None:
    right = _terms(operand)
    if left is None or right is None:
        return None
    if symbol in ("+", "-"):
        sign = 1.0 if symbol == "+" else -1.0
        return {
            name: left.get(name, 0.0) + sign * right.get(name, 0.0) for name in dict.fromkeys([*left, *right])
        }
    if symbol == "*":
        return _scaled(right, left[""]) if [*left] == [""] else _scaled(left, _number(right))
    if symbol == "/":
        divisor = _number(right)
        return _scaled(left, 1.0 / divisor) if divisor else None
    base, power = _number(left), _number(right)
    if base is None or power is None:
        return None
    return _constant(Chain(Number(base), ((symbol, Number(power)),)))


def _constant(node: Expression) -> _Terms | None:
    """Of an expression without variables."""
    try:
        return {"": node.value({})}
    except KeyError:  # a variable inside a function
        return None


def _number(terms: _Terms) -> float | None:
    return terms[""] if [*terms] == [""] else None


def _scaled(terms: _Terms | None, by: float | None) -> _Terms | None:
    return None if terms is None or by is None else {name: value * by for name, value in terms.items()}
