"""Near-duplicates between prompts: what keeps held-out prompts apart from training prompts.

Two prompts are near if, lower-cased and without punctuation, they share eight words in a row, or
most of their words (Jaccard of the word sets). Eight words is the n-gram of PaLM's contamination
check (arXiv 2204.02311); the second test is for prompts that are shorter than that, or in which
only names and numbers differ.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data_recipes.prompts import PromptRow

NGRAM_WORDS = 8
MAX_JACCARD = 0.6


@dataclass(frozen=True)
class NearDuplicate:
    """A text and an earlier one that is near it, by their indices, and why."""

    index: int
    other: int
    reason: str


def words(text: str) -> list[str]:
    """Lower-cased words without punctuation; underscores part words."""
    return re.findall(r"[^\W_]+(?:'[^\W_]+)*", text.lower().replace("\u2019", "'"))


class OverlapIndex:
    """Texts to compare others with.

    Args:
        texts: e.g. the held-out prompts.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        postings: dict[str, list[int]] = defaultdict(list)
        self._ngrams: dict[tuple[str, ...], int] = {}
        sizes = []
        for index, text in enumerate(texts):
            found = words(text)
            sizes.append(len(set(found)))
            for word in set(found):
                postings[word].append(index)
            for ngram in _ngrams(found):
                self._ngrams.setdefault(ngram, index)
        self._postings = {word: np.array(at) for word, at in postings.items()}
        self._sizes = np.array(sizes, dtype=np.int64)

    def near(self, text: str) -> tuple[int, str] | None:
        """(index of a text that is near, why), or None."""
        found = words(text)
        for ngram in _ngrams(found):
            if ngram in self._ngrams:
                return self._ngrams[ngram], f"both say {' '.join(ngram)!r}"
        unique = set(found)
        hits = [self._postings[word] for word in unique if word in self._postings]
        if not hits:
            return None
        shared = np.bincount(np.concatenate(hits), minlength=len(self._sizes))
        jaccard = shared / (self._sizes + len(unique) - shared)
        best = int(jaccard.argmax())
        if jaccard[best] < MAX_JACCARD:
            return None
        return best, f"they share {jaccard[best]:.0%} of their words"


def near_duplicates(texts: Sequence[str], others: Sequence[str]) -> list[NearDuplicate]:
    """The texts that are near one of `others`, each with the first or nearest of them."""
    index = OverlapIndex(others)
    found = ((i, index.near(text)) for i, text in enumerate(texts))
    return [NearDuplicate(i, *near) for i, near in found if near]


def _ngrams(found: list[str]) -> list[tuple[str, ...]]:
    return [tuple(found[i : i + NGRAM_WORDS]) for i in range(len(found) - NGRAM_WORDS + 1)]


def prompt_text(row: PromptRow) -> str:
    """All that the user says in a row; answers and system prompts are not compared."""
    return "\n".join(m["content"] for m in row.messages if m["role"] == "user")


def without_overlap(
    rows: Sequence[PromptRow], held_out: Sequence[PromptRow]
) -> tuple[list[PromptRow], int]:
    """Rows that are near no held-out row, and how many were near one."""
    found = near_duplicates([prompt_text(r) for r in rows], [prompt_text(r) for r in held_out])
    near = {duplicate.index for duplicate in found}
    return [row for index, row in enumerate(rows) if index not in near], len(near)
