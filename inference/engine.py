"""The one decoding loop: prefill → propose → one target forward over the tree → law → commit.

Letters: B rows, N nodes (the root included), D longest path in draft nodes, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

from drafters.target import Target
from inference.forward import TargetForward
from inference.laws import LAWS, Law, Verdict
from inference.proposal import Proposal, check
from inference.proposers import Proposer
from inference.randomness import KeyedSource, PositionSource, Source
from inference.row import Generation, Row
from inference.sampling import PolicyTensors, SamplingParams, TreePolicy
from inference.state import BatchState
from inference.tree import TokenTree

SourceFactory = Callable[[torch.Tensor, torch.Tensor], Source]
ROOT_ONLY = TokenTree.chain(0)
# Prompts of one prefill forward, sorted by length: 32 chat prompts padded to one length were 45 %
# padding, eight at a time 12 %.
PREFILL_ROWS = 8


class DecodingRun:
    """Decodes a list of prompts on `batch_size` rows; a finished row takes the next prompt.

    Args:
        forward: the target's forward.
        proposer: makes the trees; None decodes plainly, one token a round.
        prompts: token ids of each prompt.
        params: one SamplingParams a prompt; all must ask for the same law.
        make_source: randomness of a round from (seeds_B, rounds_B).
        debug: check every proposal on the host.
    """

    def __init__(
        self,
        forward: TargetForward,
        proposer: Proposer | None,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        batch_size: int,
        make_source: SourceFactory = KeyedSource,
        debug: bool = False,
    ) -> None:
        self.forward, self.target, self.proposer = forward, forward.target, proposer
        self.make_source, self.debug = make_source, debug
        self.max_depth = proposer.max_depth if proposer else 0
        num_tokens = proposer.num_tokens if proposer else 1
        self.law_name, self.law = choose_law(params, proposer)
        self.waiting = deque(range(len(prompts)))
        self.prompts, self.params = prompts, params
        self.limits = [
            _token_limit(self.target, i, p, q)
            for i, (p, q) in enumerate(zip(prompts, params, strict=True))
        ]
        self.batch_size = min(batch_size, len(prompts))
        self.rows: list[Row | None] = [None] * self.batch_size
        longest = max(len(p) + limit for p, limit in zip(prompts, self.limits, strict=True))
        capacity = -(-(longest + num_tokens + 1) // 64) * 64
        self.cache = forward.new_cache(self.batch_size, capacity)
        self._row_params = [params[0]] * self.batch_size
        self.state = self._new_state()
        if proposer:
            proposer.allocate(self.batch_size, capacity)

    @property
    def active_rows(self) -> list[int]:
        return [b for b, row in enumerate(self.rows) if row is not None]

    def run(self) -> Iterator[tuple[int, Generation]]:
        """Yields (prompt index, Generation) as prompts finish."""
        while self.waiting or self.active_rows:
            for row in self.step():
                yield row.index, row.finish(self.law_name, self.law.exact)

    @torch.inference_mode()
    def step(self) -> list[Row]:
        """Admits waiting prompts, or decodes one round; returns the rows that finished."""
        free = [b for b, row in enumerate(self.rows) if row is None]
        if free and self.waiting:
            self._admit(free)
        else:
            self._round()
        finished = [row for row in self.rows if row is not None and row.finish_reason]
        self.rows = [None if row is None or row.finish_reason else row for row in self.rows]
        return finished

    def _admit(self, free: list[int]) -> None:
        """Prefills waiting prompts into free rows, those of like length together."""
        taken = [(b, self.waiting.popleft()) for b in free if self.waiting]
        taken.sort(key=lambda pair: len(self.prompts[pair[1]]))
        for start in range(0, len(taken), PREFILL_ROWS):
            self._begin(taken[start : start + PREFILL_ROWS])

    def _begin(self, taken: list[tuple[int, int]]) -> None:
        """Prefills (row, prompt index) pairs and decides their first tokens."""
        rows = [b for b, _ in taken]
        for b, index in taken:
            self.rows[b] = Row(
                index,
                self.prompts[index],
                self.params[index],
                self.target.tokenizer,
                self.target.eos_token_ids,
                self.limits[index],
                self.max_depth,
            )
            self._row_params[b] = self.params[index]
        prompts = [self.prompts[index] for _, index in taken]
        last_features = self._prefill(rows, prompts)
        self._enter(rows, prompts)
        # The first token is judged like any other, over a tree of nothing but the root.
        chosen = torch.tensor(rows, device=self.target.device)
        proposal = Proposal.delta(self.state.root_B[chosen, None], ROOT_ONLY)
        verdict = self._judge(proposal, last_features[:, None], chosen)
        first = verdict.next_token_B
        self.state.root_B[chosen] = first
        self.state.lengths_B[chosen] += 1
        self.state.rounds_B[chosen] += 1
        self._see(chosen, first[:, None])
        for b, (token, error) in zip(
            rows, torch.stack([first, verdict.error_B.long()], 1).tolist(), strict=True
        ):
            self._refuse_error(error, b)
            self._row(b).take_first(token)

    def _prefill(self, rows: list[int], prompts: list[Sequence[int]]) -> torch.Tensor:
        """Features [R, D] of each prompt's last token."""
        ends = torch.tensor([len(p) - 1 for p in prompts], device=self.target.device)
        last = torch.zeros(
            len(rows), self.target.hidden_size, dtype=self.target.dtype, device=self.target.device
        )
        for start, tokens_BT, features_BTD in self.forward.prefill(prompts, rows, self.cache):
            length = tokens_BT.shape[1]
            here = (ends >= start) & (ends < start + length)
            at = (ends - start).clamp(0, length - 1)[:, None, None]
            found = features_BTD.gather(1, at.expand(-1, 1, features_BTD.shape[2]))[:, 0]
            last = torch.where(here[:, None], found, last)
            if self.proposer:
                self.proposer.read_prompt(rows, start, tokens_BT, features_BTD, ends + 1)
        return last

    def _enter(self, rows: list[int], prompts: list[Sequence[int]]) -> None:
        """Puts new rows into the device state; the last prompt token stands as the root."""
        state, device = self.state, self.target.device
        chosen = torch.tensor(rows, device=device)
        state.lengths_B[chosen] = torch.tensor([len(p) - 1 for p in prompts], device=device)
        state.root_B[chosen] = torch.tensor([p[-1] for p in prompts], device=device)
        seeds = [self._row_params[b].seed for b in rows]
        state.seeds_B[chosen] = torch.tensor(seeds, device=device)
        state.rounds_B[chosen] = 0
        state.policy = PolicyTensors.stack(self._row_params, device)
        if state.seen_BV is not None:
            state.seen_BV[chosen] = False
            for b, prompt in zip(rows, prompts, strict=True):
                state.seen_BV[b, torch.tensor(list(prompt), device=device)] = True

    def _round(self) -> None:
        """One speculative round of every row; one tensor comes back to the host."""
        state = self.state
        proposal = self._propose()
        longest = max(self._row(b).length for b in self.active_rows)
        features_BND = self.forward.tree(
            proposal.tokens_BN,
            proposal.parents_BN,
            proposal.max_depth,
            state.lengths_B,
            longest,
            self.cache,
        )
        verdict = self._judge(proposal, features_BND)
        if not (self.proposer is None or self.proposer.is_chain):
            self.cache.commit(state.lengths_B, verdict.path_BD)
        if self.proposer:
            self.proposer.observe(state, proposal, features_BND, verdict)
        accepted_BD = proposal.tokens_BN.gather(1, verdict.path_BD.clamp_min(0))[:, 1:]
        host = torch.cat(
            [
                verdict.num_accepted_B[:, None],
                verdict.error_B[:, None].long(),
                verdict.next_token_B[:, None],
                accepted_BD,
            ],
            dim=1,
        )
        active_B = self._active_mask()
        state.lengths_B += torch.where(active_B, verdict.num_accepted_B + 1, 0)
        state.root_B = verdict.next_token_B
        state.rounds_B += 1
        if state.seen_BV is not None:
            taken = torch.where(verdict.path_BD[:, 1:] >= 0, accepted_BD, state.root_B[:, None])
            self._see(None, torch.cat([taken, state.root_B[:, None]], 1))
        for b, (num_accepted, error, next_token, *path) in enumerate(host.tolist()):
            row = self.rows[b]
            if row is not None:
                self._refuse_error(error, b)
                row.take_round([*path[:num_accepted], next_token], num_accepted)

    def _propose(self) -> Proposal:
        state = self.state
        if self.proposer is None:
            return Proposal.delta(state.root_B[:, None], ROOT_ONLY)
        source = self.make_source(state.seeds_B, state.rounds_B)
        proposal = self.proposer.propose(state, source)
        if self.debug:
            check(proposal)
        return proposal

    def _judge(
        self, proposal: Proposal, features_BND: torch.Tensor, rows: torch.Tensor | None = None
    ) -> Verdict:
        state = self.state
        logits_BNV = self.forward.logits(features_BND)
        chosen = slice(None) if rows is None else rows
        seen_BV = None if state.seen_BV is None else state.seen_BV[chosen]
        policy = state.policy if rows is None else state.policy.select(rows)
        tree_policy = TreePolicy(logits_BNV, proposal, policy, seen_BV)
        source: Source | PositionSource
        if self.law.source == "position":
            source = PositionSource(state.seeds_B[chosen], state.positions_B[chosen])
        else:
            source = self.make_source(state.seeds_B[chosen], state.rounds_B[chosen])
        return self.law.judge(proposal, tree_policy, source)

    def _new_state(self) -> BatchState:
        device, batch = self.target.device, self.batch_size

        def zeros() -> torch.Tensor:
            return torch.zeros(batch, dtype=torch.int64, device=device)

        seen_BV = None
        if any(p.repetition_penalty != 1.0 for p in self.params):
            seen_BV = torch.zeros(batch, self.target.vocab_size, dtype=torch.bool, device=device)
        policy = PolicyTensors.stack(self._row_params, device)
        return BatchState(zeros(), zeros(), zeros(), zeros(), policy, seen_BV)

    def _row(self, b: int) -> Row:
        row = self.rows[b]
        assert row is not None
        return row

    def _active_mask(self) -> torch.Tensor:
        return torch.tensor([row is not None for row in self.rows], device=self.target.device)

    def _see(self, rows: torch.Tensor | None, tokens_BT: torch.Tensor) -> None:
        if self.state.seen_BV is not None:
            if rows is None:
                self.state.seen_BV.scatter_(1, tokens_BT, True)
            else:
                self.state.seen_BV[rows[:, None], tokens_BT] = True

    def _refuse_error(self, error: int, b: int) -> None:
        if error:
            raise FloatingPointError(
                f"prompt {self._row(b).index}: the target's probabilities are not finite, or a "
                "proposal broke its own law; run with debug=True to see which"
            )


