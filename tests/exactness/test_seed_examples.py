"""The worked examples of the notes this project grew from."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from inference.laws import LAWS
from inference.proposal import Proposal
from inference.randomness import Purpose
from inference.sampling import SamplingParams
from inference.tree import TokenTree
from tests.exactness.branches import walk
from tests.exactness.cases import (
    DRAFT_PARAMS,
    POLICIES,
    deviations,
    emitted_text,
    enumerate_round,
    make_case,
)


class TablePolicy:
    """p as a dense table, one row a node: what a law needs of a target, and no more."""

    def __init__(self, probs_NV: list[list[float]], batch: int):
        self.probs_NV = torch.tensor(probs_NV, dtype=torch.float64)

    def at(self, node_B: Tensor) -> Tensor:
        return self.probs_NV[node_B]

    def argmax(self, node_B: Tensor) -> Tensor:
        return self.probs_NV[node_B].argmax(-1)


def one_draft_token(q: list[float], token_B: Tensor) -> Proposal:
    batch = len(token_B)
    ones = torch.ones(batch, 1, dtype=torch.int64)
    return Proposal(
        tokens_BN=torch.stack((torch.zeros_like(token_B), token_B), 1),
        parents_BN=torch.tensor([[-1, 0]]).expand(batch, -1),
        max_depth=1,
        trial_parent_BT=0 * ones,
        trial_child_BT=ones,
        trial_law_T=("iid",),
        trial_row_T=(0,),
        q_BRV=torch.tensor(q, dtype=torch.float64).expand(batch, 1, -1),
    )


@pytest.mark.parametrize("law", ["rejection", "block"])
@pytest.mark.parametrize(
    "p, q, acceptance, residual",
    [
        (
            [0.2, 0.3, 0.4, 0.1],
            [0.5, 0.2, 0.2, 0.1],
            [0.4, 1.0, 1.0, 1.0],
            [0.0, 1 / 3, 2 / 3, 0.0],
        ),
        ([0.4, 0.35, 0.25], [0.7, 0.2, 0.1], [4 / 7, 1.0, 1.0], [0.0, 0.5, 0.5]),
    ],
)
def test_acceptance_and_residual_of_the_worked_example(
    law: str, p: list[float], q: list[float], acceptance: list[float], residual: list[float]
) -> None:
    def play(source, state_B: Tensor) -> dict[str, Tensor]:
        draft_BV = torch.tensor(q, dtype=torch.float64).expand(len(state_B), -1)
        token_B = source.categorical(draft_BV, Purpose.DRAFT, torch.zeros_like(state_B), 0)
        policy = TablePolicy([p, [1.0 / len(p)] * len(p)], len(state_B))
        proposal = one_draft_token(q, token_B)
        verdict = LAWS[law].judge(proposal, policy, source)
        return {
            "draft_B": token_B,
            "accepted_B": verdict.num_accepted_B,
            "first_B": emitted_text(proposal, verdict)[:, 0],
        }

    branches = walk(play)
    draft_B, accepted_B = branches.results["draft_B"], branches.results["accepted_B"]
    first_B, weight_B = branches.results["first_B"], branches.weight_B
    rejected = weight_B[accepted_B == 0].sum().item()
    for token in range(len(p)):
        drafted = weight_B[draft_B == token].sum().item()
        taken = weight_B[(draft_B == token) & (accepted_B == 1)].sum().item()
        corrected = weight_B[(first_B == token) & (accepted_B == 0)].sum().item()
        emitted = weight_B[first_B == token].sum().item()
        assert taken / drafted == pytest.approx(acceptance[token], abs=1e-12)
        assert corrected / rejected == pytest.approx(residual[token], abs=1e-12)
        assert emitted == pytest.approx(p[token], abs=1e-12)
    overlap = sum(map(min, p, q))
    assert 1 - rejected == pytest.approx(overlap, abs=1e-12)


def test_i_love_cats_becomes_i_love_dogs() -> None:
    """I love is kept, cats becomes dogs, and what hung below cats is dropped."""
    words = ["<prefix>", "I", "love", "cats", "dogs", "because"]
    draft = torch.tensor([[words.index(w) for w in ("<prefix>", "I", "love", "cats", "because")]])
    proposal = Proposal.delta(draft, TokenTree.chain(4))
    target_says = {0: "I", 1: "love", 2: "dogs", 3: "because", 4: "I"}
    probs_NV = [
        [float(word == target_says[node]) for word in words] for node in range(len(target_says))
    ]
    for law in ("greedy", "rejection", "block"):
        branches = walk(
            lambda source, _, law=law: {
                "text_BD": emitted_text(
                    proposal, LAWS[law].judge(proposal, TablePolicy(probs_NV, 1), source)
                )
            }
        )
        text = [words[token] for token in branches.results["text_BD"][0] if token >= 0]
        assert text == ["I", "love", "dogs"] and len(branches) == 1


def test_equal_laws_always_accept_though_two_draws_may_differ() -> None:
    p = [0.5, 0.3, 0.2]

    def play(source, state_B: Tensor) -> dict[str, Tensor]:
        draft_BV = torch.tensor(p, dtype=torch.float64).expand(len(state_B), -1)
        token_B = source.categorical(draft_BV, Purpose.DRAFT, torch.zeros_like(state_B), 0)
        proposal = one_draft_token(p, token_B)
        verdict = LAWS["rejection"].judge(proposal, TablePolicy([p, p], len(state_B)), source)
        return {"accepted_B": verdict.num_accepted_B}

    assert (walk(play).results["accepted_B"] == 1).all()


def test_expansion_trees_have_the_nodes_of_the_notes() -> None:
    assert TokenTree.expansion((1, 1, 3, 1, 1)).num_nodes == 11
    assert TokenTree.expansion((2, 2, 1)).num_nodes == 10


def test_independent_draws_may_give_fewer_nodes_than_the_expansion() -> None:
    """<2,2> has six nodes when children differ; a repeated draw is one node with two trials."""
    case = make_case("iid tree", POLICIES["T=1"])

    def play(source, state_B: Tensor) -> dict[str, Tensor]:
        proposal = case.propose(source, state_B)
        return {
            "nodes_B": (proposal.parents_BN >= 0).sum(1),
            "root_trials_B": (proposal.trial_parent_BT == 0).sum(1),
        }

    branches = walk(play)
    assert branches.results["nodes_B"].unique().tolist() == [2, 3, 4, 5, 6]
    assert (branches.results["root_trials_B"] == 2).all()


def test_two_and_three_medusa_candidates_make_six_paths() -> None:
    tree = TokenTree.expansion((2, 3))
    leaves = [node for node in range(tree.num_tokens) if not tree.children(node)]
    assert len(leaves) == 6 and all(tree.depths[node] == 2 for node in leaves)
    case = make_case("Medusa top-k product", POLICIES["T=1"])
    proposal = case.propose(None, torch.zeros(1, dtype=torch.int64))
    parents = proposal.parents_BN[0].tolist()
    assert len([node for node in range(len(parents)) if node not in parents]) == 6


@pytest.mark.parametrize("drafter", ["chain", "without replacement", "two SSMs merged"])
def test_p_and_q_may_have_different_policies(drafter: str) -> None:
    params = SamplingParams(temperature=0.6, top_p=0.8, repetition_penalty=1.5)
    assert params.temperature != DRAFT_PARAMS.temperature
    case = make_case(drafter, params)
    assert deviations(case, enumerate_round(case, LAWS["rejection"].judge)) <= [1e-12]
