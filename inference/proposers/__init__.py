"""Proposers: a drafter's guesses as a Proposal. One file a method; PROPOSERS is the registry."""

from __future__ import annotations

from typing import Any

from drafters.target import Target
from inference.proposers.base import Proposer
from inference.proposers.medusa import MedusaProposer
from inference.tree import TokenTree

PROPOSERS: dict[str, type] = {"medusa": MedusaProposer}


def build_proposer(drafter: Any, target: Target, tree: TokenTree | None = None) -> Proposer:
    """The proposer of a drafter's method.

    Args:
        drafter: a loaded drafter; `drafter.config.method` names the method.
        tree: a template; None takes the drafter's own.
    Raises:
        ValueError: if the method is unknown or the template does not fit the drafter.
    """
    method = drafter.config.method
    if method not in PROPOSERS:
        raise ValueError(f"no proposer for method {method!r}; known: {', '.join(PROPOSERS)}")
    return PROPOSERS[method](drafter, target, tree)


__all__ = ["PROPOSERS", "Proposer", "build_proposer"]
