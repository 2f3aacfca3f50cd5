"""A small real tokenizer, chat templates of the shapes found in the wild, and a target that answers
from a table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from data_recipes.chat import ChatTemplate
from data_recipes.conversation import Answer

CORPUS = [
    "user assistant system You are a helpful assistant. What is the answer? The answer is yes.",
    "Tell me a story about a lighthouse. Once upon a time there was a lighthouse keeper.",
    "[INST] hello [/INST] hello hello <think> </think> <<SYS>> USER ASSISTANT",
] * 3
SPECIAL = ["<|im_start|>", "<|im_end|>", "<s>", "</s>", "<|header|>", "<|/header|>", "<|eot|>"]
ENDS = ("<|im_end|>", "</s>", "<|eot|>")

TEMPLATES = {
    # SmolLM2: a system prompt of its own, no {% generation %} tags.
    "chatml": (
        "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}<|im_start|>system\n"
        "You are a helpful assistant<|im_end|>\n{% endif %}<|im_start|>{{ m['role'] }}\n"
        "{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    # Llama-2: no generation prompt; the answer follows the user's turn, with a space.
    "llama2": (
        "{% for m in messages %}{% if m['role'] == 'user' %}<s>[INST] {{ m['content'] | trim }} "
        "[/INST]{% elif m['role'] == 'assistant' %} {{ m['content'] | trim }} </s>"
        "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
    ),
    # Llama-3: trims every message, headers, one end token for every role.
    "llama3": (
        "<s>{% for m in messages %}<|header|>{{ m['role'] }}<|/header|>\n\n"
        "{{ m['content'] | trim }}<|eot|>{% endfor %}"
        "{% if add_generation_prompt %}<|header|>assistant<|/header|>\n\n{% endif %}"
    ),
    # Qwen3: strips the reasoning of all but the last answer; gives that one an empty think block.
    "qwen3": (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
        "{% if loop.last %}"
        "{% if '</think>' not in m['content'] %}<think>\n\n</think>\n\n{% endif %}"
        "{{ m['content'] }}{% else %}"
        "{{ m['content'].split('</think>')[-1].lstrip('\n') }}{% endif %}"
        "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if enable_thinking is defined and not enable_thinking %}"
        "<think>\n\n</think>\n\n{% endif %}{% endif %}"
    ),
    # Puts all that was said into one user turn.
    "merging": (
        "<|im_start|>user\n{% for m in messages %}{{ m['content'] }}\n{% endfor %}<|im_end|>\n"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    # Ends only the last answer.
    "late_end": (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
        "{% if loop.last %}<|im_end|>{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
}
# These go on otherwise than they began even after plain answers; qwen3 does so after reasoning.
REWRITING = ("merging", "late_end", "llama2")
WITHOUT_MARKER = {
    # ChatML whose author forgot the generation prompt: the model would have to write the header.
    "no_generation_prompt": (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
        "{% endfor %}"
    ),
    "plain_text": "{% for m in messages %}{{ m['content'] }}\n{% endfor %}",
}


def make_tokenizer(template: str | None, pad_is_eos: bool = True) -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(CORPUS, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>")
    tokenizer.pad_token = "<|im_end|>" if pad_is_eos else "<s>"
    tokenizer.chat_template = template
    return tokenizer


def make_template(name: str, **kwargs: Any) -> ChatTemplate:
    tokenizer = make_tokenizer(TEMPLATES[name])
    return ChatTemplate(tokenizer, tokenizer.convert_tokens_to_ids(list(ENDS)), "toy", **kwargs)


def supervised_texts(template: ChatTemplate, ids: list[int], mask: list[bool]) -> list[str]:
    """The text of every run of supervised tokens, found without the product's own search."""
    texts, run = [], []
    for token, supervised in [*zip(ids, mask, strict=True), (0, False)]:
        if supervised:
            run.append(token)
        elif run:
            texts.append(template.tokenizer.decode(run))
            run = []
    return texts


@dataclass
class ToyTarget:
    """What data generation asks of a target."""

    tokenizer: Any
    name: str = "toy"
    max_length: int = 512
    dtype: torch.dtype = torch.float32
    weights_hash: str = "w0"
    eos_token_ids: tuple[int, ...] = ()
    identity: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ids = self.tokenizer.convert_tokens_to_ids(list(ENDS))
        self.eos_token_ids = self.eos_token_ids or tuple(ids)
        self.identity = {
            "name": self.name,
            "weights_hash": self.weights_hash,
            "template_hash": ChatTemplate(self.tokenizer, ids).hash,
        }


class ToyAnswerer:
    """Answers by prompt and seed, last request first; keeps what it was asked.

    Args:
        fail_after: raises KeyboardInterrupt in the place of this answer, counted from 0.
    """

    def __init__(self, tokenizer: Any, end: str = "<|im_end|>", fail_after: int | None = None):
        self.tokenizer, self.end, self.fail_after = tokenizer, end, fail_after
        self.requests: list[tuple[list[int], Any]] = []
        self.said: list[list[int]] = []

    def __call__(self, requests):
        for index, (ids, params) in reversed(list(enumerate(requests))):
            if self.fail_after is not None and len(self.requests) >= self.fail_after:
                raise KeyboardInterrupt
            self.requests.append((ids, params))
            text = f"answer {params.seed % 1000} to {len(ids)} tokens"
            said = self.tokenizer.encode(text, add_special_tokens=False)
            ended = len(said) < params.max_new_tokens
            said = [*said, self.tokenizer.convert_tokens_to_ids(self.end)]
            said = said[: params.max_new_tokens]
            self.said.append(said)
            yield index, Answer(said, "eos" if ended else "length")
