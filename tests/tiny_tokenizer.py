"""A byte-level tokenizer without merges, made on the spot: one token a byte."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIALS = ("<pad>", "<s>", "</s>")
CHATML = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}</s>\n"
    "{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def tiny_tokenizer(size: int | None = None) -> PreTrainedTokenizerFast:
    """All 256 bytes after three special tokens; `size` keeps only the first so many tokens.

    Letters and the bytes of "é" and "€" come first, so that a small vocabulary has them.
    """
    byte_of = {c: b for b, c in zip(_byte_order(), _byte_characters(), strict=True)}
    characters = sorted(byte_of, key=lambda c: _rank(byte_of[c]))
    vocab = {token: i for i, token in enumerate([*SPECIALS, *characters][:size])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=CHATML,
    )


def _byte_order() -> list[int]:
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return kept + [b for b in range(256) if b not in kept]


def _byte_characters() -> list[str]:
    """GPT-2's printable character for each byte of `_byte_order`."""
    printable = [chr(b) for b in _byte_order()[:188]]
    return printable + [chr(256 + i) for i in range(68)]


def _rank(byte: int) -> tuple[int, int]:
    first = "abcdefghijklmnopqrstuvwxyz \n.,!?é€".encode()
    return (first.index(byte), 0) if byte in first else (len(first), byte)
