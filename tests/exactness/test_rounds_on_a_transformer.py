"""Real rounds: the engine, its slot cache and a tiny fp64 transformer, walked branch by branch.

What a one-round proof cannot see is state carried over wrongly: stale cache, positions off by one,
penalties that forget a round. The engine is run over every branch of its randomness, and the law of
the emitted text must be that of plain sampling from full forwards without a cache.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from drafters.medusa import MedusaConfig, MedusaDrafter
from drafters.target import Target
from inference import engine
from inference.cache import SlotCache
from inference.engine import DecodingRun
from inference.forward import TargetForward
from inference.proposal import Proposal
from inference.proposers.medusa import MedusaProposer
from inference.sampling import SamplingParams
from inference.tree import TokenTree
from tests.exactness.branches import Branches, ScriptedSource, walk
from tests.exactness.reference_policy import reference_probs
from tests.exactness.toy_drafters import (
    Drafter,
    DraftTable,
    drawn_tree,
    medusa_sampled,
    merged_chains,
    mixed,
    top_tree,
)
from tests.exactness.toys import num_contexts

VOCAB = 3
PROMPT = (2, 0, 2, 2)  # not every token: what a penalty sees must grow with the text
ENDED = -1  # stands behind an end token


def tiny_target(eos_token_id: int | None = None) -> Target:
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        eos_token_id=eos_token_id,
        pad_token_id=None,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(30.0)  # random weights of usual size give nearly uniform text
    return Target(model.double(), None, "tiny")


class TableProposer:
    """Any toy drafter inside the engine; its tables depend on the root token."""

    def __init__(self, drafter: Drafter, depth: int, num_tokens: int, is_chain: bool = False):
        self.drafter, self.max_depth = drafter, depth
        self.num_tokens, self.is_chain = num_tokens, is_chain
        generator = torch.Generator().manual_seed(3)
        shape = (3, VOCAB, num_contexts(VOCAB, depth), VOCAB)
        self.tables = torch.randn(shape, generator=generator, dtype=torch.float64).softmax(-1)

    def allocate(self, batch_size: int, capacity: int) -> None: ...

    def read_prompt(self, rows, start, tokens_RT, features_RTD, lengths_R) -> None: ...

    def propose(self, state, source) -> Proposal:
        models = [DraftTable(probs_SCV, state.root_B, state.root_B) for probs_SCV in self.tables]
        return self.drafter(source, models)

    def observe(self, state, proposal, features_BND, verdict) -> None: ...


def medusa_proposer(target: Target) -> MedusaProposer:
    config = MedusaConfig(
        num_heads=2, num_layers=1, hidden_size=target.hidden_size, vocab_size=VOCAB
    )
    drafter = MedusaDrafter.from_target(target, config).double()
    with torch.no_grad():
        generator = torch.Generator().manual_seed(5)
        for parameter in drafter.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(noise)
    return MedusaProposer(drafter, target, TokenTree.expansion((2, 2)))


PROPOSERS = {  # name -> (target -> proposer, tokens of text)
    "none": (lambda target: None, 4),
    "one draw": (lambda t: TableProposer(partial(drawn_tree, (1,), "iid"), 1, 2, True), 4),
    "chain": (lambda t: TableProposer(partial(drawn_tree, (1, 1), "iid"), 2, 3, True), 3),
    "without replacement": (lambda t: TableProposer(partial(drawn_tree, (2,), "wor"), 1, 3), 4),
    "iid pair": (lambda t: TableProposer(partial(drawn_tree, (2,), "iid"), 1, 3), 4),
    "top-k": (lambda t: TableProposer(partial(top_tree, (2, 2)), 2, 7), 5),
    "two SSMs merged": (lambda t: TableProposer(partial(merged_chains, 2, 1), 1, 3), 4),
    "sampled heads": (lambda t: TableProposer(partial(medusa_sampled, (2, 1), "wor"), 2, 5), 3),
    "top-1, then a draw": (lambda t: TableProposer(partial(mixed, "ti", 1), 1, 3), 4),
    "Medusa heads": (medusa_proposer, 5),
}
POLICIES = {
    "T=1": SamplingParams(temperature=1.0),
    "top-k and penalty": SamplingParams(temperature=1.5, top_k=2, repetition_penalty=1.4),
}


def enumerate_engine(
    forward: TargetForward, proposer, params: SamplingParams, num_tokens: int
) -> Branches:
    """Every branch of decoding PROMPT; results: text_BL int64, rounds_B target forwards."""

    def play(source: ScriptedSource, state_B: Tensor) -> dict[str, Tensor]:
        def make_source(seeds_B: Tensor, rounds_B: Tensor) -> ScriptedSource:
            # A seed is a row here. Rows that have finished go on in the batch without effect.
            finished_B = torch.tensor([run.rows[row] is None for row in seeds_B.tolist()])
            return source.for_rows(seeds_B, finished_B)

        rows = len(state_B)
        every = [replace(params, max_new_tokens=num_tokens, seed=row) for row in range(rows)]
        run = DecodingRun(forward, proposer, [PROMPT] * rows, every, rows, make_source, debug=True)
        text_BL = torch.full((rows, num_tokens), ENDED)
        rounds_B = torch.zeros(rows, dtype=torch.int64)
        for index, generation in run.run():
            ids = generation.token_ids
            text_BL[index, : len(ids)] = torch.tensor(ids)
            rounds_B[index] = generation.stats.rounds + generation.stats.cut_rounds
        return {"text_BL": text_BL, "rounds_B": rounds_B}

    return walk(play)


def plain_law(target: Target, params: SamplingParams, num_tokens: int) -> dict[tuple, float]:
    """The law of the text from full forwards, the policy in plain Python."""
    law = {(): 1.0}
    for _ in range(num_tokens):
        longer: dict[tuple, float] = {}
        for text, mass in law.items():
            if text and text[-1] in (*target.eos_token_ids, ENDED):
                longer[*text, ENDED] = mass
                continue
            prefix = (*PROMPT, *text)
            with torch.inference_mode():
                logits = target.logits(target.features(torch.tensor([prefix])))[0, -1].tolist()
            for token, p in enumerate(reference_probs(logits, params, prefix)):
                longer[*text, token] = mass * p
        law = longer
    return law


def deviation(branches: Branches, law: dict[tuple, float]) -> float:
    found = dict.fromkeys(law, 0.0)
    for text, weight in zip(
        branches.results["text_BL"].tolist(), branches.weight_B.tolist(), strict=True
    ):
        found[tuple(text)] += weight
    return max(abs(found[text] - law[text]) for text in law)


@pytest.fixture(autouse=True)
def one_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """All branches share a prompt: nothing is gained by prefilling eight rows at a time."""
    monkeypatch.setattr(engine, "PREFILL_ROWS", 100_000)


# The penalty is the policy that has a state of its own; how drafts are made does not touch it.
NAME_AND_POLICY = [(name, "T=1") for name in PROPOSERS]
NAME_AND_POLICY += [(name, "top-k and penalty") for name in ("none", "chain", "top-k")]


@pytest.mark.parametrize("name, policy", NAME_AND_POLICY)
def test_text_of_several_rounds_keeps_the_targets_law(name: str, policy: str) -> None:
    make_proposer, num_tokens = PROPOSERS[name]
    target, params = tiny_target(), POLICIES[policy]
    branches = enumerate_engine(TargetForward(target), make_proposer(target), params, num_tokens)
    assert branches.results["rounds_B"].max() >= 2
    assert deviation(branches, plain_law(target, params, num_tokens)) <= 1e-12


@pytest.mark.parametrize("name", ["chain", "top-k", "two SSMs merged"])
def test_end_token_inside_a_block_ends_the_text(name: str) -> None:
    make_proposer, num_tokens = PROPOSERS[name]
    target = tiny_target(eos_token_id=1)
    branches = enumerate_engine(
        TargetForward(target), make_proposer(target), POLICIES["T=1"], num_tokens
    )
    law = plain_law(target, POLICIES["T=1"], num_tokens)
    assert any(ENDED in text and p > 0.01 for text, p in law.items())
    assert deviation(branches, law) <= 1e-12


def test_block_law_keeps_the_targets_law_in_the_engine() -> None:
    make_proposer, num_tokens = PROPOSERS["chain"]
    target, params = tiny_target(), SamplingParams(temperature=1.0, law="block")
    branches = enumerate_engine(TargetForward(target), make_proposer(target), params, num_tokens)
    assert deviation(branches, plain_law(target, params, num_tokens)) <= 1e-12


def no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlotCache, "commit", lambda *_: None)


def penalties_forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DecodingRun, "_see", lambda *_: None)


def positions_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    run = TargetForward._run

    def shifted(self, tokens, positions, masks, cache):
        # Only the tree's forwards: they begin behind the prompt.
        return run(self, tokens, positions + (positions[:, :1] > 0), masks, cache)

    monkeypatch.setattr(TargetForward, "_run", shifted)


@pytest.mark.parametrize(
    "fault, policy",
    [
        (no_commit, "T=1"),
        (penalties_forget, "top-k and penalty"),
        (positions_off_by_one, "T=1"),
    ],
)
def test_state_carried_over_wrongly_is_seen(fault, policy: str, monkeypatch) -> None:
    """The negative controls: each of these faults leaves the first round right."""
    make_proposer, num_tokens = PROPOSERS["top-k"]
    target, params = tiny_target(), POLICIES[policy]
    forward = TargetForward(target)
    fault(monkeypatch)
    branches = enumerate_engine(forward, make_proposer(target), params, num_tokens)
    assert deviation(branches, plain_law(target, params, num_tokens)) > 1e-6


@pytest.mark.parametrize("name", PROPOSERS)
def test_coupled_text_does_not_depend_on_the_proposer(name: str) -> None:
    target = tiny_target()
    forward = TargetForward(target)
    params = [
        SamplingParams(temperature=1.2, law="coupled", max_new_tokens=12, seed=seed)
        for seed in range(50)
    ]

    def texts(proposer) -> list[list[int]]:
        run = DecodingRun(forward, proposer, [PROMPT] * len(params), params, 16)
        return [generation.token_ids for _, generation in sorted(run.run(), key=lambda g: g[0])]

    assert texts(PROPOSERS[name][0](target)) == texts(None)
