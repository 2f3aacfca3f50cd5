"""The decoding loop: plain text of the target, whatever the proposer, batch, ends and seeds."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tiny_models import CONFIGS, VOCAB, tiny_target

from inference.generate import SpeculativeEngine
from inference.laws import Verdict
from inference.proposal import Proposal
from inference.randomness import Source
from inference.sampling import SamplingParams
from inference.state import BatchState
from inference.tree import TokenTree

PROMPTS = [[5, 6, 7], [9, 3, 4, 8, 11, 30, 31, 32, 33, 34, 35, 36], [40, 41, 42, 43, 44], [50]]
TREE = TokenTree.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])


class StubProposer:
    """Proposes the text it is told, right or wrong, along the tree's first path."""

    def __init__(self, tree: TokenTree, texts: dict[int, list[int]], right: str) -> None:
        self.tree, self.texts, self.right = tree, texts, right
        self.num_tokens, self.max_depth = tree.num_tokens, tree.max_depth
        self.is_chain = tree.parents == TokenTree.chain(tree.num_nodes).parents
        self.first_token: dict[int, int] = {}

    def allocate(self, batch_size: int, capacity: int) -> None:
        self.prompt_of = [0] * batch_size
        self.lengths = [0] * batch_size

    def read_prompt(self, rows: Sequence[int], start, tokens_RT, features_RTD, lengths_R) -> None:
        for i, row in enumerate(rows):
            self.prompt_of[row] = int(tokens_RT[i, 0])
            self.lengths[row] = int(lengths_R[i])

    def propose(self, state: BatchState, source: Source) -> Proposal:
        tokens = []
        for row, root in enumerate(state.root_B.tolist()):
            done = int(state.lengths_B[row]) - self.lengths[row] + 1
            future = self.texts[self.prompt_of[row]][done:] + [0] * (self.max_depth + 1)
            line = [root]
            for depth, rank in zip(self.tree.depths[1:], self.tree.ranks[1:], strict=True):
                wrong = self.right == "never" or (
                    self.right == "sometimes" and (done + depth) % 3 == 0
                )
                token = future[depth - 1] + (7 if wrong else 0)
                line.append((token + rank) % VOCAB)
            tokens.append(line)
        return Proposal.delta(torch.tensor(tokens), self.tree)

    def observe(self, state: BatchState, proposal, features_BND, verdict: Verdict) -> None:
        pass


def hf_greedy(target, prompt: list[int], n: int) -> list[int]:
    out = target.model.generate(
        torch.tensor([prompt]), max_new_tokens=n, do_sample=False, pad_token_id=0,
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
    )  # fmt: skip
    return out[0, len(prompt) :].tolist()


def stub_engine(target, right: str, tree: TokenTree = TREE, n: int = 40) -> SpeculativeEngine:
    texts = {prompt[0]: hf_greedy(target, prompt, n + 8) for prompt in PROMPTS}
    return SpeculativeEngine(target, StubProposer(tree, texts, right), batch_size=3)


@pytest.mark.parametrize("family", CONFIGS)
def test_greedy_text_is_hf_generates(family: str) -> None:
    """Ragged batch, rows replaced as they finish, past the window's length (R11, R12)."""
    target = tiny_target(family)
    engine = SpeculativeEngine(target, batch_size=2)
    answers = engine.generate(PROMPTS, SamplingParams(max_new_tokens=30))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer.token_ids == hf_greedy(target, prompt, 30)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt2"])
@pytest.mark.parametrize("right", ["never", "sometimes", "always"])
@pytest.mark.parametrize("tree", [TREE, TokenTree.chain(3)], ids=["tree", "chain"])
def test_greedy_text_whatever_the_drafter(family: str, right: str, tree: TokenTree) -> None:
    target = tiny_target(family)
    answers = stub_engine(target, right, tree).generate(PROMPTS, SamplingParams(max_new_tokens=40))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer.token_ids == hf_greedy(target, prompt, 40)
        if right == "never":
            assert answer.stats.tau == 1.0
        if right == "always" and answer.finish_reason == "length":
            assert answer.stats.tau == tree.max_depth + 1
            assert answer.stats.acceptance_by_depth == [1.0] * tree.max_depth


def test_rejection_at_temperature_zero_is_greedy() -> None:
    target = tiny_target()
    mixed = [SamplingParams(max_new_tokens=20, temperature=t) for t in (0.0, 0.7, 0.0, 0.9)]
    answers = stub_engine(target, "sometimes").generate(PROMPTS, mixed)
    for i in (0, 2):
        assert answers[i].token_ids == hf_greedy(target, PROMPTS[i], 20)
    assert answers[0].law == "rejection"


@pytest.mark.parametrize("law", ["rejection", "coupled"])
def test_a_row_alone_and_in_a_batch_is_the_same(law: str) -> None:
    """A row's text depends on its own seed and prompt, not on its neighbours (R9, R12)."""
    target = tiny_target(dtype=torch.float64)
    engine = stub_engine(target, "sometimes")
    params = [
        SamplingParams(max_new_tokens=25, temperature=1.0, seed=seed, law=law)
        for seed in (3, 4, 5, 6)
    ]
    together = engine.generate(PROMPTS, params)
    for prompt, one, answer in zip(PROMPTS, params, together, strict=True):
        assert engine.generate(prompt, one).token_ids == answer.token_ids
    other_seed = SamplingParams(max_new_tokens=25, temperature=1.0, seed=99, law=law)
    assert engine.generate(PROMPTS[0], other_seed).token_ids != together[0].token_ids


