"""Greedy law: the target's argmax at each node, followed while it is in the tree."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from inference.laws.verdict import Policy, Verdict, Walk, plain_children, walk_by_choice
from inference.proposal import Proposal


def judge(proposal: Proposal, policy: Policy, source: Any = None) -> Verdict:
    """Token for token what greedy decoding of the target gives (SpecInfer's VerifyGreedy).

    Args:
        source: not used.
    """

    def choose(walk: Walk, depth: int) -> tuple[Tensor, Tensor]:
        token_B = policy.argmax(walk.node_B)
        return token_B, token_B < 0

    return walk_by_choice(proposal, choose)


def judge_plain(proposal: Proposal, policy: Policy, source: Any = None) -> tuple[list[int], int]:
    """y = argmax p(. | u); while y is a child of u: u = y. One row."""
    path: list[int] = []
    node = 0
    while True:
        token = int(policy.argmax(torch.tensor([node])))
        children = plain_children(proposal, node)
        if token not in children:
            return path, token
        node = children[token]
        path.append(node)
