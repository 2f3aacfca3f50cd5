"""What every law takes and gives, and the steps they share.

Letters: B rows, D depths (root included), M nodes asked for at once, N nodes, T trials,
V vocabulary.

All rows walk together, one level of the tree at a time; a row that has stopped carries on without
effect. Nothing here or in the laws reads a tensor on the host, and every shape is static.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from inference.proposal import ABSENT, Proposal


@dataclass
class Verdict:
    """A law's answer.

    Attributes:
        path_BD: int64 [B, max_depth + 1], accepted nodes, root first, -1 after the last.
        num_accepted_B: int64, draft nodes accepted, 0..max_depth.
        next_token_B: int64, the correction or bonus token.
        error_B: bool, NaN in the probabilities met, or a trial that breaks a rule; nothing else in
            such a row means anything.
    """

    path_BD: Tensor
    num_accepted_B: Tensor
    next_token_B: Tensor
    error_B: Tensor


class Policy(Protocol):
    """The target's probabilities at a proposal's nodes (`inference.sampling.TreePolicy`)."""

    def at(self, node_B: Tensor) -> Tensor:
        """float [B, V]: p after each row's node; the typical law asks for [B, M] at once."""
        ...

    def argmax(self, node_B: Tensor) -> Tensor:
        """int64 [B]: the greedy token after each row's node, -1 where a logit is NaN."""
        ...


@dataclass(frozen=True)
class Law:
    """A law by name.

    Attributes:
        judge: batched, (proposal, policy, source) -> Verdict.
        judge_plain: one row, reads like the equation; (proposal, policy, source) -> (accepted draft
            nodes, next token). Same decisions as `judge` when the source gives the same uniforms.
        exact: whether it keeps the target's distribution.
        source: "keyed" wants a `Source`, "position" a `PositionSource`, "none" uses none.
    """

    judge: Callable[..., Verdict]
    judge_plain: Callable[..., tuple[list[int], int]]
    exact: bool
    source: str


class Walk:
    """Where each row stands: its node, its path so far, and whether it goes on."""

    def __init__(self, proposal: Proposal):
        self.proposal = proposal
        tokens_BN = proposal.tokens_BN
        self.node_B = torch.zeros_like(tokens_BN[:, 0])
        self.going_B = torch.ones_like(self.node_B, dtype=torch.bool)
        self.error_B = torch.zeros_like(self.going_B)
        self.index_T = torch.arange(proposal.num_trials, device=tokens_BN.device)
        self.path = [self.node_B]

    def descend(self, child_B: Tensor) -> None:
        """Moves each row that goes on to child_B, and stops it where that is -1."""
        self.going_B = self.going_B & (child_B >= 0)
        self.node_B = torch.where(self.going_B, child_B, self.node_B)
        self.path.append(torch.where(self.going_B, child_B, ABSENT))

    def child_with(self, token_B: Tensor) -> Tensor:
        """int64 [B]: the child of each row's node that carries token_B, -1 if there is none."""
        parents_BN, tokens_BN = self.proposal.parents_BN, self.proposal.tokens_BN
        match_BN = (parents_BN == self.node_B[:, None]) & (tokens_BN == token_B[:, None])
        return torch.where(match_BN.any(-1), match_BN.int().argmax(-1), ABSENT)

    def next_trial(self, after_B: Tensor) -> Tensor:
        """int64 [B]: the first trial of each row's node with an index above after_B, or T."""
        last = self.proposal.num_trials
        here_BT = (self.proposal.trial_parent_BT == self.node_B[:, None]) & (
            self.index_T > after_B[:, None]
        )
        return torch.where(here_BT, self.index_T, last).amin(-1)

    def flag(self, wrong_B: Tensor) -> None:
        """Marks rows in which something was wrong; rows that have stopped are left alone."""
        self.error_B = self.error_B | (wrong_B & self.going_B)

    def verdict(self, next_token_B: Tensor) -> Verdict:
        path_BD = torch.stack(self.path, 1)
        return Verdict(path_BD, (path_BD > 0).sum(-1), next_token_B, self.error_B)


def walk_by_choice(
    proposal: Proposal, choose: Callable[[Walk, int], tuple[Tensor, Tensor]]
) -> Verdict:
    """The laws that decide the next token first and then look for it in the tree.

    Args:
        choose: (walk, depth) -> (token_B, error_B), the token after each row's node.
    """
    walk = Walk(proposal)
    chosen_B = torch.zeros_like(walk.node_B)
    for depth in range(proposal.max_depth + 1):
        token_B, wrong_B = choose(walk, depth)
        walk.flag(wrong_B)
        chosen_B = torch.where(walk.going_B, token_B.clamp(0), chosen_B)
        if depth < proposal.max_depth:
            walk.descend(walk.child_with(token_B))
    return walk.verdict(chosen_B)


def plain_children(proposal: Proposal, node: int) -> dict[int, int]:
    """One row's children of a node, token -> node index."""
    parents, tokens = proposal.parents_BN[0].tolist(), proposal.tokens_BN[0].tolist()
    return {tokens[i]: i for i in range(1, len(parents)) if parents[i] == node}


def plain_trials(proposal: Proposal, node: int) -> list[int]:
    """One row's trials at a node, in order."""
    parents = proposal.trial_parent_BT[0].tolist()
    return [trial for trial, parent in enumerate(parents) if parent == node]


def at_node(policy: Policy, node: int) -> list[float]:
    """One row's p after a node, as Python floats."""
    return policy.at(torch.tensor([node]))[0].tolist()
