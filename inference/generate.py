"""The Python API: prompts in, the target's own text out, faster.

engine = SpeculativeEngine.from_pretrained("default", "path/to/drafter")
answer = engine.generate([{"role": "user", "content": "Tell me a story."}], SamplingParams())
print(answer.text, answer.stats.tau)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from drafters.checkpoint import load_drafter
from drafters.target import Target
from inference.engine import DecodingRun, SourceFactory
from inference.forward import TargetForward
from inference.proposers import Proposer, build_proposer
from inference.randomness import KeyedSource
from inference.row import Generation
from inference.sampling import SamplingParams
from inference.selftest import check_tree_forward
from inference.tree import TokenTree

Prompt = str | Sequence[int] | Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Piece:
    """A part of a streamed answer; the last one carries the whole Generation."""

    text: str
    token_ids: list[int]
    generation: Generation | None = None


class SpeculativeEngine:
    """Decodes with a target and, if given, a proposer that guesses ahead.

    Args:
        proposer: None decodes plainly, one token a forward.
        batch_size: rows that are decoded side by side in `generate` of several prompts.
        pack_weights: see `TargetForward`.
        make_source: randomness of a round; tests put their own here.
        debug: check every proposal on the host (slow).
    Raises:
        UnsupportedTargetError: if the target cannot be run over token trees.
    """

    def __init__(
        self,
        target: Target,
        proposer: Proposer | None = None,
        batch_size: int = 8,
        pack_weights: bool | None = None,
        make_source: SourceFactory = KeyedSource,
        debug: bool = False,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; it must be ≥ 1")
        self.target, self.proposer, self.batch_size = target, proposer, batch_size
        self.make_source, self.debug = make_source, debug
        self.forward = TargetForward(target, pack_weights)
        check_tree_forward(self.forward)

    @classmethod
    def from_pretrained(
        cls,
        target: str | Target,
        drafter: str | None = None,
        tree: TokenTree | None = None,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> SpeculativeEngine:
        """Loads a target (see `Target.from_pretrained`) and a drafter folder.

        Args:
            tree: replaces the drafter's own tree template.
            options: passed to the constructor.
        """
        if isinstance(target, str):
            target = Target.from_pretrained(target, dtype=dtype, device=device)
        if drafter is None:
            return cls(target, None, **options)
        loaded = load_drafter(drafter, target, dtype=target.dtype)
        return cls(target, build_proposer(loaded, target, tree), **options)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Generation | list[Generation]:
        """Answers one prompt or several.

        Args:
            prompts: chat messages (rendered with the target's chat template), token ids, or text to
                continue; or a list of those.
            params: one for all, or one a prompt.
        Returns:
            A Generation, or a list of them in the order of the prompts.
        """
        single = is_single_prompt(prompts)
        all_prompts: list[Any] = [prompts] if single else list(prompts)
        ids = [self.encode(prompt) for prompt in all_prompts]
        answers = dict(self.generate_many(ids, params))
        ordered = [answers[i] for i in range(len(ids))]
        return ordered[0] if single else ordered

    def generate_many(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        batch_size: int | None = None,
    ) -> Iterator[tuple[int, Generation]]:
        """Yields (index, Generation) as prompts finish; a free row takes the next prompt."""
        if prompts:
            yield from self._run(prompts, params, batch_size or self.batch_size).run()

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Piece]:
        """Yields the answer piece by piece: whole characters, nothing that is cut later.

        The last piece carries the Generation.
        """
        run = self._run([self.encode(prompt)], params, 1)
        sent = 0
        while run.waiting or run.active_rows:
            finished = run.step()
            row = (finished or [row for row in run.rows if row is not None])[0]
            generation = row.finish(run.law_name, run.law.exact) if finished else None
            text = row.text.release(finished=bool(finished))
            yield Piece(text, row.token_ids[sent:], generation)
            sent = len(row.token_ids)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of chat messages, of plain text, or of token ids.

        Raises:
            ValueError: if the target lacks what the prompt needs.
        """
        if not isinstance(prompt, str) and not _is_messages(prompt):
            return [int(token) for token in prompt]  # type: ignore[arg-type]
        tokenizer = self.target.tokenizer
        if tokenizer is None:
            raise ValueError("this target has no tokenizer; give token ids")
        if isinstance(prompt, str):
            return tokenizer(prompt)["input_ids"]
        if not tokenizer.chat_template:
            raise ValueError(
                f"target {self.target.name} has no chat template; give text or token ids"
            )
        rendered = tokenizer.apply_chat_template(
            list(prompt), add_generation_prompt=True, tokenize=True, return_dict=True
        )
        return list(rendered["input_ids"])

    def _run(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        batch_size: int,
    ) -> DecodingRun:
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"{len(params)} SamplingParams for {len(prompts)} prompts")
        return DecodingRun(
            self.forward,
            self.proposer,
            prompts,
            params,
            batch_size,
            self.make_source,
            self.debug,
        )


def is_single_prompt(prompts: Any) -> bool:
    """Whether this is one prompt (text, token ids or messages) rather than a list of prompts."""
    if isinstance(prompts, str):
        return True
    return bool(prompts) and (isinstance(prompts[0], int) or _is_messages(prompts))


def _is_messages(prompt: Any) -> bool:
    return bool(prompt) and isinstance(prompt[0], dict)
