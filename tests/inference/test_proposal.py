"""What a proposal may not say, found by the debug check and by the flag on the device alike."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from inference.proposal import Proposal, check, earlier_draws, violations
from inference.tree import TokenTree


def sound() -> Proposal:
    """Two rows, three nodes; wor draws of one row of q at the root, then an iid one."""
    return Proposal(
        tokens_BN=torch.tensor([[0, 1, 2, 1], [0, 2, 1, 0]]),
        parents_BN=torch.tensor([[-1, 0, 0, 1], [-1, 0, 0, 2]]),
        max_depth=2,
        trial_parent_BT=torch.tensor([[0, 0, 1], [0, 0, 2]]),
        trial_child_BT=torch.tensor([[1, 2, 3], [1, 2, 3]]),
        trial_law_T=("wor", "wor", "iid"),
        trial_row_T=(0, 0, 1),
        q_BRV=torch.tensor(
            [[[0.2, 0.3, 0.5], [0.0, 1.0, 0.0]], [[0.2, 0.3, 0.5], [1.0, 0.0, 0.0]]]
        ),
        max_trials_per_node=2,
    )


def change(field: str, index: tuple[int, ...], value: float) -> Proposal:
    proposal = sound()
    getattr(proposal, field)[index] = value
    return proposal


BROKEN = {
    "row of q that does not sum to one": (
        change("q_BRV", (1, 1, 2), 0.5),
        r"row 1, trial 2: its row of q .* does not sum to 1",
    ),
    "negative q": (
        replace(sound(), q_BRV=sound().q_BRV + torch.tensor([-0.3, 0.0, 0.3])),
        r"row 0, trial 0: its row of q is negative",
    ),
    "NaN in q": (change("q_BRV", (0, 0, 2), math.nan), r"row 0, trial 0: its row of q"),
    "token proposed at probability zero": (
        change("tokens_BN", (1, 3), 1),
        r"row 1, trial 2: token proposed at probability zero",
    ),
    "two wor draws of one token": (
        replace(
            sound(),
            trial_parent_BT=torch.tensor([[0, 0, 1, 0], [0, 0, 2, -1]]),
            trial_child_BT=torch.tensor([[1, 2, 3, 1], [1, 2, 3, -1]]),
            trial_law_T=("wor", "wor", "iid", "wor"),
            trial_row_T=(0, 0, 1, 0),
            max_trials_per_node=3,
        ),
        r"row 0, trial 3: token proposed at probability zero",
    ),
    "two nodes for one token": (
        change("tokens_BN", (1, 2), 2),
        r"row 1, node 2: duplicate \(parent, token\)",
    ),
    "a parent after its child": (change("parents_BN", (0, 1), 2), r"row 0, node 1: order"),
    "a padding node as parent": (change("parents_BN", (1, 2), -2), r"row 1, node 3: order"),
    "a second root": (change("parents_BN", (1, 1), -1), r"row 1, node 1: order"),
    "no root": (change("parents_BN", (0, 0), -2), r"row 0, node 0: the root"),
    "a trial at another parent": (
        change("trial_parent_BT", (0, 2), 2),
        r"row 0, trial 2: its child does not hang below its parent",
    ),
    "a trial of a padding node": (
        change("parents_BN", (0, 3), -2),
        r"row 0, trial 2: its child does not hang below its parent",
    ),
    "half a trial": (
        change("trial_child_BT", (1, 2), -1),
        r"row 1, (node 3: no trial|trial 2: its child)",
    ),
    "a node without a trial": (
        replace(sound(), trial_parent_BT=torch.tensor([[0, 0, 1], [0, 0, -1]]),
                trial_child_BT=torch.tensor([[1, 2, 3], [1, 2, -1]])),
        r"row 1, node 3: no trial names it",
    ),
    "deeper than stated": (replace(sound(), max_depth=1), r"row 0, node 3: deeper than max_depth"),
    "more trials than stated": (
        replace(sound(), max_trials_per_node=1),
        r"row 0, trial 0: more trials than max_trials_per_node",
    ),
    "more trials than stated at a depth": (
        replace(sound(), max_trials_per_node=(2, 0)),
        r"row 0, trial 2: more trials than max_trials_per_node",
    ),
}  # fmt: skip


def test_sound_proposal_passes():
    check(sound())
    assert violations(sound()).tolist() == [False, False]


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_proposal_is_refused_with_its_place(fault):
    proposal, message = BROKEN[fault]
    with pytest.raises(ValueError, match=message):
        check(proposal)
    row = 1 if "row 1" in message else 0
    assert violations(proposal)[row]
    if fault not in ("negative q", "deeper than stated") and "more" not in fault:
        assert not violations(proposal)[1 - row]  # the flag names the row, not the batch


def test_trials_and_rows_of_q_that_a_row_lacks_may_hold_anything():
    proposal = sound()
    proposal.trial_parent_BT[1, 2] = proposal.trial_child_BT[1, 2] = -1
    proposal.parents_BN[1, 3] = -2
    proposal.q_BRV[1, 1] = math.nan
    check(proposal)


@pytest.mark.parametrize(
    ("static", "message"),
    [
        ({"trial_law_T": ("wor", "wor", "topk")}, r"trial 2: law 'topk', expected one of"),
        ({"trial_row_T": (0, 0, 2)}, r"trial 2: law 'iid' with row 2 of q, which has 2 rows"),
        ({"trial_row_T": (0, -1, 1)}, r"trial 1: law 'wor' with row -1"),
        ({"trial_law_T": ("wor", "wor", "delta")}, r"trial 2: law 'delta' with row 1"),
        ({"trial_law_T": ("wor",)}, r"3 trial parents, but \(3, 1, 3\)"),
        ({"q_BRV": None}, r"trial 0: law 'wor' with row 0 of q, which has 0 rows"),
        ({"parents_BN": torch.tensor([[-1, 0], [-1, 0]])}, r"must have one shape"),
    ],
)
def test_static_parts_must_agree(static, message):
    with pytest.raises(ValueError, match=message):
        replace(sound(), **static)


def test_earlier_draws_are_those_of_one_row_at_one_parent():
    proposal = replace(
        sound(),
        trial_parent_BT=torch.tensor([[0, 0, 1, 0, 0, 0]]),
        trial_child_BT=torch.tensor([[1, 2, 3, 1, 2, 2]]),
        tokens_BN=sound().tokens_BN[:1],
        parents_BN=sound().parents_BN[:1],
        q_BRV=sound().q_BRV[:1],
        trial_law_T=("wor", "wor", "wor", "iid", "wor", "wor"),
        trial_row_T=(0, 0, 0, 0, 1, 0),
    )
    earlier_TT = earlier_draws(proposal, torch.arange(6)[None])[0]
    pairs = {(x, t) for x in range(6) for t in range(6) if earlier_TT[x, t]}
    assert pairs == {(1, 0), (5, 0), (5, 1)}


def test_delta_proposal_of_a_tree_has_one_trial_a_node():
    tree = TokenTree.expansion((2, 2, 1))
    tokens_BN = torch.arange(11).expand(3, -1)
    proposal = Proposal.delta(tokens_BN, tree)
    check(proposal)
    assert proposal.num_trials == tree.num_nodes == 10
    assert [proposal.trials_at(depth) for depth in range(4)] == [2, 2, 1, 0]
    assert proposal.max_depth == 3
    assert proposal.trial_child_BT[0].tolist() == list(range(1, 11))
    assert proposal.trial_parent_BT[0].tolist() == list(tree.parents[1:])
    assert set(proposal.trial_law_T) == {"delta"} and proposal.q_BRV is None


def test_proposals_of_one_tree_share_no_memory():
    tree, tokens_BN = TokenTree.chain(2), torch.tensor([[0, 1, 2]])
    Proposal.delta(tokens_BN, tree).parents_BN[0, 2] = -2
    assert Proposal.delta(tokens_BN, tree).parents_BN.tolist() == [[-1, 0, 1]]


def test_delta_proposal_with_equal_siblings_is_refused_by_the_check():
    with pytest.raises(ValueError, match=r"row 0, node 2: duplicate"):
        check(Proposal.delta(torch.tensor([[0, 4, 4]]), TokenTree.expansion((2,))))


def test_one_row_of_a_proposal_is_that_row():
    row = sound().row(1)
    assert row.tokens_BN.tolist() == [[0, 2, 1, 0]] and row.q_BRV.shape == (1, 2, 3)
    assert row.trial_parent_BT.tolist() == [[0, 0, 2]]
    check(row)
