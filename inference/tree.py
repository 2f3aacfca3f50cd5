"""Token trees: which node hangs below which, and what that means for attention and positions.

Letters: B rows, N nodes (the root included).

Node 0 is the root: the last token that has been decided but not yet run through the target.
Draft nodes 1..N-1 follow in topological order (a parent always has the smaller index). A node's
logits predict the token *after* it, so the children of node i are judged by the logits of node i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

ROOT_PARENT = -1
PADDING_PARENT = -2  # a node that fills up a static shape; it can never be accepted


@dataclass(frozen=True)
class TokenTree:
    """A static tree template.

    Attributes:
        parents: parent index of each node; parents[0] is -1, parents[i] < i.
        ranks: rank of each node among its siblings (0 = the drafter's first choice; root: 0).
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.parents or self.parents[0] != ROOT_PARENT:
            raise ValueError("TokenTree: parents[0] is the root and must be -1")
        if len(self.ranks) != len(self.parents):
            raise ValueError(
                f"TokenTree: {len(self.ranks)} ranks for {len(self.parents)} parents; give one each"
            )
        for node, parent in enumerate(self.parents[1:], start=1):
            if not 0 <= parent < node:
                raise ValueError(
                    f"TokenTree: node {node} has parent {parent}; parents come before their nodes"
                )
        seen = set(zip(self.parents, self.ranks, strict=True))
        if len(seen) != len(self.parents):
            raise ValueError("TokenTree: two siblings share one rank")

    @property
    def num_tokens(self) -> int:
        """Tokens that one target forward carries: the root and every draft node."""
        return len(self.parents)

    @property
    def num_nodes(self) -> int:
        """Draft nodes; the root is not one of them."""
        return len(self.parents) - 1

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Distance of each node from the root."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def max_depth(self) -> int:
        return max(self.depths)

    def children(self, node: int) -> tuple[int, ...]:
        """Indices of the nodes below `node`, in rank order."""
        below = [i for i, parent in enumerate(self.parents) if parent == node and i != 0]
        return tuple(sorted(below, key=lambda i: self.ranks[i]))

    @property
    def max_children(self) -> int:
        return max(len(self.children(node)) for node in range(self.num_tokens))

    def rank_paths(self) -> list[tuple[int, ...]]:
        """Sibling ranks from the root to each draft node: the inverse of `from_paths`."""
        paths: list[tuple[int, ...]] = [()]
        for parent, rank in zip(self.parents[1:], self.ranks[1:], strict=True):
            paths.append((*paths[parent], rank))
        return paths[1:]

    @staticmethod
    def chain(num_draft_tokens: int) -> TokenTree:
        """One path of `num_draft_tokens` nodes below the root."""
        if num_draft_tokens < 0:
            raise ValueError(f"num_draft_tokens must be ≥ 0, got {num_draft_tokens}")
        return TokenTree(tuple(range(-1, num_draft_tokens)), (0,) * (num_draft_tokens + 1))

    @staticmethod
    def expansion(children_per_level: Sequence[int]) -> TokenTree:
        """SpecInfer's static expansion ⟨k1..km⟩: every node of level i gets k_i children.

        Source: SpecInfer (arXiv 2305.09781), Section 3. ⟨1,1,3,1,1⟩ has 11 nodes, ⟨2,2,1⟩ has 10.
        """
        if any(k < 1 for k in children_per_level):
            raise ValueError(f"expansion {tuple(children_per_level)}: every level needs ≥ 1 child")
        paths: list[tuple[int, ...]] = []
        frontier: list[tuple[int, ...]] = [()]
        for num_children in children_per_level:
            frontier = [(*path, rank) for path in frontier for rank in range(num_children)]
            paths += frontier
        return TokenTree.from_paths(paths)

    @staticmethod
    def from_paths(paths: Sequence[Sequence[int]]) -> TokenTree:
        """A tree from its nodes' rank paths, e.g. [(0,), (0, 0), (1,)] (Medusa's `medusa_choices`).

        Raises:
            ValueError: if a path is empty, repeated, or its prefix is missing.
        """
        ordered = sorted((tuple(int(rank) for rank in path) for path in paths), key=_level_order)
        index: dict[tuple[int, ...], int] = {(): 0}
        parents, ranks = [ROOT_PARENT], [0]
        for path in ordered:
            if not path or path in index:
                raise ValueError(f"tree path {path} is {'repeated' if path else 'empty'}")
            if min(path) < 0:
                raise ValueError(f"tree path {path}: ranks start at 0")
            if path[:-1] not in index:
                raise ValueError(f"tree path {path} needs its prefix {path[:-1]} in the tree")
            index[path] = len(parents)
            parents.append(index[path[:-1]])
            ranks.append(path[-1])
        return TokenTree(tuple(parents), tuple(ranks))


def _level_order(path: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    return len(path), path


def ancestor_mask(parents_BN: torch.Tensor, max_depth: int | None = None) -> torch.Tensor:
    """bool [B, N, N]: entry (i, j) is True where node j is node i or one of its ancestors.

    Args:
        parents_BN: int64, -1 for the root, -2 for padding (which sees only itself).
        max_depth: the deepest node's distance from the root, if known; N - 1 otherwise.
    """
    batch, num_nodes = parents_BN.shape
    mask = torch.eye(num_nodes, dtype=torch.bool, device=parents_BN.device)
    mask = mask.expand(batch, -1, -1).clone()
    current = parents_BN
    for _ in range(num_nodes - 1 if max_depth is None else max_depth):
        hop = torch.nn.functional.one_hot(current.clamp_min(0), num_nodes).bool()
        mask |= hop & (current >= 0)[..., None]
        current = torch.where(current >= 0, parents_BN.gather(1, current.clamp_min(0)), current)
    return mask


def node_depths(parents_BN: torch.Tensor, max_depth: int | None = None) -> torch.Tensor:
    """int64 [B, N]: distance of each node from the root; 0 for padding."""
    return ancestor_mask(parents_BN, max_depth).sum(-1) - 1
