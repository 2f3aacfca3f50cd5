"""The laws against their plain versions, the notes' examples, and what must never come out.

That a law keeps the target's distribution is computed in tests/exactness.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from inference.laws import LAWS
from inference.proposal import Proposal, violations
from inference.randomness import KeyedSource, PositionSource, Purpose, UniformSource, gumbel_noise
from inference.sampling import PolicyTensors, SamplingParams, TreePolicy
from inference.tree import TokenTree
from tests.inference.random_proposals import TablePolicy, random_case, random_chain

BATCH = 50
P, Q = (0.2, 0.3, 0.4, 0.1), (0.5, 0.2, 0.2, 0.1)  # the notes' example


class FixedSource(UniformSource):
    """Every uniform is the same; remembers what was asked."""

    def __init__(self, uniform: float, batch: int = 1):
        self.fixed_B = torch.full((batch,), uniform, dtype=torch.float64)
        self.bernoulli_probs: list[float] = []
        self.categorical_probs: dict[int, list[float]] = {}

    def uniform(self, purpose, node_B, trial):
        return self.fixed_B

    def bernoulli(self, prob_B, purpose, node_B, trial):
        if torch.as_tensor(node_B).flatten()[0] >= 0:
            self.bernoulli_probs.append(float(prob_B[0]))
        return super().bernoulli(prob_B, purpose, node_B, trial)

    def categorical(self, probs_BV, purpose, node_B, trial):
        if torch.as_tensor(node_B).flatten()[0] >= 0:
            self.categorical_probs[purpose] = probs_BV[0].tolist()
        return super().categorical(probs_BV, purpose, node_B, trial)


def make_source(law: str, seeds_B: Tensor):
    kind = PositionSource if LAWS[law].source == "position" else KeyedSource
    return kind(seeds_B, seeds_B * 3 + 1)


def decisions(verdict, row: int) -> tuple[list[int], int]:
    path = [node for node in verdict.path_BD[row, 1:].tolist() if node >= 0]
    return path, int(verdict.next_token_B[row])


def chain(target_probs: list, draft_probs: list, tokens: list[int]) -> tuple[Proposal, TablePolicy]:
    """One row: p at each node, q at each node but the last, drafted tokens."""
    depth = len(tokens)
    proposal = Proposal(
        tokens_BN=torch.tensor([[0, *tokens]]),
        parents_BN=torch.arange(-1, depth)[None],
        max_depth=depth,
        trial_parent_BT=torch.arange(depth)[None],
        trial_child_BT=torch.arange(1, depth + 1)[None],
        trial_law_T=("iid",) * depth,
        trial_row_T=tuple(range(depth)),
        q_BRV=torch.tensor([draft_probs], dtype=torch.float64),
        max_trials_per_node=1,
    )
    return proposal, TablePolicy(torch.tensor([target_probs], dtype=torch.float64))


@pytest.mark.parametrize("law", ["greedy", "rejection", "coupled", "typical"])
def test_batched_law_decides_as_the_plain_one_on_trees(law):
    lengths = set()
    for seed in range(40 if law == "rejection" else 12):
        proposal, policy = random_case(seed, BATCH)
        assert not violations(proposal).any()
        seeds_B = torch.arange(BATCH) + 1000 * seed
        verdict = LAWS[law].judge(proposal, policy, make_source(law, seeds_B))
        assert not verdict.error_B.any()
        for row in range(BATCH):
            source = make_source(law, seeds_B[row : row + 1])
            plain = LAWS[law].judge_plain(proposal.row(row), policy.row(row), source)
            assert decisions(verdict, row) == plain, (seed, row)
            assert len(plain[0]) == verdict.num_accepted_B[row]
            lengths.add(len(plain[0]))
    assert lengths == {0, 1, 2, 3}


@pytest.mark.parametrize("law", ["block", "rejection"])
def test_batched_law_decides_as_the_plain_one_on_chains(law):
    lengths = set()
    for seed in range(20):
        proposal, policy = random_chain(seed, BATCH)
        assert not violations(proposal).any()
        seeds_B = torch.arange(BATCH) + 1000 * seed
        verdict = LAWS[law].judge(proposal, policy, make_source(law, seeds_B))
        assert not verdict.error_B.any()
        for row in range(BATCH):
            source = make_source(law, seeds_B[row : row + 1])
            plain = LAWS[law].judge_plain(proposal.row(row), policy.row(row), source)
            assert decisions(verdict, row) == plain, (seed, row)
            lengths.add(len(plain[0]))
    assert lengths == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("law", list(LAWS))
def test_law_runs_on_tensors_that_cannot_be_read(law):
    """Meta tensors have shapes and no values: one host read, or a shape made of values, raises."""
    proposal, policy = (random_chain if law == "block" else random_case)(0, 4)
    on_meta = Proposal(
        *(
            value.to("meta") if isinstance(value, Tensor) else value
            for value in vars(proposal).values()
        )
    )
    params = [SamplingParams(temperature=0.7, top_k=3, top_p=0.9, min_p=0.01)] * 4
    params[1] = SamplingParams(repetition_penalty=1.2)
    tree_policy = TreePolicy(
        policy.probs_BNV.to("meta"),
        on_meta,
        PolicyTensors.stack(params, "meta"),
        torch.zeros(4, 5, dtype=torch.bool, device="meta"),
    )
    seeds_B = torch.zeros(4, dtype=torch.int64, device="meta")
    verdict = LAWS[law].judge(on_meta, tree_policy, make_source(law, seeds_B))
    assert verdict.path_BD.shape == (4, proposal.max_depth + 1)
    assert violations(on_meta).shape == (4,)


@pytest.mark.parametrize("law", ["rejection", "block"])
def test_law_asks_at_most_depth_times_branching_times(law):
    class Counting(KeyedSource):
        asked = 0

        def uniform(self, purpose, node_B, trial):
            Counting.asked += 1
            return super().uniform(purpose, node_B, trial)

    if law == "block":
        proposal, policy = random_chain(1, 8)
    else:
        proposal, policy = random_case(1, 8)
        proposal.trial_law_T, proposal.trial_row_T = ("iid",) * 7, (0,) * 7
        proposal.max_trials_per_node = 3
    Counting.asked = 0
    zeros_B = torch.zeros(8, dtype=torch.int64)
    LAWS[law].judge(proposal, policy, Counting(zeros_B, zeros_B))
    assert Counting.asked <= proposal.max_depth * proposal.trials_at(0) + 1


@pytest.mark.parametrize("uniform", [0.0, 1 - 2.0**-53])
@pytest.mark.parametrize("law", ["rejection", "block"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_impossible_token_never_comes_out(law, uniform, dtype):
    """The edges of the uniform's range, on proposals full of tokens the target never says."""
    seen = 0
    for seed in range(10):
        proposal, policy = (random_chain if law == "block" else random_case)(seed, BATCH)
        policy.probs_BNV = policy.probs_BNV.to(dtype)
        verdict = LAWS[law].judge(proposal, policy, FixedSource(uniform, BATCH))
        for row in range(BATCH):
            path, token = decisions(verdict, row)
            emitted = [*proposal.tokens_BN[row, path].tolist(), token]
            assert (policy.probs_BNV[row, [0, *path], emitted] > 0).all()
            seen += len(path)
    assert seen > 0


