"""No held-out prompt is near a training prompt."""

import itertools

import numpy as np
import pytest

from data_recipes.overlap import near_duplicates, prompt_text, without_overlap, words
from data_recipes.prompts import PromptRow

ORIGINAL = "Tom has 45 marbles and gives nine of them away. How many does he keep?"
NEAR = {
    "itself": ORIGINAL,
    "other case and punctuation": ORIGINAL.upper().replace(".", " --"),
    "other numbers": ORIGINAL.replace("45", "46").replace("nine", "eight"),
    "eight words in a row": "Roses! My aunt gives nine of them away. How many does he own?",
    "a longer text around it": f"{'Please read this carefully. ' * 30}{ORIGINAL}",
}
FAR = ["Why is the sky blue?", "Tom has marbles.", "", "gives nine of them away how many, or all"]


@pytest.mark.parametrize("text", NEAR.values(), ids=NEAR)
def test_near_duplicates_are_found(text):
    (found,) = near_duplicates([*FAR, text], ["Quite another prompt.", ORIGINAL])
    assert (found.index, found.other) == (len(FAR), 1) and found.reason


def test_other_prompts_are_not():
    assert near_duplicates(FAR, [ORIGINAL]) == [] and near_duplicates([ORIGINAL], []) == []


def test_short_prompts_are_compared_by_their_words():
    (found,) = near_duplicates(["Why is the sky so blue?"], ["why is the sky blue"])
    assert found.reason == "they share 83% of their words"


def test_the_index_agrees_with_comparing_every_pair():
    generator = np.random.default_rng(0)
    texts = [
        " ".join(f"w{i}" for i in generator.integers(0, 14, generator.integers(1, 14)))
        for _ in range(120)
    ]
    some, others = texts[:60], texts[60:]

    def near(a, b):
        a, b = words(a), words(b)
        grams = [{tuple(x[i : i + 8]) for i in range(len(x) - 7)} for x in (a, b)]
        return bool(grams[0] & grams[1]) or len({*a} & {*b}) >= 0.6 * len({*a} | {*b})

    expected = {i for i, a in enumerate(some) if any(near(a, b) for b in others)}
    assert {d.index for d in near_duplicates(some, others)} == expected
    assert 0 < len(expected) < 60
    assert all(near(some[d.index], others[d.other]) for d in near_duplicates(some, others))


def test_training_rows_near_held_out_ones_are_left_out_and_counted():
    def row(name, *texts):
        turns = [{"role": "user", "content": text} for text in texts]
        return PromptRow(name, ({"role": "system", "content": ORIGINAL}, *turns), "t")

    rows = [row("a", "Why is the sky blue?"), row("b", "Hello.", ORIGINAL), row("c", "Sing a song")]
    kept, count = without_overlap(rows, [row("h", ORIGINAL)])
    assert [r.id for r in kept] == ["a", "c"] and count == 1
    for held_out, training in itertools.product([row("h", ORIGINAL)], kept):
        assert not near_duplicates([prompt_text(training)], [prompt_text(held_out)])
