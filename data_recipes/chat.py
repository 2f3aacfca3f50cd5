"""Chat template → token ids, turn by turn, and the proof that a loss mask covers the answers.

Nothing here searches for a message's text in the rendered conversation, and no template has to
mark its answers: the conversation is rendered up to each answer, and a rendering must begin with
all that was rendered before it. What a template appends is then known exactly; a template that
rewrites what it has said before (Qwen3 strips the reasoning of earlier turns) is noticed, because
the longer rendering does not begin with the shorter one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from jinja2 import TemplateError

from data_recipes.prompts import Message
from drafters.identity import template_hash

# Stand for a user's text and an answer in the check of a template; no template contains them.
PROBE_QUESTION, PROBE_ANSWER = "zq7question", "zq7answer"


class ChatTemplate:
    """The chat template of a target.

    Args:
        tokenizer: a HF tokenizer with a chat template.
        eos_token_ids: tokens that end an answer.
        name: the target's name, for messages.
        template_kwargs: variables for the template, e.g. {"enable_thinking": False}.
    Raises:
        ValueError: if there is no chat template, or it does not mark where an answer begins.
    """

    def __init__(
        self,
        tokenizer: Any,
        eos_token_ids: Iterable[int],
        name: str = "target",
        template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        if getattr(tokenizer, "chat_template", None) is None:
            raise ValueError(
                f"{name} has no chat template, so nothing tells its answers from the prompts; use "
                "a chat model, or give its tokenizer a chat_template"
            )
        self.tokenizer, self.eos_token_ids = tokenizer, frozenset(eos_token_ids)
        self.template_kwargs = dict(template_kwargs or {})
        self.hash = template_hash(tokenizer)
        self.name = f"chat template {self.hash} of {name}"
        self.assistant_marker = self._find_marker()
        # Tokens decoded in front of an answer to find the marker; more, as its first may be merged.
        self._marker_window = len(self.encode(self.assistant_marker)) + 8

    def render(self, messages: Sequence[Message], open_answer: bool) -> str:
        """The conversation as text; `open_answer` adds what makes the model answer.

        Raises:
            jinja2.TemplateError: if the template refuses the messages.
        """
        return self.tokenizer.apply_chat_template(
            list(messages),
            tokenize=False,
            add_generation_prompt=open_answer,
            **self.template_kwargs,
        )

    def encode(self, text: str) -> list[int]:
        """Token ids; the template writes its own BOS, so none is added."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def opening(self, messages: Sequence[Message]) -> str:
        """The text up to the place where the next answer begins."""
        return self.render(messages, open_answer=True)

    def answer_message(self, answer_ids: Sequence[int]) -> Message:
        """An answer's tokens as the message that later turns see."""
        body = answer_ids[:-1] if self.ends(answer_ids) else answer_ids
        return {"role": "assistant", "content": self.decode(body)}

    def ends(self, answer_ids: Sequence[int]) -> bool:
        return bool(answer_ids) and answer_ids[-1] in self.eos_token_ids

    def continuation(
        self, opening: str, answer: Message, answer_ids: Sequence[int], next_opening: str
    ) -> list[int] | None:
        """Token ids between an answer and the next one, in a text that goes on unchanged.

        Args:
            opening: the text before the answer. answer, answer_ids: the answer.
            next_opening: the text up to the following answer.
        Returns:
            The ids to append; None if the template rewrites what came before, or does not go on
            with the end token that the answer has: then the next answer needs a row of its own.
        """
        said = opening + answer["content"]
        if not next_opening.startswith(said):
            return None
        ids = self.encode(next_opening[len(said) :])
        if not self.ends(answer_ids):
            return ids
        return ids[1:] if ids[:1] == [answer_ids[-1]] else None

    def given_answer(self, messages: Sequence[Message], answer: Message) -> list[int] | None:
        """Token ids of an answer that the input gives, with the end token the template writes.

        Returns:
            None if the template shows the answer otherwise than it is (drops its reasoning, puts
            an empty think block before it), or the answer spells an end token: no mask would then
            cover exactly the answer.
        """
        opening, content = self.opening(messages), answer["content"]
        closed = self.render([*messages, answer], open_answer=False)
        if not closed.startswith(opening):
            return None
        rest = closed[len(opening) :]
        lead = rest[: len(rest) - len(rest.lstrip())] if not rest.startswith(content) else ""
        if not rest.startswith(lead + content):
            return None
        ids = self._encode_after(opening, lead + content)
        if self.eos_token_ids.intersection(ids):
            return None
        tail = self.encode(rest[len(lead + content) :])
        blank = list(itertools.takewhile(lambda i: not self.decode([i]).strip(), tail))
        end = tail[len(blank) : len(blank) + 1]
        return ids + blank + end if end and end[0] in self.eos_token_ids else ids

    def prove(self, input_ids: Sequence[int], loss_mask: Sequence[bool], row: str) -> None:
        """Checks a finished row by another way than it was built.

        Raises:
            ValueError: names template and row: nothing supervised; a prompt token supervised (an
                answer that does not begin right behind the assistant marker); tokens supervised
                behind an end token.
        """
        where = f"row {row} ({self.name})"
        if len(input_ids) != len(loss_mask):
            raise ValueError(f"{where}: {len(input_ids)} tokens, {len(loss_mask)} mask values")
        spans = supervised_spans(loss_mask)
        if not spans:
            raise ValueError(f"{where}: no token is supervised")
        for start, end in spans:
            before = self.decode(input_ids[max(0, start - self._marker_window) : start])
            if not before.endswith(self.assistant_marker):
                raise ValueError(
                    f"{where}: token {start} is supervised as an answer's first, but "
                    f"{self.assistant_marker!r} does not stand before it: the prompt is supervised"
                )
            inside = [i for i in range(start, end - 1) if input_ids[i] in self.eos_token_ids]
            if inside:
                raise ValueError(
                    f"{where}: token {inside[0] + 1} is supervised, but the answer ended before it"
                )

    def _encode_after(self, opening: str, text: str) -> list[int]:
        """Ids of `text` behind `opening`: as in one text where the tokens do not merge across the
        border, else on its own, as a model that continues the opening must write it."""
        before, whole = self.encode(opening), self.encode(opening + text)
        return whole[len(before) :] if whole[: len(before)] == before else self.encode(text)

    def _find_marker(self) -> str:
        """What stands between a user's text and the answer, and only there.

        A template's generation prompt, or, where asking for one changes nothing (Llama-2), what
        ends the user's turn, if the answer follows directly.
        """
        question = [{"role": "user", "content": PROBE_QUESTION}]
        answer = {"role": "assistant", "content": PROBE_ANSWER}
        try:
            closed, opening = self.render(question, False), self.render(question, True)
            answered = self.render([*question, answer], False)
        except TemplateError as error:
            raise ValueError(f"{self.name}: fails on a single question: {error}") from error
        if opening != closed and opening.startswith(closed):
            return opening[len(closed) :]
        marker = opening.rpartition(PROBE_QUESTION)[2]
        follows = answered.startswith(opening) and answered[len(opening) :].lstrip()
        if marker.strip() and follows and follows.startswith(PROBE_ANSWER):
            return marker
        raise ValueError(
            f"{self.name}: nothing marks where an answer begins: add_generation_prompt changes "
            "nothing, and the answer does not follow the user's turn directly; use a template with "
            "a generation prompt"
        )


def supervised_spans(loss_mask: Sequence[bool]) -> list[tuple[int, int]]:
    """[start, end) of every run of supervised tokens."""
    spans, start = [], 0
    for supervised, run in itertools.groupby(loss_mask, bool):
        end = start + len(list(run))
        if supervised:
            spans.append((start, end))
        start = end
    return spans
