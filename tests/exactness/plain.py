"""Runs a law's plain version, which judges one row, in the place of the batched one."""

from __future__ import annotations

import copy

import torch

from inference.laws import Law, Verdict
from inference.proposal import Proposal
from inference.randomness import PositionSource, Source
from inference.sampling import TreePolicy
from tests.exactness.branches import ScriptedSource
from tests.exactness.cases import Judge


def row_by_row(law: Law) -> Judge:
    def judge(proposal: Proposal, policy: TreePolicy, source: Source) -> Verdict:
        batch, width = len(proposal.tokens_BN), proposal.max_depth + 1
        path_BD = torch.full((batch, width), -1)
        path_BD[:, 0] = 0
        accepted_B, next_token_B = torch.zeros(batch).long(), torch.zeros(batch).long()
        sources = rows_of(source, batch)
        for row in range(batch):
            policy_of_row = one_row_policy(proposal, policy, row)
            path, token = law.judge_plain(proposal.row(row), policy_of_row, sources[row])
            path_BD[row, 1 : len(path) + 1] = torch.tensor(path, dtype=torch.int64)
            accepted_B[row], next_token_B[row] = len(path), token
        return Verdict(path_BD, accepted_B, next_token_B, torch.zeros(batch, dtype=torch.bool))

    return judge


def one_row_policy(proposal: Proposal, policy: TreePolicy, row: int) -> TreePolicy:
    index = torch.tensor([row])
    seen_BV = None if policy.seen_BV is None else policy.seen_BV[index]
    tensors = policy.policy.select(index)
    return TreePolicy(policy.logits_BNV[index], proposal.row(row), tensors, seen_BV)


def rows_of(source: Source | PositionSource, batch: int) -> list[Source]:
    """The source of each row by itself."""
    if isinstance(source, ScriptedSource):
        return [source.for_rows(torch.tensor([row])) for row in range(batch)]
    parts = []
    for row in range(batch):
        part = copy.copy(source)
        part.__dict__ = {name: value[row : row + 1] for name, value in vars(source).items()}
        parts.append(part)
    return parts
