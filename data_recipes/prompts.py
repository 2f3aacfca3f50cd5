"""Prompt rows in the four common schemas; every row is used, or counted under a named reason.

    messages           {"messages": [{"role": "user", "content": "…"}, …]}
    ShareGPT           {"conversations": [{"from": "human", "value": "…"}, …]}
    prompt/completion  {"prompt": "…" or messages, "completion": "…" or messages}
    instruction        {"instruction": "…", "input": "…", "output": "…"}

The schema is the first of these that a row has a column of. A `system` column goes in front. A row
that does not have the form it claims (a message without a role, a prompt that is a number) is an
error; a row in good form that cannot be used is dropped under one of `DROP_REASONS`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_recipes.prompt_files import Place, iterate_rows, name_place

Message = dict[str, str]

ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant"}
ROLES |= {"user": "user", "assistant": "assistant", "system": "system"}
TOOL_ROLES = {"tool", "function", "function_call", "function_response", "observation", "ipython"}

DROP_REASONS = {
    "duplicate_row": "a row with the same id and the same messages came before",
    "empty_answer": "answers are kept, and one of them is empty",
    "empty_user_turn": "a user turn without text",
    "late_system_turn": "a system message that is not the first message",
    "missing_turn": "user and assistant do not take turns, though the row has answers",
    "no_user_turn": "nothing but system messages, or no message at all",
    "non_text_content": "a picture, sound or other part that is not text",
    "over_limit": "beyond the asked-for number of rows",
    "tool_turn": "a tool's call or result: its text belongs to an answer that is replaced",
    "unknown_role": "a role that is none of system, user, assistant, tool",
}


@dataclass(frozen=True)
class PromptRow:
    """A conversation to answer.

    Attributes:
        messages: an optional system message, then user turns; after a user turn its answer, where
            answers are kept.
        task: kind of task, from the row's `task` or `category`, else the file's name.
    """

    id: str
    messages: tuple[Message, ...]
    task: str


class Unusable(Exception):
    """A row in good form that cannot be used; carries a name from DROP_REASONS."""


def read_prompts(
    sources: Sequence[str],
    limit: int | None = None,
    split: str = "train",
    keep_answers: bool = False,
) -> tuple[list[PromptRow], Counter[str]]:
    """Reads prompt rows from files and hub data sets, one row of each in turn.

    Args:
        sources: .jsonl, .json or .parquet files, or hub ids.
        limit: rows to keep in all; None keeps every one. As the sources take turns, a limit takes
            evenly from all of them.
        split: split of hub data sets.
        keep_answers: keep the assistant turns of the input instead of removing them.
    Returns:
        (rows, dropped): how many rows were dropped, by reason.
    Raises:
        ValueError: names file and row: missing file, malformed row, one id on two different rows.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit = {limit}: must be 1 or more")
    rows: dict[str, PromptRow] = {}
    places: dict[str, Place] = {}
    dropped: Counter[str] = Counter()
    streams = [iterate_rows(source, split) for source in sources]
    for place, columns in (x for xs in itertools.zip_longest(*streams) for x in xs if x):
        try:
            row = parse_row(place, columns, keep_answers)
            if rows.get(row.id) == row:
                raise Unusable("duplicate_row")
            if row.id in rows:
                raise ValueError(
                    f"{name_place(place)}: the id {row.id!r} is also that of "
                    f"{name_place(places[row.id])}; give each row its own id, or none"
                )
            if limit is not None and len(rows) >= limit:
                raise Unusable("over_limit")
            rows[row.id], places[row.id] = row, place
        except Unusable as reason:
            dropped[str(reason)] += 1
    return list(rows.values()), dropped


def parse_row(place: Place, columns: dict[str, Any], keep_answers: bool = False) -> PromptRow:
    """One row in any of the schemas.

    Raises:
        ValueError: malformed; names file and row.
        Unusable: well-formed, but not to be used; names the reason.
    """
    try:
        for column, read in SCHEMAS.items():
            if columns.get(column) is not None:
                messages = read(columns)
                break
        else:
            raise _Malformed(
                f"none of the columns {', '.join(SCHEMAS)}; it has {', '.join(columns) or 'none'}"
            )
        system = columns.get("system")
        if system and not (messages and messages[0]["role"] == "system"):
            messages = [{"role": "system", "content": _text(system, "system")}, *messages]
        task = columns.get("task") or columns.get("category") or Path(place[0]).stem
        task = _text(task, "task")
        row_id = _row_id(place, columns.get("id"))
    except _Malformed as error:
        raise ValueError(f"{name_place(place)}: {error}") from error
    return PromptRow(row_id, tuple(_usable_turns(messages, keep_answers)), task)


