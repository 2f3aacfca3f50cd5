"""The target's features of packed documents, each document as if it stood alone.

Letters: B rows, T tokens, D hidden width.
"""

from __future__ import annotations

import torch

from data_recipes.batches import Batch, document_causal_mask
from drafters.target import Target
from inference.forward import attention_windows


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
