"""Share of the answer's words that are written in the row's language, identified by its script.

Combine it with a grader of correctness and give it a small weight: reasoning models that are rewarded only for correct
answers drift into a mix of languages (DeepSeek-R1, section 2.3.2, adds the same reward).

    row     {"messages": [...], "language": "en"}
    score   0 to 1; an answer without a single word scores 0

Scripts distinguish English from Chinese or Russian, but not from French. Numbers, formulas and text in backticks belong
to no language and are ignored.
"""

import re
import unicodedata

SCRIPTS = {
    "en": ("LATIN",), "de": ("LATIN",), "fr": ("LATIN",), "es": ("LATIN",), "pt": ("LATIN",), "it": ("LATIN",),
    "pl": ("LATIN",), "vi": ("LATIN",), "ru": ("CYRILLIC",), "uk": ("CYRILLIC",), "el": ("GREEK",),
    "ar": ("ARABIC",), "he": ("HEBREW",), "hi": ("DEVANAGARI",), "ko": ("HANGUL",), "th": ("THAI",),
    "zh": ("CJK",), "ja": ("HIRAGANA", "KATAKANA", "CJK"),
}  # fmt: skip


def grade(sample, item):
    scripts = SCRIPTS[item["language"]]  # an unlisted language is an error, not a score of 0
    text = re.sub(r"```.*?```|`[^`]*`|\$[^$]*\$", " ", sample["output_text"], flags=re.DOTALL)
    right = total = 0
    for word in re.findall(r"[^\W\d_]+", text):
        # Chinese and Japanese have no spaces, so every character counts as a word.
        for unit in (
            word if unicodedata.name(word[0], "").startswith(("CJK", "HIRAGANA", "KATAKANA")) else [word]
        ):
            total += 1
            right += unicodedata.name(unit[0], "").startswith(scripts)
    return right / total if total else 0.0
