"""The coupled law: the text of plain sampling with the same seed, token for token.

It has no branches to walk: its noise belongs to positions. So it is proven by identity, for every
drafter, over 10,000 seeds each, the sampling policies mixed in one batch.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from inference.laws import LAWS
from inference.proposal import Proposal
from inference.randomness import KeyedSource, PositionSource, gumbel_noise
from inference.sampling import PolicyTensors
from inference.tree import TokenTree
from tests.exactness.cases import POLICIES
from tests.exactness.plain import row_by_row
from tests.exactness.recorder import Recorder
from tests.exactness.reference_policy import reference_probs
from tests.exactness.toy_drafters import DRAFTERS, DraftTable
from tests.exactness.toy_text import PROMPT, ToyText
from tests.exactness.toys import child_context

RUNS, TOKENS, VOCAB = 10_000, 6, 4
PARAMS = list(POLICIES.values())
POLICY_OF_ROW = torch.arange(RUNS) % len(PARAMS)
SEEDS = torch.arange(RUNS) // len(PARAMS)  # neighbouring seeds, each under every policy
POLICY = PolicyTensors.stack(PARAMS).select(POLICY_OF_ROW)


def keyed_drafts(seeds_B: Tensor, rounds_B: Tensor, root_positions_B: Tensor) -> tuple:
    return KeyedSource(seeds_B, rounds_B), PositionSource(seeds_B, root_positions_B)


def shared_noise(seeds_B: Tensor, rounds_B: Tensor, root_positions_B: Tensor) -> tuple:
    source = PositionSource(seeds_B, root_positions_B)
    return source, source


def draft_with_the_targets_noise(width: int, source: PositionSource, models: list[DraftTable]):
    """Three levels: the `width` best tokens of log q + g, and a chain below each."""
    model = models[0]
    tree = TokenTree.expansion((width, 1, 1))
    tokens, contexts = [model.root_token_B], [torch.zeros_like(model.state_B)]
    for node in range(1, tree.num_tokens):
        above_B, depth = contexts[tree.parents[node]], tree.depths[node]
        score_BV = model.at(above_B).log() + source.gumbel(depth - 1, model.vocab)
        token_B = score_BV.topk(width if depth == 1 else 1).indices[:, tree.ranks[node]]
        tokens.append(token_B)
        contexts.append(child_context(above_B, token_B, model.vocab))
    return Proposal.delta(torch.stack(tokens, 1), tree)


def plain_text(toy: ToyText) -> Tensor:
    """int64 [RUNS, TOKENS]: plain sampling, y = argmax(log p + g), the policy in plain Python."""
    rows = []
    noise_BLV = gumbel_noise(
        SEEDS, (len(PROMPT) + torch.arange(TOKENS)).expand(RUNS, -1), toy.vocab
    ).tolist()
    logits_SV, cached = toy.logits_SV.tolist(), {}
    for row in range(RUNS):
        text, policy = list(PROMPT), int(POLICY_OF_ROW[row])
        for position in range(TOKENS):
            key = policy, text[-2], text[-1], frozenset(text)
            if key not in cached:
                logits = logits_SV[text[-2] * toy.vocab + text[-1]]
                probs = reference_probs(logits, PARAMS[policy], text)
                cached[key] = torch.tensor(probs).log().tolist()
            noise = noise_BLV[row][position]
            score = [log_p + g for log_p, g in zip(cached[key], noise, strict=True)]
            text.append(score.index(max(score)))
        rows.append(text[len(PROMPT) :])
    return torch.tensor(rows)


@pytest.fixture(scope="module")
def plain() -> Tensor:
    return plain_text(ToyText(*DRAFTERS["chain"], VOCAB))


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_text_is_that_of_plain_sampling(drafter: str, plain: Tensor, recorder: Recorder) -> None:
    toy = ToyText(*DRAFTERS[drafter], VOCAB)
    text_BL = toy.decode(LAWS["coupled"].judge, keyed_drafts, POLICY, SEEDS, TOKENS)
    assert torch.equal(text_BL, plain), f"{(text_BL != plain).any(1).sum()} texts of {RUNS} differ"
    for index, policy in enumerate(POLICIES):
        runs = int((POLICY_OF_ROW == index).sum())
        recorder.add("coupled", drafter, policy, "identical", 0.0, runs)


@pytest.mark.parametrize("width", [1, 3])
def test_text_does_not_depend_on_a_drafter_with_the_same_noise(width: int, plain: Tensor) -> None:
    toy = ToyText(lambda s, m: draft_with_the_targets_noise(width, s, m), 3, VOCAB)
    text_BL = toy.decode(LAWS["coupled"].judge, shared_noise, POLICY, SEEDS, TOKENS)
    assert torch.equal(text_BL, plain)


def test_shared_noise_is_accepted_more_often() -> None:
    """What the coupling is for: q close to p and the same noise make the same tokens."""
    accepted = {}
    for name, sources in {"own": keyed_drafts, "shared": shared_noise}.items():
        drafter = DRAFTERS["chain"][0]
        if name == "shared":
            drafter = lambda s, m: draft_with_the_targets_noise(1, s, m)  # noqa: E731
        toy = ToyText(drafter, 3, VOCAB)
        toy.draft_probs[0] = toy.logits_SCV.softmax(-1)  # a perfect drafter at temperature 1
        state_B = torch.full((RUNS,), toy.start_state())
        seen_BV = torch.zeros(RUNS, VOCAB, dtype=torch.bool)
        policy = PolicyTensors.stack([POLICIES["T=1"]]).select(torch.zeros_like(state_B))
        draft_source, law_source = sources(torch.arange(RUNS), state_B * 0, state_B * 0 + 1)
        proposal = toy.propose(draft_source, state_B)
        verdict = LAWS["coupled"].judge(
            proposal, toy.policy(proposal, state_B, policy, seen_BV), law_source
        )
        accepted[name] = verdict.num_accepted_B.double().mean().item()
    assert accepted["shared"] == 3.0
    assert accepted["own"] < 2.0


def test_noise_of_another_position_gives_another_text(plain: Tensor) -> None:
    """The negative control: identity is no accident of the toy."""

    def shifted(seeds_B, rounds_B, root_positions_B):
        return keyed_drafts(seeds_B, rounds_B, root_positions_B + 1)

    toy = ToyText(*DRAFTERS["chain"], VOCAB)
    text_BL = toy.decode(LAWS["coupled"].judge, shifted, POLICY, SEEDS, TOKENS)
    assert (text_BL != plain).any(1).float().mean() > 0.5


def test_plain_coupled_law_agrees_with_the_batched_one() -> None:
    rows = torch.arange(len(PARAMS))
    for drafter in DRAFTERS:
        toy = ToyText(*DRAFTERS[drafter], VOCAB)
        policy = POLICY.select(rows)
        batched, plain = (
            toy.decode(judge, keyed_drafts, policy, SEEDS[rows], 3)
            for judge in (LAWS["coupled"].judge, row_by_row(LAWS["coupled"]))
        )
        assert torch.equal(batched, plain)
