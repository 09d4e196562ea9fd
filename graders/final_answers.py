"""Find the final answer in the text of a model."""

import re

_TAG = re.compile(r"</?answer>", re.IGNORECASE)
_BRACE = re.compile(r"[{}]")
_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?%?")


def final_answer(text: str) -> str | None:
    """Extract the final answer of a text as written, or None."""
    marked = marked_answer(text)
    if marked is not None:
        return marked
    numbers = _NUMBER.findall(text)
    return numbers[-1] if numbers else None


def marked_answer(text: str) -> str | None:
    r"""Extract the content of the last \boxed{...} or \fbox{...}, else of the last <answer>, or None."""
    boxed = _last_boxed(text)
    return boxed if boxed is not None else _last_tagged(text)


def _last_tagged(text: str) -> str | None:
    """Extract the last <answer>...</answer> in linear time: r"<answer>(.*?)</answer>" takes quadratic time."""
    last, opened = None, None
    for tag in _TAG.finditer(text):
        if not tag[0].startswith("</"):
            opened = tag.end() if opened is None else opened
        elif opened is not None:
            last, opened = text[opened : tag.start()].strip(), None
    return last


def _last_boxed(text: str) -> str | None:
    opening = max(text.rfind(r"\boxed{"), text.rfind(r"\fbox{"))
    if opening < 0:
        return None
    start = text.index("{", opening) + 1
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[start : brace.start()].strip()
    return None  # truncated
