"""Which target is this? Hashes that tell quantised, tuned and hub variants apart."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from transformers import PreTrainedModel

SAMPLES_PER_TENSOR = 256
# Keys that say how or from where a model was loaded, not what it computes.
_VOLATILE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")


def target_identity(
    model: PreTrainedModel, tokenizer: Any, name: str, vocab_size: int
) -> dict[str, Any]:
    """Identity of a target: what data and drafters made for it are tied to.

    The weights are sampled: up to 256 evenly spaced values of every tensor, rounded to bfloat16, so
    that loading one checkpoint in fp32 or bf16 gives one identity.
    """
    return {
        "name": name,
        "weights_hash": weights_hash(model),
        "config_hash": config_hash(model),
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "template_hash": template_hash(tokenizer),
        "vocab_size": vocab_size,
    }


def weights_hash(model: PreTrainedModel) -> str:
    """Hash of names, shapes and sampled values of all parameters."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        flat = parameter.detach().reshape(-1)
        if flat.numel() == 0 or flat.device.type == "meta":
            continue
        stride = max(1, flat.numel() // SAMPLES_PER_TENSOR)
        sampled = flat[::stride][:SAMPLES_PER_TENSOR].to(torch.bfloat16).cpu()
        digest.update(sampled.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def config_hash(model: PreTrainedModel) -> str:
    settings = {k: v for k, v in model.config.to_dict().items() if k not in _VOLATILE}
    return _hash_text(json.dumps(settings, sort_keys=True, default=str))


def tokenizer_hash(tokenizer: Any) -> str | None:
    """Hash of the vocabulary; None without a tokenizer."""
    if tokenizer is None:
        return None
    return _hash_text(json.dumps(sorted(tokenizer.get_vocab().items())))


def template_hash(tokenizer: Any) -> str | None:
    """Hash of the chat template; None where there is none."""
    template = getattr(tokenizer, "chat_template", None)
    return None if template is None else _hash_text(str(template))


def _hash_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