@pytest.mark.parametrize("law", list(LAWS))
def test_padding_is_never_accepted(law):
    """Padding carries token 0, and 0 is a token the target would say everywhere."""
    proposal = Proposal.delta(torch.tensor([[3, 0, 0]]), TokenTree.chain(2))
    proposal.parents_BN = torch.tensor([[-1, -2, -2]])
    proposal.trial_parent_BT = proposal.trial_child_BT = torch.full((1, 2), -1)
    probs_BNV = torch.zeros(1, 3, 4, dtype=torch.float64)
    probs_BNV[..., 0] = 1
    source = make_source(law, torch.zeros(1, dtype=torch.int64))
    verdict = LAWS[law].judge(proposal, TablePolicy(probs_BNV), source)
    assert verdict.num_accepted_B.item() == 0 and verdict.next_token_B.item() == 0


@pytest.mark.parametrize("law", list(LAWS))
@pytest.mark.parametrize("node", [0, 1])
def test_nan_is_an_error_in_its_own_row_only(law, node):
    probs_BNV = torch.zeros(2, 2, 3, dtype=torch.float64)
    probs_BNV[..., 1] = 1
    probs_BNV[1, node, 2] = math.nan
    proposal = Proposal.delta(torch.tensor([[0, 1], [0, 1]]), TokenTree.chain(1))
    source = make_source(law, torch.zeros(2, dtype=torch.int64))
    verdict = LAWS[law].judge(proposal, TablePolicy(probs_BNV), source)
    assert verdict.error_B.tolist() == [False, True]
    assert 0 <= verdict.next_token_B.min() and verdict.next_token_B.max() < 3


