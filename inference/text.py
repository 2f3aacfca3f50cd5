"""Token ids to text as they arrive: whole characters only, and never part of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

CONTEXT_TOKENS = 6  # decoded again with every new token, so that spaces and merges come out right


class TextStream:
    """Incremental detokenisation with stop strings.

    Args:
        tokenizer: a HF tokenizer, or None (then there is no text and no stop string).
        stop: strings that end the text; the text ends before the first of them.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        if stop and tokenizer is None:
            raise ValueError("stop strings need a tokenizer")
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._context_start = 0  # self._ids[context_start:read] has been turned into text
        self._read = 0
        self.text = ""  # whole characters decoded so far; cut at a stop string
        self._released = 0
        self.stopped = False

    def push(self, token: int) -> None:
        """Takes one more token; afterwards `stopped` tells whether a stop string is complete."""
        self._ids.append(token)
        if self._tokenizer is None:
            return
        known = self._decode(self._ids[self._context_start : self._read])
        longer = self._decode(self._ids[self._context_start :])
        if longer.endswith("\ufffd"):  # in the middle of a character
            return
        self._read = len(self._ids)
        self._context_start = max(self._context_start, self._read - CONTEXT_TOKENS)
        searched_from = max(0, len(self.text) - max((len(s) for s in self._stop), default=0))
        self.text += longer[len(known) :]
        found = [at for s in self._stop if (at := self.text.find(s, searched_from)) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.stopped = True

    def release(self, finished: bool) -> str:
        """Text that is certain by now: what might begin a stop string is held back."""
        if finished:
            self.finish()
        held = 0 if finished else self._possible_stop_length()
        end = max(self._released, len(self.text) - held)
        piece = self.text[self._released : end]
        self._released = end
        return piece

    def finish(self) -> None:
        """No more tokens: a character that was cut off stays visible as U+FFFD."""
        if self._tokenizer is None or self.stopped:
            return
        known = self._decode(self._ids[self._context_start : self._read])
        self.text += self._decode(self._ids[self._context_start :])[len(known) :]
        self._read = len(self._ids)

    def _possible_stop_length(self) -> int:
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(self.text)), longest, -1):
                if self.text.endswith(stop[:length]):
                    longest = length
                    break
        return longest

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
