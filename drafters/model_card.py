"""The README.md that goes with a drafter."""

from __future__ import annotations

from typing import Any


def model_card(record: dict[str, Any]) -> str:
    """Markdown from the contents of drafter.json; figures that were not measured are left out."""
    target, training = record["target"], record["training"]
    evaluation = training.get("evaluation", {})
    config = {key: value for key, value in record["config"].items() if value is not None}
    lines = [
        "---",
        "library_name: draftsmith",
        "tags: [speculative-decoding, drafter]",
        "---",
        f"# {record['method']} drafter for {target.get('name')}",
        "",
        f"Proposes tokens for `{target.get('name')}` (weights {target.get('weights_hash')}, "
        f"template {target.get('template_hash')}) in Draftsmith. It holds its own tensors only; "
        "the target is loaded beside it.",
        "",
        "```python",
        "from inference.generate import SpeculativeEngine",
        "from inference.params import SamplingParams",
        "",
        f'engine = SpeculativeEngine.from_pretrained("{target.get("name")}", "this/folder")',
        'print(engine.generate([{"role": "user", "content": "Hello!"}], SamplingParams()).text)',
        "```",
        "",
        "## Measured on held-out answers",
        "",
    ]
    figures = [f"- {name}: {_text(value)}" for name, value in sorted(evaluation.items())]
    lines += figures or ["- not measured"]
    lines += ["", "## Made with", ""]
    lines += [f"- {k}: {_text(v)}" for k, v in sorted(training.items()) if k != "evaluation"]
    lines += ["", "## Config", ""]
    lines += [f"- {name}: {_text(value)}" for name, value in config.items()]
    return "\n".join(lines) + "\n"


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return "[" + ", ".join(_text(item) for item in value) + "]"
    return str(value)
