"""Packed documents: nothing attends across them, in any family."""

import pytest
import torch

from tests.tiny_models import CONFIGS, tiny_target
from tests.train.conftest import document
from train.features import document_features
from train.rows import collate_named


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_features_of_packed_documents_are_those_of_each_alone(family):
    target = tiny_target(family)
    docs = [document("a", 4, 11), document("b", 9, 8, seed=2), document("c", 3, 2, seed=3)]
    packed = document_features(target, collate_named([docs[:2], docs[2:]]))
    for row, start, doc in ((0, 0, docs[0]), (0, 15, docs[1]), (1, 0, docs[2])):
        alone = document_features(target, collate_named([[doc]]))[0]
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
