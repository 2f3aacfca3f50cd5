"""The prompts that ship with the demo: form, spread over tasks, and held-out ones kept apart."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "data_recipes" / "demo_prompts"
TASKS = ("chat", "story", "explanation", "code", "arithmetic", "summarise")
PER_TASK = {"train": 100, "heldout": 10}
MAX_JACCARD = 0.6


def read(split: str) -> list[dict]:
    lines = (FOLDER / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9']+", text.lower())


def ngrams(text: str, size: int = 8) -> set[tuple[str, ...]]:
    found = words(text)
    return {tuple(found[i : i + size]) for i in range(len(found) - size + 1)}


def near_duplicates(texts: list[tuple[str, str]], others: list[tuple[str, str]]) -> list[str]:
    """Pairs (id, text) x (id, text) that share eight words in a row, or most of their words."""
    seen = [(name, set(words(text)), ngrams(text)) for name, text in others]
    found = []
    for id_a, text in texts:
        words_a, ngrams_a = set(words(text)), ngrams(text)
        for id_b, words_b, ngrams_b in seen:
            if id_a == id_b:
                continue
            jaccard = len(words_a & words_b) / len(words_a | words_b)
            if shared := ngrams_a & ngrams_b:
                found.append(f"{id_a} / {id_b}: both say {' '.join(min(shared))!r}")
            elif jaccard >= MAX_JACCARD:
                found.append(f"{id_a} / {id_b}: word-set Jaccard {jaccard:.2f}")
    return found


def id_and_text(rows: list[dict]) -> list[tuple[str, str]]:
    return [(row["id"], row["messages"][0]["content"]) for row in rows]


@pytest.mark.parametrize("split", PER_TASK)
def test_every_row_is_one_user_message_with_a_known_task(split):
    for row in read(split):
        assert set(row) == {"id", "task", "messages"}, row["id"]
        (message,) = row["messages"]
        assert set(message) == {"role", "content"} and message["role"] == "user", row["id"]
        assert message["content"].strip() == message["content"] != "", row["id"]


@pytest.mark.parametrize("split", PER_TASK)
def test_tasks_are_evenly_spread_in_the_file_and_in_its_beginning(split):
    tasks = [row["task"] for row in read(split)]
    assert Counter(tasks) == dict.fromkeys(TASKS, PER_TASK[split])
    assert Counter(tasks[:30]) == dict.fromkeys(TASKS, 5)


def test_ids_are_unique_over_both_files_and_name_the_task():
    rows = read("train") + read("heldout")
    assert max(Counter(row["id"] for row in rows).values()) == 1
    for row in rows:
        assert re.fullmatch(rf"(heldout-)?{row['task']}-\d{{3}}", row["id"]), row["id"]


@pytest.mark.parametrize("split", PER_TASK)
def test_prompts_are_short(split):
    for row in read(split):
        text = row["messages"][0]["content"]
        if row["task"] == "summarise":
            paragraph = max(text.split("\n\n"), key=len)
            assert 40 <= len(words(paragraph)) <= 90, row["id"]
        else:
            assert len(words(text)) <= 60, row["id"]


def test_no_heldout_prompt_is_a_near_duplicate_of_a_training_prompt():
    assert near_duplicates(id_and_text(read("heldout")), id_and_text(read("train"))) == []


@pytest.mark.parametrize("split", PER_TASK)
def test_prompts_of_one_file_are_no_near_duplicates(split):
    rows = id_and_text(read(split))
    assert near_duplicates(rows, rows) == []


def test_near_duplicates_are_found_by_shared_words_and_by_a_shared_phrase():
    original = ("a", "Tom has 45 marbles and gives nine of them away. How many does he keep?")
    new_number = ("b", "Tom has 46 marbles and gives eight of them away. How many does he keep?")
    same_phrase = ("c", "My aunt grows roses. She gives nine of them away. How many does he keep?")
    other = ("d", "Why is the sky blue?")
    found = near_duplicates([original], [original, new_number, same_phrase, other])
    assert [line.split(":")[0] for line in found] == ["a / b", "a / c"]
