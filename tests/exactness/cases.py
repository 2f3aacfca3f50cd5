"""What is enumerated: sampling policies, kinds of tables, and one round of any law over them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from inference.laws import Verdict
from inference.proposal import Proposal
from inference.randomness import Source
from inference.sampling import SamplingParams, TreePolicy
from tests.exactness.branches import Branches, walk
from tests.exactness.toy_drafters import DRAFTERS, Drafter, DraftTable
from tests.exactness.toys import (
    ROOT_TOKEN,
    ToyTarget,
    emitted_mass,
    random_logits,
    table_probs,
)

TOLERANCE = 1e-12
NUM_MODELS = 3
Judge = Callable[[Proposal, TreePolicy, Source], Verdict]

POLICIES: dict[str, SamplingParams] = {
    "T=0": SamplingParams(temperature=0.0, repetition_penalty=1.7),
    "T=0.5": SamplingParams(temperature=0.5),
    "T=1": SamplingParams(temperature=1.0),
    "T=1.5": SamplingParams(temperature=1.5),
    "top-k": SamplingParams(temperature=1.0, top_k=2),
    "top-p": SamplingParams(temperature=1.0, top_p=0.7),
    "min-p": SamplingParams(temperature=1.0, min_p=0.3),
    "penalty": SamplingParams(temperature=1.0, repetition_penalty=1.7),
    "all": SamplingParams(temperature=1.5, top_k=3, top_p=0.9, min_p=0.1, repetition_penalty=1.3),
}
# The drafters' own policy: never the target's, since p and q need not share one.
DRAFT_PARAMS = SamplingParams(temperature=0.8)

# How a state's target and drafters relate: (kind of p, kind of q); see `random_logits`.
TABLES: dict[str, tuple[str, str]] = {
    "generic": ("generic", "generic"),
    "q = p": ("generic", "equal"),
    "disjoint supports": ("lower", "upper"),
    "one-hot p": ("one_hot", "generic"),
    "one-hot q": ("generic", "one_hot"),
    "zeros": ("zeros", "zeros"),
    "ties": ("ties", "ties"),
    "small draft vocabulary": ("generic", "lower"),
}
# Smaller than the default where the tree is large: every case stays under the bound on branches.
DEFAULT_VOCABULARY = 4
VOCABULARY = {
    "top-k": 5,
    "top-k, wide": 5,
    "Medusa top-k product": 5,
    "a draw, then top-2": 5,
    "three SSMs merged": 3,
    "iid tree": 3,
    "iid, three draws": 3,
}


@dataclass
class Case:
    """A drafter with its models, and the toy targets that it is judged by, one pair a state."""

    drafter: Drafter
    draft_probs: list[Tensor]  # float64 [S, C, V], one a model
    target: ToyTarget

    @property
    def depth(self) -> int:
        return self.target.depth

    @property
    def num_states(self) -> int:
        return len(self.target.probs_SCV)

    def propose(self, source: Source, state_B: Tensor) -> Proposal:
        root_B = torch.full_like(state_B, ROOT_TOKEN)
        return self.drafter(
            source, [DraftTable(probs_SCV, state_B, root_B) for probs_SCV in self.draft_probs]
        )


def make_case(
    drafter_name: str,
    params: SamplingParams,
    tables: Sequence[str] = ("generic",),
    vocab: int | None = None,
    seed: int = 0,
) -> Case:
    """A case whose states are the kinds of tables named."""
    drafter, depth = DRAFTERS[drafter_name]
    vocab = vocab or VOCABULARY.get(drafter_name, DEFAULT_VOCABULARY)
    kinds = [TABLES[table] for table in tables]
    logits = [
        random_logits(seed + state, vocab, depth, target_kind)
        for state, (target_kind, _) in enumerate(kinds)
    ]
    target = ToyTarget(torch.stack(logits), params, depth)
    draft_kinds = tuple(draft_kind for _, draft_kind in kinds)
    draft_probs = []
    for model in range(NUM_MODELS):
        probs_SCV = _draft_probs(model, seed, vocab, depth, draft_kinds).clone()
        for state, draft_kind in enumerate(draft_kinds):
            if draft_kind == "equal":
                probs_SCV[state] = target.probs_SCV[state]
        draft_probs.append(probs_SCV)
    return Case(drafter, draft_probs, target)


@lru_cache(maxsize=1024)
def _draft_probs(model: int, seed: int, vocab: int, depth: int, kinds: tuple[str, ...]) -> Tensor:
    """float64 [S, C, V]: a draft model's table for each state; the same under every policy of p."""
    logits = [
        random_logits(
            1000 * (model + 1) + seed + state, vocab, depth, "generic" if kind == "equal" else kind
        )
        for state, kind in enumerate(kinds)
    ]
    return table_probs(torch.stack(logits), DRAFT_PARAMS)


def play(case: Case, judge: Judge, source: Source, state_B: Tensor) -> dict[str, Tensor]:
    """One round: draft, judge. Returns the emitted text and the number of accepted tokens."""
    proposal = case.propose(source, state_B)
    verdict = judge(proposal, case.target.policy(proposal, state_B), source)
    return {
        "text_BD": emitted_text(proposal, verdict),
        "accepted_B": verdict.num_accepted_B,
        "error_B": verdict.error_B,
    }


def emitted_text(proposal: Proposal, verdict: Verdict) -> Tensor:
    """int64 [B, max_depth + 1]: accepted tokens, then the next token, then -1."""
    path_BD, accepted_B1 = verdict.path_BD, verdict.num_accepted_B[:, None]
    tokens_BD = proposal.tokens_BN.gather(1, path_BD.clamp_min(0))
    text_BD = torch.cat((tokens_BD[:, 1:], tokens_BD[:, :1]), 1)  # one free column at the end
    text_BD = text_BD.scatter(1, accepted_B1, verdict.next_token_B[:, None])
    return text_BD.masked_fill(torch.arange(text_BD.shape[1]) > accepted_B1, -1)


def enumerate_round(case: Case, judge: Judge) -> Branches:
    return walk(lambda source, state_B: play(case, judge, source, state_B), case.num_states)


def deviations(case: Case, branches: Branches) -> list[float]:
    """By state, the largest difference between the law of one round, completed by the target, and
    the target's own; infinite if the law reported an error."""
    mass = emitted_mass(branches, case.num_states, case.target.vocab)
    off_S = (case.target.complete(mass) - case.target.joint()).abs().amax(1)
    total_S = branches.mean(torch.ones(len(branches)))
    error_S = branches.mean(branches.results["error_B"])
    off_S = torch.maximum(off_S, (total_S - 1).abs()).masked_fill(error_S > 0, math.inf)
    return off_S.tolist()


def mean_accepted(branches: Branches) -> list[float]:
    """By state, E[accepted draft tokens] of one round."""
    return branches.mean(branches.results["accepted_B"]).tolist()


def first_accepted(branches: Branches) -> list[float]:
    """By state, the probability that at least one draft token is accepted."""
    return branches.mean(branches.results["accepted_B"] > 0).tolist()
