"""One row of the batch on the host: what has been emitted, where it ends, what it measured."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from inference.sampling import SamplingParams
from inference.text import TextStream


@dataclass
class GenerationStats:
    """What one answer cost.

    Attributes:
        rounds: target forwards of speculative rounds; the prompt's own forward is not one of them,
            nor is a last round of which an end or a limit cut tokens off (`cut_rounds`, 0 or 1).
        emitted_tokens: tokens those rounds emitted, correction and bonus counted.
        accepted_by_depth: rounds in which at least d draft tokens were accepted, d = 1, 2, …
        seconds: wall time from the row's admission to its end.
    """

    rounds: int = 0
    cut_rounds: int = 0
    emitted_tokens: int = 0
    accepted_by_depth: list[int] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def tau(self) -> float:
        """Tokens per target forward; 1.0 for plain decoding."""
        return self.emitted_tokens / self.rounds if self.rounds else float("nan")

    @property
    def acceptance_by_depth(self) -> list[float]:
        """P(depth d accepted | depth d - 1 accepted), d = 1, 2, …"""
        reached = [self.rounds, *self.accepted_by_depth]
        return [b / a if a else 0.0 for a, b in zip(reached, reached[1:], strict=False)]


@dataclass
class Generation:
    """A finished answer.

    Attributes:
        token_ids: what was emitted, the end token included; nothing after it.
        text: decoded without special tokens; ends before a stop string.
        finish_reason: "eos", "stop" or "length".
        law: the acceptance law's name; `exact` says whether it keeps the target's distribution.
    """

    token_ids: list[int]
    text: str
    finish_reason: str
    stats: GenerationStats
    law: str
    exact: bool


class Row:
    """Bookkeeping of one prompt while it occupies a row of the batch."""

    def __init__(
        self,
        index: int,
        prompt: Sequence[int],
        params: SamplingParams,
        tokenizer: Any,
        eos_token_ids: Sequence[int],
        token_limit: int,
        max_depth: int,
    ) -> None:
        self.index, self.prompt, self.params = index, list(prompt), params
        self.text = TextStream(tokenizer, params.stop)
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stats = GenerationStats(accepted_by_depth=[0] * max_depth)
        self._eos = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._limit = token_limit
        self._started = time.perf_counter()

    @property
    def length(self) -> int:
        """Tokens committed to the cache: everything but the last emitted token."""
        return len(self.prompt) + max(len(self.token_ids) - 1, 0)

    def take_first(self, token: int) -> None:
        """The token that the prompt's own forward decided."""
        self._emit([token])

    def take_round(self, tokens: Sequence[int], num_accepted: int) -> list[int]:
        """The tokens of one round, cut at an end token, a stop string or the limit."""
        emitted = self._emit(tokens)
        if len(emitted) < len(tokens):
            self.stats.cut_rounds += 1
            return emitted
        self.stats.rounds += 1
        self.stats.emitted_tokens += len(emitted)
        for depth in range(num_accepted):
            self.stats.accepted_by_depth[depth] += 1
        return emitted

    def finish(self, law: str, exact: bool) -> Generation:
        self.stats.seconds = time.perf_counter() - self._started
        self.text.finish()
        assert self.finish_reason is not None
        return Generation(
            self.token_ids, self.text.text, self.finish_reason, self.stats, law, exact
        )

    def _emit(self, tokens: Sequence[int]) -> list[int]:
        emitted = []
        for token in tokens:
            self.token_ids.append(token)
            emitted.append(token)
            self.text.push(token)
            if token in self._eos:
                self.finish_reason = "eos"
            elif self.text.stopped:
                self.finish_reason = "stop"
            elif len(self.token_ids) >= self._limit:
                self.finish_reason = "length"
            if self.finish_reason:
                break
        return emitted
