"""The runtime's attention function: grouped queries folded into the query length.

transformers copies the whole cache with `repeat_kv` when a mask is given. Here the G query heads
that share a key/value head become G·T queries of that head, and the cache is read in place.

Letters: B rows, H query heads, K key/value heads, G = H / K, T queries, S visible slots, D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedConfig
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

IMPLEMENTATION = "draftsmith"


def folded_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over the slot cache (an entry of transformers' AttentionInterface).

    Args:
        query: [B, H, T, D]. key, value: [B, K, S, D].
        attention_mask: additive float [B, 1, G·T, S] (or [B, 1, T, S], repeated here), 0 or -inf,
            no row without a 0.
        softcap: Gemma-2's cap on the scores. s_aux: gpt-oss's sink logits [H].
    Returns:
        ([B, T, H, D], None)
    """
    batch, heads, length, dim = query.shape
    groups = heads // key.shape[1]
    query = query.reshape(batch, key.shape[1], groups * length, dim)
    if attention_mask.shape[2] != groups * length:
        attention_mask = attention_mask.repeat(1, 1, groups, 1)
    if softcap is None and s_aux is None:
        out = nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, scale=scaling
        )
    else:
        scores = query @ key.transpose(2, 3) * (dim**-0.5 if scaling is None else scaling)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores + attention_mask
        if s_aux is not None:
            sinks = s_aux.view(1, key.shape[1], groups, 1).expand(batch, -1, -1, length)
            scores = torch.cat([scores, sinks.reshape(batch, key.shape[1], -1, 1)], dim=-1)
        weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
        out = weights[..., : key.shape[2]] @ value
    return out.reshape(batch, heads, length, -1).transpose(1, 2), None


AttentionInterface.register(IMPLEMENTATION, folded_attention)
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)


def attention_configs(model: nn.Module) -> list[PreTrainedConfig]:
    """Every distinct config that a module of `model` reads its attention implementation from."""
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    return list({id(config): config for config in configs}.values())


@contextmanager
def use_folded_attention(configs: list[PreTrainedConfig]) -> Iterator[None]:
    """Within the block, the models of `configs` attend through `folded_attention`."""
    before = [config._attn_implementation for config in configs]
    try:
        for config in configs:
            config._attn_implementation = IMPLEMENTATION
        yield
    finally:
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation = implementation
