"""The Medusa-1 objective: labels, loss, and where it looks."""

import math

import pytest
import torch

from drafters.medusa import MedusaConfig, MedusaDrafter
from tests.tiny_models import VOCAB, tiny_target
from tests.train.conftest import document, documents
from train.acceptance import MAX_RANK, NO_TOKEN
from train.features import document_features
from train.medusa_objective import (
    MedusaObjective,
    answer_ranks,
    head_labels,
    medusa_loss,
    true_ranks,
)
from train.rows import collate_named

WEIGHTS = torch.tensor([0.8, 0.64])


def plain_loss(logits, labels, weights):
    """The definition, in Python floats."""
    total = [0.0] * len(logits)
    for k, head in enumerate(logits.tolist()):
        for position, label in zip(head, labels[k].tolist(), strict=True):
            if label != -100:
                log_sum = math.log(sum(math.exp(x) for x in position))
                total[k] += weights[k] * (log_sum - position[label])
    return total


def make_drafter(target, head_type="own", draft_vocab=None, num_heads=2):
    size = None if draft_vocab is None else len(draft_vocab)
    config = MedusaConfig(
        num_heads=num_heads, hidden_size=32, vocab_size=VOCAB, head_type=head_type,
        draft_vocab_size=size,
    )  # fmt: skip
    drafter = MedusaDrafter.from_target(target, config, draft_vocab)
    torch.manual_seed(1)
    with torch.no_grad():
        drafter.w1.add_(torch.randn_like(drafter.w1) * 0.1)
    return drafter


def test_loss_equals_its_definition():
    torch.manual_seed(0)
    logits = torch.randn(2, 5, 7, dtype=torch.float64)
    labels = torch.tensor([[1, -100, 6, 0, 3], [-100, 2, 2, -100, 5]])
    loss, count = medusa_loss(logits, labels, WEIGHTS)
    assert loss.tolist() == pytest.approx(plain_loss(logits, labels, WEIGHTS.tolist()), rel=1e-7)
    assert count == 7 and loss.dtype == torch.float64


def test_loss_of_half_precision_logits_is_taken_in_fp32():
    logits = (torch.randn(2, 3, 50) * 8).bfloat16()
    labels = torch.randint(0, 50, (2, 3))
    loss, _ = medusa_loss(logits, labels, WEIGHTS)
    exact = plain_loss(logits.double(), labels, WEIGHTS.tolist())
    assert loss.dtype == torch.float32
    assert loss.tolist() == pytest.approx(exact, rel=1e-5)


def test_nothing_supervised_gives_zero_and_zero_with_a_gradient():
    logits = torch.randn(2, 3, 5, requires_grad=True)
    loss, count = medusa_loss(logits, torch.full((2, 3), -100), WEIGHTS)
    assert loss.tolist() == [0, 0] and count == 0
    loss.sum().backward()
    assert torch.equal(logits.grad, torch.zeros(2, 3, 5))


def test_shapes_that_disagree_are_refused():
    with pytest.raises(ValueError, match="do not belong together"):
        medusa_loss(torch.zeros(2, 3, 5), torch.zeros(2, 4, dtype=torch.int64), WEIGHTS)
    with pytest.raises(ValueError, match="do not belong together"):
        medusa_loss(torch.zeros(2, 3, 5), torch.zeros(2, 3, dtype=torch.int64), WEIGHTS[:1])


def test_head_k_is_supervised_exactly_where_its_token_is_in_the_mask():
    """Both edges of both answers of a row, and of a document packed behind it."""
    first = document("a", 3, 4)
    second = document("b", 2, 3, seed=9)
    two_turns = document("c", 2, 7, seed=5)
    two_turns.loss_mask[4:6] = False  # x_4, x_5 are the user's second turn
    batch = collate_named([[first, second], [two_turns]])
    labels = head_labels(batch, num_heads=3)
    for k in range(1, 4):
        expected = torch.full((2, 12), -100)
        for row, offset, doc in ((0, 0, first), (0, 7, second), (1, 0, two_turns)):
            for t in range(len(doc)):
                ahead = t + 1 + k
                if ahead < len(doc) and doc.loss_mask[ahead]:
                    expected[row, offset + t] = int(doc.input_ids[ahead])
        assert torch.equal(labels[k - 1], expected), f"head {k}"


def test_a_document_in_front_does_not_change_the_loss():
    target = tiny_target(dtype=torch.float64)
    drafter, objective = make_drafter(target), MedusaObjective(2, 0.8)
    a, b = document("a", 4, 8), document("b", 5, 6, seed=2)
    packed = objective.loss(target, drafter, collate_named([[a, b]])).loss_sum
    apart = sum(objective.loss(target, drafter, collate_named([[d]])).loss_sum for d in (a, b))
    assert float(packed.detach()) == pytest.approx(float(apart.detach()), rel=1e-10)


@pytest.mark.parametrize("head_type", ["own", "tied", "reduced"])
def test_chunks_change_neither_loss_nor_gradient(head_type):
    target = tiny_target(dtype=torch.float64)
    vocab = torch.arange(2, 60) if head_type == "reduced" else None
    batch = collate_named([documents(2), documents(3, seed=7)])
    found = []
    for logits_per_chunk in (2**25, 700):
        drafter = make_drafter(target, head_type, vocab)
        objective = MedusaObjective(2, 0.8, logits_per_chunk=logits_per_chunk)
        loss = objective.loss(target, drafter, batch)
        loss.loss_sum.backward()
        grads = [parameter.grad for parameter in drafter.parameters()]
        found.append((loss, grads))
    (whole, whole_grads), (parts, parts_grads) = found
    torch.testing.assert_close(whole.loss_sum, parts.loss_sum)
    torch.testing.assert_close(whole_grads, parts_grads)
    for name, value in whole.sums.items():
        torch.testing.assert_close(value, parts.sums[name])


