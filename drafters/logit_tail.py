"""What a model family does to logits after its LM head, for logits that were computed elsewhere."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from drafters.target import Target


class _GivenLogits(nn.Module):
    """Stands where the LM head stands and passes on what was multiplied elsewhere."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.__dict__["weight"] = weight  # some families look at its dtype; it is no weight of ours

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        return logits


def finish_logits(target: Target, raw_logits: torch.Tensor) -> torch.Tensor:
    """What the target's family does after its LM head (soft-cap, logit scale), on any width.

    The model's own forward is run with trunk and head taken out, so no list of families is needed.
    """
    head: Any = target.model.get_output_embeddings()
    tail = copy.copy(target._head)
    tail._modules = {
        name: _GivenLogits(head.weight) if module is head else module
        for name, module in tail._modules.items()
    }
    flat_1NU = raw_logits.reshape(1, -1, raw_logits.shape[-1])
    return tail(inputs_embeds=flat_1NU).logits.reshape(raw_logits.shape)


def family_finishes_logits(target: Target) -> bool:
    """Whether `finish_logits` changes anything for this target."""
    head: Any = target.model.get_output_embeddings()
    if all(module is not head for module in target._head._modules.values()):
        raise ValueError(
            f"target {target.name}: its LM head is not a direct part of the model, so Medusa heads "
            "of their own cannot follow what comes after it; use head_type 'tied'"
        )
    probe = torch.linspace(-50, 50, 101, dtype=target.dtype, device=target.device)[None]
    return not torch.equal(finish_logits(target, probe), probe)