@pytest.mark.parametrize("right", ["never", "sometimes", "always"])
def test_coupled_text_is_plain_samplings(right: str) -> None:
    target = tiny_target(dtype=torch.float64)
    params = [
        SamplingParams(max_new_tokens=30, temperature=0.8, seed=s, law="coupled") for s in range(4)
    ]
    plain = SpeculativeEngine(target, batch_size=4).generate(PROMPTS, params)
    drafted = stub_engine(target, right).generate(PROMPTS, params)
    assert [a.token_ids for a in plain] == [a.token_ids for a in drafted]


@pytest.mark.parametrize("end", range(1, 14))
def test_end_token_at_every_position_of_the_block(end: int) -> None:
    """EOS inside an accepted block: text, reason and statistics of plain decoding (R5, R14)."""
    target = tiny_target()
    text = hf_greedy(target, PROMPTS[0], 40)
    eos = text[end - 1]
    first = text.index(eos) + 1
    target.model.generation_config.eos_token_id = eos
    target.config.eos_token_id = eos
    try:
        answer = stub_engine(target, "always").generate(
            PROMPTS[0], SamplingParams(max_new_tokens=40)
        )
    finally:
        target.model.generation_config.eos_token_id = 2
    assert answer.token_ids == text[:first]
    assert answer.finish_reason == "eos"


@pytest.mark.parametrize("limit", range(1, 12))
def test_max_new_tokens_is_tokens_exactly(limit: int) -> None:
    target = tiny_target()
    answer = stub_engine(target, "always").generate(
        PROMPTS[1], SamplingParams(max_new_tokens=limit, ignore_eos=True)
    )
    assert len(answer.token_ids) == limit
    assert answer.finish_reason == "length"


def test_cache_after_every_round_equals_a_fresh_prefill() -> None:
    """R10: keys and values of the committed text, for every row, after every round."""
    target = tiny_target("qwen3", torch.float64)
    engine = stub_engine(target, "sometimes")
    run = engine._run(PROMPTS, SamplingParams(max_new_tokens=20), 3)
    rounds = 0
    while run.waiting or run.active_rows:
        run.step()
        rounds += 1
        for b in run.active_rows:
            row = run.rows[b]
            text = (row.prompt + row.token_ids)[: row.length]
            assert run.state.lengths_B[b] == row.length
            fresh = engine.forward.new_cache(1, 64)
            with torch.inference_mode():
                list(engine.forward.prefill([text], [0], fresh))
            pairs = zip(
                run.cache.committed(b, row.length), fresh.committed(0, row.length), strict=True
            )
            for ours, theirs in pairs:
                torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    assert rounds > 10


def test_text_may_end_exactly_at_the_context() -> None:
    target = tiny_target("gpt2")  # learned positions: one step beyond would be an index error
    prompt = [5 + i % 50 for i in range(target.max_length - 6)]
    texts = {prompt[0]: hf_greedy(target, prompt, 6)}
    engine = SpeculativeEngine(target, StubProposer(TREE, texts, "always"))
    answer = engine.generate(prompt, SamplingParams(max_new_tokens=50, ignore_eos=True))
    assert answer.token_ids == texts[prompt[0]]
    assert answer.finish_reason == "length"


def test_a_prompt_longer_than_the_context_is_refused() -> None:
    target = tiny_target()
    with pytest.raises(ValueError, match=r"prompt 0 has 256 tokens.*ends at 256"):
        SpeculativeEngine(target).generate([3] * 256, SamplingParams())


def test_nan_logits_stop_the_run() -> None:
    target = tiny_target()
    engine = SpeculativeEngine(target)
    with torch.no_grad():
        target.model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="not finite"):
        engine.generate([5, 6], SamplingParams(max_new_tokens=3))


def test_streamed_pieces_make_up_the_answer() -> None:
    target = tiny_target()
    engine = stub_engine(target, "sometimes")
    pieces = list(engine.stream(PROMPTS[0], SamplingParams(max_new_tokens=15, ignore_eos=True)))
    whole = engine.generate(PROMPTS[0], SamplingParams(max_new_tokens=15, ignore_eos=True))
    assert sum((piece.token_ids for piece in pieces), []) == whole.token_ids
    assert pieces[-1].generation.token_ids == whole.token_ids
    assert all(piece.generation is None for piece in pieces[:-1])


def test_repetition_penalty_is_hf_generates() -> None:
    """R7: penalties see each node's own prefix."""
    target = tiny_target()
    params = SamplingParams(max_new_tokens=25, repetition_penalty=1.4, ignore_eos=True)
    expected = target.model.generate(
        torch.tensor([PROMPTS[1]]), max_new_tokens=25, do_sample=False, repetition_penalty=1.4,
        eos_token_id=None, pad_token_id=0,
    )[0, len(PROMPTS[1]) :].tolist()  # fmt: skip
    for engine in (SpeculativeEngine(target), stub_engine(target, "sometimes")):
        assert engine.generate(PROMPTS[1], params).token_ids == expected
