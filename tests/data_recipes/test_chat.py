"""Templates are checked before use, and a mask is proven by another way than it was built."""

import pytest

from data_recipes.chat import ChatTemplate, supervised_spans
from tests.data_recipes.toy_chat import (
    ENDS,
    TEMPLATES,
    WITHOUT_MARKER,
    make_template,
    make_tokenizer,
)

MARKERS = {
    "chatml": "<|im_start|>assistant\n",
    "llama2": " [/INST]",
    "llama3": "<|header|>assistant<|/header|>\n\n",
    "qwen3": "<|im_start|>assistant\n",
    "merging": "<|im_start|>assistant\n",
    "late_end": "<|im_start|>assistant\n",
}


def question(text="What is the answer?"):
    return [{"role": "user", "content": text}]


def answer(text):
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_assistant_marker_is_found_in_the_rendering(name):
    template = make_template(name)
    assert template.assistant_marker == MARKERS[name]
    assert template.opening(question()).endswith(MARKERS[name])


@pytest.mark.parametrize("name", WITHOUT_MARKER)
def test_a_template_without_an_assistant_marker_is_refused(name):
    tokenizer = make_tokenizer(WITHOUT_MARKER[name])
    with pytest.raises(ValueError, match="of toy: nothing marks where an answer begins"):
        ChatTemplate(tokenizer, [1], "toy")


def test_a_tokenizer_without_a_template_is_refused():
    with pytest.raises(ValueError, match="toy has no chat template"):
        ChatTemplate(make_tokenizer(None), [1], "toy")
    with pytest.raises(ValueError, match="toy has no chat template"):
        ChatTemplate(None, [1], "toy")


def test_a_template_that_fails_on_a_question_is_refused():
    tokenizer = make_tokenizer("{{ raise_exception('needs tools') }}")
    with pytest.raises(ValueError, match="fails on a single question: needs tools"):
        ChatTemplate(tokenizer, [1], "toy")


def test_template_kwargs_reach_the_template():
    template = make_template("qwen3", template_kwargs={"enable_thinking": False})
    assert template.assistant_marker == "<|im_start|>assistant\n<think>\n\n</think>\n\n"


@pytest.mark.parametrize("name, end", [("chatml", "<|im_end|>"), ("llama3", "<|eot|>")])
def test_a_given_answer_is_its_text_and_its_end_token(name, end):
    template = make_template(name)
    ids = template.given_answer(question(), answer("The answer is yes."))
    assert template.tokenizer.decode(ids) == "The answer is yes." + end
    assert ids[-1] == template.tokenizer.convert_tokens_to_ids(end)


def test_a_given_answer_behind_a_space_keeps_it():
    template = make_template("llama2")
    ids = template.given_answer(question(), answer("yes"))
    assert template.tokenizer.decode(ids) == " yes </s>"


@pytest.mark.parametrize(
    "name, text",
    [
        ("qwen3", "yes"),  # an empty think block is put before it
        ("llama3", " padded "),  # trimmed
        ("chatml", "first<|im_end|>second"),  # spells an end token
        ("merging", "yes"),
    ],
)
def test_a_given_answer_that_is_shown_otherwise_is_refused(name, text):
    assert make_template(name).given_answer(question(), answer(text)) is None


def test_an_answer_with_its_reasoning_is_taken_as_it_is():
    ids = make_template("qwen3").given_answer(question(), answer("<think>\nhm\n</think>\n\nyes"))
    assert make_template("qwen3").decode(ids) == "<think>\nhm\n</think>\n\nyes<|im_end|>"


def proven(template, pieces):
    ids, mask = [], []
    for text, supervised in pieces:
        piece = template.encode(text)
        ids += piece
        mask += [supervised] * len(piece)
    template.prove(ids, mask, "r7")


PROMPT = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
NEXT = "\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
GOOD = [(PROMPT, False), ("hello<|im_end|>", True), (NEXT, False), ("a story", True)]


def test_a_right_mask_is_proven(chatml):
    proven(chatml, GOOD)


WRONG = {
    "nothing supervised": ([(PROMPT + "hello<|im_end|>", False)], "no token is supervised"),
    "all supervised": ([(PROMPT + "hello<|im_end|>", True)], "the prompt is supervised"),
    "user turn supervised": (
        [("<|im_start|>user\n", False), ("hello", True), (NEXT, False), ("yes", True)],
        "the prompt is supervised",
    ),
    "one token early": (
        [(PROMPT[:-1], False), ("\nhello<|im_end|>", True)],
        "the prompt is supervised",
    ),
    "one token late": (
        [(PROMPT + "hello", False), (" world<|im_end|>", True)],
        "the prompt is supervised",
    ),
    "second answer late": (
        [*GOOD[:2], (NEXT + "a", False), (" story<|im_end|>", True)],
        "the prompt is supervised",
    ),
    "runs on after the end": (
        [(PROMPT, False), ("hello<|im_end|>\n", True), (NEXT[1:], False), ("yes", True)],
        "the answer ended before it",
    ),
    "context between answers supervised": (
        [(PROMPT, False), ("hello<|im_end|>" + NEXT + "yes", True)],
        "the answer ended before it",
    ),
}


@pytest.mark.parametrize("pieces, message", WRONG.values(), ids=WRONG)
def test_a_wrong_mask_is_an_error_that_names_template_and_row(chatml, pieces, message):
    with pytest.raises(ValueError, match=message) as error:
        proven(chatml, pieces)
    assert "row r7" in str(error.value) and chatml.hash in str(error.value)


def test_supervised_spans_are_runs_of_true():
    mask = [False, True, True, False, False, True]
    assert supervised_spans(mask) == [(1, 3), (5, 6)]
    assert supervised_spans([True]) == [(0, 1)] and supervised_spans([]) == []


def test_end_tokens_of_the_toys_are_single_tokens():
    tokenizer = make_tokenizer(TEMPLATES["chatml"])
    assert all(len(tokenizer.encode(end, add_special_tokens=False)) == 1 for end in ENDS)
