"""Nothing crosses a document (case D5), and no label is off by one (case D4)."""

import itertools

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from data_recipes.answered import Document
from data_recipes.batches import (
    Batches,
    collate,
    document_causal_mask,
    first_fit,
    shifted_labels,
)


def document(name, mask, first=10):
    mask = np.array([bool(m) for m in mask])
    return Document(name, "t", np.arange(first, first + len(mask), dtype=np.int32), mask)


def documents(count=23, seed=0):
    """Documents of 3 to 20 tokens with all tokens of a set different."""
    generator = np.random.default_rng(seed)
    found, first = [], 100
    for i in range(count):
        length = int(generator.integers(3, 21))
        mask = generator.random(length) < 0.5
        mask[0], mask[-1] = False, True
        found.append(document(f"d{i}", mask, first))
        first += length
    return found


def plain_labels(rows, offset, length):
    """The labels, from the documents alone and one position at a time."""
    labels = np.full((len(rows), length), -100)
    for b, row in enumerate(rows):
        start = 0
        for d in row:
            for t in range(len(d)):
                if t + offset < len(d) and d.loss_mask[t + offset]:
                    labels[b, start + t] = d.input_ids[t + offset]
            start += len(d)
    return labels.tolist()


@pytest.mark.parametrize("offset", range(1, 8))
def test_labels_are_supervised_exactly_where_the_predicted_token_is_in_the_mask(offset):
    docs = documents()
    rows = [docs[:3], docs[3:4], docs[4:9]]
    batch = collate(rows)
    length = batch["input_ids"].shape[1]
    assert shifted_labels(batch, offset).tolist() == plain_labels(rows, offset, length)


def test_both_edges_of_an_answer_by_hand():
    """Tokens 10..16, answer 12..14: the prompt's last token predicts 12; 14 predicts nothing."""
    batch = collate([[document("a", [0, 0, 1, 1, 1, 0, 0])]])
    assert shifted_labels(batch, 1).tolist() == [[-100, 12, 13, 14, -100, -100, -100]]
    assert shifted_labels(batch, 2).tolist() == [[12, 13, 14, -100, -100, -100, -100]]
    assert shifted_labels(batch, 3).tolist() == [[13, 14, -100, -100, -100, -100, -100]]
    assert shifted_labels(batch, 7).tolist() == [[-100] * 7]


def test_no_label_crosses_a_document_or_reaches_padding():
    batch = collate([[document("a", [0, 1], 10), document("b", [1, 1, 1], 20)]], length=8)
    assert shifted_labels(batch, 1).tolist() == [[11, -100, 21, 22, -100, -100, -100, -100]]
    assert shifted_labels(batch, 2).tolist() == [[-100, -100, 22, -100, -100, -100, -100, -100]]


@pytest.mark.parametrize("offset", [0, -1])
def test_an_offset_below_one_is_refused(offset):
    with pytest.raises(ValueError, match="must be 1 or more"):
        shifted_labels(collate([[document("a", [0, 1])]]), offset)


def test_positions_restart_and_padding_is_marked_by_documents_alone():
    batch = collate([[document("a", [0, 1]), document("b", [0, 1, 1])], [document("c", [0, 1])]])
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2], [0, 1, 0, 0, 0]]
    assert batch["document_ids"].tolist() == [[0, 0, 1, 1, 1], [0, 0, -1, -1, -1]]
    assert batch["loss_mask"].tolist() == [
        [False, True, False, True, True],
        [False, True] + 3 * [False],
    ]
    with pytest.raises(ValueError, match="length = 4: a row has 5 tokens"):
        collate([[document("a", [0, 1]), document("b", [0, 1, 1])]], length=4)


def test_a_token_with_the_padding_id_is_attended_to_and_supervised():
    """The end token is id 0, as is what batches are padded with: document_ids tell them apart."""
    ending = Document("a", "t", np.array([7, 8, 0], dtype=np.int32), np.array([False, True, True]))
    batch = collate([[ending]], length=5)
    assert shifted_labels(batch, 1).tolist() == [[8, 0, -100, -100, -100]]
    mask = document_causal_mask(batch["document_ids"])
    assert mask[0, 0, 2].tolist() == [True, True, True, False, False]


