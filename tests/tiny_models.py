"""Tiny random models of real Hugging Face families, for tests."""

from __future__ import annotations

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from drafters.target import Target

VOCAB = 97
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_NO_GQA = {key: value for key, value in _COMMON.items() if key != "num_key_value_heads"}

CONFIGS = {
    "llama": lambda: LlamaConfig(**_COMMON),
    "qwen2": lambda: Qwen2Config(**_COMMON),
    "qwen3": lambda: Qwen3Config(**_COMMON, head_dim=8),
    "mistral": lambda: MistralConfig(**_COMMON, sliding_window=9),
    "gemma3": lambda: Gemma3TextConfig(
        **_COMMON,
        head_dim=8,
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        final_logit_softcapping=3.0,
    ),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=3, n_head=4, n_positions=256, bos_token_id=1,
        eos_token_id=2,
    ),
    "gpt_neox": lambda: GPTNeoXConfig(**_NO_GQA),
    "opt": lambda: OPTConfig(
        **{k: v for k, v in _NO_GQA.items() if k != "intermediate_size"},
        ffn_dim=48,
        word_embed_proj_dim=32,
    ),
    "phi3": lambda: Phi3Config(**_COMMON),
}  # fmt: skip


def tiny_model(family: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """A random model whose logits differ enough between tokens to show a wrong mask."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[family](), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6.0)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.to(dtype).eval()


def tiny_target(
    family: str = "llama",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    tokenizer: object | None = None,
) -> Target:
    return Target(tiny_model(family, dtype, seed), tokenizer, name=f"tiny-{family}")
