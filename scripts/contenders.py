"""Ways of decoding a prompt that are measured against each other, and how they are timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from record import tau_of
from tqdm import tqdm

from drafters.target import Target
from inference.generate import SpeculativeEngine
from inference.params import SamplingParams
from inference.row import Generation


@dataclass
class Contender:
    """A way of decoding one prompt. `decode` returns (token ids, Generation or None)."""

    method: str
    temperature: float
    decode: Callable[[list[int], int], tuple[list[int], Generation | None]]
    law: str | None = None
    tree_nodes: int = 0
    seconds: list[list[float]] = field(default_factory=list)  # per pass, per prompt
    tokens: list[int] = field(default_factory=list)
    generations: list[Generation] = field(default_factory=list)


def engine_contender(
    method: str, engine: SpeculativeEngine, temperature: float, max_new_tokens: int
) -> Contender:
    def decode(prompt: list[int], seed: int) -> tuple[list[int], Generation]:
        params = SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens, seed=seed)
        answer = engine.generate(prompt, params)
        assert isinstance(answer, Generation)
        return answer.token_ids, answer

    nodes = engine.proposer.num_tokens - 1 if engine.proposer else 0
    law = SamplingParams(temperature=temperature).law_name
    return Contender(method, temperature, decode, law, nodes)


def hf_contender(target: Target, max_new_tokens: int) -> Contender:
    """`generate` of transformers, greedy, as a user would call it."""

    def decode(prompt: list[int], _: int) -> tuple[list[int], None]:
        return hf_greedy(target, [prompt], max_new_tokens)[0], None

    return Contender("hf_generate", 0.0, decode)


@torch.inference_mode()
def hf_greedy(target: Target, prompts: Sequence[list[int]], max_new_tokens: int) -> list[list[int]]:
    """transformers' own greedy answers, padded on the left, cut after the end token."""
    eos = list(target.eos_token_ids)
    pad = eos[0] if eos else 0
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts], device=target.device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts]).to(ids.device)
    out = target.model.generate(
        ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=pad
    )
    answers = []
    for line in out[:, longest:].tolist():
        end = next((i + 1 for i, token in enumerate(line) if token in eos), len(line))
        answers.append(line[:end])
    return answers


def time_contenders(
    contenders: Sequence[Contender], prompts: Sequence[list[int]], passes: int
) -> None:
    """Fills in seconds, tokens and generations; a pass decodes every prompt with every method."""
    for contender in contenders:  # compile, allocate, warm caches
        contender.decode(prompts[0], 0)
    with tqdm(
        total=passes * len(prompts) * len(contenders), desc="benchmark", unit="answer"
    ) as bar:
        for number in range(passes):
            for contender in contenders:
                contender.seconds.append([])
            for at, prompt in enumerate(prompts):
                turn = (number + at) % len(contenders)
                for contender in [*contenders[turn:], *contenders[:turn]]:
                    started = time.perf_counter()
                    ids, generation = contender.decode(prompt, 1000 + at)
                    contender.seconds[-1].append(time.perf_counter() - started)
                    if number == 0:
                        contender.tokens.append(len(ids))
                        contender.generations += [generation] if generation else []
                    bar.update()


def check_identity(
    target: Target,
    engines: dict[str, SpeculativeEngine],
    prompts: Sequence[list[int]],
    max_new_tokens: int,
) -> tuple[dict[str, bool], dict[str, float]]:
    """Greedy fp32 text of each engine against plain decoding here and HF generate.

    Prompts are decoded in batches; an answer that differs is decoded again alone on both sides, as
    padding in HF's batch may round a near-tie the other way, and only that counts.
    Returns:
        ({method: identical}, {method: τ})
    """
    params = SamplingParams(max_new_tokens=max_new_tokens)
    expected = hf_greedy(target, prompts, max_new_tokens)
    identical, taus = {}, {}
    for method, engine in engines.items():
        answers = dict(engine.generate_many(prompts, params, batch_size=len(prompts)))
        taus[method] = tau_of(list(answers.values()))
        identical[method] = True
        for at, prompt in enumerate(prompts):
            if answers[at].token_ids != expected[at]:
                expected[at] = hf_greedy(target, [prompt], max_new_tokens)[0]
                alone = engine.generate(prompt, params)
                identical[method] &= alone.token_ids == expected[at]
    return identical, taus


@torch.inference_mode()
def near_ties(
    target: Target,
    prompts: Sequence[list[int]],
    ours: Sequence[list[int]],
    plain: Sequence[list[int]],
) -> dict[str, float | int]:
    """Where two greedy answers part, how far apart were the target's first two choices?

    Forwards of one token and of a tree round differently; in bf16 that flips near-ties. A flip at a
    wide margin would be a fault.
    Returns:
        prompts, different (answers that part), largest_margin (logits, at the first differing
        token, relative to the largest logit there).
    """
    margins = []
    for prompt, mine, other in zip(prompts, ours, plain, strict=True):
        part = next((i for i, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), None)
        if part is None:
            continue
        ids = torch.tensor([prompt + other[:part]], device=target.device)
        logits = target.model(input_ids=ids).logits[0, -1].float()
        first, second = logits.topk(2).values
        margins.append(float((first - second) / logits.abs().max()))
    return {
        "prompts": len(prompts),
        "different": len(margins),
        "largest_margin": max(margins, default=0.0),
    }
