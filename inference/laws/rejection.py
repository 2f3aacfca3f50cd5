"""Rejection law: recursive rejection sampling, exact for every proposal.

The trials of a node are judged in their order. r starts as p. A trial whose token x was drawn from
q (given the trials before it) passes with probability min(1, r(x) / q(x)); else r becomes
norm((r - q)+). After the last trial the correction is drawn from r. On a chain this is Leviathan et
al. (arXiv 2211.17192) and Chen et al. (2302.01318); on merged models SpecInfer's multi-step
speculative sampling (2305.09781, Algorithm 2) with one trial per proposer; on draws without
replacement EAGLE's and Sequoia's.

Delta trials have q = 1 at their token: a run of them is one draw y ~ r, which descends if y is one
of their tokens, and otherwise leaves r without them.

Letters: B rows, N nodes, T trials, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inference.laws.verdict import Policy, Verdict, Walk, at_node, plain_trials
from inference.proposal import ABSENT, SUM_TOLERANCE, Proposal, earlier_draws, int64_constant
from inference.randomness import NOT_ASKED, Purpose, Source


def judge(proposal: Proposal, policy: Policy, source: Source) -> Verdict:
    """Batched: trials_at(depth) rounds of tensor operations a level; one if all trials are delta.

    Args:
        proposal: any.
        policy: p at each node; its dtype is the dtype of all arithmetic here.
        source: the injected randomness.
    """
    walk = Walk(proposal)
    residual_BV = policy.at(walk.node_B)
    decided_B = torch.full_like(walk.node_B, ABSENT)  # corrections drawn while judging delta trials
    for depth in range(proposal.max_depth):
        if depth:
            residual_BV = torch.where(walk.going_B[:, None], policy.at(walk.node_B), residual_BV)
        walk.flag(~(residual_BV.sum(-1) > 0))
        level = _Level(walk, residual_BV, source)
        for _ in range(proposal.trials_at(depth) if _has_draws(proposal) else 1):
            level.judge_next()
        residual_BV = level.residual_BV
        decided_B = torch.where(walk.going_B & (level.token_B >= 0), level.token_B, decided_B)
        walk.descend(level.child_B)
    if proposal.max_depth:
        residual_BV = torch.where(walk.going_B[:, None], policy.at(walk.node_B), residual_BV)
    walk.flag(~(residual_BV.sum(-1) > 0))
    asked_B = torch.where(decided_B < 0, walk.node_B, NOT_ASKED)
    final_B = source.categorical(residual_BV, Purpose.FINAL, asked_B, 0)
    return walk.verdict(torch.where(decided_B < 0, final_B, decided_B))


def _has_draws(proposal: Proposal) -> bool:
    return any(law != "delta" for law in proposal.trial_law_T)


class _Level:
    """Judges the trials of each row's node, one a call (a run of delta trials counts as one).

    Attributes:
        residual_BV: r. child_B: the accepted child, -1 if none yet.
        token_B: the correction, where a delta draw has already made it, else -1.
    """

    def __init__(self, walk: Walk, residual_BV: Tensor, source: Source):
        self.walk, self.proposal, self.source = walk, walk.proposal, source
        self.residual_BV = residual_BV
        self.child_B = torch.full_like(walk.node_B, ABSENT)
        self.token_B = torch.full_like(walk.node_B, ABSENT)
        self.last_B = torch.full_like(walk.node_B, -1)
        laws, device = self.proposal.trial_law_T, walk.node_B.device
        self.is_delta_T = int64_constant(tuple(int(x == "delta") for x in laws), device).bool()
        self.row_T = int64_constant(self.proposal.trial_row_T, device)

    def judge_next(self) -> None:
        if not self.proposal.num_trials:
            return
        walk, laws = self.walk, self.proposal.trial_law_T
        trial_B = walk.next_trial(self.last_B)
        open_B = walk.going_B & (self.child_B < 0) & (self.token_B < 0)
        open_B = open_B & (trial_B < self.proposal.num_trials)
        trial_B = trial_B.clamp(max=self.proposal.num_trials - 1)
        is_delta_B = self.is_delta_T[trial_B]
        self.last_B = torch.where(open_B, trial_B, self.last_B)
        if any(law != "delta" for law in laws):
            self._judge_draw(trial_B, open_B & ~is_delta_B)
        if any(law == "delta" for law in laws):
            self._judge_deltas(trial_B, open_B & is_delta_B)

    def _tokens(self, trial_BX: Tensor) -> tuple[Tensor, Tensor]:
        """(child node, its token) of trials; the root stands in for absent ones."""
        child_BX = self.proposal.trial_child_BT.gather(1, trial_BX).clamp(0)
        return child_BX, self.proposal.tokens_BN.gather(1, child_BX)

    def _judge_draw(self, trial_B: Tensor, open_B: Tensor) -> None:
        child_B1, token_B1 = self._tokens(trial_B[:, None])
        draft_BV, sound_B = self._draft_probs(trial_B, token_B1)
        self.walk.flag(open_B & ~sound_B)
        target_B = self.residual_BV.gather(1, token_B1)[:, 0]
        draft_B = draft_BV.gather(1, token_B1)[:, 0]
        left_BV = torch.sub(self.residual_BV, draft_BV, out=draft_BV).clamp_(min=0)
        mass_B = left_BV.sum(-1)
        # r <= q everywhere means r = q: the trial that exhausts the residual passes. (Where it
        # only seems so by rounding and r(x) = 0, r stays as it is.)
        exhausted_B = ~(mass_B > 0)
        ratio_B = target_B / torch.where(draft_B > 0, draft_B, 1)
        accept_prob_B = torch.where(exhausted_B, (target_B > 0).to(ratio_B.dtype), ratio_B)
        asked_B = torch.where(open_B, self.walk.node_B, NOT_ASKED)
        accepted_B = self.source.bernoulli(
            accept_prob_B.clamp(max=1), Purpose.ACCEPT, asked_B, trial_B
        )
        self.child_B = torch.where(open_B & accepted_B, child_B1[:, 0], self.child_B)
        subtract_B = open_B & ~accepted_B & ~exhausted_B
        left_BV.div_(torch.where(exhausted_B, 1, mass_B)[:, None])
        self.residual_BV = torch.where(subtract_B[:, None], left_BV, self.residual_BV)

    def _draft_probs(self, trial_B: Tensor, token_B1: Tensor) -> tuple[Tensor, Tensor]:
        """(q of each row's trial given the trials before it, whether it is a proper law)."""
        q_BRV = self.proposal.q_BRV
        assert q_BRV is not None
        rows_B = torch.arange(len(trial_B), device=trial_B.device)
        draft_BV = q_BRV[rows_B, self.row_T[trial_B].clamp(0)].to(self.residual_BV.dtype)
        total_B = draft_BV.sum(-1)
        sound_B = ((total_B - 1).abs() <= SUM_TOLERANCE) & (draft_BV.gather(1, token_B1)[:, 0] > 0)
        if "wor" in self.proposal.trial_law_T:
            earlier_BT = earlier_draws(self.proposal, trial_B[:, None])[:, 0]
            _, tokens_BT = self._tokens(self.walk.index_T.expand(len(trial_B), -1))
            draft_BV = _zero(draft_BV, tokens_BT, earlier_BT)
            total_B = torch.where(earlier_BT.any(-1), draft_BV.sum(-1), 1)
            sound_B = sound_B & (total_B > 0)
            draft_BV.div_(torch.where(total_B > 0, total_B, 1)[:, None])
        return draft_BV, sound_B

    def _judge_deltas(self, trial_B: Tensor, open_B: Tensor) -> None:
        index_T, last = self.walk.index_T, self.proposal.num_trials
        here_BT = self.proposal.trial_parent_BT == self.walk.node_B[:, None]
        here_BT = here_BT & (index_T >= trial_B[:, None])
        stop_B = torch.where(here_BT & ~self.is_delta_T, index_T, last).amin(-1)
        block_BT = here_BT & (index_T < stop_B[:, None]) & open_B[:, None]
        children_BT, tokens_BT = self._tokens(index_T.expand(len(trial_B), -1))
        asked_B = torch.where(open_B, self.walk.node_B, NOT_ASKED)
        drawn_B = self.source.categorical(self.residual_BV, Purpose.SIBLINGS, asked_B, trial_B)
        hit_BT = block_BT & (tokens_BT == drawn_B[:, None])
        hit_B = hit_BT.any(-1)
        child_B = children_BT.gather(1, hit_BT.int().argmax(-1)[:, None])[:, 0]
        self.child_B = torch.where(hit_B, child_B, self.child_B)
        self.token_B = torch.where(open_B & ~hit_B & (stop_B == last), drawn_B, self.token_B)
        self.last_B = torch.where(open_B, stop_B - 1, self.last_B)
        if _has_draws(self.proposal):
            rest_BV = _zero(self.residual_BV, tokens_BT, block_BT & ~hit_B[:, None])
            total_B = rest_BV.sum(-1)
            total_B = torch.where(open_B & ~hit_B & (total_B > 0), total_B, 1)
            self.residual_BV = rest_BV.div_(total_B[:, None])


def _zero(probs_BV: Tensor, tokens_BT: Tensor, which_BT: Tensor) -> Tensor:
    """probs_BV with the chosen tokens set to zero, by a scatter whose repeats write the same."""
    first_B1 = which_BT.int().argmax(-1, keepdim=True)
    tokens_BT = torch.where(which_BT, tokens_BT, tokens_BT.gather(1, first_B1))
    kept_BT = torch.where(which_BT.any(-1, keepdim=True), 0, probs_BV.gather(1, tokens_BT))
    return probs_BV.scatter(1, tokens_BT, kept_BT)


def judge_plain(proposal: Proposal, policy: Policy, source: Source) -> tuple[list[int], int]:
    """One row, in Python floats. Returns (accepted draft nodes, next token)."""
    children, tokens = proposal.trial_child_BT[0].tolist(), proposal.tokens_BN[0].tolist()
    path: list[int] = []
    node = 0
    while True:
        r = at_node(policy, node)
        trials = plain_trials(proposal, node)
        accepted = None
        while trials and accepted is None:
            first = trials[0]
            if proposal.trial_law_T[first] == "delta":
                block = _leading_deltas(proposal, trials)
                y = int(
                    source.categorical(
                        torch.tensor([r], dtype=torch.float64), Purpose.SIBLINGS, node, first
                    )
                )
                trials = trials[len(block) :]
                hits = [children[trial] for trial in block if tokens[children[trial]] == y]
                if hits:
                    accepted = hits[0]
                elif not trials:
                    return path, y
                else:
                    gone = {tokens[children[trial]] for trial in block}
                    r = _normalise([0.0 if x in gone else r_x for x, r_x in enumerate(r)])
                continue
            q, x = _plain_draft_probs(proposal, node, first), tokens[children[first]]
            left = [max(r_v - q_v, 0.0) for r_v, q_v in zip(r, q, strict=True)]
            exhausted = not sum(left) > 0
            accept_prob = float(r[x] > 0) if exhausted else min(1.0, r[x] / q[x])
            prob_1 = torch.tensor([accept_prob], dtype=torch.float64)
            if bool(source.bernoulli(prob_1, Purpose.ACCEPT, node, first)):
                accepted = children[first]
            elif not exhausted:
                r = _normalise(left)
            trials = trials[1:]
        if accepted is None:
            return path, int(
                source.categorical(torch.tensor([r], dtype=torch.float64), Purpose.FINAL, node, 0)
            )
        node = accepted
        path.append(node)


def _leading_deltas(proposal: Proposal, trials: list[int]) -> list[int]:
    laws = [proposal.trial_law_T[trial] for trial in trials]
    drawn = [index for index, law in enumerate(laws) if law != "delta"]
    return trials[: drawn[0]] if drawn else trials


def _plain_draft_probs(proposal: Proposal, node: int, trial: int) -> list[float]:
    """q of a trial given the earlier trials of its node."""
    assert proposal.q_BRV is not None
    law, row = proposal.trial_law_T[trial], proposal.trial_row_T[trial]
    q = proposal.q_BRV[0, row].tolist()
    if law == "iid":
        return q
    for earlier in plain_trials(proposal, node):
        if earlier < trial and proposal.trial_law_T[earlier] == "wor":
            if proposal.trial_row_T[earlier] == row:
                q[int(proposal.tokens_BN[0, proposal.trial_child_BT[0, earlier]])] = 0.0
    return _normalise(q)


def _normalise(weights: list[float]) -> list[float]:
    total = sum(weights)
    return [weight / total for weight in weights]
