"""Every row is used, or counted under a named reason; a malformed row is an error that names it."""

import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_recipes.prompts import DROP_REASONS, read_prompts


def message(role, content):
    return {"role": role, "content": content}


U, A, S = message("user", "q"), message("assistant", "a"), message("system", "s")


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def read_one(tmp_path, row, **options):
    rows, dropped = read_prompts([write(tmp_path / "p.jsonl", [row])], **options)
    assert not dropped
    return rows[0]


SCHEMAS = {
    "messages": {"messages": [S, U, A, message("user", "r")]},
    "sharegpt": {
        "conversations": [
            {"from": "system", "value": "s"},
            {"from": "human", "value": "q"},
            {"from": "gpt", "value": "a"},
            {"from": "human", "value": "r"},
        ]
    },
    "prompt of messages": {"prompt": [S, U, A, message("user", "r")]},
}


@pytest.mark.parametrize("row", SCHEMAS.values(), ids=SCHEMAS)
def test_conversation_schemas_read_alike(tmp_path, row):
    read = read_one(tmp_path, row)
    assert list(read.messages) == [S, U, message("user", "r")]
    kept = read_one(tmp_path, row, keep_answers=True)
    assert list(kept.messages) == [S, U, A, message("user", "r")]


SINGLE = {
    "prompt": ({"prompt": "q", "completion": "a"}, "q"),
    "prompt alone": ({"prompt": "q"}, "q"),
    "completion of messages": ({"prompt": [U], "completion": [A]}, "q"),
    "instruction": ({"instruction": "do", "input": "this", "output": "a"}, "do\n\nthis"),
    "instruction without input": ({"instruction": "do", "input": "", "output": "a"}, "do"),
    "text parts": ({"messages": [message("user", [{"type": "text", "text": "q"}])]}, "q"),
}


@pytest.mark.parametrize("row, question", SINGLE.values(), ids=SINGLE)
def test_single_question_schemas(tmp_path, row, question):
    assert list(read_one(tmp_path, row).messages) == [message("user", question)]
    kept = read_one(tmp_path, row, keep_answers=True).messages
    has_answer = "completion" in row or "output" in row
    assert [m["content"] for m in kept] == [question] + ["a"] * has_answer


def test_a_system_column_goes_in_front(tmp_path):
    assert list(read_one(tmp_path, {"prompt": "q", "system": "s"}).messages) == [S, U]
    assert list(read_one(tmp_path, {"messages": [S, U], "system": "x"}).messages) == [S, U]


def test_rows_of_user_turns_only_read_as_they_are(tmp_path):
    row = {"id": "x/0", "source": "x", "category": "math", "messages": [U, U], "reference": "72"}
    read = read_one(tmp_path, row)
    assert (read.id, read.task, list(read.messages)) == ("x/0", "math", [U, U])


def test_task_comes_from_task_then_category_then_the_file_name(tmp_path):
    rows = [{"prompt": "a", "task": "t", "category": "c"}, {"prompt": "b", "category": "c"}]
    rows, _ = read_prompts([write(tmp_path / "stem.jsonl", [*rows, {"prompt": "d"}])])
    assert [row.task for row in rows] == ["t", "c", "stem"]


DROPPED = {
    "empty_user_turn": [{"prompt": "  "}, {"messages": [U, A, message("user", "")]}],
    "late_system_turn": [{"messages": [U, S]}, {"messages": [S, S, U]}],
    "missing_turn": [{"messages": [A, U]}, {"messages": [U, U, A]}, {"messages": [U, A, A]}],
    "no_user_turn": [{"messages": [S]}, {"messages": []}, {"messages": [A]}],
    "non_text_content": [{"messages": [message("user", [{"type": "image", "url": "x"}])]}],
    "tool_turn": [
        {"messages": [U, message("tool", "42"), A]},
        {"messages": [U, {**message("assistant", None), "tool_calls": [{"name": "f"}]}]},
        {
            "conversations": [
                {"from": "human", "value": "q"},
                {"from": "function_call", "value": ""},
            ]
        },
    ],
    "unknown_role": [{"messages": [message("narrator", "once")]}],
}


@pytest.mark.parametrize("reason", DROPPED)
def test_unusable_rows_are_counted_under_their_reason(tmp_path, reason):
    for row in DROPPED[reason]:
        rows, dropped = read_prompts([write(tmp_path / "p.jsonl", [row, {"prompt": "good"}])])
        assert dropped == {reason: 1}, row
        assert [m["content"] for m in rows[0].messages] == ["good"]


def test_an_empty_answer_drops_a_row_only_where_answers_are_kept(tmp_path):
    row = {"prompt": "q", "completion": " "}
    assert list(read_one(tmp_path, row).messages) == [U]
    _, dropped = read_prompts([write(tmp_path / "p.jsonl", [row])], keep_answers=True)
    assert dropped == {"empty_answer": 1}


def test_every_reason_is_documented_and_every_documented_one_is_tested():
    elsewhere = {"empty_answer", "duplicate_row", "over_limit"}
    assert set(DROPPED) | elsewhere == set(DROP_REASONS)


