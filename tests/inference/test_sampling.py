"""Logits become the probabilities that Hugging Face `generate` would draw from."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from inference.proposal import Proposal
from inference.sampling import (
    PolicyTensors,
    SamplingParams,
    TreePolicy,
    expand_draft_probs,
    probabilities,
    processed_logits,
)
from inference.tree import TokenTree

VOCAB = 64
PARAMS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.0, top_k=5),
    SamplingParams(temperature=1.0, top_k=1000),
    SamplingParams(temperature=1.0, top_p=0.7),
    SamplingParams(temperature=1.0, top_p=1e-4),
    SamplingParams(temperature=1.0, min_p=0.2),
    SamplingParams(temperature=1.0, min_p=1.0),
    SamplingParams(temperature=1.0, repetition_penalty=1.3),
    SamplingParams(temperature=1.0, repetition_penalty=0.7),
    SamplingParams(temperature=1.4, top_k=20, top_p=0.9, min_p=0.05, repetition_penalty=1.2),
    SamplingParams(temperature=0.3, top_k=3, top_p=0.5, min_p=0.5, repetition_penalty=1.9),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, top_k=3, top_p=0.4, repetition_penalty=1.5),
]


@pytest.fixture
def stable_sort(monkeypatch):
    """HF leaves the order of equal logits to torch.sort, which promises none; ours is kept."""
    unstable = torch.sort
    monkeypatch.setattr(
        torch, "sort", lambda x, descending=False: unstable(x, descending=descending, stable=True)
    )


def hugging_face(logits_BV: Tensor, params: SamplingParams, ids_BT: Tensor) -> Tensor:
    """The distribution of `generate`, by its own processors in its own order."""
    processors = LogitsProcessorList()
    if params.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.temperature == 0:
        scores_BV = processors(ids_BT, logits_BV)
        return torch.nn.functional.one_hot(scores_BV.argmax(-1), logits_BV.shape[1]).to(scores_BV)
    if params.temperature != 1:
        processors.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        processors.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        processors.append(MinPLogitsWarper(params.min_p))
    return processors(ids_BT, logits_BV).softmax(-1)


def seen_tokens(ids_BT: Tensor, vocab: int = VOCAB) -> Tensor:
    return torch.zeros(len(ids_BT), vocab, dtype=torch.bool).scatter(1, ids_BT, True)


def random_logits(batch: int, ties: bool, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits_BV = torch.randn(batch, VOCAB, generator=generator, dtype=dtype) * 3
    logits_BV[:, :4] = -math.inf
    return logits_BV.round() if ties else logits_BV


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("index", range(len(PARAMS)))
def test_probabilities_are_bitwise_hugging_face(index, ties, dtype, stable_sort):
    params = PARAMS[index]
    logits_BV = random_logits(100, ties, dtype)
    ids_BT = torch.randint(VOCAB, (100, 20), generator=torch.Generator().manual_seed(1))
    policy = PolicyTensors.stack([params] * 100)
    ours_BV = probabilities(logits_BV, policy, seen_tokens(ids_BT))
    assert ours_BV.dtype == dtype
    assert torch.equal(ours_BV, hugging_face(logits_BV, params, ids_BT))


@pytest.mark.parametrize("params", [p for p in PARAMS if p.top_p < 1])
def test_top_p_differs_from_hugging_face_only_among_equal_logits(params):
    """HF as it is, its own sort included: the same probabilities, for tokens equally likely."""
    logits_BV = random_logits(100, True, torch.float32)
    ids_BT = torch.zeros(100, 1, dtype=torch.int64)  # token 0 is impossible: no penalty to see
    ours_BV = probabilities(logits_BV, PolicyTensors.stack([params] * 100), seen_tokens(ids_BT))
    theirs_BV = hugging_face(logits_BV, params, ids_BT)
    for row in range(100):
        ours, theirs = ours_BV[row] > 0, theirs_BV[row] > 0
        assert logits_BV[row][ours].sort().values.equal(logits_BV[row][theirs].sort().values)
    assert torch.allclose(ours_BV.sort(-1).values, theirs_BV.sort(-1).values, rtol=1e-6, atol=0)


@pytest.mark.parametrize("ties", [False, True])
def test_rows_of_a_mixed_batch_are_what_they_are_alone(ties, stable_sort):
    batch = len(PARAMS)
    logits_BV = random_logits(batch, ties, torch.float32, seed=2)
    ids_BT = torch.randint(VOCAB, (batch, 9), generator=torch.Generator().manual_seed(3))
    mixed_BV = probabilities(logits_BV, PolicyTensors.stack(PARAMS), seen_tokens(ids_BT))
    for row, params in enumerate(PARAMS):
        one = slice(row, row + 1)
        assert torch.equal(mixed_BV[one], hugging_face(logits_BV[one], params, ids_BT[one]))


def test_several_nodes_of_a_row_share_its_parameters():
    batch = len(PARAMS)
    logits_BMV = torch.stack(
        [random_logits(batch, True, torch.float32, seed) for seed in range(3)], 1
    )
    seen_BV = seen_tokens(torch.arange(batch)[:, None])
    policy = PolicyTensors.stack(PARAMS)
    together_BMV = probabilities(logits_BMV, policy, seen_BV)
    for node in range(3):
        assert torch.equal(
            together_BMV[:, node], probabilities(logits_BMV[:, node], policy, seen_BV)
        )
    index = torch.tensor([3, 3, 12])
    picked_BV = probabilities(logits_BMV[index, 0], policy.select(index), seen_BV[index])
    assert torch.equal(picked_BV, together_BMV[index, 0])


def test_half_precision_logits_give_fp32_probabilities():
    logits_BV = random_logits(4, False, torch.float32).bfloat16()
    policy = PolicyTensors.stack([SamplingParams(temperature=0.8)] * 4)
    probs_BV = probabilities(logits_BV, policy)
    assert probs_BV.dtype == torch.float32
    assert torch.equal(probs_BV, (logits_BV.float() / 0.8).softmax(-1))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_logits_do_not_pass_for_probabilities(temperature):
    logits_BV = random_logits(2, False, torch.float32)
    logits_BV[1, 9] = math.nan
    policy = PolicyTensors.stack([SamplingParams(temperature=temperature)] * 2)
    assert probabilities(logits_BV, policy).isnan().any(-1).tolist() == [False, True]


def test_work_that_no_row_asks_for_is_not_done(monkeypatch):
    def forbidden(name):
        def call(*args, **kwargs):
            raise AssertionError(f"{name} was called")

        return call

    logits_BV = random_logits(2, False, torch.float32)
    plain = PolicyTensors.stack([SamplingParams(temperature=1.0)] * 2)
    greedy = PolicyTensors.stack([SamplingParams(top_k=4, top_p=0.5, min_p=0.1)] * 2)
    for name in ("sort", "topk", "cumsum", "__truediv__"):
        monkeypatch.setattr(Tensor, name, forbidden(name))
    probabilities(logits_BV, plain)
    monkeypatch.setattr(Tensor, "softmax", forbidden("softmax"))
    probabilities(logits_BV, greedy)
    with pytest.raises(AssertionError, match="sort"):
        policy = PolicyTensors.stack([SamplingParams(temperature=1.0, top_p=0.5)] * 2)
        probabilities(logits_BV, policy)


def test_penalty_without_the_text_is_refused():
    policy = PolicyTensors.stack([SamplingParams(repetition_penalty=1.1)])
    with pytest.raises(ValueError, match="repetition_penalty needs seen_BV"):
        processed_logits(torch.zeros(1, VOCAB), policy)
    proposal = Proposal.delta(torch.tensor([[1]]), TokenTree.chain(0))
    with pytest.raises(ValueError, match="repetition_penalty needs seen_BV"):
        TreePolicy(torch.zeros(1, 1, VOCAB), proposal, policy)


@pytest.mark.parametrize("params", [p for p in PARAMS if p.repetition_penalty != 1])
def test_each_node_is_penalised_for_its_own_prefix(params):
    """Against HF's processors on the ids of every node's own path, in a batch of two trees."""
    tree = TokenTree.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0)])
    generator = torch.Generator().manual_seed(5)
    tokens_BN = torch.randint(10, 40, (2, tree.num_tokens), generator=generator)
    text_BT = torch.randint(VOCAB, (2, 12), generator=generator)
    text_BT[:, -1] = tokens_BN[:, 0]
    logits_BNV = torch.randn(2, tree.num_tokens, VOCAB, generator=generator) * 3
    proposal = Proposal.delta(tokens_BN, tree)
    policy = TreePolicy(
        logits_BNV, proposal, PolicyTensors.stack([params] * 2), seen_tokens(text_BT)
    )
    for node in range(tree.num_tokens):
        path, above = [], node
        while above > 0:
            path.insert(0, above)
            above = tree.parents[above]
        ids_BT = torch.cat((text_BT, tokens_BN[:, path]), 1)
        node_B = torch.full((2,), node)
        expected_BV = hugging_face(logits_BNV[:, node], params, ids_BT)
        assert torch.equal(policy.at(node_B), expected_BV)
        scores_BV = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(
            ids_BT, logits_BNV[:, node]
        )
        assert torch.equal(policy.argmax(node_B), scores_BV.argmax(-1))
    rows_B, nodes_BM = torch.arange(2), torch.tensor([[0, 6, 3], [2, 2, 5]])
    several_BMV = policy.at(nodes_BM)
    for m in range(3):
        assert torch.equal(several_BMV[rows_B, m], policy.at(nodes_BM[:, m]))


def test_only_nodes_that_are_asked_for_become_probabilities(monkeypatch):
    rows = []
    softmax = Tensor.softmax
    monkeypatch.setattr(
        Tensor, "softmax", lambda x, *args: rows.append(x.numel() // VOCAB) or softmax(x, *args)
    )
    proposal = Proposal.delta(torch.arange(11).expand(2, -1), TokenTree.expansion((2, 2, 1)))
    policy = PolicyTensors.stack([SamplingParams(temperature=1.0)] * 2)
    TreePolicy(torch.zeros(2, 11, VOCAB), proposal, policy).at(torch.tensor([3, 0]))
    assert rows == [2]


def test_argmax_is_the_lowest_id_of_a_tie_and_flags_nan():
    proposal = Proposal.delta(torch.zeros(3, 1, dtype=torch.int64), TokenTree.chain(0))
    logits_BNV = torch.tensor([[[1.0, 5.0, 5.0]], [[0.0, -1.0, 0.0]], [[0.0, math.nan, 1.0]]])
    policy = TreePolicy(logits_BNV, proposal, PolicyTensors.stack([SamplingParams()] * 3))
    assert policy.argmax(torch.zeros(3, dtype=torch.int64)).tolist() == [1, 0, -1]


def test_small_draft_vocabulary_is_spread_over_the_target_s():
    draft_probs = torch.tensor([[[0.25, 0.75]], [[1.0, 0.0]]])
    full = expand_draft_probs(draft_probs, torch.tensor([4, 1]), 6)
    assert full.tolist() == [[[0, 0.75, 0, 0, 0.25, 0]], [[0, 0, 0, 0, 1.0, 0]]]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", "1"),
        ("top_k", -1),
        ("top_k", 2.5),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("max_new_tokens", 0),
        ("max_new_tokens", True),
        ("stop", ("",)),
        ("stop", (3,)),
        ("seed", 2**63),
        ("seed", 0.5),
        ("law", "exact"),
        ("typical_epsilon", 0.0),
        ("typical_delta", 1.5),
    ],
)
def test_bad_parameter_is_refused_by_name_and_value(field, value):
    with pytest.raises(ValueError, match=rf"SamplingParams\.{field} = .*: must be"):
        SamplingParams(**{field: value})


def test_law_follows_the_temperature_unless_named():
    assert SamplingParams().law_name == "greedy"
    assert SamplingParams(temperature=0.5).law_name == "rejection"
    assert SamplingParams(temperature=0.5, law="coupled").law_name == "coupled"
    with pytest.raises(ValueError, match=r"law = 'greedy': must be not 'greedy' at"):
        SamplingParams(temperature=0.5, law="greedy")


def test_one_stop_string_need_not_be_in_a_tuple():
    assert SamplingParams(stop="\n\n").stop == ("\n\n",)
