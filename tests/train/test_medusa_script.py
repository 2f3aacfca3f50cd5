"""train/medusa.py from a YAML to a drafter that decodes, on a tiny target."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import train.medusa
from data_recipes.conversation import AnsweredRow
from data_recipes.shards import write_manifest, write_shard
from drafters import load_drafter
from drafters.target import Target
from inference.generate import SpeculativeEngine
from inference.params import SamplingParams
from tests.tiny_models import VOCAB, tiny_model

ROOT = Path(__file__).parents[2]


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(VOCAB)}
    inner = Tokenizer(models.WordLevel(words, unk_token="w3"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="w2", pad_token="w0")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    return tokenizer


def answer(target: Target, count: int) -> list[AnsweredRow]:
    """Greedy answers of the target to random prompts."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, VOCAB, (6,), generator=generator).tolist() for _ in range(count)]
    answers = SpeculativeEngine(target).generate(prompts, SamplingParams(max_new_tokens=20))
    rows = []
    for i, (prompt, generation) in enumerate(zip(prompts, answers, strict=True)):
        row = AnsweredRow(f"row-{i}", "test", seeds=[0], finish_reasons=[generation.finish_reason])
        row.append(prompt, supervised=False)
        row.append(generation.token_ids, supervised=True)
        rows.append(row)
    return rows