@pytest.mark.parametrize("law", ["rejection", "block"])
@pytest.mark.parametrize(
    "q", [(0.5, 0.5, 0.5, 0.1), (0.0, 0.5, 0.4, 0.1), (math.nan, 0.2, 0.2, 0.1)]
)
def test_improper_draft_law_is_an_error(law, q):
    proposal, policy = chain([P, P], [q], [0])
    verdict = LAWS[law].judge(proposal, policy, FixedSource(0.5))
    assert verdict.error_B.tolist() == [True]
    assert violations(proposal).tolist() == [True]


@pytest.mark.parametrize("law", ["rejection", "block"])
def test_notes_example_accepts_seven_tenths_and_corrects_from_the_residual(law):
    acceptance = 0.0
    for token, q_x in enumerate(Q):
        proposal, policy = chain([P, P], [Q], [token])
        source = FixedSource(1 - 2.0**-53)  # rejects whatever can be rejected
        verdict = LAWS[law].judge(proposal, policy, source)
        acceptance += q_x * source.bernoulli_probs[0]
        if P[token] < Q[token]:
            assert verdict.num_accepted_B.item() == 0
            residual = source.categorical_probs[Purpose.FINAL]
            assert residual == pytest.approx([0, 1 / 3, 2 / 3, 0], abs=1e-15)
        else:
            assert verdict.num_accepted_B.item() == 1
            assert source.categorical_probs[Purpose.FINAL] == pytest.approx(P, abs=1e-15)  # bonus
    assert acceptance == pytest.approx(0.7, abs=1e-15)


def test_notes_acceptance_probabilities():
    p, q = (0.4, 0.35, 0.25), (0.7, 0.2, 0.1)
    for token, expected in enumerate((4 / 7, 1, 1)):
        proposal, policy = chain([p, p], [q], [token])
        source = FixedSource(0.999)
        LAWS["rejection"].judge(proposal, policy, source)
        assert source.bernoulli_probs == pytest.approx([expected], abs=1e-15)


def test_notes_residual_of_two_equal_parts():
    p, q = (0.4, 0.35, 0.25), (0.7, 0.2, 0.1)
    proposal, policy = chain([p, p], [q], [0])
    source = FixedSource(0.999)
    LAWS["rejection"].judge(proposal, policy, source)
    assert source.categorical_probs[Purpose.FINAL] == pytest.approx([0, 0.5, 0.5], abs=1e-15)


def test_i_love_cats_keeps_i_love_and_corrects_to_dogs():
    i, love, cats, dogs = 0, 1, 2, 3
    eye = torch.eye(4, dtype=torch.float64).tolist()
    says = [eye[i], eye[love], eye[dogs], eye[cats]]
    drafts = [(0.7, 0.1, 0.1, 0.1), (0.1, 0.7, 0.1, 0.1), (0.1, 0.1, 0.7, 0.1)]
    for law in ("greedy", "rejection", "block"):
        proposal, policy = chain(says, drafts, [i, love, cats])
        verdict = LAWS[law].judge(proposal, policy, FixedSource(0.3))
        assert decisions(verdict, 0) == ([1, 2], dogs)


