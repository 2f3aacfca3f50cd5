"""Incremental text equals the whole text, and stop strings are found wherever they fall."""

from __future__ import annotations

import pytest
from tiny_tokenizer import tiny_tokenizer

from inference.text import TextStream

TEXT = "the café costs 5€. Stop here, please STOP now"


def feed(text: str, stop: tuple[str, ...] = (), block: int = 1) -> tuple[TextStream, list[str]]:
    tokenizer = tiny_tokenizer()
    stream, pieces = TextStream(tokenizer, stop), []
    ids = tokenizer(text)["input_ids"]
    for at in range(0, len(ids), block):
        for token in ids[at : at + block]:
            stream.push(token)
            if stream.stopped:
                break
        pieces.append(stream.release(finished=stream.stopped))
        if stream.stopped:
            return stream, pieces
    pieces.append(stream.release(finished=True))
    return stream, pieces


@pytest.mark.parametrize("block", [1, 2, 3, 7, 100])
def test_pieces_join_to_the_whole_text(block: int) -> None:
    stream, pieces = feed(TEXT, block=block)
    assert "".join(pieces) == stream.text == TEXT


def test_a_character_is_released_only_when_its_last_byte_is_there() -> None:
    _, pieces = feed("5€é", block=1)
    assert pieces == ["5", "", "", "€", "", "é", ""]


@pytest.mark.parametrize("block", [1, 2, 3, 5, 8, 100])
@pytest.mark.parametrize("stop", [("STOP",), ("€. S", "zzz"), (" now", "Stop"), ("é",), ("t",)])
def test_text_ends_before_the_first_stop_string(stop: tuple[str, ...], block: int) -> None:
    """R6: also where it begins in one block of tokens and ends in the next."""
    stream, pieces = feed(TEXT, stop, block)
    expected = TEXT[: min(at for s in stop if (at := TEXT.find(s)) >= 0)]
    assert stream.stopped and stream.text == "".join(pieces) == expected


def test_nothing_that_might_begin_a_stop_string_is_released() -> None:
    tokenizer = tiny_tokenizer()
    stream = TextStream(tokenizer, ("abcd",))
    released = []
    for token in tokenizer("xabcx abc")["input_ids"]:
        stream.push(token)
        released.append(stream.release(finished=False))
    assert released == ["x", "", "", "", "abcx", " ", "", "", ""]
    assert stream.release(finished=True) == "abc"


def test_an_unfinished_character_at_the_end_stays_visible() -> None:
    tokenizer = tiny_tokenizer()
    stream = TextStream(tokenizer)
    for token in tokenizer("a€")["input_ids"][:-1]:
        stream.push(token)
    assert stream.release(finished=True) == "a\ufffd"


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        TextStream(None, ("x",))
