"""What a method plugs into the training loop: an objective, and the one module that is wrapped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from drafters.target import Target

Batch = dict[str, Any]
FROZEN_PREFIX = "frozen_target."


@dataclass
class BatchLoss:
    """What one micro-batch gives.

    Attributes:
        loss_sum: scalar with gradient, nats summed over the micro-batch; 0 for nothing supervised.
        sums: detached figures that add up over micro-batches and processes, for the log.
    """

    loss_sum: torch.Tensor
    sums: dict[str, torch.Tensor]


class Objective(Protocol):
    """What a method trains: everything else of the loop is the same for all of them."""

    def count(self, batch: Batch) -> torch.Tensor:
        """int64 []: labels by whose number, over the whole global step, the loss is divided."""

    def loss(self, target: Target, drafter: nn.Module, batch: Batch) -> BatchLoss:
        """The loss of one micro-batch; runs inside the wrapped module."""

    def report(self, sums: dict[str, torch.Tensor], count: int) -> dict[str, float]:
        """Figures for the log from the sums of some global steps and their counts together."""

    def blame(self, sums: dict[str, torch.Tensor]) -> str | None:
        """The part (head, term) whose loss is not finite; None if all are finite."""


class TrainingModel(nn.Module):
    """Target and drafter in one module, so that DDP and ZeRO wrap one thing.

    The target stays frozen and in eval mode, and is left out of `state_dict`.
    """

    def __init__(self, target: Target, drafter: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.target, self.objective = target, objective
        self.frozen_target = target.model.requires_grad_(False)
        self.drafter = drafter
        self.register_load_state_dict_post_hook(_frozen_is_not_missing)

    def forward(self, batch: Batch) -> BatchLoss:
        return self.objective.loss(self.target, self.drafter, batch)

    def train(self, mode: bool = True) -> TrainingModel:
        super().train(mode)
        self.frozen_target.eval()
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        state = super().state_dict(*args, **kwargs)
        frozen = kwargs.get("prefix", "") + FROZEN_PREFIX
        for name in [name for name in state if name.startswith(frozen)]:
            del state[name]
        return state

    def trained_parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.parameters() if parameter.requires_grad]


def _frozen_is_not_missing(module: nn.Module, incompatible: Any) -> None:
    missing = incompatible.missing_keys
    missing[:] = [name for name in missing if FROZEN_PREFIX not in name]
