"""Medusa heads: their start, their weights, their vocabulary, their tree."""

import pytest
import torch
from torch.nn import functional as F

from drafters.medusa import MedusaConfig, MedusaDrafter
from drafters.target import Target
from tests.tiny_models import CONFIGS, VOCAB, tiny_model, tiny_target

# Chosen so that the rows' product rounds as the whole one does: a multiple of the kernel's width.
DRAFT_IDS = torch.arange(3, 3 + 64)


def config_of(target: Target, **changes) -> MedusaConfig:
    fields = {"num_heads": 3, "hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
    return MedusaConfig(**(fields | changes))


def features_of(target: Target, rows: int = 7) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCAB, (2, rows), generator=generator)
    with torch.no_grad():
        return target.features(ids)


def trained(drafter: MedusaDrafter) -> MedusaDrafter:
    """Random weights everywhere, as if it had been trained."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return drafter


@pytest.mark.parametrize("head_type", ["own", "tied"])
@pytest.mark.parametrize("num_layers", [0, 1, 3])
@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_heads_equal_the_lm_head_at_step_0_bit_for_bit(family, head_type, num_layers):
    target = tiny_target(family)
    config = config_of(target, head_type=head_type, num_layers=num_layers)
    drafter = MedusaDrafter.from_target(target, config)
    features = features_of(target)
    logits = drafter.logits(features, target)
    assert logits.shape == (3, 2, 7, target.vocab_size)
    for head in logits:
        assert torch.equal(head, target.logits(features))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_reduced_heads_equal_the_lm_heads_rows_at_step_0(family):
    target = tiny_target(family)
    config = config_of(target, head_type="reduced", draft_vocab_size=64)
    drafter = MedusaDrafter.from_target(target, config, DRAFT_IDS)
    features = features_of(target)
    rows = F.linear(features, target.lm_head_weight[DRAFT_IDS])
    if family == "gemma3":
        rows = torch.tanh(rows / 3.0) * 3.0
    for head in drafter.logits(features, target):
        assert torch.equal(head, rows)
        torch.testing.assert_close(head, target.logits(features)[..., DRAFT_IDS])


def test_lm_head_bias_is_part_of_the_heads():
    target = tiny_target("llama")
    head = target.model.get_output_embeddings()
    head.bias = torch.nn.Parameter(torch.randn(VOCAB), requires_grad=False)
    features = features_of(target)
    drafter = MedusaDrafter.from_target(target, config_of(target))
    assert torch.equal(drafter.logits(features, target)[1], target.logits(features))
    config = config_of(target, head_type="reduced", draft_vocab_size=64)
    reduced = MedusaDrafter.from_target(target, config, DRAFT_IDS)
    torch.testing.assert_close(
        reduced.logits(features, target)[1], target.logits(features)[..., DRAFT_IDS]
    )


def test_every_layer_and_head_has_its_own_weights():
    target = tiny_target()
    drafter = MedusaDrafter.from_target(target, config_of(target, num_layers=2))
    features = features_of(target)
    before = drafter.logits(features, target)
    with torch.no_grad():
        drafter.w1[1, 1].add_(torch.eye(target.hidden_size))
    after = drafter.logits(features, target)
    assert torch.equal(after[0], before[0]) and torch.equal(after[2], before[2])
    # With shared layers x + SiLU(x) would come twice.
    x = features + F.silu(features)
    torch.testing.assert_close(after[1], target.logits(x))


def test_heads_are_residual_silu_blocks():
    target = tiny_target()
    drafter = trained(MedusaDrafter.from_target(target, config_of(target, num_layers=2)))
    features = features_of(target)
    logits = drafter.logits(features, target)
    for k in range(3):
        x = features
        for layer in range(2):
            x = x + F.silu(F.linear(x, drafter.w1[k, layer], drafter.b1[k, layer]))
        torch.testing.assert_close(logits[k], F.linear(x, drafter.w2[k]))


def test_first_heads_alone_give_what_they_give_together():
    target = tiny_target()
    drafter = trained(MedusaDrafter.from_target(target, config_of(target)))
    features = features_of(target)[0, 0]
    alone = drafter.logits(features, target, num_heads=2)
    assert alone.shape == (2, VOCAB)
    torch.testing.assert_close(alone, drafter.logits(features, target)[:2])


def test_draft_ids_and_target_ids_are_inverse():
    target = tiny_target()
    config = config_of(target, head_type="reduced", draft_vocab_size=3)
    drafter = MedusaDrafter.from_target(target, config, torch.tensor([5, 40, 9]))
    assert drafter.to_target_ids(torch.tensor([[2, 0], [1, 1]])).tolist() == [[9, 5], [40, 40]]
    assert drafter.to_draft_ids(torch.tensor([9, 5, 40, 6, 0, -100])).tolist() == [
        2, 0, 1, -100, -100, -100,
    ]  # fmt: skip
    whole = MedusaDrafter.from_target(target, config_of(target))
    assert whole.to_draft_ids(torch.tensor([9, -100])).tolist() == [9, -100]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 0}, "num_heads is 0; it must be ≥ 1"),
        ({"num_layers": -1}, "num_layers is -1"),
        ({"head_type": "shared"}, "head_type is 'shared'; use one of own, tied, reduced"),
        ({"head_type": "reduced"}, "draft_vocab_size is None"),
        ({"head_type": "reduced", "draft_vocab_size": 0}, "draft_vocab_size is 0"),
        ({"head_type": "reduced", "draft_vocab_size": -1}, "draft_vocab_size is -1"),
        ({"head_type": "reduced", "draft_vocab_size": VOCAB + 1}, f"needs 1 to {VOCAB}"),
        ({"draft_vocab_size": 5}, "draft_vocab_size is 5, but head_type 'own'"),
        ({"method": "eagle"}, "method is 'eagle'"),
    ],
)
def test_impossible_configs_are_refused_by_field_and_value(changes, message):
    with pytest.raises(ValueError, match=message):
        config_of(tiny_target(), **changes)


def test_tree_deeper_than_the_heads_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match="tree is 4 deep, but the drafter has 3 heads"):
        config_of(tiny_target(), tree=[[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]])
    with pytest.raises(ValueError, match="choice number 6, but a head chooses from 5 tokens"):
        config_of(tiny_target(), head_type="reduced", draft_vocab_size=5, tree=[[5]])
    assert config_of(tiny_target(), tree=[(0,), (0, 2)]).tree == [[0], [0, 2]]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (None, "none given"),
        (torch.tensor([1, 2]), "shape"),
        (torch.tensor([1, 2, 2]), "twice"),
        (torch.tensor([1, 2, VOCAB]), "ids must lie within"),
        (torch.tensor([-1, 2, 3]), "ids must lie within"),
    ],
)
def test_a_map_that_is_no_map_is_refused(ids, message):
    target = tiny_target()
    config = config_of(target, head_type="reduced", draft_vocab_size=3)
    with pytest.raises(ValueError, match=message):
        MedusaDrafter.from_target(target, config, ids)


def test_config_of_another_target_is_refused():
    target = tiny_target()
    with pytest.raises(ValueError, match="hidden_size is 31, but target tiny-llama has 32"):
        MedusaDrafter.from_target(target, config_of(target, hidden_size=31))


def test_heads_may_be_wider_than_the_targets_dtype():
    target = Target(tiny_model("llama", torch.bfloat16))
    drafter = MedusaDrafter.from_target(target, config_of(target), dtype=torch.float32)
    logits = drafter.logits(features_of(target), target)
    assert logits.dtype == torch.float32 and drafter.w2.dtype == torch.float32