def write_answers(folder: Path, target: Target, rows: list[AnsweredRow]) -> None:
    folder.mkdir()
    write_shard(folder / "shard-00000.parquet", rows, {"rows": len(rows)})
    manifest = {"schema_version": 1, "made_with": {"target": target.identity}}
    write_manifest(folder, manifest | {"shards": {"total": 1, "finished": 1}})


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A target folder, its answers, and a recipe."""
    home = tmp_path_factory.mktemp("home")
    tiny_model("llama").save_pretrained(home / "target")
    tiny_tokenizer().save_pretrained(home / "target")
    target = Target.from_pretrained(str(home / "target"), dtype="float32")
    write_answers(home / "data", target, answer(target, 40))
    (home / "recipe.yaml").write_text(
        f"target: {home}/target\ndtype: float32\ndata: {home}/data\noutput: {home}/drafter\n"
        "num_heads: 2\nhead_type: reduced\ndraft_vocab_size: 60\ntree_nodes: 5\nmax_length: 64\n"
        "batch_size: 4\nmicro_batch_size: 2\nepochs: 20\nlearning_rate: 0.02\nheldout_rows: 8\n"
        "decode_rows: 6\ndecode_tokens: 20\nlog_every: 5\ncheckpoint_every: 5\n"
    )
    return home


def run_main(monkeypatch, home: Path, *arguments: str) -> None:
    argv = ["medusa.py", "--config", str(home / "recipe.yaml"), *arguments]
    monkeypatch.setattr(sys, "argv", argv)
    train.medusa.main()


@pytest.mark.filterwarnings("ignore:draft vocabulary")
@pytest.mark.parametrize("keep_features", ["false", "true"])
def test_from_a_recipe_to_a_drafter_that_decodes_the_targets_text(
    home, monkeypatch, tmp_path, keep_features, recwarn
):
    output = str(tmp_path / "drafter")
    run_main(monkeypatch, home, "--output", output, "--keep_features", keep_features)
    record = json.loads((tmp_path / "drafter" / "drafter.json").read_text())
    evaluation = record["training"]["evaluation"]
    # The held-out answers are the target's own greedy text, so simulation and decoding agree.
    assert evaluation["decode_tau"] == evaluation["decode_simulated_tau"] > 1.0
    assert not [w for w in recwarn if "real decoding" in str(w.message)]
    assert record["training"]["last_log"]["head1_top1"] > 0.5
    assert len(record["config"]["tree"]) == 5 and record["draft_vocab"]["coverage"] > 0
    assert "tree_tau" in (tmp_path / "drafter" / "README.md").read_text()

    target = Target.from_pretrained(str(home / "target"), dtype="float32")
    drafter = load_drafter(output, target)
    assert drafter.config.head_type == "reduced" and drafter.draft_vocab.numel() == 60
    params = SamplingParams(max_new_tokens=30)
    prompts = [[5, 9, 11], [40, 3]]
    with_drafter = SpeculativeEngine.from_pretrained(target, output).generate(prompts, params)
    plain = SpeculativeEngine(target).generate(prompts, params)
    assert [a.token_ids for a in with_drafter] == [a.token_ids for a in plain]


def test_the_held_out_answers_are_not_trained_on(home, monkeypatch, tmp_path):
    seen = []
    plain = train.medusa.run_training

    def watched(accelerator, model, order, *args):
        seen.extend(document.id for row in order._rows for document in row)
        return plain(accelerator, model, order, *args)

    monkeypatch.setattr(train.medusa, "run_training", watched)
    held_out = []
    evaluation = train.medusa.Evaluation

    def watched_evaluation(*args):
        held_out.extend(document.id for document in args[-1])
        return evaluation(*args)

    monkeypatch.setattr(train.medusa, "Evaluation", watched_evaluation)
    arguments = ("--output", str(tmp_path / "d"), "--steps", "1", "--decode_rows", "0")
    run_main(monkeypatch, home, *arguments)
    assert len(held_out) == 8 and len(seen) == 32 and not set(held_out) & set(seen)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num_headz", "3"], "--num_headz is no setting; did you mean 'num_heads'"),
        (["--data", "/nowhere"], "/nowhere: no manifest.json there"),
        (["--target", "/nowhere"], "target /nowhere: no such folder"),
        (["--draft_vocab_size", "98"], "draft_vocab_size is 98; it must be within 1 and 97"),
        (["--draft_vocab_size", "-1"], "draft_vocab_size is -1"),
        (["--heldout_rows", "40"], "heldout_rows is 40, but there are only 40 rows"),
    ],
)
def test_what_a_user_gets_wrong_is_named(home, monkeypatch, tmp_path, arguments, message):
    output = tmp_path / "drafter"
    with pytest.raises(ValueError, match=message):
        run_main(monkeypatch, home, "--output", str(output), *arguments)
    assert not output.exists()


def test_answers_of_another_target_are_refused(home, monkeypatch, tmp_path):
    other = tmp_path / "other"
    tiny_model("llama", seed=1).save_pretrained(other)
    tiny_tokenizer().save_pretrained(other)
    with pytest.raises(ValueError, match="target.weights_hash"):
        run_main(monkeypatch, home, "--target", str(other), "--output", str(tmp_path / "d"))


def test_a_folder_of_other_files_is_refused_before_training(home, monkeypatch, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    monkeypatch.setattr(train.medusa, "run_training", None)  # would fail if reached
    with pytest.raises(ValueError, match="holds files, but no drafter"):
        run_main(monkeypatch, home, "--output", str(tmp_path))
    assert (tmp_path / "notes.txt").read_text() == "mine"


def command(home: Path, output: Path) -> list[str]:
    script = [sys.executable, "train/medusa.py", "--config", str(home / "recipe.yaml")]
    return [*script, "--output", str(output), "--decode_rows", "0"]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_a_killed_process_started_again_ends_with_the_uninterrupted_weights(home, tmp_path):
    whole = tmp_path / "whole"
    subprocess.run(command(home, whole), cwd=ROOT, env=environment(), check=True)
    killed = tmp_path / "killed"
    for number in range(2):
        process = subprocess.Popen(command(home, killed), cwd=ROOT, env=environment())
        wanted = tmp_path / "killed-run" / "checkpoints" / f"step-{10 + 20 * number:08d}"
        while process.poll() is None and not wanted.exists():
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL and not killed.exists()
    subprocess.run(command(home, killed), cwd=ROOT, env=environment(), check=True)
    expected = load_file(whole / "model.safetensors")
    found = load_file(killed / "model.safetensors")
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name


@pytest.mark.slow
def test_a_mistake_is_one_line_and_exit_code_2(home, tmp_path):
    done = subprocess.run(
        [*command(home, tmp_path / "d"), "--learning_rat", "1"],
        cwd=ROOT, env=environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: --learning_rat is no setting")
    assert "Traceback" not in done.stderr