def test_trial_that_exhausts_the_residual_is_accepted():
    """q = p up to one rounding: nothing is left to reject into, whatever the uniform."""
    p = torch.tensor([0.1, 0.2, 0.7], dtype=torch.float32)
    proposal, policy = chain([p.tolist()] * 2, [p.tolist()], [1])
    policy.probs_BNV = policy.probs_BNV.float() * (1 - 2.0**-23)
    proposal.q_BRV = proposal.q_BRV.float()
    verdict = LAWS["rejection"].judge(proposal, policy, FixedSource(1 - 2.0**-53))
    assert decisions(verdict, 0)[0] == [1] and not verdict.error_B.any()
    assert LAWS["rejection"].judge_plain(proposal, policy, FixedSource(1 - 2.0**-53))[0] == [1]


def test_second_proposer_of_a_rejected_token_still_subtracts_its_law():
    proposal, policy = chain([P, P], [Q, (0.7, 0.1, 0.1, 0.1)], [0, 0])
    proposal.parents_BN = torch.tensor([[-1, 0, -2]])
    proposal.trial_parent_BT = torch.tensor([[0, 0]])
    proposal.trial_child_BT = torch.tensor([[1, 1]])
    proposal.max_trials_per_node = 2
    policy.probs_BNV = torch.cat((policy.probs_BNV, policy.probs_BNV[:, :1]), 1)
    source = FixedSource(0.9)
    verdict = LAWS["rejection"].judge(proposal, policy, source)
    assert verdict.num_accepted_B.item() == 0
    assert source.bernoulli_probs == pytest.approx([0.4, 0.0], abs=1e-15)
    left = [0, 1 / 3 - 0.1, 2 / 3 - 0.1, 0]
    expected = [x / sum(left) for x in left]
    assert source.categorical_probs[Purpose.FINAL] == pytest.approx(expected, abs=1e-14)


def test_block_refuses_trees_by_name():
    proposal = Proposal.delta(torch.tensor([[0, 1, 2]]), TokenTree.expansion((2,)))
    policy = TablePolicy(torch.full((1, 3, 3), 1 / 3))
    for judge in (LAWS["block"].judge, LAWS["block"].judge_plain):
        with pytest.raises(
            ValueError, match="'block' judges chains only: 2 trials for a depth of 1"
        ):
            judge(proposal, policy, FixedSource(0.5))


def test_block_flags_two_trials_at_one_node():
    proposal, policy = chain([P, P, P], [Q, Q], [0, 1])
    proposal.parents_BN[0, 2] = proposal.trial_parent_BT[0, 1] = 0
    assert LAWS["block"].judge(proposal, policy, FixedSource(0.5)).error_B.tolist() == [True]


def test_block_tests_every_position():
    """A position that fails does not end the search: the longest success counts."""
    p_0, q_0 = (0.5, 0.5), (0.9, 0.1)
    p_1, q_1 = (0.9, 0.1), (0.5, 0.5)
    proposal, policy = chain([p_0, p_1, p_0], [q_0, q_1], [0, 0])
    a_1 = 5 / 9
    a_2 = a_1 * 0.9 / 0.5
    mass = max(a_1 * 0.9 - 0.5, 0) + max(a_1 * 0.1 - 0.5, 0)
    h_1 = mass / (mass + 1 - a_1) if mass > 0 else 0.0
    source = FixedSource(0.9)
    verdict = LAWS["block"].judge(proposal, policy, source)
    assert h_1 < 0.9 < min(a_2, 1)
    assert source.bernoulli_probs == pytest.approx([h_1, min(a_2, 1)], abs=1e-15)
    assert decisions(verdict, 0)[0] == [1, 2]


def test_coupled_gives_the_text_of_plain_sampling():
    """Token for token argmax(log p + g) at its own position, whatever the tree proposes."""
    generator = torch.Generator().manual_seed(3)
    table_VV = torch.rand(5, 5, generator=generator, dtype=torch.float64).softmax(-1)
    lengths = []
    for seed in range(12):
        proposal, _ = random_case(seed, BATCH)
        policy = TablePolicy(table_VV[proposal.tokens_BN])  # p depends on the last token only
        seeds_B, positions_B = torch.arange(BATCH) + seed, torch.arange(BATCH) % 7
        verdict = LAWS["coupled"].judge(proposal, policy, PositionSource(seeds_B, positions_B))
        for row in range(BATCH):
            path, token = decisions(verdict, row)
            emitted = [*proposal.tokens_BN[row, path].tolist(), token]
            last, plain = int(proposal.tokens_BN[row, 0]), []
            for step in range(len(emitted)):
                position = positions_B[row : row + 1, None] + 1 + step
                noise_V = gumbel_noise(seeds_B[row : row + 1], position, 5)[0, 0]
                last = int((table_VV[last].log() + noise_V).argmax())
                plain.append(last)
            assert emitted == plain
            lengths.append(len(path))
    assert max(lengths) >= 2