def choose_law(params: Sequence[SamplingParams], proposer: Proposer | None) -> tuple[str, Law]:
    """The law that all prompts ask for: greedy when every temperature is 0, rejection otherwise.

    Raises:
        ValueError: if two prompts of one run name different laws.
    """
    names = {p.law_name for p in params}
    # At temperature 0 p is one-hot, and the rejection law then decides what the greedy law does.
    if names == {"greedy", "rejection"}:
        names = {"rejection"}
    if len(names) > 1:
        raise ValueError(f"one run has one law, but its prompts ask for {', '.join(sorted(names))}")
    name = names.pop()
    if name == "block" and proposer is not None and not proposer.is_chain:
        raise ValueError("law 'block' judges chains only; this proposer makes a tree")
    return name, LAWS[name]


def _token_limit(target: Target, index: int, prompt: Sequence[int], params: SamplingParams) -> int:
    """Tokens the prompt may get: max_new_tokens, or what the context leaves."""
    room = target.max_length - len(prompt)
    if not len(prompt):
        raise ValueError(f"prompt {index} is empty; give at least one token")
    if room <= 0:
        raise ValueError(
            f"prompt {index} has {len(prompt)} tokens, but the context of {target.name} ends at "
            f"{target.max_length}; shorten it"
        )
    return min(params.max_new_tokens, room)
