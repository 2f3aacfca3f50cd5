"""Tree forwards against plain forwards of every path, on many model families."""

from __future__ import annotations

import pytest
import torch
from tiny_models import CONFIGS, VOCAB, tiny_target
from transformers import AutoModelForCausalLM, BloomConfig

from drafters.target import Target
from inference.forward import TargetForward, UnsupportedTargetError
from inference.selftest import check_tree_forward
from inference.tree import TokenTree

TREE = TokenTree.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 1, 0), (0, 1, 1)])
PROMPT_LENGTHS = (3, 14, 9)  # ragged; 14 and 9 lie beyond the tiny windows


def tree_and_path_logits(target: Target) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, N, V] of the runtime's forward, and of one plain forward a path."""
    forward = TargetForward(target)
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]
    batch = len(prompts)
    tokens = torch.randint(3, VOCAB, (batch, TREE.num_tokens), generator=generator)
    cache = forward.new_cache(batch, 64)
    with torch.inference_mode():
        for _ in forward.prefill(prompts, range(batch), cache):
            pass
        features = forward.tree(
            tokens,
            torch.tensor(TREE.parents).expand(batch, -1),
            TREE.max_depth,
            torch.tensor(PROMPT_LENGTHS),
            max(PROMPT_LENGTHS),
            cache,
        )
        in_tree = forward.logits(features)
        plain = torch.zeros_like(in_tree)
        for row in range(batch):
            for node in range(TREE.num_tokens):
                path, at = [], node
                while at >= 0:
                    path.insert(0, tokens[row, at].item())
                    at = TREE.parents[at]
                ids = torch.tensor([prompts[row] + path])
                plain[row, node] = target.model(input_ids=ids, use_cache=False).logits[0, -1]
    return in_tree, plain


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_tree_logits_equal_path_logits(family: str, dtype: torch.dtype, bound: float) -> None:
    in_tree, plain = tree_and_path_logits(tiny_target(family, dtype))
    scale = plain.abs().max().clamp_min(1.0)
    assert (in_tree - plain).abs().max() / scale <= bound
    # The comparison can fail: siblings' logits differ by far more than the bound.
    assert (plain[:, 1] - plain[:, 2]).abs().max() > 100 * bound


@pytest.mark.parametrize("family", CONFIGS)
def test_features_give_the_models_own_logits(family: str) -> None:
    target = tiny_target(family, torch.float64)
    ids = torch.arange(3, 20)[None]
    with torch.inference_mode():
        expected = target.model(input_ids=ids, use_cache=False).logits
        assert torch.equal(target.logits(target.features(ids)), expected)


@pytest.mark.parametrize("family", CONFIGS)
def test_self_test_passes(family: str) -> None:
    check_tree_forward(TargetForward(tiny_target(family)))


def test_alibi_is_refused_for_trees() -> None:
    config = BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4)
    target = Target(AutoModelForCausalLM.from_config(config), name="tiny-bloom")
    with pytest.raises(UnsupportedTargetError, match="tiny-bloom"):
        check_tree_forward(TargetForward(target))


def test_self_test_catches_a_mask_that_shows_siblings(monkeypatch: pytest.MonkeyPatch) -> None:
    def everyone(parents: torch.Tensor, max_depth: int | None = None) -> torch.Tensor:
        batch, nodes = parents.shape
        return torch.ones(batch, nodes, nodes, dtype=torch.bool).tril()

    forward = TargetForward(tiny_target("llama"))
    monkeypatch.setattr("inference.forward.ancestor_mask", everyone)
    with pytest.raises(UnsupportedTargetError, match="differ"):
        check_tree_forward(forward)


def test_committed_cache_equals_a_fresh_prefill() -> None:
    """Commit moves exactly the accepted path's keys and values behind the text (R10)."""
    target = tiny_target("mistral", torch.float64)
    forward = TargetForward(target)
    prompts = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19]]
    tokens = torch.randint(3, VOCAB, (2, TREE.num_tokens))
    lengths = torch.tensor([4, 11])
    cache = forward.new_cache(2, 64)
    path = torch.tensor([[0, 1, 5, 7], [0, 3, -1, -1]])
    with torch.inference_mode():
        list(forward.prefill(prompts, [0, 1], cache))
        parents = torch.tensor(TREE.parents).expand(2, -1)
        forward.tree(tokens, parents, TREE.max_depth, lengths, 11, cache)
        cache.commit(lengths, path)
        for row in range(2):
            taken = [n for n in path[row].tolist() if n >= 0]
            text = prompts[row] + tokens[row, taken].tolist()
            fresh = forward.new_cache(1, 64)
            list(forward.prefill([text], [0], fresh))
            for (k1, v1), (k2, v2) in zip(
                cache.committed(row, len(text)), fresh.committed(0, len(text)), strict=True
            ):
                torch.testing.assert_close(k1, k2, rtol=0, atol=1e-12)
                torch.testing.assert_close(v1, v2, rtol=0, atol=1e-12)


def test_prefill_in_chunks_and_into_some_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("gemma3", torch.float64)
    forward = TargetForward(target)
    prompts = [list(range(3, 30)), list(range(40, 51))]
    monkeypatch.setattr("inference.forward.PREFILL_CHUNK", 8)
    cache = forward.new_cache(4, 64)
    with torch.inference_mode():
        chunks = list(forward.prefill(prompts, [2, 0], cache))
        features = torch.cat([features for _, _, features in chunks], dim=1)
        for i, prompt in enumerate(prompts):
            plain = target.features(torch.tensor([prompt]))
            torch.testing.assert_close(features[i, : len(prompt)], plain[0], rtol=0, atol=1e-11)
