"""A proposal: a tree of candidate tokens, and from which law each of them was drawn.

Letters: B rows, N nodes (root included), T trials, R rows of q, V vocabulary.

A *node* is a unique (parent, token). A *trial* says that at this parent this token was drawn from
this law; two proposers that name one token make one node and two trials, and no trial may be lost
(SpecInfer's theorem 4.2 needs one trial per proposer). Trials of a parent are judged in index
order. Order and number of trials must be settled before their own draws; laws and rows of q are
static tuples, so that they cannot depend on what was drawn.

    delta   chosen without randomness, or by randomness that never saw the target's p
    iid     drawn from its row of q, independently of the trials before it
    wor     drawn from its row of q without the tokens that earlier "wor" trials of the same row
            took at the same parent (EAGLE trees, Sequoia)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from inference.tree import PADDING_PARENT, ROOT_PARENT, TokenTree, ancestor_mask

ABSENT = -1  # a trial that does not exist in this row; a trial that has no row of q
TRIAL_LAWS = ("delta", "iid", "wor")
# A softmax over 150,000 tokens in fp32 sums to one within 1e-5; a q that is off by more is a fault.
SUM_TOLERANCE = 1e-4


@dataclass
class Proposal:
    """What a drafter hands to the target and to the law.

    Attributes:
        tokens_BN: int64. Column 0 is the root: the last emitted token, already decided.
        parents_BN: int64, parents_BN[:, i] < i; -1 at the root, -2 at padding nodes, which are
            never accepted, whatever their token.
        max_depth: no node is deeper (static).
        trial_parent_BT, trial_child_BT: int64 node indices; -1 where a row lacks the trial.
        trial_law_T: "delta" | "iid" | "wor" (static).
        trial_row_T: index into q_BRV, -1 for delta (static).
        q_BRV: float, rows of the drafters' probabilities; None if every trial is delta. Rows that
            no existing trial names may hold anything.
        max_trials_per_node: static upper bound, one number or one for each depth of the parent;
            None means T. The law takes that many rounds a level, so a tight bound saves time.
    Raises:
        ValueError: if the static parts disagree with each other.
    """

    tokens_BN: Tensor
    parents_BN: Tensor
    max_depth: int
    trial_parent_BT: Tensor
    trial_child_BT: Tensor
    trial_law_T: tuple[str, ...]
    trial_row_T: tuple[int, ...]
    q_BRV: Tensor | None = None
    max_trials_per_node: int | tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        self.trial_law_T, self.trial_row_T = tuple(self.trial_law_T), tuple(self.trial_row_T)
        num_trials = self.trial_parent_BT.shape[1]
        if self.tokens_BN.shape != self.parents_BN.shape:
            raise ValueError(
                f"proposal: tokens {tuple(self.tokens_BN.shape)} and parents "
                f"{tuple(self.parents_BN.shape)} must have one shape [B, N]"
            )
        counts = (self.trial_child_BT.shape[1], len(self.trial_law_T), len(self.trial_row_T))
        if any(count != num_trials for count in counts):
            raise ValueError(
                f"proposal: {num_trials} trial parents, but {counts} children, laws and rows"
            )
        num_rows = 0 if self.q_BRV is None else self.q_BRV.shape[1]
        for trial, (law, row) in enumerate(zip(self.trial_law_T, self.trial_row_T, strict=True)):
            if law not in TRIAL_LAWS:
                raise ValueError(f"trial {trial}: law {law!r}, expected one of {TRIAL_LAWS}")
            if law == "delta" and row != ABSENT or law != "delta" and not 0 <= row < num_rows:
                raise ValueError(
                    f"trial {trial}: law {law!r} with row {row} of q, which has {num_rows} rows "
                    "(a delta trial has row -1)"
                )

    @property
    def num_rows(self) -> int:
        return self.tokens_BN.shape[0]

    @property
    def num_trials(self) -> int:
        return len(self.trial_law_T)

    def trials_at(self, depth: int) -> int:
        """Static upper bound on the trials of one parent of this depth."""
        bound = self.max_trials_per_node
        if bound is None:
            return self.num_trials
        if isinstance(bound, tuple):
            bound = bound[depth] if depth < len(bound) else 0
        return min(bound, self.num_trials)

    @staticmethod
    def delta(tokens_BN: Tensor, tree: TokenTree) -> Proposal:
        """An all-delta proposal on a static tree, one trial a node, in node order.

        Args:
            tokens_BN: int64 [B, tree.num_tokens]; siblings must carry distinct tokens.
        """
        batch, device = tokens_BN.shape[0], tokens_BN.device
        parents_BN = int64_constant(tree.parents, device).repeat(batch, 1)
        nodes = int64_constant(tuple(range(1, tree.num_tokens)), device).repeat(batch, 1)
        return Proposal(
            tokens_BN=tokens_BN,
            parents_BN=parents_BN,
            max_depth=tree.max_depth,
            trial_parent_BT=parents_BN[:, 1:],
            trial_child_BT=nodes,
            trial_law_T=("delta",) * tree.num_nodes,
            trial_row_T=(ABSENT,) * tree.num_nodes,
            max_trials_per_node=tuple(
                max(
                    len(tree.children(i)) for i in range(tree.num_tokens) if tree.depths[i] == depth
                )
                for depth in range(tree.max_depth)
            ),
        )

    def check(self) -> None:
        """Raises ValueError if a rule is broken; see `check`."""
        check(self)

    def row(self, row: int) -> Proposal:
        """The same proposal for one of its rows (B = 1)."""
        return replace(
            self,
            tokens_BN=self.tokens_BN[row : row + 1],
            parents_BN=self.parents_BN[row : row + 1],
            trial_parent_BT=self.trial_parent_BT[row : row + 1],
            trial_child_BT=self.trial_child_BT[row : row + 1],
            q_BRV=None if self.q_BRV is None else self.q_BRV[row : row + 1],
        )


@lru_cache(maxsize=256)
def int64_constant(values: tuple[int, ...], device: torch.device) -> Tensor:
    """A constant int64 vector, copied to the device once and not at every step."""
    return torch.tensor(values, dtype=torch.int64, device=device)


def faults(proposal: Proposal) -> dict[str, Tensor]:
    """Every rule a proposal can break, by name: bool [B, N] or [B, T], True where it is broken.

    Runs on the device without a host read.
    """
    parents_BN, tokens_BN = proposal.parents_BN, proposal.tokens_BN
    index_N = torch.arange(parents_BN.shape[1], device=parents_BN.device)
    real_BN = parents_BN != PADDING_PARENT
    above_BN = parents_BN.clamp(0)
    same_BNN = (parents_BN[:, :, None] == parents_BN[:, None]) & (
        tokens_BN[:, :, None] == tokens_BN[:, None]
    )
    earlier_NN = index_N[:, None] > index_N
    depth_BN = ancestor_mask(parents_BN, proposal.max_depth + 1).sum(-1) - 1
    draft_BN = real_BN & (index_N > 0)
    root_BN = (index_N == 0) & (parents_BN != ROOT_PARENT)
    bad_parent_BN = (parents_BN < 0) | (parents_BN >= index_N) | ~real_BN.gather(1, above_BN)
    parent_BT, child_BT = proposal.trial_parent_BT, proposal.trial_child_BT
    exists_BT = (parent_BT >= 0) | (child_BT >= 0)
    safe_BT = child_BT.clamp(0)
    bounds = tuple(proposal.trials_at(depth) for depth in range(proposal.max_depth + 2))
    bound_BN = int64_constant(bounds, parents_BN.device)[depth_BN.clamp(0, proposal.max_depth + 1)]
    tried_BN = ((child_BT[:, None] == index_N[:, None]) & exists_BT[:, None]).any(-1)
    found = {
        "node: the root must be node 0, with parent -1": root_BN,
        "node: order: a parent must be a real node before its child": draft_BN & bad_parent_BN,
        "node: deeper than max_depth": draft_BN & (depth_BN > proposal.max_depth),
        "node: duplicate (parent, token)": draft_BN & (same_BNN & earlier_NN).any(-1),
        "node: no trial names it": draft_BN & ~tried_BN,
        "trial: its child does not hang below its parent": exists_BT
        & ((parent_BT < 0) | (child_BT < 0) | (parents_BN.gather(1, safe_BT) != parent_BT)),
        "trial: more trials than max_trials_per_node": exists_BT
        & (
            (parent_BT[:, :, None] == parent_BT[:, None]).sum(-1)
            > bound_BN.gather(1, parent_BT.clamp(0))
        ),
    }
    if proposal.q_BRV is not None:
        found |= _q_faults(proposal, tokens_BN.gather(1, safe_BT), exists_BT)
    return found


def _q_faults(proposal: Proposal, token_BT: Tensor, exists_BT: Tensor) -> dict[str, Tensor]:
    q_BRV = proposal.q_BRV
    assert q_BRV is not None
    device = q_BRV.device
    row_T = int64_constant(proposal.trial_row_T, device)
    drawn_BT = exists_BT & (row_T >= 0)
    safe_T = row_T.clamp(0)
    total_BT = q_BRV.sum(-1)[:, safe_T]
    unsound_BT = ~((total_BT - 1).abs() <= SUM_TOLERANCE) | (q_BRV.amin(-1) < 0)[:, safe_T]
    chosen_BT = q_BRV[torch.arange(len(q_BRV), device=device)[:, None], safe_T, token_BT]
    index_T = torch.arange(len(row_T), device=device)
    earlier_BTT = earlier_draws(proposal, index_T.expand(len(q_BRV), -1))
    repeated_BT = (earlier_BTT & (token_BT[:, :, None] == token_BT[:, None])).any(-1)
    return {
        "trial: its row of q is negative, NaN, or does not sum to 1": drawn_BT & unsound_BT,
        "trial: token proposed at probability zero": drawn_BT & (~(chosen_BT > 0) | repeated_BT),
    }


def earlier_draws(proposal: Proposal, trial_BX: Tensor) -> Tensor:
    """bool [B, X, T]: which trials took their token from trial x's row of q before it did.

    Only "wor" trials see each other; X counts any number of trials a row.
    """
    parent_BT, device = proposal.trial_parent_BT, proposal.trial_parent_BT.device
    row_T = int64_constant(proposal.trial_row_T, device)
    wor_T = int64_constant(tuple(int(law == "wor") for law in proposal.trial_law_T), device).bool()
    index_T = torch.arange(len(row_T), device=device)
    same_BXT = (row_T[trial_BX][..., None] == row_T) & wor_T[trial_BX][..., None] & wor_T
    parent_BX = parent_BT.gather(1, trial_BX)
    here_BXT = (parent_BX[..., None] == parent_BT[:, None]) & (parent_BX >= 0)[..., None]
    return same_BXT & here_BXT & (index_T < trial_BX[..., None])


def violations(proposal: Proposal) -> Tensor:
    """bool [B]: rows whose proposal breaks a rule, without a host read."""
    return torch.stack([fault.any(-1) for fault in faults(proposal).values()]).any(0)


def check(proposal: Proposal) -> None:
    """Debug check (reads the device).

    Raises:
        ValueError: naming the first row, and the node or trial, that breaks a rule.
    """
    for rule, broken in faults(proposal).items():
        if broken.any():
            row, index = broken.nonzero()[0].tolist()
            kind, what = rule.split(": ", 1)
            raise ValueError(f"proposal, row {row}, {kind} {index}: {what}")
