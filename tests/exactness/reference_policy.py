"""Logits to probabilities in plain Python: what `inference.sampling` must give, computed apart.

The order is that of Hugging Face `generate`: repetition penalty, temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from inference.sampling import SamplingParams


def reference_probs(
    logits: list[float], params: SamplingParams, seen: Iterable[int]
) -> list[float]:
    """The distribution that one context's next token is drawn from.

    Args:
        logits: V floats, -inf for a token that is impossible.
        seen: token ids of the context, each penalised once.
    """
    if params.repetition_penalty != 1.0:
        logits = list(logits)
        for token in set(seen):
            penalised = logits[token]
            factor = params.repetition_penalty
            logits[token] = penalised / factor if penalised > 0 else penalised * factor
    if params.temperature == 0:
        best = logits.index(max(logits))
        return [float(token == best) for token in range(len(logits))]
    logits = [logit / params.temperature for logit in logits]
    if params.top_k:
        smallest = sorted(logits, reverse=True)[min(params.top_k, len(logits)) - 1]
        logits = [logit if logit >= smallest else -math.inf for logit in logits]
    if params.top_p < 1.0:
        probs, kept, mass = _softmax(logits), set(), 0.0
        # Hugging Face drops from the bottom of an ascending sort: of equals, higher ids stay.
        for token in sorted(range(len(probs)), key=lambda t: (-probs[t], -t)):
            if mass < params.top_p:
                kept.add(token)
            mass += probs[token]
        logits = [logit if t in kept else -math.inf for t, logit in enumerate(logits)]
    if params.min_p > 0:
        probs = _softmax(logits)
        floor = params.min_p * max(probs)
        logits = [x if probs[t] >= floor else -math.inf for t, x in enumerate(logits)]
    return _softmax(logits)


def _softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    weights = [math.exp(logit - top) for logit in logits]
    total = math.fsum(weights)
    return [weight / total for weight in weights]
