"""How many draft tokens the target would keep: simulated on held-out answers.

Letters: N supervised positions, K depths (Medusa heads), R ranks kept.

A *round* starts at a position t whose next token x_{t+1} is decided (the root). The drafter guesses
x_{t+2}, x_{t+3}, ...; guesses that equal the answer are accepted up to the first miss, and the
target adds one token of its own. On the target's own greedy answers decoding does exactly this.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from inference.tree import TokenTree

MAX_RANK = 10  # choices of a head that a tree may use; Medusa's published trees stay within 10
NO_TOKEN = -1  # rank where the answer has no such token
# Path probabilities lean on the product of the heads' accuracies as if it had been seen so often.
PRIOR_POSITIONS = 50.0

Path = tuple[int, ...]


@dataclass
class AnswerRanks:
    """Ranks of the answers' true tokens among a drafter's choices.

    Attributes:
        ranks_NK: int64; entry [t, k-1] is the rank of x_{t+1+k} (0 = first choice), MAX_RANK for a
            miss, NO_TOKEN where the answer ends before.
        starts: index of each answer's first position; an answer's positions follow one another.
    """

    ranks_NK: torch.Tensor
    starts: list[int]

    @property
    def answers(self) -> list[torch.Tensor]:
        ends = [*self.starts[1:], len(self.ranks_NK)]
        return [self.ranks_NK[a:b] for a, b in zip(self.starts, ends, strict=True)]

    @staticmethod
    def join(answers: Sequence[torch.Tensor]) -> AnswerRanks:
        """From the ranks of single answers."""
        starts, total = [], 0
        for ranks in answers:
            starts.append(total)
            total += len(ranks)
        width = answers[0].shape[1] if answers else 0
        joined = torch.cat(list(answers)) if answers else torch.zeros(0, width, dtype=torch.int64)
        return AnswerRanks(joined, starts)


def rank_accuracy(ranks_NK: torch.Tensor) -> torch.Tensor:
    """float64 [K, MAX_RANK]: P(rank of head k's true token = r), where there is a token."""
    exists_K = (ranks_NK != NO_TOKEN).sum(0).clamp_min(1)
    hits_KR = torch.stack([(ranks_NK == rank).sum(0) for rank in range(MAX_RANK)], dim=1)
    return hits_KR.double() / exists_K[:, None]


@dataclass
class Simulation:
    """Rounds of teacher-forced decoding.

    Attributes:
        rounds, emitted: target forwards and the tokens they gave; a last round of which the
            answer's end cut tokens off is left out, as the runtime leaves it out.
        reached: rounds in which at least d draft tokens were accepted, d = 0, 1, ...
    """

    rounds: int
    emitted: int
    reached: list[int]

    @property
    def tau(self) -> float:
        """Tokens per target forward."""
        return self.emitted / self.rounds if self.rounds else float("nan")

    @property
    def acceptance_by_depth(self) -> list[float]:
        """P(depth d accepted | depth d-1 accepted), d = 1, 2, ..."""
        pairs = zip(self.reached, self.reached[1:], strict=False)
        return [deeper / above if above else 0.0 for above, deeper in pairs]


def simulate(ranks: AnswerRanks, tree: TokenTree, max_tokens: int | None = None) -> Simulation:
    """Walks every answer round by round with a tree template.

    Args:
        max_tokens: an answer's tokens beyond so many are left out; None keeps all.
    """
    result = Simulation(0, 0, [0] * (tree.max_depth + 1))
    for ranks_NK in ranks.answers:
        accepted_N = accepted_lengths(ranks_NK, tree.rank_paths()).tolist()
        last = len(accepted_N) if max_tokens is None else min(len(accepted_N), max_tokens)
        at = 0  # token number `at` of the answer is the root
        while at < last - 1:
            accepted = accepted_N[at]
            if at + accepted + 1 > last - 1:
                break
            result.rounds += 1
            result.emitted += accepted + 1
            for depth in range(accepted + 1):
                result.reached[depth] += 1
            at += accepted + 1
    return result


def accepted_lengths(ranks_NK: torch.Tensor, paths: Sequence[Sequence[int]]) -> torch.Tensor:
    """int64 [N]: draft tokens accepted by a round that starts at each position."""
    accepted_N = torch.zeros(len(ranks_NK), dtype=torch.int64)
    alive_N = torch.ones(len(ranks_NK), dtype=torch.bool)
    for depth in range(1, max((len(path) for path in paths), default=0) + 1):
        in_tree = torch.tensor([_code(path) for path in paths if len(path) == depth])
        codes_N = torch.zeros(len(ranks_NK), dtype=torch.int64)
        for ranks_N in ranks_NK[:, :depth].unbind(1):
            codes_N = codes_N * (MAX_RANK + 2) + ranks_N + 1
        alive_N = alive_N & torch.isin(codes_N, in_tree)
        accepted_N += alive_N
    return accepted_N


def _code(path: Sequence[int]) -> int:
    code = 0
    for rank in path:
        if rank >= MAX_RANK:
            raise ValueError(f"tree path {tuple(path)}: ranks are counted up to {MAX_RANK - 1}")
        code = code * (MAX_RANK + 2) + rank + 1
    return code


def best_tree(
    rank_accuracy_KR: torch.Tensor, num_nodes: int, ranks_NK: torch.Tensor | None = None
) -> list[Path]:
    """Rank paths of the tree that keeps the most draft tokens on average, for a budget of nodes.

    A round's expected accepted length is the sum of its nodes' path probabilities, and a path is
    never likelier than its prefix, so taking the likeliest node next to the tree, again and again,
    is optimal. Source: Medusa (arXiv 2401.10774), Section 2.3.3.

    Differs from the paper: where `ranks_NK` is given, a path's probability is its share of the
    positions (heads hit and miss together), leaning on the product of the heads' accuracies where a
    path was seldom seen. Without it, the product alone.

    Args:
        rank_accuracy_KR: see `rank_accuracy`.
        num_nodes: draft nodes, the root not counted.
    Returns:
        Paths, likeliest first; each one's prefix comes before it.
    Raises:
        ValueError: if num_nodes < 1.
    """
    if num_nodes < 1:
        raise ValueError(f"tree_nodes is {num_nodes}; a tree needs at least 1")
    depth, width = rank_accuracy_KR.shape
    seen: dict[Path, int] = {}
    for ranks in [] if ranks_NK is None else ranks_NK.tolist():
        for end in range(1, depth + 1):
            path = tuple(ranks[:end])
            seen[path] = seen.get(path, 0) + 1
    prior = PRIOR_POSITIONS if ranks_NK is not None else 1.0
    positions = len(ranks_NK) if ranks_NK is not None else 0

    def probability(path: Path) -> float:
        product = 1.0
        for head, rank in enumerate(path):
            product *= float(rank_accuracy_KR[head, rank])
        return (seen.get(path, 0) + prior * product) / (positions + prior)

    def children(path: Path) -> list[tuple[float, int, Path]]:
        below = [(*path, rank) for rank in range(width)] if len(path) < depth else []
        return [(-probability(child), len(child), child) for child in below]

    frontier, chosen = children(()), []
    heapq.heapify(frontier)
    while frontier and len(chosen) < num_nodes:
        _, _, path = heapq.heappop(frontier)
        chosen.append(path)
        for child in children(path):
            heapq.heappush(frontier, child)
    return chosen


def acceptance_figures(ranks: AnswerRanks, tree: TokenTree) -> dict[str, float]:
    """Flat figures for the log: head accuracy, and simulated τ and conditional acceptance."""
    figures = {}
    accuracy_KR = rank_accuracy(ranks.ranks_NK)
    for head, accuracy_R in enumerate(accuracy_KR, start=1):
        for k in (1, 5):
            figures[f"head{head}_top{k}"] = float(accuracy_R[:k].sum())
    chain = TokenTree.chain(len(accuracy_KR))
    for name, template in (("chain", chain), ("tree", tree)):
        simulation = simulate(ranks, template)
        figures[f"{name}_tau"] = simulation.tau
        for depth, rate in enumerate(simulation.acceptance_by_depth, start=1):
            figures[f"{name}_acceptance_{depth}"] = rate
    return figures
