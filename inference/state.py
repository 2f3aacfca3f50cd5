"""What a batch is made of on the device, between two rounds.

Letters: B rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from inference.sampling import PolicyTensors


@dataclass
class BatchState:
    """The batch on the device.

    Attributes:
        lengths_B: int64, tokens committed to the cache; also the root's position.
        root_B: int64, the last emitted token, not yet in the cache.
        seeds_B, rounds_B: int64, key of every random draw of the row's round.
        policy: the rows' sampling parameters.
        seen_BV: bool, tokens that occur in the row's text; None where no row has a penalty.
    """

    lengths_B: torch.Tensor
    root_B: torch.Tensor
    seeds_B: torch.Tensor
    rounds_B: torch.Tensor
    policy: PolicyTensors
    seen_BV: torch.Tensor | None

    @property
    def positions_B(self) -> torch.Tensor:
        """Position of the root in its row's text."""
        return self.lengths_B
