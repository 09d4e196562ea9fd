"""Parse and evaluate the formula of `calculate_output` with a recursive descent parser, without `eval`.

    expression = term (("+" | "-") term)*
    term       = signed (("*" | "/") signed)*
    signed     = ("+" | "-") signed | power
    power      = atom ("^" signed)?                  right associative, so 2^3^2 is 2^9; "**" means "^"
    atom       = number | name | function "(" expression ("," expression)* ")" | "(" expression ")"

A sign has lower precedence than a power: -x^2 is -(x^2), and 2^-1 is 0.5. `log` is the natural logarithm.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from graders.types import MAX_SCORE, is_score

# Both limits guard against hostile input. The first bounds the tree; the second bounds recursion: parsing takes about
# eight Python frames a level, and the default recursion limit is 1,000.
MAX_LENGTH = 4096
MAX_DEPTH = 32

_OPERATORS: dict[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "^": math.pow,  # unlike `**`, raises ValueError for (-8)^0.5 instead of returning a complex number
}
_FUNCTIONS: dict[str, Callable[..., float]] = {
    "min": lambda *args: min(args),
    "max": lambda *args: max(args),
    "abs": abs,
    "floor": math.floor,
    "ceil": math.ceil,
    "exp": math.exp,
    "sqrt": math.sqrt,
    "log": math.log,
}
_VARIADIC = ("min", "max")
_NAME = re.compile(r"[^\W\d]\w*")
_TOKEN = re.compile(
    rf"""(?P<number> (?: [0-9]+\.?[0-9]* | \.[0-9]+ ) (?: [eE][-+]?[0-9]+ )? )
    | (?P<name> {_NAME.pattern} )
    | (?P<symbol> \*\* | [-+*/^(),] )""",
    re.VERBOSE,
)
_SPACE = re.compile(r"\s*")


class FormulaError(ValueError):
    """The text is not a valid formula over the given names. `position` is the 0-based offset of the error."""

    def __init__(self, message: str, position: int) -> None:
        super().__init__(message, position)
        self.message, self.position = message, position

    def __str__(self) -> str:
        return f"{self.message} (at position {self.position})"


class FormulaDomainError(ArithmeticError):
    """The formula has no real value for these scores, or one that is too large for a score."""


class Expression(Protocol):
    def value(self, scores: Mapping[str, float]) -> float: ...


@dataclass(frozen=True)
class Formula:
    """A parsed formula. Evaluation raises only FormulaDomainError."""

    text: str
    root: Expression

    @classmethod
    def parse(cls, text: str, names: Collection[str]) -> Formula:
        """Parse `text`. Raises FormulaError unless it is a formula whose variables are all among `names`."""
        if len(text) > MAX_LENGTH:
            raise FormulaError(f"the formula is longer than {MAX_LENGTH} characters", MAX_LENGTH)
        return cls(text, _Parser(_tokens(text), names).formula())

    def evaluate(self, values: Mapping[str, float]) -> float:
        """Return the value for these scores, which is a score. Raises FormulaDomainError."""
        result = self.root.value(values)
        if not is_score(result):
            raise FormulaDomainError(f"{result:g} is not from {-MAX_SCORE:g} to {MAX_SCORE:g}")
        return result


def is_name(text: str) -> bool:
    """Return whether `text` is a valid variable name in a formula."""
    return _NAME.fullmatch(text) is not None


@dataclass(frozen=True)
class Number:
    number: float

    def value(self, scores: Mapping[str, float]) -> float:
        return self.number


@dataclass(frozen=True)
class Variable:
    name: str

    def value(self, scores: Mapping[str, float]) -> float:
        score = float(scores[self.name])
        if not math.isfinite(score):
            raise FormulaDomainError(f"{self.name} is {score}")
        return score


@dataclass(frozen=True)
class Negative:
    operand: Expression

    def value(self, scores: Mapping[str, float]) -> float:
        return -self.operand.value(scores)


@dataclass(frozen=True)
class Chain:
    """Operators of the same precedence, applied left to right, such as a - b + c; or a single power.

    The expression is flat, so a sum of 1,000 terms is no deeper than a sum of two.
    """

    first: Expression
    rest: tuple[tuple[str, Expression], ...]

    def value(self, scores: Mapping[str, float]) -> float:
        total = self.first.value(scores)
        for symbol, operand in self.rest:
            right = operand.value(scores)
            total = _finite(f"{total:g} {symbol} {right:g}", _OPERATORS[symbol], total, right)
        return total


@dataclass(frozen=True)
class FunctionCall:
    function: str
    args: tuple[Expression, ...]

    def value(self, scores: Mapping[str, float]) -> float:
        args = [arg.value(scores) for arg in self.args]
        shown = f"{self.function}({', '.join(f'{arg:g}' for arg in args)})"
        return _finite(shown, _FUNCTIONS[self.function], *args)


def _finite(operation: str, function: Callable[..., float], *args: float) -> float:
    """Apply one operation. Each result is checked, because min(1, 1e308 * 10) would hide the overflow."""
    try:
        result = float(function(*args))
    except (ValueError, ArithmeticError):
        raise FormulaDomainError(f"{operation} has no finite value") from None
    if not math.isfinite(result):
        raise FormulaDomainError(f"{operation} has no finite value")
    return result


class _Token(NamedTuple):
    kind: str  # "number", "name", "symbol" or "end"
    text: str
    position: int

    @property
    def label(self) -> str:
        return "the end" if self.kind == "end" else repr(self.text)


def _tokens(text: str) -> list[_Token]:
    tokens: list[_Token] = []
    at = _skip_space(text, 0)
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise FormulaError(f"unexpected character {text[at]!r}", at)
        spelling = "^" if match[0] == "**" else match[0]
        tokens.append(_Token(str(match.lastgroup), spelling, at))
        at = _skip_space(text, match.end())
    return [*tokens, _Token("end", "", len(text))]


def _skip_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


class _Parser:
    """A recursive descent parser with one method per rule of the grammar in the module docstring."""

    def __init__(self, tokens: list[_Token], names: Collection[str]) -> None:
        self.tokens, self.names = tokens, names
        self.at, self.depth = 0, 0

    def formula(self) -> Expression:
        root = self.expression()
        if self.next.kind != "end":
            raise FormulaError(f"expected an operator, got {self.next.label}", self.next.position)
        return root

    def expression(self) -> Expression:
        return self.chain(self.term, ("+", "-"))

    def term(self) -> Expression:
        return self.chain(self.signed, ("*", "/"))

    def chain(self, operand: Callable[[], Expression], symbols: tuple[str, ...]) -> Expression:
        first, rest = operand(), []
        while symbol := self.take(*symbols):
            rest.append((symbol.text, operand()))
        return Chain(first, tuple(rest)) if rest else first

    def signed(self) -> Expression:
        # Signs, powers, parentheses and calls all nest through this method, so it counts the depth.
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise FormulaError(f"nested more than {MAX_DEPTH} deep", self.next.position)
        if sign := self.take("+", "-"):
            operand = self.signed()
            expression = Negative(operand) if sign.text == "-" else operand
        else:
            expression = self.power()
        self.depth -= 1
        return expression

    def power(self) -> Expression:
        base = self.atom()
        return Chain(base, (("^", self.signed()),)) if self.take("^") else base

    def atom(self) -> Expression:
        token = self.next
        self.at += 1
        if token.kind == "number":
            return _number(token)
        if token.kind == "name":
            return self.call(token) if self.take("(") else self.variable(token)
        if token.text != "(":
            raise FormulaError(f"expected a number, a name or '(', got {token.label}", token.position)
        inner = self.expression()
        self.close()
        return inner

    def variable(self, token: _Token) -> Expression:
        if token.text in self.names:
            return Variable(token.text)
        if token.text in _FUNCTIONS:
            raise FormulaError(
                f"the function {token.label} needs its arguments in parentheses", token.position
            )
        raise FormulaError(f"unknown name {token.label}, known are {', '.join(self.names)}", token.position)

    def call(self, token: _Token) -> Expression:
        if token.text not in _FUNCTIONS:
            raise FormulaError(
                f"unknown function {token.label}, known are {', '.join(_FUNCTIONS)}", token.position
            )
        args: list[Expression] = []
        if not self.take(")"):
            args.append(self.expression())
            while self.take(","):
                args.append(self.expression())
            self.close()
        wanted = "at least one argument" if token.text in _VARIADIC else "exactly one argument"
        if not args or (len(args) > 1 and token.text not in _VARIADIC):
            raise FormulaError(f"{token.label} takes {wanted}, got {len(args)}", token.position)
        return FunctionCall(token.text, tuple(args))

    def close(self) -> None:
        if not self.take(")"):
            raise FormulaError(f"expected ')', got {self.next.label}", self.next.position)

    @property
    def next(self) -> _Token:
        return self.tokens[self.at]

    def take(self, *symbols: str) -> _Token | None:
        token = self.next
        if token.kind != "symbol" or token.text not in symbols:
            return None
        self.at += 1
        return token


def _number(token: _Token) -> Number:
    number = float(token.text)
    if not math.isfinite(number):
        raise FormulaError("the number is too large", token.position)
    return Number(number)
