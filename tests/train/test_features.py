"""Packed documents: nothing attends across them, in any family."""

import pytest
import torch

from tests.tiny_models import CONFIGS, tiny_target
from tests.train.conftest import document, documents
from train.features import KeptFeatures, document_features
from train.rows import collate_named


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_features_of_packed_documents_are_those_of_each_alone(family):
    target = tiny_target(family)
    docs = [document("a", 4, 11), document("b", 9, 8, seed=2), document("c", 3, 2, seed=3)]
    packed = document_features(target, collate_named([docs[:2], docs[2:]]))
    for row, start, doc in ((0, 0, docs[0]), (0, 15, docs[1]), (1, 0, docs[2])):
        alone = target.features(torch.from_numpy(doc.input_ids).long()[None])[0]
        torch.testing.assert_close(
            packed[row, start : start + len(doc)], alone, atol=2e-5, rtol=1e-4
        )


def test_attention_implementations_agree_on_packed_documents():
    """Longer than the windows of a hybrid family; HF's eager softmax is fp32, whatever comes in."""
    found = []
    for implementation in ("eager", "sdpa"):
        target = tiny_target("gemma3", torch.float64)
        target.model.set_attn_implementation(implementation)
        batch = collate_named([[document("a", 4, 11), document("b", 9, 8, seed=2)]])
        found.append(document_features(target, batch))
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=1e-3)


def test_kept_features_are_the_features_and_the_target_runs_once_a_row(monkeypatch):
    target = tiny_target()
    rows = [documents(2), documents(3, seed=7), documents(1, seed=9)]
    kept = KeptFeatures(target, num_tokens=1000)
    lengths = []
    plain = target.features

    def counted(input_ids, **kwargs):
        lengths.append(input_ids.shape)
        return plain(input_ids, **kwargs)

    wanted = document_features(target, collate_named(rows))
    monkeypatch.setattr(target, "features", counted)
    batch = collate_named(rows)
    found = kept(target, batch)
    real = batch["document_ids"] >= 0
    torch.testing.assert_close(found[real], wanted[real], atol=1e-5, rtol=1e-4)
    assert found.shape == wanted.shape and lengths == [(1, n) for n in real.sum(1).tolist()]
    assert torch.equal(kept(target, batch), found) and len(lengths) == 3


def test_kept_features_are_the_same_bits_in_whatever_batch_a_row_comes_first():
    target = tiny_target()
    rows = [documents(2), documents(3, seed=7), documents(1, seed=9)]
    together = KeptFeatures(target, 1000)(target, collate_named(rows))
    alone = KeptFeatures(target, 1000)(target, collate_named(rows[2:]))
    assert torch.equal(together[2, : alone.shape[1]], alone[0])


def test_features_that_do_not_fit_into_memory_are_refused_with_both_sizes():
    with pytest.raises(ValueError, match=r"1,000,000,000,000,000 tokens take 128000000\.0 GB"):
        KeptFeatures(tiny_target(), 10**15)
