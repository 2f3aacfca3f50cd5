"""The target's features of packed documents, each document as if it stood alone.

Letters: B rows, T tokens, D hidden width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psutil
import torch
from torch.nn.utils.rnn import pad_sequence

from data_recipes.batches import Batch, document_causal_mask
from drafters.target import Target
from inference.forward import attention_windows

Features = Callable[[Target, dict[str, Any]], torch.Tensor]


def document_features(target: Target, batch: Batch) -> torch.Tensor:
    """f [B, T, D]: the last hidden states after the final norm.

    Args:
        batch: input_ids, position_ids (from 0 in each document) and document_ids, int64 [B, T].
    """
    return target.features(
        batch["input_ids"],
        attention_mask=document_masks(target, batch),
        position_ids=batch["position_ids"],
    )


def document_masks(target: Target, batch: Batch) -> torch.Tensor | dict[str, torch.Tensor] | None:
    """Additive masks [B, 1, T, T] within documents, one per layer type if they differ.

    They are given to the model because not every family finds packed documents by itself from
    positions that restart (OPT attends across them). Flash kernels take no such mask, and read the
    positions.
    """
    if "flash" in (target.config._attn_implementation or ""):
        return None
    within_B1TT = document_causal_mask(batch["document_ids"])
    positions_BT = batch["position_ids"]
    distance_B1TT = (positions_BT[:, :, None] - positions_BT[:, None, :])[:, None]
    masks = {}
    for layer_type, window in attention_windows(target).items():
        allowed = within_B1TT if window is None else within_B1TT & (distance_B1TT < window)
        mask = torch.zeros(allowed.shape, dtype=target.dtype, device=allowed.device)
        masks[layer_type] = mask.masked_fill_(~allowed, float("-inf"))
    return masks if len(masks) > 1 else next(iter(masks.values()))


class KeptFeatures:
    """Features of packed rows, each computed once in a run and then kept in memory.

    For a frozen target and data small enough: from the second epoch on the target is not run. A
    row is always computed by itself, so that its features are the same bits whatever batch it
    first comes in, and a resumed run computes what it has lost to the same bits again.

    Args:
        num_tokens: of all rows together; the memory they take is checked before the first is kept.
    Raises:
        ValueError: if there is not so much memory.
    """

    def __init__(self, target: Target, num_tokens: int) -> None:
        self.memory_bytes = num_tokens * target.hidden_size * target.dtype.itemsize
        free = psutil.virtual_memory().available
        if self.memory_bytes > free:
            raise ValueError(
                f"keep_features: {num_tokens:,} tokens take {self.memory_bytes / 1e9:.1f} GB, but "
                f"only {free / 1e9:.1f} GB of memory are free; set keep_features to false"
            )
        self._rows: dict[tuple[str, ...], torch.Tensor] = {}

    def __call__(self, target: Target, batch: dict[str, Any]) -> torch.Tensor:
        """f [B, T, D] of `document_features`; zeros on padding."""
        lengths = (batch["document_ids"] >= 0).sum(1).tolist()
        rows = []
        for row, (names, length) in enumerate(zip(batch["row_ids"], lengths, strict=True)):
            key = tuple(names)
            if key not in self._rows:
                fields = ("input_ids", "position_ids", "document_ids")
                alone = {field: batch[field][row : row + 1, :length] for field in fields}
                self._rows[key] = document_features(target, alone)[0].cpu()
            rows.append(self._rows[key].to(target.device))
        features_BTD = pad_sequence(rows, batch_first=True)
        padding = batch["input_ids"].shape[1] - features_BTD.shape[1]
        return torch.nn.functional.pad(features_BTD, (0, 0, 0, padding))