def test_attention_sees_its_own_past_and_nothing_else():
    batch = collate([[document("a", [0, 1]), document("b", [0, 1, 1])]], length=6)
    mask = document_causal_mask(batch["document_ids"])
    assert mask.shape == (1, 1, 6, 6)
    assert mask[0, 0].long().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 1, 1, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_packed_documents_get_the_logits_they_get_alone(attention):
    tolerance = {"eager": 1e-5, "sdpa": 1e-11}[attention]  # eager attention's softmax is fp32
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=600,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,  # so that a leak shows
        attn_implementation=attention,
    )
    model = LlamaForCausalLM(config).double().eval()
    docs = documents(9)
    rows = [docs[:4], docs[4:9]]
    batch = collate(rows)
    visible = document_causal_mask(batch["document_ids"])
    bias = torch.zeros(visible.shape, dtype=torch.float64)
    bias = bias.masked_fill(~visible, torch.finfo(torch.float64).min)
    with torch.no_grad():
        packed = model(
            batch["input_ids"], attention_mask=bias, position_ids=batch["position_ids"]
        ).logits
        assert packed.isfinite().all()
        for b, row in enumerate(rows):
            start = 0
            for d in row:
                alone = model(torch.from_numpy(d.input_ids).long()[None]).logits[0]
                here = packed[b, start : start + len(d)]
                torch.testing.assert_close(here, alone, rtol=0, atol=tolerance)
                start += len(d)


def test_first_fit_uses_every_item_once_and_overfills_no_row():
    lengths = np.random.default_rng(0).integers(1, 65, 500).tolist()
    rows = first_fit(lengths, 64)
    assert sorted(itertools.chain(*rows)) == list(range(500))
    assert max(sum(lengths[i] for i in row) for row in rows) <= 64
    assert sum(lengths) / (len(rows) * 64) > 0.9
    assert first_fit([3, 3, 2, 5, 1], 5) == [[0, 2], [1, 4], [3]]
    with pytest.raises(ValueError, match="item 1 has 6 tokens, a row has 5"):
        first_fit([3, 6], 5)


def seen_documents(batches):
    """First token (unique for a document) of every document in the batches, in order."""
    found = []
    for batch in batches:
        starts = (batch["position_ids"] == 0) & (batch["document_ids"] >= 0)
        found.append(batch["input_ids"][starts].tolist())
    return found


@pytest.mark.parametrize("packed", [True, False])
def test_every_document_comes_once(packed):
    docs = documents()
    batches = Batches(docs, max_length=40, batch_size=3, seed=5, packed=packed)
    seen = seen_documents(batches)
    assert len(seen) == len(batches)
    assert sorted(itertools.chain(*seen)) == sorted(int(d.input_ids[0]) for d in docs)


def test_packing_is_a_function_of_the_seed():
    docs = documents()
    rows = [Batches(docs, 40, 3, seed).rows for seed in (1, 2, 1)]
    assert rows[0] == rows[2] != rows[1]


def test_without_shuffling_the_order_is_the_data_sets():
    docs = documents()
    seen = seen_documents(Batches(docs, 40, 3, packed=False, shuffle=False))
    assert list(itertools.chain(*seen)) == [int(d.input_ids[0]) for d in docs]


def test_unpacked_rows_hold_one_document_and_are_padded_on_the_right():
    for batch in Batches(documents(), 40, 4, packed=False):
        assert batch["document_ids"].max() == 0
        padding = batch["document_ids"] < 0
        assert not (padding[:, :-1] & ~padding[:, 1:]).any()


def test_documents_past_max_length_are_cut_and_counted():
    docs = [document("a", [0] * 5 + [1] * 5), document("b", [0] * 9 + [1]), document("c", [0, 1])]
    batches = Batches(docs, max_length=8, batch_size=1, shuffle=False)
    assert (batches.cut, batches.left_out) == (2, 1)
    assert [(d.id, len(d)) for d in batches.documents] == [("a", 8), ("c", 2)]
    with pytest.raises(
        ValueError, match="no document has a supervised token within max_length = 3"
    ):
        Batches(docs[:2], max_length=3, batch_size=1)


@pytest.mark.parametrize("name", ["max_length", "batch_size"])
def test_sizes_below_one_are_refused(name):
    sizes = {"max_length": 8, "batch_size": 1} | {name: 0}
    with pytest.raises(ValueError, match=f"{name} = 0: must be 1 or more"):
        Batches([document("a", [0, 1])], **sizes)


def test_fill_is_the_share_of_tokens_that_are_not_padding():
    docs = [document("a", [0, 1, 1]), document("b", [0, 1]), document("c", [0, 1, 1, 1])]
    assert Batches(docs, max_length=5, batch_size=1, shuffle=False).fill == 9 / 10
    assert Batches(docs, max_length=5, batch_size=1, packed=False).fill == 9 / 15
