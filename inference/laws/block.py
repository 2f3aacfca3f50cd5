"""Block law: a chain is judged as a whole (block verification, Sun et al., arXiv 2403.10444).

With x_1..x_L the drafted chain, p_i and q_i the target's and drafter's law after i tokens of it:

    a_0 = 1,  a_i = min(1, a_{i-1} p_{i-1}(x_i) / q_{i-1}(x_i))
    Z_i = sum_x (a_i p_i(x) - q_i(x))+
    h_i = Z_i / (Z_i + 1 - a_i) for i < L,  h_L = a_L

Every position i is tested with probability h_i; the longest success tau is kept (0 if none), and
the next token is drawn from norm((a_tau p_tau - q_tau)+), or from p_L when tau = L. Exact, and its
expected length is never below the rejection law's.

Letters: B rows, N nodes, T trials, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inference.laws.verdict import Policy, Verdict, Walk, at_node, plain_trials
from inference.proposal import ABSENT, SUM_TOLERANCE, Proposal, int64_constant
from inference.randomness import NOT_ASKED, Purpose, Source


def refuse_trees(proposal: Proposal) -> None:
    """Raises ValueError unless the proposal's static shape is that of a chain."""
    if proposal.num_trials > proposal.max_depth:
        raise ValueError(
            f"law 'block' judges chains only: {proposal.num_trials} trials for a depth of "
            f"{proposal.max_depth} make a tree; use 'rejection' or 'coupled'"
        )


def judge(proposal: Proposal, policy: Policy, source: Source) -> Verdict:
    """Batched: max_depth rounds of tensor operations. Delta trials count as a one-hot q.

    Raises:
        ValueError: if the proposal is not a chain. A row with two trials at one node, which only
            the device can see, gets an error in its verdict.
    """
    refuse_trees(proposal)
    walk = Walk(proposal)
    parent_BT = proposal.trial_parent_BT
    shared_BTT = (parent_BT[:, :, None] == parent_BT[:, None]) & (parent_BT >= 0)[:, :, None]
    walk.flag((shared_BTT.sum(-1) > 1).any(-1))
    weight_B = torch.ones_like(policy.at(walk.node_B)[:, 0])  # a_i
    kept_B, kept_depth_B, kept_weight_B = walk.node_B, torch.zeros_like(walk.node_B), weight_B
    for depth in range(proposal.max_depth + 1):
        target_BV = policy.at(walk.node_B)
        walk.flag(~(target_BV.sum(-1) > 0))
        draft_BV, child_B, token_B1, sound_B = _draft(walk, target_BV)
        walk.flag(~sound_B)
        if depth:
            mass_B = (weight_B[:, None] * target_BV - draft_BV).clamp(0).sum(-1)
            # Z = 0 with a = 1 means p = q here: a deeper position then succeeds for certain.
            whole_B = torch.where(mass_B > 0, mass_B + (1 - weight_B), 1)
            success_prob_B = torch.where(child_B >= 0, mass_B / whole_B, weight_B)
            asked_B = torch.where(walk.going_B, walk.node_B, NOT_ASKED)
            success_B = source.bernoulli(success_prob_B, Purpose.ACCEPT, asked_B, 0) & walk.going_B
            kept_B = torch.where(success_B, walk.node_B, kept_B)
            kept_depth_B = torch.where(success_B, depth, kept_depth_B)
            kept_weight_B = torch.where(success_B, weight_B, kept_weight_B)
        if depth < proposal.max_depth:
            draft_B = draft_BV.gather(1, token_B1)[:, 0]
            ratio_B = target_BV.gather(1, token_B1)[:, 0] / torch.where(draft_B > 0, draft_B, 1)
            weight_B = (weight_B * ratio_B).clamp(max=1)
            walk.descend(child_B)
    next_token_B = _draw_next(walk, policy, source, kept_B, kept_weight_B)
    verdict = walk.verdict(next_token_B)
    level_D = torch.arange(proposal.max_depth + 1, device=kept_B.device)
    verdict.path_BD = torch.where(level_D <= kept_depth_B[:, None], verdict.path_BD, ABSENT)
    verdict.num_accepted_B = kept_depth_B
    return verdict