def test_used_and_dropped_rows_add_up(tmp_path):
    bad = [row for rows in DROPPED.values() for row in rows]
    path = write(tmp_path / "p.jsonl", [*bad, *({"prompt": f"q{i}"} for i in range(5))])
    rows, dropped = read_prompts([path], limit=3)
    assert len(rows) == 3 and dropped["over_limit"] == 2
    assert len(rows) + sum(dropped.values()) == len(bad) + 5


def test_a_limit_takes_evenly_from_all_sources(tmp_path):
    paths = [
        write(tmp_path / f"{name}.jsonl", [{"prompt": f"{name}{i}"} for i in range(count)])
        for name, count in (("a", 9), ("b", 1), ("c", 9))
    ]
    rows, _ = read_prompts(paths, limit=5)
    assert [row.messages[0]["content"] for row in rows] == ["a0", "b0", "c0", "a1", "c1"]


def test_repeated_rows_are_dropped_and_clashing_ids_refused(tmp_path):
    path = write(tmp_path / "p.jsonl", [{"id": "x", "prompt": "q"}] * 2)
    rows, dropped = read_prompts([path])
    assert len(rows) == 1 and dropped == {"duplicate_row": 1}
    write(tmp_path / "p.jsonl", [{"id": "x", "prompt": "q"}, {"id": "x", "prompt": "r"}])
    with pytest.raises(ValueError, match=r"p\.jsonl, row 2: the id 'x' .*p\.jsonl, row 1"):
        read_prompts([path])


def test_numbers_as_ids_do_not_clash_between_files(tmp_path):
    paths = [write(tmp_path / f"{n}.jsonl", [{"id": 0, "prompt": n}]) for n in ("a", "b")]
    rows, _ = read_prompts(paths)
    assert [row.id for row in rows] == ["a/0", "b/0"]


MALFORMED = {
    "not JSON": ('{"prompt": "q"', "not valid JSON"),
    "not UTF-8": (b'{"prompt": "\xff"}', "not UTF-8"),
    "not an object": ("[1]", "a row is an object, not list"),
    "no schema": ('{"text": "q"}', "none of the columns messages, conversations, prompt"),
    "prompt is a number": ('{"prompt": 3}', "prompt must be text, not int"),
    "messages is text": ('{"messages": "q"}', "messages must be a list of messages, not str"),
    "message is text": ('{"messages": ["q"]}', "message 1 of messages must be an object"),
    "no role": ('{"messages": [{"content": "q"}]}', "message 1 of messages has no role"),
    "no text": ('{"conversations": [{"from": "human"}]}', "message 1 of conversations has no text"),
    "content is a number": ('{"messages": [{"role": "user", "content": 1}]}', "must be text"),
    "task is a list": ('{"prompt": "q", "task": ["t"]}', "task must be text, not list"),
}


@pytest.mark.parametrize("line, message", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_row_is_an_error_that_names_file_and_row(tmp_path, line, message):
    line = line if isinstance(line, bytes) else line.encode()
    (tmp_path / "p.jsonl").write_bytes(b'{"prompt": "good"}\n\n' + line + b"\n")
    with pytest.raises(ValueError) as error:
        read_prompts([str(tmp_path / "p.jsonl")])
    assert str(error.value).startswith(f"{tmp_path / 'p.jsonl'}, row 3: ")
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["missing.jsonl", "no/such/file.txt", "missing.parquet"])
def test_a_missing_file_is_named(tmp_path, name):
    with pytest.raises(ValueError, match="no such file"):
        read_prompts([str(tmp_path / name)])


def test_parquet_and_json_arrays_read_like_jsonl(tmp_path):
    rows = [{"id": "a", "messages": [S, U]}, {"id": "b", "messages": [U, A]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    (tmp_path / "p.json").write_text(json.dumps(rows, indent=1))
    expected = [r.messages for r in read_prompts([write(tmp_path / "p.jsonl", rows)])[0]]
    for name in ("p.parquet", "p.json"):
        assert [r.messages for r in read_prompts([str(tmp_path / name)])[0]] == expected


def test_a_damaged_parquet_file_is_named(tmp_path):
    (tmp_path / "p.parquet").write_bytes(b"PAR1 but not really")
    with pytest.raises(ValueError, match=r"p\.parquet: not a readable Parquet file"):
        read_prompts([str(tmp_path / "p.parquet")])


def test_a_hub_data_set_is_read_by_name_and_split(monkeypatch):
    asked = []

    def load_dataset(name, split):
        asked.append((name, split))
        return datasets.Dataset.from_list([{"prompt": "q"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    rows, _ = read_prompts(["some/data"], split="train_sft")
    assert asked == [("some/data", "train_sft")] and rows[0].id == "data/row-1"


def test_a_hub_data_set_that_cannot_be_loaded_is_one_clear_line(monkeypatch):
    def load_dataset(name, split):
        raise RuntimeError("offline\nand a long story")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match="some/data: no such file.*'train': offline$"):
        read_prompts(["some/data"])
