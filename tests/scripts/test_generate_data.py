"""The command line from prompts to answers, on a tiny model in a folder."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from data_recipes.answered import AnsweredDataset
from scripts.generate_data import main
from tests.data_recipes.toy_chat import TEMPLATES, make_tokenizer

SCRIPT = Path(__file__).parents[2] / "scripts" / "generate_data.py"


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tokenizer = make_tokenizer(TEMPLATES["chatml"])
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=128,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def prompts(tmp_path):
    rows = [{"prompt": f"What is {word}?", "task": word[0]} for word in ("love", "life", "art")]
    rows.append({"messages": [{"role": "tool", "content": "x"}]})
    rows.append({"prompt": "word " * 200, "task": "long"})
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_answers_are_written_counted_and_readable(model, prompts, tmp_path, capsys):
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"prompt": "what is ART"}\n')
    out = tmp_path / "answers"
    argv = ["--target", model, "--dtype", "float32", "--prompts", prompts, "--output", str(out)]
    argv += ["--held-out", str(held_out), "--max-new-tokens", "5", "--batch-size", "2"]
    main(argv)
    dataset = AnsweredDataset(out)
    assert [d.task for d in dataset] == ["l", "l"]
    assert all(1 <= d.loss_mask.sum() <= 5 for d in dataset)
    expected = {"near_held_out": 1, "prompt_too_long": 1, "tool_turn": 1}
    assert dataset.manifest["dropped"] == expected
    output = capsys.readouterr().out
    assert "2 rows, 2 answers" in output and all(f"1 × {reason}" in output for reason in expected)


def test_a_users_error_is_one_line_on_stderr_and_exit_code_2(tmp_path, monkeypatch, capsys):
    missing, out = tmp_path / "no.jsonl", tmp_path / "out"
    argv = ["generate_data.py", "--prompts", str(missing), "--output", str(out)]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert end.value.code == 2
    assert capsys.readouterr() == ("", f"error: {missing}: no such file\n")
    assert not out.exists()


BAD = {
    "unknown": (["--max-tokens", "5"], "max_tokens is no setting"),
    "temperature": (["--temperature", "-1"], r"SamplingParams.temperature = -1.0: must be 0"),
    "limit": (["--limit", "0"], "limit = 0: must be 1 or more"),
    "batch_size": (["--batch-size", "0"], "batch_size is 0; it must be"),
    "template_kwargs": (["--template-kwargs", "{"], "template_kwargs is '{': not valid JSON"),
    "template_kwargs list": (["--template-kwargs", "[1]"], "it must be a JSON object"),
    "target": (["--target", "./nowhere"], "target ./nowhere: no such folder"),
}


@pytest.mark.parametrize("argv, message", BAD.values(), ids=BAD)
def test_bad_settings_are_named(prompts, tmp_path, argv, message):
    with pytest.raises(ValueError, match=message):
        main(["--prompts", prompts, "--output", str(tmp_path / "out"), *argv])
    assert not (tmp_path / "out").exists()
