"""Measure what the rejection law costs beside the target forward it judges.

    python scripts/benchmark_laws.py --target default --out scripts/results/laws.json

One run, alternating: the target's forward over a tree of 64 tokens a row (logits included), then
the law on those logits, for delta trials and for draws without replacement, at T = 1 without and
with top-p. Medians over passes. The bound is 15 % of the forward at T = 1 without top-p.

Letters: B rows, N nodes, R rows of q, V vocabulary.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import TypeVar

import torch
from record import environment, write_record
from torch import Tensor

from drafters.target import Target
from inference.forward import TargetForward
from inference.laws import LAWS
from inference.proposal import Proposal, check
from inference.randomness import KeyedSource, draw_without_replacement
from inference.sampling import PolicyTensors, SamplingParams, TreePolicy
from inference.tree import TokenTree
from train.config import option, parse_config, run_script

Result = TypeVar("Result")


@dataclass(kw_only=True)
class LawBenchmarkConfig:
    """What is measured on what."""

    target: str = option("default", "hub id, folder, .gguf file, or 'default' (SmolLM2-135M)")
    dtype: str = option("float32", "of the target")
    batch: int = option(8, "rows")
    expansion: list[int] = field(
        default_factory=lambda: [7, 2, 1, 1, 1],
        metadata={"help": "children per level; the default has 64 nodes"},
    )
    prefix: int = option(128, "committed tokens of each row")
    top_p: float = option(0.9, "of the rows measured with top-p")
    passes: int = option(9, "measurements of each; the median counts")
    seed: int = option(0, "of the prompts and all draws")
    out: str | None = option(None, "JSON record; none: only the table is printed")


class TreeForward:
    """The target's forward over one tree a row, behind a random prefix of random tokens."""

    def __init__(self, target: Target, tree: TokenTree, config: LawBenchmarkConfig):
        self.forward, self.batch, self.prefix = TargetForward(target), config.batch, config.prefix
        generator = torch.Generator().manual_seed(config.seed)
        shape = (config.batch, config.prefix)
        prompts = torch.randint(target.vocab_size, shape, generator=generator).tolist()
        self.cache = self.forward.new_cache(config.batch, config.prefix + tree.num_tokens + 64)
        for _ in self.forward.prefill(prompts, list(range(config.batch)), self.cache):
            pass
        self.lengths_B = torch.full((config.batch,), config.prefix, device=target.device)

    def __call__(self, proposal: Proposal) -> Tensor:
        """Logits [B, N, V]."""
        features_BND = self.forward.tree(
            proposal.tokens_BN,
            proposal.parents_BN,
            proposal.max_depth,
            self.lengths_B,
            self.prefix,
            self.cache,
        )
        return self.forward.logits(features_BND)


def drawn_proposal(q_BRV: Tensor, tree: TokenTree, source: KeyedSource) -> Proposal:
    """Siblings drawn without replacement, a row of q for each parent: the dearest to judge."""
    batch, device = q_BRV.shape[0], q_BRV.device
    tokens_BN = torch.zeros(batch, tree.num_tokens, dtype=torch.int64, device=device)
    inner = [node for node in range(tree.num_tokens) if tree.children(node)]
    for row, parent in enumerate(inner):
        children = tree.children(parent)
        drawn_BK, exists_BK = draw_without_replacement(q_BRV[:, row], source, parent, children)
        assert exists_BK.all(), "a full softmax does not run out of tokens"
        tokens_BN[:, children] = drawn_BK
    return replace(
        Proposal.delta(tokens_BN, tree),
        trial_law_T=("wor",) * tree.num_nodes,
        trial_row_T=tuple(inner.index(parent) for parent in tree.parents[1:]),
        q_BRV=q_BRV,
    )


def measure(config: LawBenchmarkConfig, target: Target) -> list[dict[str, object]]:
    """Rows of the record: median milliseconds of the forward and of the law, and their ratio."""
    tree = TokenTree.expansion(config.expansion)
    forward = TreeForward(target, tree, config)
    seeds_B = torch.arange(config.batch, device=target.device) + config.seed
    source = KeyedSource(seeds_B, torch.zeros_like(seeds_B))
    root = Proposal.delta(seeds_B[:, None].repeat(1, tree.num_tokens), tree)
    inner = [node for node in range(tree.num_tokens) if tree.children(node)]
    q_BRV = (forward(root)[:, inner].float() / 1.5).softmax(-1)
    drawn = drawn_proposal(q_BRV, tree, source)
    check(drawn)
    proposals = {"delta": Proposal.delta(drawn.tokens_BN, tree), "wor": drawn}
    forward_ms: list[float] = []
    law_ms: dict[tuple[str, float], list[float]] = {}
    for index in range(config.passes + 1):
        for kind, proposal in proposals.items():
            logits_BNV, elapsed = timed(lambda p=proposal: forward(p), target.device)
            forward_ms += [elapsed] * (index > 0)  # the first pass warms up
            for top_p in (1.0, config.top_p):
                params = [SamplingParams(temperature=1.0, top_p=top_p)] * config.batch
                policy = PolicyTensors.stack(params, target.device)
                verdict, elapsed = timed(
                    lambda p=proposal, x=logits_BNV, y=policy: LAWS["rejection"].judge(
                        p, TreePolicy(x, p, y), source
                    ),
                    target.device,
                )
                assert not verdict.error_B.any(), "the law refused the benchmark's own proposal"
                law_ms.setdefault((kind, top_p), []).extend([elapsed] * (index > 0))
    whole_ms = statistics.median(forward_ms)
    return [
        {
            "law": "rejection",
            "trials": kind,
            "temperature": 1.0,
            "top_p": top_p,
            "dtype": config.dtype,
            "batch": config.batch,
            "tree_nodes": tree.num_tokens,
            "vocabulary": target.vocab_size,
            "forward_ms": round(whole_ms, 2),
            "law_ms": round(statistics.median(times), 2),
            "share_of_forward": round(statistics.median(times) / whole_ms, 4),
        }
        for (kind, top_p), times in law_ms.items()
    ]


def timed(call: Callable[[], Result], device: torch.device) -> tuple[Result, float]:
    """(what the call returns, milliseconds)."""
    start = time.perf_counter()
    result = call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return result, 1000 * (time.perf_counter() - start)


@torch.inference_mode()
def main() -> None:
    config = parse_config(LawBenchmarkConfig)
    target = Target.from_pretrained(config.target, dtype=config.dtype)
    rows = measure(config, target)
    for row in rows:
        print(
            f"rejection, {row['trials']:5s} T=1 top_p={row['top_p']:<4g} {row['law_ms']:8.1f} ms"
            f" beside a forward of {row['forward_ms']:.1f} ms: {row['share_of_forward']:.1%}"
        )
    if config.out:
        record = {"environment": environment(target), "settings": asdict(config), "rows": rows}
        write_record(config.out, record)


if __name__ == "__main__":
    run_script(main)