def _draw_next(
    walk: Walk, policy: Policy, source: Source, kept_B: Tensor, weight_B: Tensor
) -> Tensor:
    """int64 [B]: the token after tau, from norm((a p - q)+), with q = 0 at the chain's end."""
    walk.node_B = kept_B
    target_BV = policy.at(kept_B)
    draft_BV = _draft(walk, target_BV)[0]
    left_BV = (weight_B[:, None] * target_BV - draft_BV).clamp(0)
    mass_B = left_BV.sum(-1)
    residual_BV = torch.where(
        (mass_B > 0)[:, None], left_BV / torch.where(mass_B > 0, mass_B, 1)[:, None], target_BV
    )
    return source.categorical(residual_BV, Purpose.FINAL, kept_B, 0)


def _draft(walk: Walk, target_BV: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(q after each row's node, the child, its token [B, 1], whether the trial is proper).

    q is zero and the child -1 where the chain ends.
    """
    proposal, node_B = walk.proposal, walk.node_B
    draft_BV = torch.zeros_like(target_BV)
    if not proposal.num_trials:
        return draft_BV, node_B - node_B - 1, node_B[:, None] * 0, node_B >= 0
    trial_B = walk.next_trial(torch.full_like(node_B, ABSENT))
    exists_B = trial_B < proposal.num_trials
    trial_B = trial_B.clamp(max=proposal.num_trials - 1)
    child_B = proposal.trial_child_BT.gather(1, trial_B[:, None])[:, 0]
    token_B1 = proposal.tokens_BN.gather(1, child_B.clamp(0)[:, None])
    row_B = int64_constant(proposal.trial_row_T, node_B.device)[trial_B]
    if "delta" in proposal.trial_law_T:
        draft_BV = draft_BV.scatter(1, token_B1, 1.0)
    if proposal.q_BRV is not None:
        rows_B = torch.arange(len(node_B), device=node_B.device)
        drawn_BV = proposal.q_BRV[rows_B, row_B.clamp(0)].to(target_BV.dtype)
        draft_BV = torch.where((row_B >= 0)[:, None], drawn_BV, draft_BV)
    sound_B = (draft_BV.sum(-1) - 1).abs() <= SUM_TOLERANCE
    sound_B = sound_B & (draft_BV.gather(1, token_B1)[:, 0] > 0)
    draft_BV = torch.where(exists_B[:, None], draft_BV, 0)
    return draft_BV, torch.where(exists_B, child_B, ABSENT), token_B1, sound_B | ~exists_B


def judge_plain(proposal: Proposal, policy: Policy, source: Source) -> tuple[list[int], int]:
    """One row, in Python floats. Returns (accepted draft nodes, next token)."""
    refuse_trees(proposal)
    chain, laws_q = [0], []  # nodes, and q after each of them
    while trials := plain_trials(proposal, chain[-1]):
        chain.append(int(proposal.trial_child_BT[0, trials[0]]))
        laws_q.append(_plain_q(proposal, trials[0], len(at_node(policy, 0))))
    targets = [at_node(policy, node) for node in chain]
    tokens = [int(proposal.tokens_BN[0, node]) for node in chain]
    last, a, tau = len(chain) - 1, [1.0], 0
    laws_q.append([0.0] * len(targets[0]))
    for i in range(1, last + 1):
        x = tokens[i]
        a.append(min(1.0, a[i - 1] * targets[i - 1][x] / laws_q[i - 1][x]))
        z = sum(max(a[i] * p - q, 0.0) for p, q in zip(targets[i], laws_q[i], strict=True))
        h = a[i] if i == last else z / (z + (1 - a[i])) if z > 0 else 0.0
        h_1 = torch.tensor([h], dtype=torch.float64)
        if bool(source.bernoulli(h_1, Purpose.ACCEPT, chain[i], 0)):
            tau = i
    left = [max(a[tau] * p - q, 0.0) for p, q in zip(targets[tau], laws_q[tau], strict=True)]
    if not sum(left) > 0:
        left = targets[tau]
    residual_1V = torch.tensor([left], dtype=torch.float64) / sum(left)
    return chain[1 : tau + 1], int(source.categorical(residual_1V, Purpose.FINAL, chain[tau], 0))


def _plain_q(proposal: Proposal, trial: int, vocab_size: int) -> list[float]:
    if proposal.trial_law_T[trial] == "delta":
        token = int(proposal.tokens_BN[0, proposal.trial_child_BT[0, trial]])
        return [float(x == token) for x in range(vocab_size)]
    assert proposal.q_BRV is not None
    return proposal.q_BRV[0, proposal.trial_row_T[trial]].tolist()
