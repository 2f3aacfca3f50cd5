"""Conversations become rows in which exactly the answers are supervised (cases D1, D2, D3, D7)."""

import pytest

from data_recipes.conversation import Answer, Conversation, answer_seed
from data_recipes.prompts import PromptRow
from tests.data_recipes.toy_chat import (
    REWRITING,
    TEMPLATES,
    make_template,
    make_tokenizer,
    supervised_texts,
)

END = {"llama2": "</s>", "llama3": "<|eot|>"}
QUESTIONS = ("hello", "Tell me a story.", "What is the answer?")


def user(*texts):
    return tuple({"role": "user", "content": text} for text in texts)


def answered(template, messages, answers, max_length=512, row_id="r"):
    """The conversation after the target said `answers` (texts or token ids)."""
    conversation = Conversation(PromptRow(row_id, tuple(messages), "t"), template, max_length, 0)
    for said in answers:
        assert conversation.prompt is not None
        ids = template.encode(said) if isinstance(said, str) else said
        conversation.take(Answer(ids, "eos" if template.ends(ids) else "length"))
    assert conversation.prompt is None
    return conversation


def proven_texts(conversation):
    """Supervised texts of each row; every row passes the independent proof."""
    template = conversation.template
    for row in conversation.rows:
        template.prove(row.input_ids, row.loss_mask, row.id)
    return [supervised_texts(template, row.input_ids, row.loss_mask) for row in conversation.rows]


@pytest.mark.parametrize("name", TEMPLATES)
def test_supervised_tokens_are_exactly_the_answers_and_their_end_tokens_for_each_turn(name):
    template, end = make_template(name), END.get(name, "<|im_end|>")
    answers = [f"{text}{end}" for text in ("hello hello", "Once upon a time", "yes")]
    texts = proven_texts(answered(template, user(*QUESTIONS), answers))
    assert [text for row in texts for text in row] == answers
    assert len(texts) == (3 if name in REWRITING else 1)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("cut", [False, True], ids=["ended", "cut at the limit"])
def test_every_answer_stands_behind_the_text_the_target_sees_when_serving(name, cut):
    """What stands before an answer is the rendering of the turns before it, made here in one go."""
    template, end = make_template(name), "" if cut else END.get(name, "<|im_end|>")
    conversation = answered(template, user(*QUESTIONS), [f"a{i}{end}" for i in range(3)])
    seen = []
    for row in conversation.rows:
        mask = [False, *row.loss_mask]
        starts = [i for i in range(len(row.loss_mask)) if mask[i + 1] and not mask[i]]
        seen += [template.tokenizer.decode(row.input_ids[:start]) for start in starts]
    for turn, text in enumerate(seen):
        history = []
        for i in range(turn):
            history += [*user(QUESTIONS[i]), {"role": "assistant", "content": f"a{i}"}]
        assert text == template.render([*history, *user(QUESTIONS[turn])], open_answer=True)
    assert len(seen) == 3


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_user_turn_that_equals_the_answer_does_not_move_the_mask(name):
    template, end = make_template(name), END.get(name, "<|im_end|>")
    messages = user("yes", "yes", "the answer is yes")
    texts = proven_texts(answered(template, messages, [f"yes{end}"] * 3))
    assert [text for row in texts for text in row] == [f"yes{end}"] * 3
    rows = answered(template, messages, [f"yes{end}"] * 3).rows
    assert sum(sum(row.loss_mask) for row in rows) == 3 * len(template.encode(f"yes{end}"))


def test_masks_do_not_depend_on_whether_pad_and_end_are_one_token():
    rows = []
    for pad_is_eos in (True, False):
        template = make_template("chatml")
        template.tokenizer = make_tokenizer(TEMPLATES["chatml"], pad_is_eos)
        conversation = answered(template, user("hello"), ["yes<|im_end|>"])
        rows.append((conversation.rows[0].input_ids, conversation.rows[0].loss_mask))
    assert rows[0] == rows[1]
    ids, mask = rows[0]
    assert mask[-1] and ids[-1] == template.tokenizer.eos_token_id


def test_reasoning_stripped_from_history_splits_the_conversation():
    template = make_template("qwen3")
    answers = ["<think>\nhm\n</think>\n\nyes<|im_end|>", "<think>\nso\n</think>\n\nno<|im_end|>"]
    conversation = answered(template, user("hello", "hello"), answers)
    assert proven_texts(conversation) == [[answers[0]], [answers[1]]]
    assert [row.id for row in conversation.rows] == ["r", "r#turn-2"]
    assert "hm" not in template.decode(conversation.rows[1].input_ids)


def test_an_empty_think_block_is_context_and_the_answer_supervised():
    template = make_template("qwen3", template_kwargs={"enable_thinking": False})
    conversation = answered(template, user("hello", "hello"), ["yes<|im_end|>", "no<|im_end|>"])
    assert proven_texts(conversation) == [["yes<|im_end|>"], ["no<|im_end|>"]]


