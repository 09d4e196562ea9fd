"""Reject phrases and identifiers that the style guide bans, in Python files, and the phrases in Markdown, too.

Usage: python .ci/english.py [PATH ...]. Without paths it checks CHECKED and counts VAGUE_WORDS. Prints file:line, the
phrase and the advice, and exits with 1 if there is a match or a count has risen.
"""

import ast
import re
import sys
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Paths that are clean: everything but the generated reference, the decisions and the tests.
CHECKED = (
    "api",
    "bench",
    "core",
    "examples",
    "graders",
    "helm",
    "migrations",
    "regraft_server",
    "sdk",
    "worker",
    "docs/howto",
    "docs/tutorial",
    "docs/explain",
    "docs/measured",
    "docs/contribute",
    "docs/index.md",
    "changelog.d",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "RELEASE.md",
)

# Phrase (regular expression, case-insensitive) -> advice.
BANNED = {
    r"\bwho(?:m)?ever\b": "name the subject: the client, the operator, the worker",
    r"\bwhosever\b": "name the owner",
    r"\bnobody\b": "name the subject: no worker, no client; for a default: unset",
    r"\bsomebody\b": "name the subject",
    r"\beverybody\b": "name the subject: all clients, every request",
    r"\banybody\b": "name the subject",
    r"\b(?:goes|go|went|going) on\b": "continues, resumes",
    r"\b(?:is|are|was|were|be|been) told\b": "is notified, receives; for code: is passed",
    r"\btold of\b": "notified, emitted",
    r"\bis asked\b|\bare asked\b|\bwas asked\b": "is called, is queried, is requested",
    r"\basked for\b": "requested",
    r"\bask(?:s|ing)? again\b": "retry, try again",
    r"\bcomes? back\b": "returns",
    r"\btakes? home\b|\bgo(?:es)? home\b": "export, download",
    r"\bhas it that\b": "says, defines",
    r"\bdoes without\b|\bdo without\b": "does not need",
    r"\bin the place of\b": "instead of, replaces",
    r"\bis away\b": "is unavailable",
    r"\bbroke off\b|\bbreaks off\b": "closed the connection, is truncated",
    r"\bas it (?:should|may) be\b|\bas they should be\b": "valid",
    r"\bat the price of\b": "costs",
    r"\bof its own\b|\bof their own\b|\bof our own\b": "its own ...",
    r"\bmakes? sure that\b": "say what it does: deletes, validates",
    r"\ball there (?:is|are)\b": "all",
    r"\bso (?:many|long|often|much) (?!as\b|that\b|more\b)": "state the number or the variable",
    r"(?<!there )\bis no (?:url|tar|toml|json|manifest|jsonl|table|row|schema|key|id)\b": "is not a ..., is invalid",
    r"\bin the words (?:of|for)\b": "with the same message as",
    r"\bby the drop\b": "slowly",
    r"\bstands? (?:in|behind|before|at|beside|for what)\b": "is",
    r"\bhears? (?:of|that)\b": "is notified",
    r"\bin front of\b": "before",
    r"\bwhat is left\b|\bleft behind\b|\bleaves? behind\b": "the rest, leftovers",
    r"\bnext to nothing\b": "hardly anything",
    r"\btakes? (?:his|her|its|their) time\b": "is slow, blocks",
    r"\bhas nothing to\b": "state the condition",
    r"\bteach(?:es)? nothing\b": "has no signal, zero-variance group",
    r"\bhalf (?:of )?a surrogate pair\b": "lone surrogate",
    r"\bput together\b": "assembled, joined",
    r"\b(?:misspelt|honoured|normalised|organisations?|serialised|centred|utilisation)\b": "American spelling",
    r"\blook-alikes?\b": "S3-compatible",
    r"^(?:what|where|how|why) (?:is|was|has|does|happens|happened|becomes|became|goes|comes|it|the|a|there)\b[^?]*\.": (
        "name the subject instead of starting with a noun clause"
    ),
}

