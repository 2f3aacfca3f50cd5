"""τ and speed-up of a real decode in the bundled runtime, set beside the simulation."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from data_recipes.answered import Document
from data_recipes.batches import Batch, collate
from drafters.target import Target
from inference.generate import SpeculativeEngine
from inference.params import SamplingParams
from inference.proposers import Proposer, build_proposer
from inference.tree import TokenTree
from train.acceptance import AnswerRanks, simulate

MAX_GAP = 0.1  # of the simulated τ, before real decoding is called different


def compare_with_decoding(
    target: Target,
    drafter: Any,
    tree: TokenTree,
    documents: Sequence[Document],
    ranks_of: Callable[[Batch], list[torch.Tensor]],
    max_new_tokens: int,
) -> dict[str, float]:
    """τ and speed-up of real greedy decoding, beside what the simulation says of the same prompts.

    A gap above 10 % is a warning: either the stored answers are not the target's greedy ones, or
    training and runtime disagree.

    Args:
        documents: the prompt of each one's first answer is decoded, one at a time.
        ranks_of: ranks of a batch's answers, see `AnswerRanks`.
    Returns:
        decode_tau, decode_simulated_tau, decode_speedup (tokens/s over plain decoding's).
    """
    prompts = [d.input_ids[: int(d.loss_mask.argmax())].tolist() for d in documents]
    first_answers = [ranks_of(collate([[document]]))[0] for document in documents]
    simulated = simulate(AnswerRanks.join(first_answers), tree, max_new_tokens).tau
    tau, rate = _decode(target, build_proposer(drafter, target, tree), prompts, max_new_tokens)
    _, plain_rate = _decode(target, None, prompts, max_new_tokens)
    if abs(tau - simulated) > MAX_GAP * simulated:
        warnings.warn(
            f"real decoding keeps {tau:.2f} tokens a step, the simulation says {simulated:.2f}: "
            "either the held-out answers are not the target's greedy ones, or something is wrong",
            stacklevel=2,
        )
    speedup = rate / plain_rate
    return {"decode_tau": tau, "decode_simulated_tau": simulated, "decode_speedup": speedup}


def _decode(
    target: Target, proposer: Proposer | None, prompts: list[list[int]], max_new_tokens: int
) -> tuple[float, float]:
    """(τ, tokens per second) of greedy decoding, one prompt at a time."""
    engine = SpeculativeEngine(target, proposer, batch_size=1)
    params = SamplingParams(temperature=0.0, max_new_tokens=max_new_tokens)
    answers = [answer for _, answer in engine.generate_many(prompts, params)]
    rounds = sum(answer.stats.rounds for answer in answers)
    emitted = sum(answer.stats.emitted_tokens for answer in answers)
    tokens = sum(len(answer.token_ids) for answer in answers)
    seconds = sum(answer.stats.seconds for answer in answers)
    return emitted / rounds if rounds else float("nan"), tokens / max(seconds, 1e-9)