def test_logits_are_held_for_one_chunk_at_a_time(monkeypatch):
    target = tiny_target()
    drafter = make_drafter(target)
    widths = []
    plain = MedusaDrafter.logits

    def watched(self, features, *args, **kwargs):
        widths.append(len(features))
        return plain(self, features, *args, **kwargs)

    monkeypatch.setattr(MedusaDrafter, "logits", watched)
    batch = collate_named([documents(6)])
    MedusaObjective(2, 0.8, logits_per_chunk=2 * VOCAB * 10).loss(target, drafter, batch)
    supervised = int((head_labels(batch, 2) != -100).any(0).sum())
    assert max(widths) == 10 and sum(widths) == supervised < batch["input_ids"].numel()


def test_labels_outside_the_draft_vocabulary_count_but_teach_nothing():
    target = tiny_target()
    batch = collate_named([documents(4)])
    objective = MedusaObjective(2, 0.8)
    labels = head_labels(batch, 2)
    present = labels[labels != -100].unique()
    absent = torch.tensor(sorted(set(range(VOCAB)) - set(present.tolist())))
    drafter = make_drafter(target, "reduced", absent)
    loss = objective.loss(target, drafter, batch)
    assert float(loss.loss_sum.detach()) == 0
    assert loss.sums["labels"].tolist() == (labels != -100).sum((1, 2)).tolist()
    assert objective.count(batch) == int(batch["loss_mask"].sum())
    figures = objective.report(loss.sums, int(objective.count(batch)))
    assert figures["head1_top1"] == 0 and figures["head1_top5"] == 0


def test_report_divides_the_loss_by_next_tokens_and_each_head_by_its_own():
    objective = MedusaObjective(2, 0.5)
    sums = {
        "nats": torch.tensor([6.0, 8.0], dtype=torch.float64),
        "top1": torch.tensor([1, 0]),
        "top5": torch.tensor([3, 2]),
        "labels": torch.tensor([4, 2]),
    }
    assert objective.report(sums, 10) == {
        "loss": pytest.approx((0.5 * 6 + 0.25 * 8) / 10),
        "head1_loss": 1.5, "head1_top1": 0.25, "head1_top5": 0.75,
        "head2_loss": 4.0, "head2_top1": 0.0, "head2_top5": 1.0,
    }  # fmt: skip


def test_ranks_count_what_a_head_likes_better():
    logits = torch.tensor([[[0.1, 3.0, 2.0, -1.0]] * 4])
    labels = torch.tensor([[1, 2, 3, -100]])
    assert true_ranks(logits, labels).tolist() == [[0, 1, 3, 4]]


@pytest.mark.parametrize("head_type", ["own", "tied", "reduced"])
def test_a_batch_without_supervision_gives_zero_with_a_gradient_for_every_weight(head_type):
    """All processes must reduce the same tensors, whatever their batch holds."""
    target = tiny_target()
    drafter = make_drafter(target, head_type, torch.arange(9) if head_type == "reduced" else None)
    batch = collate_named([documents(2)])
    batch["loss_mask"][:] = False
    loss = MedusaObjective(2, 0.8).loss(target, drafter, batch)
    loss.loss_sum.backward()
    assert loss.loss_sum.item() == 0 and MedusaObjective(2, 0.8).count(batch) == 0
    for name, parameter in drafter.named_parameters():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter)), name


def test_a_token_outside_a_tiny_draft_vocabulary_is_a_miss():
    target = tiny_target()
    drafter = make_drafter(target, "reduced", torch.tensor([0, 1, 2]))  # in no answer
    (ranks,) = answer_ranks(target, drafter, collate_named([[document("a", 3, 4)]]), 100)
    assert ranks.tolist() == [
        [MAX_RANK, MAX_RANK], [MAX_RANK, MAX_RANK], [MAX_RANK, NO_TOKEN], [NO_TOKEN, NO_TOKEN],
    ]  # fmt: skip


@pytest.mark.parametrize("chunk_size", [1000, 3])
def test_answer_ranks_follow_each_answer_to_its_end(chunk_size):
    target = tiny_target()
    vocab = torch.arange(3, 70)
    drafter = make_drafter(target, "reduced", vocab)
    docs = [document("a", 3, 5), document("b", 2, 3, seed=9), document("c", 4, 6, seed=5)]
    docs[2].loss_mask[6] = False  # two answers, of 2 and 3 tokens; head 2 could reach across
    answers = answer_ranks(target, drafter, collate_named([docs[:2], docs[2:]]), chunk_size)
    spans = [(docs[0], 3, 8), (docs[1], 2, 5), (docs[2], 4, 6), (docs[2], 7, 10)]
    assert [len(answer) for answer in answers] == [b - a for _, a, b in spans]
    for answer, (doc, begin, end) in zip(answers, spans, strict=True):
        features = document_features(target, collate_named([[doc]]))[0]
        for i, ranks in enumerate(answer.tolist()):
            logits = drafter.logits(features[begin - 1 + i], target)
            for k in (1, 2):
                ahead = begin + i + k
                if ahead >= end:
                    assert ranks[k - 1] == NO_TOKEN
                    continue
                order = drafter.to_target_ids(logits[k - 1].argsort(descending=True)).tolist()
                token = int(doc.input_ids[ahead])
                rank = order.index(token) if token in order else MAX_RANK
                assert ranks[k - 1] == min(rank, MAX_RANK)
