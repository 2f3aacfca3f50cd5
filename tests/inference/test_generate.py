"""The Python API: prompts of every kind, stop strings, streams, and what is refused."""

from __future__ import annotations

import pytest
import torch
from tiny_models import VOCAB, tiny_target
from tiny_tokenizer import tiny_tokenizer

from drafters.medusa import MedusaConfig, MedusaDrafter
from drafters.target import Target
from inference.generate import SpeculativeEngine
from inference.params import SamplingParams
from inference.proposers import build_proposer
from inference.tree import TokenTree

TREE = TokenTree.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
MESSAGES = [{"role": "user", "content": "hello there"}]
PROMPTS = [[5, 6, 7], [9, 3, 4, 8, 11, 30, 31], [40, 41, 42, 43, 44], [50]]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target("llama", tokenizer=tiny_tokenizer(VOCAB))


def medusa(target: Target, reduced: bool = False, seed: int = 1) -> MedusaDrafter:
    """Heads whose guesses are right now and then: small random changes of the LM head."""
    draft_vocab = torch.arange(3, 60) if reduced else None
    config = MedusaConfig(
        num_heads=3,
        num_layers=1,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        head_type="reduced" if reduced else "own",
        draft_vocab_size=57 if reduced else None,
    )
    drafter = MedusaDrafter.from_target(target, config, draft_vocab)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return drafter.eval()


def medusa_engine(target: Target, reduced: bool = False) -> SpeculativeEngine:
    drafter = medusa(target, reduced)
    return SpeculativeEngine(
        target, build_proposer(drafter, target, TREE), batch_size=3, debug=True
    )


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3", "opt"])
def test_medusa_text_is_plain_text(family: str, reduced: bool) -> None:
    target = tiny_target(family)
    params = SamplingParams(max_new_tokens=30)
    plain = SpeculativeEngine(target, batch_size=2).generate(PROMPTS, params)
    drafted = medusa_engine(target, reduced).generate(PROMPTS, params)
    assert [a.token_ids for a in drafted] == [a.token_ids for a in plain]
    assert all(a.exact and a.law == "greedy" for a in drafted)


def test_coupled_medusa_text_is_plain_samplings(target: Target) -> None:
    params = [
        SamplingParams(temperature=1.0, law="coupled", seed=s, max_new_tokens=20) for s in range(4)
    ]
    plain = SpeculativeEngine(target).generate(PROMPTS, params)
    drafted = medusa_engine(target).generate(PROMPTS, params)
    assert [a.token_ids for a in drafted] == [a.token_ids for a in plain]


def test_typical_says_that_it_is_not_exact(target: Target) -> None:
    params = SamplingParams(temperature=0.7, law="typical", max_new_tokens=10)
    answer = medusa_engine(target).generate(PROMPTS[0], params)
    assert answer.exact is False and answer.law == "typical"
    assert (
        medusa_engine(target)
        .generate(PROMPTS[0], SamplingParams(temperature=0.7, max_new_tokens=10))
        .exact
    )


def test_a_tree_deeper_than_the_heads_is_refused(target: Target) -> None:
    with pytest.raises(ValueError, match="5 deep.*3 heads"):
        build_proposer(medusa(target), target, TokenTree.chain(5))


def test_block_law_refuses_a_tree(target: Target) -> None:
    with pytest.raises(ValueError, match="chains only"):
        medusa_engine(target).generate(PROMPTS[0], SamplingParams(temperature=1.0, law="block"))


def test_messages_text_and_ids_are_prompts(target: Target) -> None:
    engine = SpeculativeEngine(target)
    rendered = "<s>user\nhello there</s>\n<s>assistant\n"
    assert engine.encode(MESSAGES) == engine.encode(rendered)
    assert engine.encode([4, 5]) == [4, 5]
    params = SamplingParams(max_new_tokens=4)
    one = engine.generate(MESSAGES, params)
    several = engine.generate([MESSAGES, rendered, engine.encode(rendered)], params)
    assert [a.token_ids for a in several] == [one.token_ids] * 3


@pytest.mark.parametrize("drafted", [False, True])
def test_stop_strings_at_every_place_of_the_answer(target: Target, drafted: bool) -> None:
    """R5, R6: text, ids and reason are those of plain decoding token by token."""
    engine = medusa_engine(target) if drafted else SpeculativeEngine(target)
    free = SpeculativeEngine(target).generate(
        PROMPTS[1], SamplingParams(max_new_tokens=24, ignore_eos=True)
    )
    tokenizer = target.tokenizer
    for at in range(1, 12):
        stop = tokenizer.decode(free.token_ids[at : at + 2], skip_special_tokens=True)
        if not stop or "\ufffd" in stop:
            continue
        answer = engine.generate(
            PROMPTS[1], SamplingParams(max_new_tokens=24, ignore_eos=True, stop=(stop,))
        )
        seen = ""
        for count in range(1, 25):
            seen = tokenizer.decode(free.token_ids[:count], skip_special_tokens=True)
            if stop in seen:
                break
        assert answer.finish_reason == "stop"
        assert answer.text == seen[: seen.index(stop)]
        assert answer.token_ids == free.token_ids[:count]


def test_streamed_text_is_the_answers_text(target: Target) -> None:
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    engine = medusa_engine(target)
    pieces = list(engine.stream(MESSAGES, params))
    whole = engine.generate(MESSAGES, params)
    assert "".join(piece.text for piece in pieces) == whole.text


def test_what_a_prompt_lacks_is_named(target: Target) -> None:
    engine = SpeculativeEngine(target)
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        engine.generate([[4], []], SamplingParams())
    bare = SpeculativeEngine(tiny_target())
    with pytest.raises(ValueError, match="no tokenizer"):
        bare.generate("text", SamplingParams())
    without_template = tiny_tokenizer(VOCAB)
    without_template.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        SpeculativeEngine(tiny_target(tokenizer=without_template)).generate(MESSAGES)
    with pytest.raises(ValueError, match="1 SamplingParams for 2 prompts"):
        engine.generate(PROMPTS[:2], [SamplingParams()])


def test_a_batch_has_at_least_one_row(target: Target) -> None:
    with pytest.raises(ValueError, match="batch_size is 0"):
        SpeculativeEngine(target, batch_size=0)


def test_one_run_has_one_law(target: Target) -> None:
    params = [SamplingParams(law="coupled", temperature=1.0), SamplingParams(temperature=1.0)]
    with pytest.raises(ValueError, match="coupled, rejection"):
        SpeculativeEngine(target).generate(PROMPTS[:2], params)


def test_bf16_answers_part_only_at_near_ties() -> None:
    """R13: one-token and tree-shaped forwards round differently; only near-ties may flip."""
    target = tiny_target("llama", torch.bfloat16)
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    prompts = [[5 + i, 6 + 2 * i, 7] for i in range(12)]
    plain = SpeculativeEngine(target, batch_size=1).generate(prompts, params)
    drafter = medusa(target)
    engine = SpeculativeEngine(target, build_proposer(drafter, target, TREE), batch_size=4)
    drafted = engine.generate(prompts, params)
    for prompt, ours, theirs in zip(prompts, drafted, plain, strict=True):
        pairs = enumerate(zip(ours.token_ids, theirs.token_ids, strict=True))
        part = next((i for i, (a, b) in pairs if a != b), None)
        if part is not None:
            text = torch.tensor([prompt + theirs.token_ids[:part]])
            logits = target.model(input_ids=text).logits[0, -1].float()
            first, second = logits.topk(2).values
            # bf16 keeps 8 bits: 2 % of the largest logit is five roundings of it.
            assert (first - second) / logits.abs().max() < 0.02