def test_token_ids_stay_as_generated():
    """The answer is spelled byte by byte: tokenising its text again would give other ids."""
    template = make_template("chatml")
    spelled = [template.encode(letter)[0] for letter in "answer"]
    end = template.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert template.encode("answer") != spelled
    row = answered(template, user("hello", "hello"), [[*spelled, end], "yes<|im_end|>"]).rows[0]
    start = row.loss_mask.index(True)
    assert row.input_ids[start : start + 7] == [*spelled, end]


def test_an_answer_cut_at_the_limit_has_no_end_token_supervised():
    template = make_template("chatml")
    conversation = answered(template, user("hello", "hello"), ["Once upon", "yes<|im_end|>"])
    assert proven_texts(conversation) == [["Once upon", "yes<|im_end|>"]]
    text = template.decode(conversation.rows[0].input_ids)
    assert "Once upon<|im_end|>\n<|im_start|>user" in text


def test_an_answer_cut_inside_a_character_keeps_its_bytes():
    template = make_template("chatml")
    cut = template.encode("é")[:1]
    row = answered(template, user("hello", "hello"), [cut, "yes<|im_end|>"]).rows[0]
    assert row.input_ids[row.loss_mask.index(True)] == cut[0]


def test_an_end_token_the_template_does_not_write_splits_the_conversation():
    """Two end tokens: the target used the one that its template does not put after answers."""
    template = make_template("llama3")
    conversation = answered(template, user("hello", "hello"), ["yes</s>", "no<|eot|>"])
    assert proven_texts(conversation) == [["yes</s>"], ["no<|eot|>"]]
    assert "</s>" not in template.decode(conversation.rows[1].input_ids)


def test_an_answer_the_template_trims_splits_the_conversation():
    template = make_template("llama3")
    conversation = answered(template, user("hello", "hello"), ["yes \n<|eot|>", "no<|eot|>"])
    assert proven_texts(conversation) == [["yes \n<|eot|>"], ["no<|eot|>"]]


def test_an_answer_that_is_only_an_end_token_is_supervised():
    conversation = answered(make_template("chatml"), user("hello"), ["<|im_end|>"])
    assert proven_texts(conversation) == [["<|im_end|>"]]


def test_a_prompt_as_long_as_the_context_is_dropped_under_its_name():
    template = make_template("chatml")
    length = len(template.encode(template.opening(user("hello"))))
    fits = answered(template, user("hello"), ["<|im_end|>"], max_length=length + 1)
    assert fits.end_reason is None and len(fits.rows) == 1
    too_long = answered(template, user("hello"), [], max_length=length)
    assert too_long.end_reason == "prompt_too_long" and too_long.rows == []


def test_a_later_turn_past_the_context_keeps_the_answers_before_it():
    conversation = answered(
        make_template("chatml"), user("hello", "hello " * 60), ["yes<|im_end|>"], max_length=60
    )
    assert conversation.end_reason == "prompt_too_long"
    assert proven_texts(conversation) == [["yes<|im_end|>"]]


def test_messages_the_template_refuses_are_named():
    system = {"role": "system", "content": "s"}
    conversation = answered(make_template("llama2"), [system, *user("hello")], [])
    assert conversation.end_reason == "template_refused" and conversation.rows == []


def test_given_answers_are_kept_and_only_the_missing_ones_asked_for():
    template = make_template("chatml")
    messages = [*user("hello"), {"role": "assistant", "content": "given"}, *user("hello")]
    conversation = answered(template, messages, ["asked<|im_end|>"])
    assert proven_texts(conversation) == [["given<|im_end|>", "asked<|im_end|>"]]
    assert conversation.rows[0].finish_reasons == ["given", "eos"]


def test_a_given_answer_shown_otherwise_ends_the_conversation_under_its_name():
    messages = [*user("hello"), {"role": "assistant", "content": "yes"}]
    conversation = answered(make_template("qwen3"), messages, [])
    assert conversation.end_reason == "answer_not_as_given" and conversation.rows == []


def test_a_given_answer_past_the_context_is_not_cut():
    messages = [*user("hello"), {"role": "assistant", "content": "yes " * 50}]
    conversation = answered(make_template("chatml"), messages, [], max_length=60)
    assert conversation.end_reason == "prompt_too_long" and conversation.rows == []


def test_seeds_differ_by_global_seed_row_and_turn_and_by_nothing_else():
    seeds = {answer_seed(s, row, turn) for s in (0, 1) for row in ("a", "b") for turn in (1, 2)}
    assert len(seeds) == 8 and all(0 <= seed < 2**63 for seed in seeds)
    # Stored rows name their seeds: the function must never change.
    assert answer_seed(0, "a", 1) == 6421629770881614306
