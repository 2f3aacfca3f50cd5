"""What the engine asks of a proposer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from inference.laws import Verdict
from inference.proposal import Proposal
from inference.randomness import Source
from inference.state import BatchState


class Proposer(Protocol):
    """Makes one tree a row and round; keeps what it needs between rounds, row by row.

    Attributes:
        num_tokens: tokens of a tree, the root included.
        max_depth: longest path in draft nodes.
        is_chain: whether every tree is one path.
    """

    num_tokens: int
    max_depth: int
    is_chain: bool

    def allocate(self, batch_size: int, capacity: int) -> None:
        """A new run begins: forget everything; rows of up to `capacity` tokens will come."""

    def read_prompt(
        self,
        rows: Sequence[int],
        start: int,
        tokens_RT: torch.Tensor,
        features_RTD: torch.Tensor,
        lengths_R: torch.Tensor,
    ) -> None:
        """One chunk of new rows' prompts with the target's features.

        Args:
            rows: the rows of the batch that the prompts enter.
            start: position of the chunk's first token.
            tokens_RT, features_RTD: padded on the right; lengths_R are the whole prompts' lengths.
        """

    def propose(self, state: BatchState, source: Source) -> Proposal:
        """The next tree below state.root_B, all randomness drawn from `source`."""

    def observe(
        self,
        state: BatchState,
        proposal: Proposal,
        features_BND: torch.Tensor,
        verdict: Verdict,
    ) -> None:
        """The round's outcome, before `state` moves on; features of every node of the tree."""