def test_coupled_at_temperature_zero_is_greedy():
    proposal, policy = random_case(2, BATCH)
    logits_BNV = policy.probs_BNV.log()
    greedy = PolicyTensors.stack([SamplingParams()] * BATCH)
    tree_policy = TreePolicy(logits_BNV, proposal, greedy)
    zeros_B = torch.zeros(BATCH, dtype=torch.int64)
    coupled = LAWS["coupled"].judge(proposal, tree_policy, PositionSource(zeros_B, zeros_B))
    expected = LAWS["greedy"].judge(proposal, tree_policy, None)
    assert torch.equal(coupled.path_BD, expected.path_BD)
    assert torch.equal(coupled.next_token_B, expected.next_token_B)


def test_typical_keeps_the_longest_acceptable_path_and_a_greedy_token():
    probs_BNV = torch.tensor([[[0.1, 0.9], [0.95, 0.05], [0.5, 0.5], [0.4, 0.6]]])
    tree = TokenTree.from_paths([(0,), (1,), (1, 0)])
    proposal = Proposal.delta(torch.tensor([[0, 1, 0, 1]]), tree)
    verdict = LAWS["typical"].judge(proposal, TablePolicy(probs_BNV), None)
    # p(0 | root) = .1 is over min(.09, .3 e^-H), so the path through it is kept: it is longer than
    # the path through the target's favourite, and its end is followed by that node's argmax.
    assert decisions(verdict, 0) == ([2, 3], 1)
    assert not LAWS["typical"].exact and all(
        law.exact for name, law in LAWS.items() if name != "typical"
    )


@pytest.mark.parametrize(
    ("epsilon", "delta", "accepted"), [(0.3, 1.0, 0), (0.2, 1.0, 1), (1, 0.3, 1), (1, 1, 0)]
)
def test_typical_threshold_is_the_smaller_of_the_two(epsilon, delta, accepted):
    """p(x) = .25 of a uniform p over four: exp(-H) = .25. Strict, so delta = 1 refuses it."""
    proposal = Proposal.delta(torch.tensor([[0, 1]]), TokenTree.chain(1))
    params = SamplingParams(temperature=1.0, typical_epsilon=epsilon, typical_delta=delta)
    logits_BNV = torch.zeros(1, 2, 4, dtype=torch.float64)
    policy = TreePolicy(logits_BNV, proposal, PolicyTensors.stack([params]))
    assert LAWS["typical"].judge(proposal, policy).num_accepted_B.item() == accepted


@pytest.mark.parametrize("law", ["greedy", "rejection", "coupled", "block"])
def test_root_alone_is_plain_decoding(law):
    proposal = Proposal.delta(torch.tensor([[2]]), TokenTree.chain(0))
    probs_BNV = torch.tensor([[[0.0, 1.0, 0.0]]], dtype=torch.float64)
    source = make_source(law, torch.zeros(1, dtype=torch.int64))
    verdict = LAWS[law].judge(proposal, TablePolicy(probs_BNV), source)
    assert verdict.path_BD.tolist() == [[0]]
    assert verdict.num_accepted_B.tolist() == [0] and verdict.next_token_B.tolist() == [1]


def test_row_decides_alone_as_in_a_batch_in_fp32():
    proposal, policy = random_case(11, BATCH)
    policy.probs_BNV = policy.probs_BNV.float()
    seeds_B = torch.arange(BATCH)
    together = LAWS["rejection"].judge(proposal, policy, KeyedSource(seeds_B, seeds_B))
    for row in range(BATCH):
        source = KeyedSource(seeds_B[row : row + 1], seeds_B[row : row + 1])
        alone = LAWS["rejection"].judge(proposal.row(row), policy.row(row), source)
        assert decisions(alone, 0) == decisions(together, row)
