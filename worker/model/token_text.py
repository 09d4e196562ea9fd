"""The text of each token of an answer, such that all of them together are the text of the answer."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

UNFINISHED = "\ufffd"  # U+FFFD, which tokenizers emit for incomplete UTF-8
LONGEST = 4  # bytes of a character


class TokenTexts:
    """Remembers the text of each token that it has seen, because decoding one takes ten microseconds."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def __call__(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token, special tokens included.

        A character of several tokens is the text of the last of them, and the others have none.
        """
        texts: list[str] = []
        unfinished: list[int] = []
        for id in ids:
            text = self._alone(id) if texts else self._decoded([id])
            if unfinished or UNFINISHED in text:
                unfinished.append(id)
                text = self._decoded(unfinished)
                if text.endswith(UNFINISHED) and len(unfinished) < LONGEST:
                    text = ""
                else:
                    unfinished = []
            texts.append(text)
        if unfinished:
            texts[-1] = self._decoded(unfinished)
        return texts

    def _alone(self, id: int) -> str:
        text = self._texts.get(id)
        if text is None:
            text = self._texts[id] = self._after_another(id)
        return text

    def _after_another(self, id: int) -> str:
        """Tokenizers may drop a space at the start of a text (SentencePiece), so the token is decoded twice."""
        once, twice = self._decoded([id]), self._decoded([id, id])
        return twice[len(once) :] if twice.startswith(once) and UNFINISHED not in twice else once

    def _decoded(self, ids: Sequence[int]) -> str:
        return str(
            self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )
