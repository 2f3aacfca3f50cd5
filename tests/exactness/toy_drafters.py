"""Toy drafters: every kind of proposal the methods make, drawn through the injected source.

A drafter is a function (source, models) -> Proposal, where `models` is a list of `DraftTable`. Its
draws and the law's draws share one source, so that the enumerator walks both. Draws are made by the
runtime's own `draw_iid` and `draw_without_replacement`.

Letters: B rows, C contexts, K draws, S states of the committed text, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from inference.proposal import Proposal
from inference.randomness import Source, draw_iid, draw_without_replacement
from tests.exactness.toys import child_context

ABSENT = -1


@dataclass
class DraftTable:
    """One draft model: probs_SCV, and which committed text (state) each row has."""

    probs_SCV: Tensor
    state_B: Tensor
    root_token_B: Tensor

    @property
    def vocab(self) -> int:
        return self.probs_SCV.shape[2]

    def at(self, context_B: Tensor | int) -> Tensor:
        """float [B, V]: q after a context."""
        return self.probs_SCV[self.state_B, context_B]


Drafter = Callable[[Source, list[DraftTable]], Proposal]


class Sketch:
    """A proposal in the making: nodes and trials are added one column at a time.

    A row to which a column does not apply (its parent is absent) gets a padding node and no trial;
    a token that its parent already has gets no second node, only a second trial.
    """

    def __init__(self, source: Source, model: DraftTable):
        self.source, self.vocab = source, model.vocab
        self.root_B = torch.zeros_like(model.state_B)
        self.tokens = [model.root_token_B]
        self.parents = [torch.full_like(self.root_B, -1)]
        self.contexts = [self.root_B]
        self.trials: list[tuple[Tensor, Tensor, str, int]] = []
        self.rows: list[Tensor] = []
        self.num_draws = 0

    def context(self, node_B: Tensor) -> Tensor:
        return torch.stack(self.contexts, 1).gather(1, node_B.clamp_min(0)[:, None])[:, 0]

    def row(self, probs_BV: Tensor) -> int:
        """Registers a row of q and returns its index."""
        self.rows.append(probs_BV)
        return len(self.rows) - 1

    def draw(
        self, probs_BV: Tensor, parent_B: Tensor, law: str = "iid", count: int = 1
    ) -> tuple[Tensor, Tensor]:
        """(tokens [B, count], exists [B, count]): the runtime's own draws."""
        keys = range(self.num_draws, self.num_draws + count)
        self.num_draws += count
        if law == "wor":
            return draw_without_replacement(probs_BV, self.source, parent_B, keys)
        tokens_BK = draw_iid(probs_BV, self.source, parent_B, keys)
        return tokens_BK, (parent_B >= 0)[:, None].expand_as(tokens_BK)

    def add(self, parent_B: Tensor, token_B: Tensor, law: str, row: int = -1) -> Tensor:
        """One trial, and its node unless it exists. Returns the node, ABSENT without a parent."""
        present_B = parent_B >= 0
        node_B = torch.where(present_B, len(self.tokens), ABSENT)
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            same_B = present_B & (parent == parent_B) & (token == token_B)
            node_B = torch.where(same_B, node, node_B)
        new_B = node_B == len(self.tokens)
        above_B = self.context(parent_B)
        self.trials.append((parent_B, node_B, law, row))
        self.contexts.append(torch.where(new_B, child_context(above_B, token_B, self.vocab), 0))
        self.tokens.append(torch.where(new_B, token_B, 0))
        self.parents.append(torch.where(new_B, parent_B, -2))
        return node_B

    def add_drawn(
        self, parent_B: Tensor, tokens_BK: Tensor, exists_BK: Tensor, law: str, probs_BV: Tensor
    ) -> list[Tensor]:
        """Trials of one row of q. Returns the new nodes: a repeated token's node grows once."""
        row, children = self.row(probs_BV), []
        for token_B, exists_B in zip(tokens_BK.unbind(1), exists_BK.unbind(1), strict=True):
            fresh = len(self.tokens)
            here_B = torch.where(exists_B, parent_B, ABSENT)
            node_B = self.add(here_B, token_B, law, row)
            children.append(torch.where(node_B == fresh, node_B, ABSENT))
        return children

    def finish(self, depth: int, width: int) -> Proposal:
        parents, children, laws, rows = zip(*self.trials, strict=True)
        return Proposal(
            tokens_BN=torch.stack(self.tokens, 1),
            parents_BN=torch.stack(self.parents, 1),
            max_depth=depth,
            trial_parent_BT=torch.stack(parents, 1),
            trial_child_BT=torch.stack(children, 1),
            trial_law_T=laws,
            trial_row_T=rows,
            q_BRV=torch.stack(self.rows, 1) if self.rows else None,
            max_trials_per_node=width,
        )


def rest_of(probs_BV: Tensor, tokens: Sequence[Tensor], parent_B: Tensor) -> tuple[Tensor, Tensor]:
    """q without `tokens`, renormalised, and the parent, ABSENT where nothing is left to draw."""
    rest_BV = probs_BV.clone()
    for token_B in tokens:
        rest_BV.scatter_(1, token_B[:, None], 0.0)
    total_B = rest_BV.sum(-1)
    parent_B = torch.where(total_B > 0, parent_B, ABSENT)
    return torch.where((total_B > 0)[:, None], rest_BV / total_B[:, None], probs_BV), parent_B


def drawn_tree(
    widths: Sequence[int], law: str, source: Source, models: list[DraftTable]
) -> Proposal:
    """One model, `widths[d]` draws below every node of depth d, `law` "iid" or "wor"."""
    model = models[0]
    sketch = Sketch(source, model)
    level = [sketch.root_B]
    for width in widths:
        children = []
        for parent_B in level:
            probs_BV = model.at(sketch.context(parent_B))
            tokens_BK, exists_BK = sketch.draw(probs_BV, parent_B, law, width)
            children += sketch.add_drawn(parent_B, tokens_BK, exists_BK, law, probs_BV)
        level = children
    return sketch.finish(len(widths), max(widths))


def top_tree(widths: Sequence[int], source: Source, models: list[DraftTable]) -> Proposal:
    """One model's most probable tokens: EAGLE-2, prompt lookup, or greedy drafting (δ)."""
    model = models[0]
    sketch = Sketch(source, model)
    level = [sketch.root_B]
    for width in widths:
        children = []
        for parent_B in level:
            top_BK = model.at(sketch.context(parent_B)).topk(width).indices
            children += [sketch.add(parent_B, token_B, "delta") for token_B in top_BK.unbind(1)]
        level = children
    return sketch.finish(len(widths), max(widths))


def medusa_product(widths: Sequence[int], source: Source, models: list[DraftTable]) -> Proposal:
    """Medusa: head d's top tokens, whatever the path (δ). Head d is context d of the table."""
    model = models[0]
    sketch = Sketch(source, model)
    level = [sketch.root_B]
    for head, width in enumerate(widths):
        top_BK = model.at(head).topk(width).indices
        level = [
            sketch.add(parent_B, token_B, "delta")
            for parent_B in level
            for token_B in top_BK.unbind(1)
        ]
    return sketch.finish(len(widths), max(widths))


def medusa_sampled(
    widths: Sequence[int], law: str, source: Source, models: list[DraftTable]
) -> Proposal:
    """Medusa with sampled heads: one set of draws a depth, shared by every node of that depth."""
    model = models[0]
    sketch = Sketch(source, model)
    level = [sketch.root_B]
    for head, width in enumerate(widths):
        probs_BV = model.at(head)
        tokens_BK, exists_BK = sketch.draw(probs_BV, sketch.root_B, law, width)
        children = []
        for parent_B in level:
            children += sketch.add_drawn(parent_B, tokens_BK, exists_BK, law, probs_BV)
        level = children
    return sketch.finish(len(widths), max(widths))


def merged_chains(num_ssms: int, depth: int, source: Source, models: list[DraftTable]) -> Proposal:
    """SpecInfer's merge: each model draws its own chain; a shared token is one node, two trials."""
    sketch = Sketch(source, models[0])
    ends = [sketch.root_B] * num_ssms
    for _ in range(depth):
        for ssm in range(num_ssms):
            probs_BV = models[ssm].at(sketch.context(ends[ssm]))
            tokens_B1, _ = sketch.draw(probs_BV, ends[ssm])
            ends[ssm] = sketch.add(ends[ssm], tokens_B1[:, 0], "iid", sketch.row(probs_BV))
    return sketch.finish(depth, num_ssms)


def mixed(order: str, depth: int, source: Source, models: list[DraftTable]) -> Proposal:
    """δ trials and drawn trials at one parent, in the order given.

    Args:
        order: one letter a trial: t the model's top token (δ), s its second (δ), i a draw from q,
            r a draw from q without the tokens tried before (Hu et al., top-(k-1) plus one).
    """
    model = models[0]
    sketch = Sketch(source, model)
    parent_B = sketch.root_B
    for _ in range(depth):
        probs_BV = model.at(sketch.context(parent_B))
        top_BK = probs_BV.topk(2).indices
        tried: list[Tensor] = []
        next_B = None
        for letter in order:
            here_B, row, law = parent_B, -1, "delta"
            if letter in "ir":
                before = tried if letter == "r" else []
                rest_BV, here_B = rest_of(probs_BV, before, parent_B)
                row, law = sketch.row(rest_BV), "iid"
                token_B = sketch.draw(rest_BV, here_B)[0][:, 0]
            else:
                token_B = top_BK[:, "ts".index(letter)]
            node_B = sketch.add(here_B, token_B, law, row)
            next_B = node_B if next_B is None else next_B
            tried.append(token_B)
        parent_B = next_B
    return sketch.finish(depth, len(order))


DRAFTERS: dict[str, tuple[Drafter, int]] = {  # name -> (drafter, depth)
    "chain": (partial(drawn_tree, (1, 1, 1), "iid"), 3),
    "short chain": (partial(drawn_tree, (1, 1), "iid"), 2),
    "top-1 chain": (partial(top_tree, (1, 1, 1)), 3),
    "iid tree": (partial(drawn_tree, (2, 2), "iid"), 2),
    "iid, three draws": (partial(drawn_tree, (3, 1), "iid"), 2),
    "without replacement": (partial(drawn_tree, (2, 2), "wor"), 2),
    "without replacement, three draws": (partial(drawn_tree, (3, 1), "wor"), 2),
    "top-k": (partial(top_tree, (2, 2, 1)), 3),
    "top-k, wide": (partial(top_tree, (3, 3)), 2),
    "Medusa top-k product": (partial(medusa_product, (2, 3)), 2),
    "Medusa sampled heads, iid": (partial(medusa_sampled, (2, 2), "iid"), 2),
    "Medusa sampled heads, without replacement": (partial(medusa_sampled, (2, 2), "wor"), 2),
    "two SSMs merged": (partial(merged_chains, 2, 2), 2),
    "three SSMs merged": (partial(merged_chains, 3, 2), 2),
    "top-1, then a draw": (partial(mixed, "ti", 2), 2),
    "top-1, then a draw of the rest": (partial(mixed, "tr", 2), 2),
    "a draw, then top-2": (partial(mixed, "its", 1), 1),
}
CHAINS = ("chain", "short chain", "top-1 chain")