# Identifiers (regular expression of the whole name) -> advice. Words of our own that the field has another word for.
BANNED_NAMES = {
    r"(?:\w+_)?held_to": "response_schema",
    r"_?taught(?:_\w+)?": "training_rewards, learned",
    r"[Ss]teering": "token_constraints",
    r"Ahead\w*": "Async..., Remaining...; core/results/prefetch.py",
    r"\w*left_behind|leave_alone": "abandoned, exclusive",
    r"give_time": "extend_leases",
    r"(?:tell|told|asked|shown|kept|held)_waiting": "notify_queued",
    r"Spell(?:er|ing)": "TokenTexts",
    r"Totals|_?[Ll]essons?": "GradientSums, AnswerSignal, training fields",
    r"(?:\w*[a-z])?Sink": "Exporter",
    r"\w+Figures": "...Collector",
    r"Observed\w*|Watched\w*": "Instrumented..., Heartbeat...",
    r"_?be_(?:rank|member)": "run_rank, run_member",
    r"wearing|beats_into": "with_weights, heartbeat_to",
    r"\w*Wish(?:es|Reader)?": "...Request",
}

# Names that say nothing, of functions, classes, parameters and attributes. Locals may be short.
VAGUE_NAMES = frozenset(
    "again asked given held here kept made meant one said shown some taken tell thing told whole".split()
)

# Words that say nothing inside of names, and how many definitions of PRODUCT have one in their name. No number rises:
# name the thing (the job, the row, the slot), unless the name is OpenAI's or a library's. Lower it after a renaming.
VAGUE_WORDS = {
    "ahead": 15,
    "asked": 2,
    "found": 37,
    "given": 1,
    "held": 11,
    "kept": 5,
    "meant": 2,
    "one": 39,
    "part": 98,
    "parts": 69,
    "place": 62,
    "places": 33,
    "said": 1,
    "shown": 6,
    "silent": 11,
    "told": 0,
    "whole": 14,
}
PRODUCT = ("api", "core", "graders", "sdk", "worker")
GENERATED = ("sdk/regraft/types.py", "sdk/regraft/sync/")

# (file, regular expression of the line): matches that are correct English or fixed by an interface.
ALLOWED: tuple[tuple[str, str], ...] = (
    # The guide of the command line has the same table of exit codes, which tests/sdk/test_docs.py compares.
    ("sdk/regraft/cli/parser.py", r"^130 {2}interrupted;"),
    # Public strings (an event and a validation error), changed with their tests.
    ("worker/recording/metrics.py", r"samples could not be graded and teach nothing\."),
    ("worker/supervisor/validation.py", r"If it scores all answers alike, the job has nothing to learn\."),
    # A customer's question that the demo classifies: data, not documentation.
    ("examples/demo.py", r"^Somebody else needs the book"),
    # The message that names the two missing layers of the sandbox.
    ("graders/sandbox/pool.py", r"and a user of its own \("),
    # `nobody` is the name of the Unix user 65534.
    ("graders/sandbox/users.py", r"`nobody`"),
    ("docs/howto/cli.md", r"^130 \| interrupted;"),
)

_NAMES = {re.compile(pattern): advice for pattern, advice in BANNED_NAMES.items()}
_PATTERNS = {re.compile(pattern, re.IGNORECASE): advice for pattern, advice in BANNED.items()}


def main(arguments: list[str]) -> int:
    count = 0
    for file in sorted(_files(arguments or [str(ROOT / name) for name in CHECKED])):
        name = file.relative_to(ROOT).as_posix() if file.is_relative_to(ROOT) else str(file)
        for line, text in _texts(file):
            for pattern, advice in _PATTERNS.items():
                match = pattern.search(text)
                if match and not any(name == where and re.search(what, text) for where, what in ALLOWED):
                    sys.stdout.write(f"{name}:{line}: {match.group()!r}: {advice}\n")
                    count += 1
        if file.suffix == ".py":
            count += _bad_names(file, name) + _vague_names(file, name)
    if count:
        sys.stderr.write(f"{count} banned phrases\n")
    return 1 if count or (not arguments and counts_differ(vague_definitions(), VAGUE_WORDS)) else 0


