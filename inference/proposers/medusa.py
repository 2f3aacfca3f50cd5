"""Medusa's proposal: the top choices of heads that all read one feature, as a fixed tree.

Letters: B rows, N nodes (the root included), K heads, D hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from drafters.medusa import MedusaDrafter
from drafters.target import Target
from inference.laws import Verdict
from inference.proposal import Proposal
from inference.randomness import Source
from inference.state import BatchState
from inference.tree import TokenTree


class MedusaProposer:
    """Node at depth k with rank r below its parent: the r-th most likely token of head k.

    The choices are made without randomness, so every trial is δ: any law that takes δ trials keeps
    the target's distribution. Source: Medusa (arXiv 2401.10774), Section 2.1.2.

    Args:
        tree: rank paths; None takes the drafter's own template.
    Raises:
        ValueError: if the tree is deeper than the heads or wider than the draft vocabulary.
    """

    def __init__(
        self, drafter: MedusaDrafter, target: Target, tree: TokenTree | None = None
    ) -> None:
        if tree is None:
            paths, heads = drafter.config.tree, drafter.config.num_heads
            tree = TokenTree.from_paths(paths) if paths else TokenTree.chain(heads)
        drafter.config.check_tree(tree.rank_paths())
        self.drafter, self.target, self.tree = drafter, target, tree
        self.num_tokens, self.max_depth = tree.num_tokens, tree.max_depth
        self.is_chain = tree.parents == TokenTree.chain(tree.num_nodes).parents
        self.num_choices = max(tree.ranks) + 1
        # Node i's token is entry [depth - 1, rank] of the heads' top choices.
        places = [
            (depth - 1) * self.num_choices + rank
            for depth, rank in zip(tree.depths[1:], tree.ranks[1:], strict=True)
        ]
        self._places = torch.tensor(places, dtype=torch.int64, device=target.device)
        self._features_BD = torch.empty(0)

    def allocate(self, batch_size: int, capacity: int) -> None:
        self._features_BD = torch.zeros(
            batch_size, self.target.hidden_size, dtype=self.target.dtype, device=self.target.device
        )

    def read_prompt(
        self,
        rows: Sequence[int],
        start: int,
        tokens_RT: torch.Tensor,
        features_RTD: torch.Tensor,
        lengths_R: torch.Tensor,
    ) -> None:
        """Keeps the feature of each prompt's last token."""
        offset_R = lengths_R - 1 - start
        here_R = (offset_R >= 0) & (offset_R < tokens_RT.shape[1])
        at = offset_R.clamp(0, tokens_RT.shape[1] - 1)[:, None, None]
        last_RD = features_RTD.gather(1, at.expand(-1, 1, features_RTD.shape[2]))[:, 0]
        chosen = torch.tensor(rows, device=last_RD.device)
        kept_RD = self._features_BD[chosen]
        self._features_BD[chosen] = torch.where(here_R[:, None], last_RD, kept_RD)

    def propose(self, state: BatchState, source: Source) -> Proposal:
        logits_KBV = self.drafter.logits(self._features_BD, self.target, num_heads=self.max_depth)
        top_KBC = logits_KBV.topk(self.num_choices, dim=-1).indices
        tokens_KBC = self.drafter.to_target_ids(top_KBC)
        choices_BP = tokens_KBC.transpose(0, 1).reshape(len(state.root_B), -1)
        tokens_BN = torch.cat([state.root_B[:, None], choices_BP[:, self._places]], dim=1)
        return Proposal.delta(tokens_BN, self.tree)

    def observe(
        self,
        state: BatchState,
        proposal: Proposal,
        features_BND: torch.Tensor,
        verdict: Verdict,
    ) -> None:
        """The last accepted node's feature predicts from the correction or bonus token on."""
        last_B = verdict.path_BD.gather(1, verdict.num_accepted_B[:, None])
        index = last_B[..., None].expand(-1, 1, features_BND.shape[2])
        self._features_BD = features_BND.gather(1, index)[:, 0]
