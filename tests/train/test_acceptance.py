"""Simulated acceptance and the choice of a tree, against walks written out by hand."""

import itertools
import random

import pytest
import torch

from inference.tree import TokenTree
from train.acceptance import (
    MAX_RANK,
    NO_TOKEN,
    AnswerRanks,
    acceptance_figures,
    accepted_lengths,
    best_tree,
    rank_accuracy,
    simulate,
)

MISS = MAX_RANK


def random_ranks(count: int, heads: int, seed: int) -> torch.Tensor:
    """Ranks of an answer of `count` tokens; the end of the answer is marked."""
    draw = random.Random(seed)
    rows = []
    for i in range(count):
        row = [draw.choice([0, 0, 0, 1, 1, 2, 5, MISS]) for _ in range(heads)]
        rows.append([r if i + 1 + k < count else NO_TOKEN for k, r in enumerate(row)])
    return torch.tensor(rows)


def walk_by_hand(ranks, paths, limit=None):
    """Plain decoding of one answer: (rounds, emitted, accepted lengths of the rounds)."""
    paths = {tuple(path) for path in paths}
    length = len(ranks) if limit is None else min(limit, len(ranks))
    committed, emitted, accepted = 1, 0, []  # the prompt's own forward gave token 0
    while committed < length:
        row, depth = ranks[committed - 1].tolist(), 0
        while depth < len(row) and tuple(row[: depth + 1]) in paths:
            depth += 1
        block = depth + 1
        if committed + block > length:
            break  # cut by the end of the answer: not counted
        accepted.append(depth)
        emitted += block
        committed += block
    return len(accepted), emitted, accepted


@pytest.mark.parametrize(
    "paths",
    [
        [(0,)],
        [(0,), (0, 0), (0, 0, 0)],
        [(0,), (1,), (0, 0), (0, 2), (1, 0), (0, 0, 1)],
        [(2,), (5,)],
    ],
)
@pytest.mark.parametrize("limit", [None, 1, 2, 9])
def test_simulation_walks_every_answer_as_decoding_would(paths, limit):
    answers = [random_ranks(length, 3, seed) for seed, length in enumerate((1, 2, 5, 17, 40))]
    tree = TokenTree.from_paths(paths)
    simulation = simulate(AnswerRanks.join(answers), tree, limit)
    by_hand = [walk_by_hand(ranks, paths, limit) for ranks in answers]
    rounds = sum(rounds for rounds, _, _ in by_hand)
    accepted = list(itertools.chain.from_iterable(rounds for _, _, rounds in by_hand))
    assert simulation.rounds == rounds
    assert simulation.emitted == sum(emitted for _, emitted, _ in by_hand)
    depths = range(tree.max_depth + 1)
    assert simulation.reached == [sum(a >= depth for a in accepted) for depth in depths]


def test_tau_and_conditional_acceptance_of_a_small_answer():
    """Five tokens, chain of two: rounds at tokens 0 (keeps 2) and 3 (keeps 0)."""
    ranks = torch.tensor([[0, 0], [MISS, MISS], [0, MISS], [1, NO_TOKEN], [NO_TOKEN, NO_TOKEN]])
    simulation = simulate(AnswerRanks.join([ranks]), TokenTree.chain(2))
    assert (simulation.rounds, simulation.emitted) == (2, 4)
    assert simulation.tau == 2.0
    assert simulation.acceptance_by_depth == [0.5, 1.0]


def test_an_answer_that_ends_inside_a_block_leaves_the_block_out():
    ranks = torch.tensor([[0, 0], [0, NO_TOKEN], [NO_TOKEN, NO_TOKEN]])
    assert simulate(AnswerRanks.join([ranks]), TokenTree.chain(2)).rounds == 0
    assert simulate(AnswerRanks.join([ranks]), TokenTree.chain(1)).emitted == 2


