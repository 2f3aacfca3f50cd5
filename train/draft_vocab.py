"""A drafter's own, smaller vocabulary: the most frequent tokens of the training answers."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass
class DraftVocab:
    """A draft vocabulary and what made it.

    Attributes:
        ids: int64 [U], target token ids, rising.
        coverage: share of the training answers' tokens that are in it.
        made_from: hash of the answers' token counts, the tokenizer and the size.
    """

    ids: torch.Tensor
    coverage: float
    made_from: str


def count_answer_tokens(
    rows: Iterable[tuple[torch.Tensor, torch.Tensor]], vocab_size: int
) -> torch.Tensor:
    """int64 [V]: how often each token stands in an answer.

    Args:
        rows: (input_ids [T], loss_mask [T]) of each stored row.
    """
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for input_ids, loss_mask in rows:
        counts += torch.bincount(input_ids[loss_mask.bool()], minlength=vocab_size)
    return counts


def choose_draft_vocab(counts: torch.Tensor, size: int, tokenizer_hash: str | None) -> DraftVocab:
    """The `size` most frequent tokens; among equally frequent ones the lower ids.

    A corpus with fewer distinct tokens fills up by id, and a warning says so.

    Raises:
        ValueError: if size is not within 1 and the vocabulary, or nothing was counted.
    """
    if not 1 <= size <= len(counts):
        raise ValueError(f"draft_vocab_size is {size}; it must be within 1 and {len(counts)}")
    if counts.sum() == 0:
        raise ValueError("draft vocabulary: the training answers hold not one token")
    distinct = int((counts > 0).sum())
    if distinct < size:
        warnings.warn(
            f"draft vocabulary: the training answers use {distinct} distinct tokens; "
            f"{size - distinct} more are taken by id",
            stacklevel=2,
        )
    ids = torch.argsort(counts, descending=True, stable=True)[:size].sort().values
    made_from = hashlib.sha256(counts.numpy().tobytes())
    made_from.update(json.dumps([size, tokenizer_hash]).encode())
    coverage = float(counts[ids].sum() / counts.sum())
    return DraftVocab(ids, coverage, made_from.hexdigest()[:16])