def prompts_hash(rows: Sequence[PromptRow]) -> str:
    """Hash of ids and messages, in order."""
    text = json.dumps([[row.id, row.task, row.messages] for row in rows], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class _Malformed(Exception):
    """A row without the form it claims; the place is added where it is known."""


def _row_id(place: Place, given: Any) -> str:
    """The row's own id; a bare number, which many files count from 0, gets the file's name."""
    stem = Path(place[0]).stem
    if given is None:
        return f"{stem}/row-{place[1]}"
    if isinstance(given, int) and not isinstance(given, bool):
        return f"{stem}/{given}"
    return _text(given, "id")


def _usable_turns(messages: list[Message], keep_answers: bool) -> list[Message]:
    roles = [m["role"] for m in messages]
    for role in roles:
        if role in TOOL_ROLES:
            raise Unusable("tool_turn")
        if role not in ("system", "user", "assistant"):
            raise Unusable("unknown_role")
    if "user" not in roles:
        raise Unusable("no_user_turn")
    if "system" in roles[1:]:
        raise Unusable("late_system_turn")
    turns = [role for role in roles if role != "system"]
    if "assistant" in turns and turns != ["user", "assistant"] * (len(turns) // 2) + (
        ["user"] if len(turns) % 2 else []
    ):
        raise Unusable("missing_turn")
    if any(m["role"] == "user" and not m["content"].strip() for m in messages):
        raise Unusable("empty_user_turn")
    if not keep_answers:
        return [m for m in messages if m["role"] != "assistant"]
    if any(m["role"] == "assistant" and not m["content"].strip() for m in messages):
        raise Unusable("empty_answer")
    return messages


def _from_messages(columns: dict[str, Any]) -> list[Message]:
    return _messages(columns["messages"], "messages")


def _from_conversations(columns: dict[str, Any]) -> list[Message]:
    return _messages(columns["conversations"], "conversations")


def _from_prompt(columns: dict[str, Any]) -> list[Message]:
    sides = [("prompt", "user"), ("completion", "assistant")]
    return _sides([(columns.get(column), column, role) for column, role in sides])


def _from_instruction(columns: dict[str, Any]) -> list[Message]:
    parts = [_text(columns[c], c) for c in ("instruction", "input") if columns.get(c)]
    text = "\n\n".join(parts)
    return _sides([(text, "instruction", "user"), (columns.get("output"), "output", "assistant")])


SCHEMAS: dict[str, Callable[[dict[str, Any]], list[Message]]] = {
    "messages": _from_messages,
    "conversations": _from_conversations,
    "prompt": _from_prompt,
    "instruction": _from_instruction,
}


def _sides(sides: list[tuple[Any, str, str]]) -> list[Message]:
    messages = []
    for value, column, role in sides:
        if isinstance(value, list):
            messages += _messages(value, column)
        elif value is not None:
            messages.append({"role": role, "content": _text(value, column)})
    return messages


def _messages(value: Any, column: str) -> list[Message]:
    """Messages with `role` and `content`, or ShareGPT's `from` and `value`."""
    if not isinstance(value, list):
        raise _Malformed(f"{column} must be a list of messages, not {type(value).__name__}")
    messages = []
    for number, message in enumerate(value, 1):
        where = f"message {number} of {column}"
        if not isinstance(message, dict):
            raise _Malformed(f"{where} must be an object, not {type(message).__name__}")
        role = message.get("role") or message.get("from")
        if not isinstance(role, str):
            raise _Malformed(f"{where} has no role (`role`, or `from`)")
        role = ROLES.get(role.lower(), role.lower())
        if message.get("tool_calls"):
            role = "tool"
        if "content" not in message and "value" not in message:
            raise _Malformed(f"{where} has no text (`content`, or `value`)")
        content = message["content"] if message.get("content") is not None else message.get("value")
        messages.append({"role": role, "content": _content(content, where)})
    return messages


def _content(content: Any, where: str) -> str:
    """A string; a list of text parts is joined."""
    if content is None:
        return ""
    if isinstance(content, list):
        if not all(isinstance(part, dict) and "type" in part for part in content):
            raise _Malformed(f"{where}: a part of its content has no type")
        if any(part["type"] != "text" for part in content):
            raise Unusable("non_text_content")
        return "".join(_text(part.get("text"), where) for part in content)
    return _text(content, where)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise _Malformed(f"{where} must be text, not {type(value).__name__}")
    return value
