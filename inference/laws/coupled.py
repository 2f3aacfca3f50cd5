"""Coupled law: the target decides each token with noise that belongs to the token's position.

y = argmax(log p + g), g standard Gumbel noise keyed by (row seed, absolute position): a draw from p
(the Gumbel-max trick), and the same draw whether a drafter proposed anything or not. The text is
therefore, token for token, that of plain sampling with the same seed, for any drafter and any tree
built without a look at this row's p. A drafter that uses the same noise is accepted more often.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inference.laws.verdict import Policy, Verdict, Walk, plain_children, walk_by_choice
from inference.proposal import Proposal
from inference.randomness import PositionSource, gumbel_argmax


def judge(proposal: Proposal, policy: Policy, source: PositionSource) -> Verdict:
    """Batched: one round a level; noise is made for the visited level only.

    Args:
        source: seeds and root positions of the rows.
    """

    def choose(walk: Walk, depth: int) -> tuple[Tensor, Tensor]:
        probs_BV = policy.at(walk.node_B)
        token_B = gumbel_argmax(probs_BV, source.gumbel(depth, probs_BV.shape[-1]))
        return token_B, ~(probs_BV.sum(-1) > 0)

    return walk_by_choice(proposal, choose)


def judge_plain(
    proposal: Proposal, policy: Policy, source: PositionSource
) -> tuple[list[int], int]:
    """One row: y = argmax(log p(. | u) + g at the position after u); while y is a child: u = y."""
    path: list[int] = []
    node = 0
    while True:
        p = policy.at(torch.tensor([node]))[0].double()
        token = int((p.log() + source.gumbel(len(path), len(p))[0]).argmax())
        children = plain_children(proposal, node)
        if token not in children:
            return path, token
        node = children[token]
        path.append(node)