def test_a_miss_and_a_missing_token_never_extend_a_path():
    ranks = torch.tensor([[MISS, 0], [NO_TOKEN, NO_TOKEN], [0, NO_TOKEN]])
    paths = [(r,) for r in range(MAX_RANK)] + [(r, 0) for r in range(MAX_RANK)]
    assert accepted_lengths(ranks, paths).tolist() == [0, 0, 1]
    with pytest.raises(ValueError, match="ranks are counted up to 9"):
        accepted_lengths(ranks, [(MAX_RANK,)])


def test_rank_accuracy_is_over_the_tokens_that_exist():
    ranks = torch.tensor([[0, 1], [0, MISS], [2, NO_TOKEN], [MISS, NO_TOKEN]])
    table = rank_accuracy(ranks)
    assert table.shape == (2, MAX_RANK)
    assert table[0, :3].tolist() == [0.5, 0.0, 0.25]
    assert table[1, :3].tolist() == [0.0, 0.5, 0.0]


def expected_length(paths, table) -> float:
    total = 0.0
    for path in paths:
        product = 1.0
        for head, rank in enumerate(path):
            product *= float(table[head, rank])
        total += product
    return total


@pytest.mark.parametrize("seed", range(4))
def test_best_tree_beats_every_tree_of_its_size(seed):
    """All trees of 4 nodes over 2 heads with 3 ranks, by brute force."""
    torch.manual_seed(seed)
    table = torch.rand(2, 3, dtype=torch.float64)
    table = table / table.sum(1, keepdim=True)
    nodes = [(r,) for r in range(3)] + [(r, s) for r in range(3) for s in range(3)]
    best = max(
        expected_length(chosen, table)
        for chosen in itertools.combinations(nodes, 4)
        if all(len(path) == 1 or path[:1] in chosen for path in chosen)
    )
    found = best_tree(table, 4)
    TokenTree.from_paths(found)  # prefixes are there
    assert expected_length(found, table) == pytest.approx(best)


def test_best_tree_counts_heads_that_hit_together():
    """Head 2 hits exactly where head 1 misses: by products (0, 0) looks good, and never happens."""
    ranks = torch.tensor([[0, MISS]] * 500 + [[1, 0]] * 500)
    table = rank_accuracy(ranks)
    assert (0, 0) in best_tree(table, 3)
    assert best_tree(table, 3, ranks) == [(0,), (1,), (1, 0)]


def test_best_tree_stays_within_heads_and_budget():
    table = torch.full((2, MAX_RANK), 0.1, dtype=torch.float64)
    paths = best_tree(table, 500)
    assert len(paths) == 110 and max(map(len, paths)) == 2
    assert len(best_tree(table, 7)) == 7
    with pytest.raises(ValueError, match="tree_nodes is 0"):
        best_tree(table, 0)


def test_more_nodes_never_keep_fewer_tokens():
    ranks = AnswerRanks.join([random_ranks(300, 3, seed) for seed in range(3)])
    table = rank_accuracy(ranks.ranks_NK)
    lengths = []
    for nodes in (1, 3, 7, 20):
        paths = best_tree(table, nodes, ranks.ranks_NK)
        lengths.append(float(accepted_lengths(ranks.ranks_NK, paths).double().mean()))
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1]


def test_figures_are_flat_and_named_by_head_and_depth():
    ranks = AnswerRanks.join([random_ranks(60, 2, 1), random_ranks(40, 2, 2)])
    tree = TokenTree.from_paths([(0,), (1,), (0, 0)])
    figures = acceptance_figures(ranks, tree)
    table = rank_accuracy(ranks.ranks_NK)
    assert figures["head2_top1"] == float(table[1, 0])
    assert figures["head1_top5"] == pytest.approx(float(table[0, :5].sum()))
    assert figures["chain_tau"] == simulate(ranks, TokenTree.chain(2)).tau
    assert figures["tree_acceptance_2"] == simulate(ranks, tree).acceptance_by_depth[1]
    assert figures["tree_tau"] >= figures["chain_tau"]
