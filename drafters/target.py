"""Any Hugging Face causal LM as a target: tokenizer, embedding, last hidden state, logits.

Letters: B rows, T tokens, D hidden width, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from drafters.identity import target_identity
from drafters.target_files import resolve_target


class _TrunkOutput(BaseModelOutputWithPast):
    """A trunk's output of which every optional part (cross attentions, router logits) is absent."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _GivenFeatures(nn.Module):
    """Stands where the trunk stands and returns the features it is given."""

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> _TrunkOutput:
        return _TrunkOutput(last_hidden_state=inputs_embeds)

    @property
    def decoder(self) -> _GivenFeatures:  # OPT reaches through its trunk to a decoder
        return self


class Target:
    """A frozen causal LM, reached through the model's own accessors only.

    Args:
        model: any HF causal LM; it is put in eval mode and frozen.
        tokenizer: its tokenizer; None is enough for work on token ids.
        name: what the user called it (hub id, folder or file).
    Raises:
        ValueError: if the model has no trunk, embedding or LM head of its own.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any = None, name: str = "target") -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name
        self.config = model.config.get_text_config()
        prefix = model.base_model_prefix
        if model.base_model is model or model.get_output_embeddings() is None:
            raise ValueError(
                f"target {name}: {type(model).__name__} is not a causal LM with a trunk and an LM "
                "head; load it through AutoModelForCausalLM"
            )
        # The model's own forward with the trunk taken out: the head and whatever the family adds
        # to it (bias, soft-cap, logit scale) come from the model, not from a list kept here.
        self._head = copy.copy(model)
        self._head._modules = {**model._modules, prefix: _GivenFeatures()}

    @classmethod
    def from_pretrained(
        cls,
        name: str,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> Target:
        """Loads a hub id, a local folder, a `.gguf` file or "default" (the bundled SmolLM2-135M).

        Args:
            dtype: None picks what is fast on the device (see `preferred_dtype`).
        Raises:
            ValueError: names the target and what was wrong with it.
        """
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        dtype = preferred_dtype(device) if dtype is None else parse_dtype(dtype)
        path = resolve_target(name)
        options = {"revision": revision, "trust_remote_code": trust_remote_code}
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, **options)
            model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **options)
        except (OSError, ValueError) as error:
            first_line = str(error).strip().splitlines()[0]
            raise ValueError(f"target {name}: cannot be loaded: {first_line}") from error
        return cls(model.to(device), tokenizer, name)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def vocab_size(self) -> int:
        """Width of the logits: padding of the vocabulary included."""
        return self.lm_head_weight.shape[0]

    @property
    def max_length(self) -> int:
        """Longest text in tokens, prompt and answer together."""
        return getattr(self.config, "max_position_embeddings", None) or 2**30

    @property
    def lm_head_weight(self) -> torch.Tensor:
        """float [V, D]."""
        return self.model.get_output_embeddings().weight

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every token that ends an answer, from the generation config, then the tokenizer."""
        ids: list[int] = []
        generation = getattr(self.model, "generation_config", None)
        for source in (generation, self.config, self.tokenizer):
            found = getattr(source, "eos_token_id", None)
            ids += found if isinstance(found, Iterable) else [] if found is None else [found]
        return tuple(dict.fromkeys(int(i) for i in ids))

    @property
    def identity(self) -> dict[str, Any]:
        """Hashes of weights, config, tokenizer and chat template: see `target_identity`."""
        return target_identity(self.model, self.tokenizer, self.name, self.vocab_size)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """E(x) [..., D] as the trunk sees it, the family's scaling included."""
        return self.model.get_input_embeddings()(input_ids)

    def features(self, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """f [B, T, D]: the last hidden state after the final norm.

        Args:
            input_ids: int64 [B, T].
            kwargs: attention_mask, position_ids, cache, use_cache, as the trunk takes them.
        """
        kwargs.setdefault("use_cache", kwargs.get("cache") is not None)
        return self.model.base_model(input_ids=input_ids, **kwargs).last_hidden_state

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """[..., V]: logits of p(x_{t+1} | x_≤t) from f_t; the only place the LM head is applied."""
        flat_1TD = features.reshape(1, -1, features.shape[-1])
        return self._head(inputs_embeds=flat_1TD).logits.reshape(*features.shape[:-1], -1)


def preferred_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 on CUDA and on CPUs with AMX or AVX512-BF16, float32 elsewhere.

    A CPU without those instructions converts on the way: a bf16 forward over 8 tokens then costs
    more than an fp32 one.
    """
    if device.type == "cuda":
        return torch.bfloat16
    probes = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    has_bf16 = any(getattr(torch.cpu, probe, lambda: False)() for probe in probes)
    return torch.bfloat16 if has_bf16 else torch.float32


def parse_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """A torch dtype from its name, e.g. "bfloat16"."""
    if isinstance(dtype, torch.dtype):
        return dtype
    known = {"float64": torch.float64, "float32": torch.float32}
    known |= {"bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype not in known:
        raise ValueError(f"dtype {dtype!r} is unknown; use one of {', '.join(known)}")
    return known[dtype]
