"""Start-up check: a small tree through the runtime against the target's own plain forward.

Masks fail silently on models that read them differently. Three nodes below a short prompt show it.
"""

from __future__ import annotations

import torch

from inference.forward import TargetForward, UnsupportedTargetError

# The root's children 1 and 2 are siblings, 3 hangs below 2.
PARENTS = ((-1, 0, 0, 2),)
PATHS = ((0,), (0, 1), (0, 2), (0, 2, 3))
PROMPT_TOKENS = 6
# Largest difference of logits over their largest magnitude. Rounding stays well below; a node that
# sees a wrong token is off by far more.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}


@torch.inference_mode()
def check_tree_forward(forward: TargetForward) -> None:
    """Compares every node's logits with a plain forward of the same path.

    Raises:
        UnsupportedTargetError: with the largest difference, if the target reads masks or positions
            in its own way (ALiBi, for one).
    """
    target = forward.target
    vocabulary = target.vocab_size
    tokens = [(17 * i + 5) % vocabulary for i in range(PROMPT_TOKENS + len(PARENTS[0]))]
    prompt, nodes = tokens[:PROMPT_TOKENS], tokens[PROMPT_TOKENS:]
    cache = forward.new_cache(1, 64)
    worst, scale = 0.0, 1.0
    try:
        for _ in forward.prefill([prompt], [0], cache):
            pass
        on_device = torch.tensor([nodes], device=target.device)
        parents = torch.tensor(PARENTS, device=target.device)
        lengths = torch.tensor([len(prompt)], device=target.device)
        features = forward.tree(on_device, parents, 2, lengths, len(prompt), cache)
        tree_logits = forward.logits(features)[0]
        for node, path in enumerate(PATHS):
            ids = torch.tensor([prompt + [nodes[i] for i in path]], device=target.device)
            plain = target.model(input_ids=ids, use_cache=False).logits[0, -1]
            scale = max(scale, plain.abs().max().item())
            difference = (tree_logits[node] - plain).abs().max().item()
            worst = max(worst, difference if difference == difference else float("inf"))
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise UnsupportedTargetError(
            f"target {target.name}: {type(target.model).__name__} cannot be run over a token tree: "
            f"{str(error).strip().splitlines()[0]}"
        ) from error
    if worst > TOLERANCE[target.dtype] * scale:
        raise UnsupportedTargetError(
            f"target {target.name}: logits of a token tree differ from the plain forward's by "
            f"{worst:.3g} (largest logit {scale:.3g}): {type(target.model).__name__} reads masks "
            "or positions in its own way, so trees would be wrong"
        )
