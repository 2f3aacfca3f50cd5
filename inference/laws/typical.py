"""Typical acceptance (Medusa, arXiv 2401.10774, section 2.3.1). It does NOT keep the target's law.

A candidate x after node u is acceptable if

    p(x | u) > min(epsilon, delta * exp(-H(p(. | u))))

The longest path of acceptable nodes is kept (the lowest node index wins ties), and the next token
is the target's argmax at its end: the first token of every step is greedy and always kept.

Differs from the paper: among paths of one length the paper's code keeps the most likely; here the
drafter's order decides, so that the choice does not hang on rounding.

Letters: B rows, M nodes of one chunk, N nodes, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from inference.laws.verdict import Policy, Verdict, Walk, at_node
from inference.params import TYPICAL_DELTA, TYPICAL_EPSILON
from inference.proposal import Proposal

NODES_AT_ONCE = 8  # bounds the memory of the entropies: [B, 8, V] instead of [B, N, V]


def judge(proposal: Proposal, policy: Policy, source: Any = None) -> Verdict:
    """Batched. epsilon and delta are policy.typical_thresholds, Medusa's .09 and .3 if it has none.

    Args:
        source: not used.
    """
    walk = Walk(proposal)
    acceptable_BN, sound_BN = _acceptable(proposal, policy)
    parents_BN = proposal.parents_BN
    reached_BN = parents_BN == -1
    depth_BN = torch.zeros_like(parents_BN)
    for depth in range(1, proposal.max_depth + 1):
        above_BN = reached_BN.gather(1, parents_BN.clamp(0)) & (parents_BN >= 0)
        reached_BN = reached_BN | (above_BN & acceptable_BN)
        deeper_BN = (
            above_BN & acceptable_BN & (depth_BN.gather(1, parents_BN.clamp(0)) == depth - 1)
        )
        depth_BN = torch.where(deeper_BN, depth, depth_BN)
    best_B = torch.where(reached_BN, depth_BN, -1).argmax(-1)  # the first of the deepest
    walk.flag(~(sound_BN | ~reached_BN).all(-1))
    for child_B in _path_to(best_B, parents_BN, depth_BN, proposal.max_depth):
        walk.descend(child_B)
    token_B = policy.argmax(best_B)
    walk.error_B = walk.error_B | (token_B < 0)
    return walk.verdict(token_B.clamp(0))


def _thresholds(policy: Policy, like_B: Tensor) -> tuple[Tensor, Tensor]:
    if hasattr(policy, "typical_thresholds"):
        epsilon_B, delta_B = policy.typical_thresholds
        return epsilon_B.to(like_B.dtype), delta_B.to(like_B.dtype)
    return torch.full_like(like_B, TYPICAL_EPSILON), torch.full_like(like_B, TYPICAL_DELTA)


def _acceptable(proposal: Proposal, policy: Policy) -> tuple[Tensor, Tensor]:
    """(bool [B, N]: passes the test at its parent; bool [B, N]: p after this node is sound)."""
    tokens_BN, parents_BN = proposal.tokens_BN, proposal.parents_BN
    batch, num_nodes = tokens_BN.shape
    acceptable_BN = torch.zeros_like(tokens_BN, dtype=torch.bool)
    sound = []
    for start in range(0, num_nodes, NODES_AT_ONCE):
        nodes_M = torch.arange(
            start, min(start + NODES_AT_ONCE, num_nodes), device=tokens_BN.device
        )
        probs_BMV = policy.at(nodes_M.expand(batch, -1))
        entropy_BM = torch.special.entr(probs_BMV).sum(-1)
        epsilon_B, delta_B = _thresholds(policy, entropy_BM[:, 0])
        floor_BM = torch.minimum(epsilon_B[:, None], delta_B[:, None] * torch.exp(-entropy_BM))
        child_probs_BMN = probs_BMV.gather(2, tokens_BN[:, None].expand(-1, len(nodes_M), -1))
        below_BMN = parents_BN[:, None] == nodes_M[:, None]
        passes_BMN = below_BMN & (child_probs_BMN > floor_BM[..., None])
        acceptable_BN = acceptable_BN | passes_BMN.any(1)
        sound.append(probs_BMV.sum(-1) > 0)
    return acceptable_BN, torch.cat(sound, 1)


def _path_to(best_B: Tensor, parents_BN: Tensor, depth_BN: Tensor, max_depth: int) -> list[Tensor]:
    """For each level 1..max_depth the path's node, -1 beyond its end."""
    level_B = depth_BN.gather(1, best_B[:, None])[:, 0]
    nodes, node_B = [], best_B
    for depth in range(max_depth, 0, -1):
        here_B = level_B >= depth
        nodes.append(torch.where(here_B, node_B, -1))
        above_B = parents_BN.gather(1, node_B[:, None])[:, 0].clamp(0)
        node_B = torch.where(here_B, above_B, node_B)
    return nodes[::-1]


def judge_plain(proposal: Proposal, policy: Policy, source: Any = None) -> tuple[list[int], int]:
    """One row. Returns (accepted draft nodes, next token)."""
    parents, tokens = proposal.parents_BN[0].tolist(), proposal.tokens_BN[0].tolist()
    epsilon, delta = (float(x[0]) for x in _thresholds(policy, torch.zeros(1, dtype=torch.float64)))
    paths: dict[int, list[int]] = {0: []}
    for node in range(1, len(tokens)):
        if parents[node] not in paths:
            continue
        p = at_node(policy, parents[node])
        entropy = -sum(x * math.log(x) for x in p if x > 0)
        if p[tokens[node]] > min(epsilon, delta * math.exp(-entropy)):
            paths[node] = [*paths[parents[node]], node]
    best = max(paths, key=lambda node: (len(paths[node]), -node))
    return paths[best], int(policy.argmax(torch.tensor([best])))
