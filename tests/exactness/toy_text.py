"""Many rounds on a toy: text whose next token depends on the last two (and on penalties).

The target and the drafters are random tables; rows, seeds, rounds and positions are kept as the
runtime keeps them. Letters: B rows, C contexts below a state, L tokens, S states, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from inference.proposal import Proposal
from inference.sampling import PolicyTensors, SamplingParams, TreePolicy
from tests.exactness.branches import Branches, walk
from tests.exactness.cases import Judge, emitted_text
from tests.exactness.toy_drafters import Drafter, DraftTable
from tests.exactness.toys import context_tokens, emitted_mass, node_contexts, num_contexts

PROMPT = (1, 0)
# (row seeds, the rows' rounds, positions of the rows' root tokens) -> (drafter's, law's source).
SourceFactory = Callable[[Tensor, Tensor, Tensor], tuple]


class ToyText:
    """Args: drafter, depth: who proposes, and how deep. scale: spread of the random logits."""

    def __init__(self, drafter: Drafter, depth: int, vocab: int, seed: int = 0, scale: float = 1.0):
        generator = torch.Generator().manual_seed(seed)
        shape = (4, vocab * vocab, vocab)  # the target and three draft models
        logits_MSV = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
        self.drafter, self.depth, self.vocab = drafter, depth, vocab
        states = torch.tensor(
            [
                [self._state_after(state, context) for context in range(num_contexts(vocab, depth))]
                for state in range(vocab * vocab)
            ]
        )
        self.logits_SCV = logits_MSV[0][states]
        self.logits_SV = logits_MSV[0]
        self.draft_probs = [table.softmax(-1)[states] for table in logits_MSV[1:]]

    def _state_after(self, state: int, context: int) -> int:
        for token in context_tokens(context, self.vocab):
            state = state % self.vocab * self.vocab + token
        return state

    def start_state(self) -> int:
        return PROMPT[0] * self.vocab + PROMPT[1]

    def propose(self, source, state_B: Tensor, dtype: torch.dtype = torch.float64) -> Proposal:
        root_B = state_B % self.vocab
        tables = [DraftTable(probs.to(dtype), state_B, root_B) for probs in self.draft_probs]
        return self.drafter(source, tables)

    def policy(
        self, proposal: Proposal, state_B: Tensor, policy: PolicyTensors, seen_BV: Tensor
    ) -> TreePolicy:
        dtype = torch.float64 if proposal.q_BRV is None else proposal.q_BRV.dtype
        contexts_BN = node_contexts(proposal, self.vocab)
        logits_BNV = self.logits_SCV[state_B[:, None], contexts_BN].to(dtype)
        return TreePolicy(logits_BNV, proposal, policy, seen_BV)

    def decode(
        self,
        judge: Judge,
        sources: SourceFactory,
        policy: PolicyTensors,
        seeds_B: Tensor,
        num_tokens: int,
        dtype: torch.dtype = torch.float64,
    ) -> Tensor:
        """int64 [B, num_tokens]: round after round, until every row has its tokens."""
        batch = len(seeds_B)
        room = num_tokens * (self.depth + 1)
        text_BL = torch.zeros(batch, len(PROMPT) + room, dtype=torch.int64)
        text_BL[:, : len(PROMPT)] = torch.tensor(PROMPT)
        length_B = torch.full((batch,), len(PROMPT))
        seen_BV = torch.zeros(batch, self.vocab, dtype=torch.bool)
        seen_BV[:, list(PROMPT)] = True
        for played in range(num_tokens):
            if length_B.min() >= len(PROMPT) + num_tokens:
                break
            last_two_B2 = text_BL.gather(1, length_B[:, None] + torch.tensor([-2, -1]))
            state_B = last_two_B2 @ torch.tensor([self.vocab, 1])
            rounds_B = torch.full((batch,), played)
            draft_source, law_source = sources(seeds_B, rounds_B, length_B - 1)
            proposal = self.propose(draft_source, state_B, dtype)
            verdict = judge(proposal, self.policy(proposal, state_B, policy, seen_BV), law_source)
            assert not verdict.error_B.any()
            new_BD = emitted_text(proposal, verdict)
            # Columns past a row's new tokens get a zero, and the row's next round writes there.
            columns_BD = length_B[:, None] + torch.arange(self.depth + 1)
            text_BL = text_BL.scatter(1, columns_BD, new_BD.clamp_min(0))
            new_BDV = new_BD[..., None] == torch.arange(self.vocab)
            seen_BV = seen_BV | new_BDV.any(1)
            length_B = length_B + verdict.num_accepted_B + 1
        return text_BL[:, len(PROMPT) : len(PROMPT) + num_tokens]

    def enumerate_rounds(self, judge: Judge, params: SamplingParams) -> dict[int, Tensor]:
        """The exact law of one round from every state: tokens emitted -> float64 [S, V ** tokens].

        For policies without a repetition penalty, under which two tokens are the whole state.
        """
        tensors = PolicyTensors.stack([params])
        num_states = self.vocab**2

        def play(source, state_B: Tensor) -> dict[str, Tensor]:
            proposal = self.propose(source, state_B)
            policy = tensors.select(torch.zeros_like(state_B))
            verdict = judge(proposal, self.policy(proposal, state_B, policy, None), source)
            return {"text_BD": emitted_text(proposal, verdict)}

        branches: Branches = walk(play, num_states)
        return emitted_mass(branches, num_states, self.vocab)

    def law_of_text(self, mass: dict[int, Tensor], num_tokens: int) -> Tensor:
        """float64 [V ** num_tokens]: the law of the text after as many rounds as it takes.

        Args:
            mass: as `enumerate_rounds` gives it; {1: p} for plain sampling.
        """
        # law_after[n]: the law of the next n tokens from each state, [S, V ** n].
        law_after = [torch.ones(self.vocab**2, 1, dtype=torch.float64)]
        for count in range(1, num_tokens + 1):
            law = torch.zeros(self.vocab**2, self.vocab**count, dtype=torch.float64)
            for emitted, mass_SX in mass.items():
                if emitted >= count:  # what comes after the text is summed out
                    law += mass_SX.view(self.vocab**2, self.vocab**count, -1).sum(-1)
                else:
                    ends_SX = self._end_states(emitted)
                    rest_SXY = law_after[count - emitted][ends_SX]
                    law += (mass_SX[..., None] * rest_SXY).flatten(1)
            law_after.append(law)
        return law_after[num_tokens][self.start_state()]

    def _end_states(self, num_tokens: int) -> Tensor:
        """int64 [S, V ** num_tokens]: the state after each text."""
        text_X = torch.arange(self.vocab**num_tokens)
        state_S1 = torch.arange(self.vocab**2)[:, None]
        return (state_S1 * self.vocab**num_tokens + text_X) % self.vocab**2
