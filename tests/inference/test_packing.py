"""Packed linear layers give the ordinary layers' results and leave no trace."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_target
from torch import nn

from inference.forward import TargetForward
from inference.packing import PackedLinears, can_pack

needs_kernels = pytest.mark.skipif(
    not can_pack(torch.float32, torch.device("cpu")), reason="no packed kernels on this machine"
)


@needs_kernels
@pytest.mark.parametrize("rows", [1, 3, 8, 40])
@pytest.mark.parametrize("bias", [True, False])
def test_packed_products_equal_plain_ones(rows: int, bias: bool) -> None:
    layer = nn.Linear(48, 96, bias=bias)
    inputs = torch.randn(2, rows, 48)
    with torch.inference_mode():
        plain = layer(inputs)
        with PackedLinears(layer).active():
            packed = layer(inputs)
        after = layer(inputs)
    torch.testing.assert_close(packed, plain, rtol=1e-5, atol=1e-5)
    assert torch.equal(after, plain)


@needs_kernels
def test_packing_reads_the_weights_once() -> None:
    layer = nn.Linear(8, 8)
    packed = PackedLinears(layer)
    inputs = torch.randn(1, 8)
    with torch.inference_mode():
        before = layer(inputs)
        layer.weight.zero_()
        with packed.active():
            torch.testing.assert_close(layer(inputs), before)


def test_a_model_is_left_as_it_was_found() -> None:
    target = tiny_target("qwen2")
    forward = TargetForward(target)
    implementation = target.model.config._attn_implementation
    with forward._fast():
        assert target.model.config._attn_implementation != implementation
    assert target.model.config._attn_implementation == implementation
    assert not any("forward" in module.__dict__ for module in target.model.modules())


def test_fp64_is_not_packed() -> None:
    assert not can_pack(torch.float64, torch.device("cpu"))
    with pytest.raises(ValueError, match="pack_weights"):
        TargetForward(tiny_target(dtype=torch.float64), pack_weights=True)
