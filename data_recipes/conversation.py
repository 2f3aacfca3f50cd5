"""One conversation on its way through the target: what is asked next, and the rows it becomes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from jinja2 import TemplateError

from data_recipes.chat import ChatTemplate
from data_recipes.prompts import Message, PromptRow

DROP_REASONS = {
    "prompt_too_long": "prompt as long as the context or longer: no room for an answer",
    "template_refused": "the chat template refuses the messages",
    "answer_not_as_given": "a given answer is rendered differently, or spells an end token",
}


@dataclass(frozen=True)
class Answer:
    """What the target said.

    Attributes:
        token_ids: as generated, the end token included.
        finish_reason: "eos", "length" or "stop"; "given" for an answer of the input.
    """

    token_ids: list[int]
    finish_reason: str


@dataclass
class AnsweredRow:
    """A stored row: a text in tokens, and which of them are the target's own.

    Attributes:
        id: the prompt row's id; with `#turn-N` where a conversation became several rows.
        loss_mask: True where the token belongs to an answer, its end token included.
        seeds, finish_reasons: one for each answer in the row.
    """

    id: str
    task: str
    input_ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)

    def append(self, token_ids: list[int], supervised: bool) -> None:
        self.input_ids += token_ids
        self.loss_mask += [supervised] * len(token_ids)


class Conversation:
    """Answers a prompt row turn by turn.

    `prompt` holds the token ids that the target must answer now, None when there is nothing left;
    `take` takes the answer. Answers that the row itself gives are taken without asking.

    As long as the template only appends, the conversation is one row. Where it rewrites what came
    before, the row ends and the next answer gets a row of its own, behind the history as the target
    sees it then: unsupervised, so that nothing rewritten is ever trained on.

    Attributes:
        rows: what there is to store.
        end_reason: a name from DROP_REASONS if the conversation ended before its last turn.
    """

    def __init__(
        self, row: PromptRow, template: ChatTemplate, max_length: int, global_seed: int
    ) -> None:
        self.row, self.template, self.max_length = row, template, max_length
        self.global_seed = global_seed
        self.rows: list[AnsweredRow] = []
        self.end_reason: str | None = None
        self.prompt: list[int] | None = None
        self.turn = 0
        self._waiting = list(row.messages)
        self._history: list[Message] = []
        self._opening = ""
        self._last: tuple[Message, list[int]] | None = None
        # The row that the next answer goes into, and the unsupervised tokens it adds before it.
        self._pending: tuple[AnsweredRow, list[int]] = (AnsweredRow(row.id, row.task), [])
        self._advance()

    @property
    def seed(self) -> int:
        """Seed of the answer that is asked for now."""
        return answer_seed(self.global_seed, self.row.id, self.turn)

    def take(self, answer: Answer) -> None:
        """The target's answer to `prompt`."""
        assert self.prompt is not None and answer.token_ids
        self._store(self.template.answer_message(answer.token_ids), answer)
        self._advance()

    def _advance(self) -> None:
        """Goes on to the next turn that the target must answer."""
        self.prompt = None
        try:
            while self._waiting and self.end_reason is None:
                self._open_turn()
                given = self._waiting[0] if self._waiting else None
                if self.end_reason or given is None or given["role"] != "assistant":
                    return
                self._take_given(self._waiting.pop(0))
        except TemplateError:
            self._end("template_refused")

    def _open_turn(self) -> None:
        while self._waiting and self._waiting[0]["role"] == "system":
            self._history.append(self._waiting.pop(0))
        self._history.append(self._waiting.pop(0))
        self.turn += 1
        opening = self.template.opening(self._history)
        added = None
        if self._last is not None:
            added = self.template.continuation(self._opening, *self._last, opening)
        if added is None:
            self._start_row(self.template.encode(opening))
        else:
            self._pending = (self.rows[-1], added)
        self._opening = opening
        row, added = self._pending
        self.prompt = row.input_ids + added
        if len(self.prompt) >= self.max_length:
            self._end("prompt_too_long")

    def _start_row(self, prompt: list[int]) -> None:
        name = self.row.id if not self.rows else f"{self.row.id}#turn-{self.turn}"
        self._pending = (AnsweredRow(name, self.row.task), prompt)

    def _take_given(self, message: Message) -> None:
        assert self.prompt is not None
        ids = self.template.given_answer(self._history, message)
        if ids is None:
            self._end("answer_not_as_given")
        elif len(self.prompt) + len(ids) > self.max_length:
            self._end("prompt_too_long")
        else:
            self._store(message, Answer(ids, "given"))

    def _store(self, message: Message, answer: Answer) -> None:
        row, added = self._pending
        if not self.rows or self.rows[-1] is not row:
            self.rows.append(row)
        row.append(added, supervised=False)
        row.append(answer.token_ids, supervised=True)
        row.seeds.append(self.seed)
        row.finish_reasons.append(answer.finish_reason)
        self._history.append(message)
        self._last = (message, answer.token_ids)

    def _end(self, reason: str) -> None:
        self.end_reason, self.prompt = reason, None


def answer_seed(global_seed: int, row_id: str, turn: int) -> int:
    """Seed of one answer, in [0, 2^63): a function of these three and of nothing else."""
    digest = hashlib.sha256(f"{global_seed}\0{row_id}\0{turn}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
