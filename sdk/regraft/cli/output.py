"""Output of the command line: tables and sentences, or one JSON document."""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any


def plain(value: Any) -> Any:
    """Convert the client's objects to JSON values."""
    if hasattr(value, "model_dump"):
        # Not to_dict(): the SDK's union of graders warns about unknown types, although it keeps their fields.
        return value.model_dump(mode="json", warnings=False)
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value


def print_json(value: Any) -> None:
    print(json.dumps(plain(value), indent=2, ensure_ascii=False), flush=True)


def print_json_line(value: Any) -> None:
    print(json.dumps(plain(value), ensure_ascii=False), flush=True)


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns side by side, numbers right-aligned. Without rows only the head."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    right = [
        bool(rows) and all(isinstance(row[index], int | float) for row in rows) for index in range(len(head))
    ]
    lines = []
    for line in [list(head), *cells]:
        padded = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def when(unix: int | None) -> str:
    """A point in time to the minute, with its time zone."""
    return "-" if unix is None else datetime.fromtimestamp(unix, UTC).strftime("%Y-%m-%d %H:%M UTC")


def shortened(text: str, width: int) -> str:
    """Collapse white space, and cut to `width` characters."""
    line = " ".join(text.split())
    return line if len(line) <= width else f"{line[: width - 1]}…"


MAX_BLANKS = 8  # of an answer, at each end


def answer_cell(text: str, width: int, encoding: str | None) -> str:
    """As `shortened`, with marks for the blanks at both ends: graders read them."""
    inner = text.strip()
    if not inner:
        return _blanks(text, encoding)
    start = text.index(inner)
    ends = [_blanks(part, encoding) for part in (text[:start], text[start + len(inner) :])]
    return shortened(ends[0] + inner + ends[1], width)


def _blanks(text: str, encoding: str | None) -> str:
    space = "·"
    try:
        space.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        space = "_"
    marks = "".join(space if one == " " else repr(one)[1:-1] for one in text[:MAX_BLANKS])
    return marks + ("…" if len(text) > MAX_BLANKS else "")


def duration(seconds: float) -> str:
    """90 -> "1 min 30 s"; hours without seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def expected_costs(estimate: Mapping[str, Any], finish: int, now: float) -> dict[str, str]:
    """A running job's estimate as lines by name: the time that is left, GPU time, and cost where there is a price.

    Args:
        finish: when the job is estimated to end, by which the age of the estimate is known.
    """
    left, total = estimate["remaining_seconds"], estimate["total_gpu_seconds"]
    age = left["expected"] - (finish - now)
    least, likely, most = (duration(max(0.0, left[name] - age)) for name in ("low", "expected", "high"))
    lines = {
        "time left": f"{likely}, between {least} and {most}; done at {when(finish)}",
        "GPU time": f"{duration(total['expected'])} in all, between {duration(total['low'])} and "
        f"{duration(total['high'])}",
    }
    if cost := estimate.get("cost"):
        lines["cost"] = (
            f"{amount(cost['expected'])} {cost['currency']} in all, between {amount(cost['low'])} and "
            f"{amount(cost['high'])}"
        )
    return lines


def amount(value: float) -> str:
    """An amount of money without its currency, as the console writes it. Small ones need more digits."""
    size = abs(value)
    if 0 < size < 0.0001:
        return "< 0.0001"
    return f"{value:,.{4 if 0 < size < 0.995 else 2}f}"


def page_of(limit: int) -> int:
    """The size of the first page of as many items."""
    return min(max(limit, 1), 100)


def answer(arguments: argparse.Namespace, value: Any, text: Callable[[], str]) -> int:
    """Print the value as JSON, or its text. Returns the exit code."""
    if arguments.output == "json":
        print_json(value)
    elif shown := text():
        print(shown)
    return 0


def say(text: str) -> None:
    """Print to stderr."""
    print(text, file=sys.stderr, flush=True)


def say_quarters(say: Callable[[str], None]) -> Callable[[str, float, str], None]:
    """A function of a phase, of the share of it that is done, and of a text, which says one text for each quarter."""
    said: set[tuple[str, int]] = set()

    def say_new(phase: str, share: float, text: str) -> None:
        quarter = (phase, int(4 * share))
        if quarter not in said:
            said.add(quarter)
            say(text)

    return say_new


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