def vague_definitions(root: Path = ROOT) -> dict[str, list[str]]:
    """The definitions of PRODUCT by the vague words in their names, as "file:line name"."""
    definitions: dict[str, list[str]] = {word: [] for word in VAGUE_WORDS}
    for file in sorted(_files([str(root / folder) for folder in PRODUCT])):
        name = file.relative_to(root).as_posix()
        if file.suffix != ".py" or name.startswith(GENERATED):
            continue
        for node in ast.walk(_tree(file)):
            for line, defined in _defined(node):
                for word in {word.lower() for word in _WORDS.findall(defined.replace("NotFound", ""))}:
                    if word in definitions:
                        definitions[word].append(f"{name}:{line} {defined}")
    return definitions


# Of snake_case and of CamelCase.
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def counts_differ(definitions: Mapping[str, Sequence[str]], allowed: Mapping[str, int]) -> bool:
    """Print the definitions of each word that more names have than is allowed, and each number to be lowered.

    A number that is too high would let the next such name in unseen.
    """
    for word, named in definitions.items():
        if len(named) > allowed[word]:
            sys.stdout.write("".join(f"{definition}\n" for definition in named))
            sys.stderr.write(
                f"{len(named)} definitions have {word!r} in their names, and VAGUE_WORDS allows {allowed[word]}: "
                "the new one is in the list above, name what it is\n"
            )
        elif len(named) < allowed[word]:
            sys.stderr.write(f"lower VAGUE_WORDS[{word!r}] to {len(named)}\n")
    return any(len(named) != allowed[word] for word, named in definitions.items())


def _bad_names(file: Path, name: str) -> int:
    """Print the banned identifiers of a file, each once, and return their number."""
    with tokenize.open(file) as source:
        tokens = [token for token in tokenize.generate_tokens(source.readline) if token.type == tokenize.NAME]
    first = {token.string: token.start[0] for token in reversed(tokens)}
    bad = [
        (line, word, advice)
        for word, line in first.items()
        for pattern, advice in _NAMES.items()
        if pattern.fullmatch(word)
    ]
    for line, word, advice in sorted(bad):
        sys.stdout.write(f"{name}:{line}: identifier {word!r}: {advice}\n")
    return len(bad)


def _vague_names(file: Path, name: str) -> int:
    """Print the definitions with a name that says nothing, and return their number."""
    vague = {
        (line, word)
        for node in ast.walk(_tree(file))
        for line, word in _defined(node)
        if word.strip("_").lower() in VAGUE_NAMES
    }
    for line, word in sorted(vague):
        sys.stdout.write(f"{name}:{line}: {word!r} says nothing: name what it does, or what it is\n")
    return len(vague)


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_bytes())


def _defined(node: ast.AST) -> Iterator[tuple[int, str]]:
    """The names that a node defines for readers elsewhere: of a class, a function, its parameters, an attribute."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.lineno, node.name
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        yield from ((argument.lineno, argument.arg) for argument in arguments)
    if isinstance(node, ast.ClassDef):
        fields = [line for line in node.body if isinstance(line, ast.AnnAssign)]
        yield from ((field.lineno, field.target.id) for field in fields if isinstance(field.target, ast.Name))
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.lineno, node.attr


def _files(names: list[str]) -> Iterator[Path]:
    for name in names:
        path = Path(name).resolve()
        if path.is_dir():
            yield from (
                file for suffix in ("*.py", "*.md") for file in path.rglob(suffix) if not file.is_symlink()
            )
        else:
            yield path


def _texts(file: Path) -> Iterator[tuple[int, str]]:
    """The lines of prose in a file, with their numbers."""
    if file.suffix == ".md":
        return _markdown(file)
    return _python(file)


def _python(file: Path) -> Iterator[tuple[int, str]]:
    with tokenize.open(file) as source:
        for token in tokenize.generate_tokens(source.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string.lstrip("# ")
            elif token.type in _STRINGS and " " in token.string:
                for offset, line in enumerate(token.string.splitlines()):
                    yield token.start[0] + offset, line.strip().lstrip("rbfRBF\"'")


# Python 3.12 splits f-strings into tokens.
_STRINGS = {tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}


def _markdown(file: Path) -> Iterator[tuple[int, str]]:
    """All lines outside of code blocks."""
    code = False
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if line.lstrip().startswith("```"):
            code = not code
        elif not code:
            yield number, line.lstrip("-#>| ")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
