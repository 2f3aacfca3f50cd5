"""Answers become shards that appear whole, a manifest counts everything, and runs resume."""

import errno
import resource
from collections import Counter
from dataclasses import replace

import pyarrow.parquet as pq
import pytest

from data_recipes import generate
from data_recipes.answered import AnsweredDataset
from data_recipes.chat import ChatTemplate
from data_recipes.conversation import AnsweredRow, answer_seed
from data_recipes.generate import GenerationSettings, engine_answerer, generate_answers
from data_recipes.prompts import PromptRow
from data_recipes.shards import read_manifest, read_shard, shard_path, write_manifest
from inference.params import SamplingParams
from tests.data_recipes.toy_chat import (
    TEMPLATES,
    ToyAnswerer,
    ToyTarget,
    make_tokenizer,
    supervised_texts,
)

SETTINGS = GenerationSettings(SamplingParams(temperature=0.7, max_new_tokens=40), rows_per_shard=3)


def prompts(count=7):
    """Rows of one, two and three turns in turn."""
    return [
        PromptRow(
            f"p{i}",
            tuple({"role": "user", "content": f"q{i}.{turn}"} for turn in range(1 + i % 3)),
            f"task{i % 2}",
        )
        for i in range(count)
    ]


@pytest.fixture
def target():
    return ToyTarget(make_tokenizer(TEMPLATES["chatml"]))


def run(target, folder, answerer=None, rows=None, settings=SETTINGS, dropped=None):
    answerer = answerer or ToyAnswerer(target.tokenizer)
    rows = prompts() if rows is None else rows
    return generate_answers(target, rows, folder, answerer, settings, dropped, progress=False)


def stored_rows(folder):
    return [row for path in sorted(folder.glob("shard-*")) for row in read_shard(path)[0]]


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_token_ids_and_masks_are_stored_as_generated(target, tmp_path):
    answerer = ToyAnswerer(target.tokenizer)
    run(target, tmp_path, answerer)
    said = {
        params.seed: ids for (_, params), ids in zip(answerer.requests, answerer.said, strict=True)
    }
    asked = {params.seed: ids for ids, params in answerer.requests}
    rows = stored_rows(tmp_path)
    assert [row["id"] for row in rows] == [f"p{i}" for i in range(7)]
    for row in rows:
        answers = [said[seed] for seed in row["seeds"]]
        runs = [i for i, m in enumerate(row["loss_mask"]) if m]
        assert [row["input_ids"][i] for i in runs] == [token for ids in answers for token in ids]
        last = asked[row["seeds"][-1]]
        assert row["input_ids"] == last + answers[-1]


def test_every_answer_has_its_own_seed_whatever_its_neighbours(target, tmp_path):
    run(target, tmp_path / "all")
    run(target, tmp_path / "some", rows=prompts()[4:5])
    row = next(row for row in stored_rows(tmp_path / "all") if row["id"] == "p4")
    assert row["seeds"] == [answer_seed(0, "p4", 1), answer_seed(0, "p4", 2)]
    assert stored_rows(tmp_path / "some") == [row]


def test_the_global_seed_changes_every_seed(target, tmp_path):
    run(target, tmp_path / "a")
    other = replace(SETTINGS, sampling=replace(SETTINGS.sampling, seed=1))
    run(target, tmp_path / "b", settings=other)
    seeds = [{s for row in stored_rows(tmp_path / n) for s in row["seeds"]} for n in ("a", "b")]
    assert len(seeds[0]) == len(seeds[1]) == 13 and not seeds[0] & seeds[1]


def test_the_manifest_counts_what_is_in_the_shards(target, tmp_path):
    long = PromptRow("long", ({"role": "user", "content": "word " * 600},), "task0")
    cut = replace(prompts()[1], id="cut")
    cut = replace(cut, messages=(cut.messages[0], {"role": "user", "content": "word " * 600}))
    manifest = run(target, tmp_path, rows=[*prompts(), long, cut], dropped=Counter(tool_turn=2))
    rows = stored_rows(tmp_path)
    assert manifest == read_manifest(tmp_path)
    assert manifest["shards"] == {"total": 3, "finished": 3}
    assert manifest["dropped"] == {"prompt_too_long": 1, "tool_turn": 2}
    counts = manifest["counts"]
    assert counts["ended_early"] == {"prompt_too_long": 1}
    assert (counts["prompts"], counts["rows"], counts["answers"]) == (9, 8, 14)
    assert counts["tokens"] == sum(len(row["input_ids"]) for row in rows)
    assert counts["supervised_tokens"] == sum(sum(row["loss_mask"]) for row in rows)
    assert counts["rows_by_task"] == dict(Counter(row["task"] for row in rows))
    assert counts["finish_reasons"] == {"eos": 14}
    made_with = manifest["made_with"]
    assert made_with["target"] == target.identity and made_with["target"]["template_hash"]
    assert made_with["sampling"]["temperature"] == 0.7 and made_with["max_new_tokens"] == 40


def test_an_answer_at_the_limit_is_marked_and_has_no_end_token(target, tmp_path):
    settings = replace(SETTINGS, sampling=SamplingParams(max_new_tokens=3))
    manifest = run(target, tmp_path, rows=prompts(1), settings=settings)
    (row,) = stored_rows(tmp_path)
    assert row["finish_reasons"] == ["length"] and sum(row["loss_mask"]) == 3
    assert row["input_ids"][-1] not in target.eos_token_ids
    assert manifest["counts"]["finish_reasons"] == {"length": 1}


def test_a_template_that_rewrites_gives_one_row_per_answer_and_is_counted(tmp_path):
    target = ToyTarget(make_tokenizer(TEMPLATES["merging"]))
    manifest = run(target, tmp_path, rows=prompts(3))
    rows = stored_rows(tmp_path)
    assert [row["id"] for row in rows] == ["p0", "p1", "p1#turn-2", "p2", "p2#turn-2", "p2#turn-3"]
    assert manifest["counts"]["split_conversations"] == 2


@pytest.mark.parametrize("fail_after", [0, 1, 5, 6, 12])
def test_a_stopped_run_goes_on_where_it_was(target, tmp_path, fail_after):
    run(target, tmp_path / "whole")
    folder = tmp_path / "stopped"
    with pytest.raises(KeyboardInterrupt):
        run(target, folder, ToyAnswerer(target.tokenizer, fail_after=fail_after))
    finished = len(list(folder.glob("shard-*")))
    assert finished == {0: 0, 1: 0, 5: 0, 6: 1, 12: 2}[fail_after]
    before = files(folder)
    answerer = ToyAnswerer(target.tokenizer)
    run(target, folder, answerer)
    turns = {0: 13, 1: 7, 2: 1}  # the three shards have 6, 6 and 1
    assert len(answerer.requests) == turns[finished]
    after = files(folder)
    assert after == files(tmp_path / "whole")
    assert all(after[name] == data for name, data in before.items() if name != "manifest.json")


def test_a_finished_run_answers_nothing_and_writes_nothing(target, tmp_path):
    first = run(target, tmp_path)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    answerer = ToyAnswerer(target.tokenizer)
    assert run(target, tmp_path, answerer) == first and answerer.requests == []
    assert times == {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}


@pytest.mark.parametrize("kill_at", [2, 3, 4])
def test_a_run_killed_between_a_shard_and_the_manifest_loses_nothing(
    target, tmp_path, monkeypatch, kill_at
):
    """The manifest is written at the start, and after each of the three shards."""
    expected = run(target, tmp_path / "whole")
    written = []

    def killed(folder, manifest):
        written.append(manifest)
        if len(written) == kill_at:
            raise KeyboardInterrupt
        write_manifest(folder, manifest)

    folder = tmp_path / "killed"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(generate, "write_manifest", killed)
        run(target, folder)
    assert shard_path(folder, kill_at - 2).exists()
    assert read_manifest(folder)["shards"]["finished"] == kill_at - 2
    assert run(target, folder) == read_manifest(folder) == expected


def test_a_run_killed_while_it_writes_leaves_no_half_shard(target, tmp_path, monkeypatch):
    run(target, tmp_path / "whole")

    def killed(table, path, **_):
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    folder = tmp_path / "killed"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(pq, "write_table", killed)
        run(target, folder)
    assert not list(folder.glob("shard-*"))
    run(target, folder)
    assert files(folder) == files(tmp_path / "whole")


@pytest.mark.parametrize("kill_at", range(1, 8))
def test_a_run_killed_before_any_rename_goes_on(target, tmp_path, monkeypatch, kill_at):
    """Seven files are written: the manifest, and three times a shard and the manifest again."""
    run(target, tmp_path / "whole")
    calls = []

    def killed(_):
        calls.append(0)
        if len(calls) == kill_at:
            raise KeyboardInterrupt

    folder = tmp_path / "killed"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("os.fsync", killed)
        run(target, folder)
    named = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    assert len(named) == {1: 0}.get(kill_at, 1 + (kill_at - 1) // 2)
    run(target, folder)
    assert files(folder) == files(tmp_path / "whole")


def test_a_wrong_mask_is_never_stored(target, tmp_path, monkeypatch):
    """A fault in the building of rows is found by the proof, before the shard is written."""

    def supervise_all(row, token_ids, supervised):
        row.input_ids += token_ids
        row.loss_mask += [True] * len(token_ids)

    monkeypatch.setattr(AnsweredRow, "append", supervise_all)
    with pytest.raises(ValueError, match="row p0 .chat template .*the prompt is supervised"):
        run(target, tmp_path)
    assert not list(tmp_path.glob("shard-*"))


CHANGES = {
    "sampling.temperature": dict(
        settings=replace(SETTINGS, sampling=replace(SETTINGS.sampling, temperature=0.5))
    ),
    "max_new_tokens": dict(
        settings=replace(SETTINGS, sampling=replace(SETTINGS.sampling, max_new_tokens=41))
    ),
    "sampling.seed": dict(settings=replace(SETTINGS, sampling=replace(SETTINGS.sampling, seed=3))),
    "max_length": dict(settings=replace(SETTINGS, max_length=100)),
    "rows_per_shard": dict(settings=replace(SETTINGS, rows_per_shard=4)),
    "template_kwargs": dict(settings=replace(SETTINGS, template_kwargs={"a": 1})),
    "prompts.count": dict(rows=prompts(6)),
    "prompts.hash": dict(rows=list(reversed(prompts()))),
    "target.weights_hash": dict(weights_hash="w1"),
    "target.template_hash": dict(template="llama3"),
}


@pytest.mark.parametrize("field", CHANGES)
def test_a_folder_made_with_other_settings_is_refused_naming_the_field(target, tmp_path, field):
    run(target, tmp_path)
    before = files(tmp_path)
    change = dict(CHANGES[field])
    if "weights_hash" in change:
        target = ToyTarget(target.tokenizer, weights_hash=change.pop("weights_hash"))
    if "template" in change:
        target = ToyTarget(make_tokenizer(TEMPLATES[change.pop("template")]))
    with pytest.raises(ValueError, match=f"was made with {field.replace('.', '[.]')} = "):
        run(target, tmp_path, **change)
    assert files(tmp_path) == before


def test_the_same_target_under_another_name_goes_on(target, tmp_path):
    run(target, tmp_path, rows=prompts(2))
    renamed = ToyTarget(target.tokenizer, name="elsewhere/toy")
    answerer = ToyAnswerer(target.tokenizer)
    run(renamed, tmp_path, answerer, rows=prompts(2))
    assert answerer.requests == []


def test_shards_without_a_manifest_are_not_gone_on_with(target, tmp_path):
    run(target, tmp_path)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(ValueError, match="has shards but no manifest.json"):
        run(target, tmp_path)


def test_a_full_disk_leaves_nothing_half_written_and_the_run_resumes(target, tmp_path):
    run(target, tmp_path / "whole")
    folder = tmp_path / "full"
    with pytest.raises(KeyboardInterrupt):
        run(target, folder, ToyAnswerer(target.tokenizer, fail_after=6))
    before = files(folder)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # no file may grow past 1,000 bytes
    try:
        with pytest.raises(OSError, match=r"cannot write .*shard-00001\.parquet: "):
            run(target, folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert files(folder) == before
    run(target, folder)
    assert files(folder) == files(tmp_path / "whole")


def test_a_write_error_names_its_cause(target, tmp_path, monkeypatch):
    def fails(table, path, **_):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pq, "write_table", fails)
    with pytest.raises(OSError, match=r"shard-00000\.parquet: No space left on device"):
        run(target, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


def test_what_cannot_be_used_at_all_is_an_error_with_the_reasons(target, tmp_path):
    with pytest.raises(ValueError, match="no prompt to answer; dropped: {'tool_turn': 3}"):
        run(target, tmp_path, rows=[], dropped=Counter(tool_turn=3))
    long = PromptRow("long", ({"role": "user", "content": "word " * 600},), "t")
    with pytest.raises(ValueError, match="not one prompt.*{'prompt_too_long': 1}"):
        run(target, tmp_path, rows=[long])


def test_a_template_without_a_marker_is_refused_before_anything_is_written(tmp_path):
    target = ToyTarget(make_tokenizer(TEMPLATES["chatml"]))
    target.tokenizer.chat_template = None
    with pytest.raises(ValueError, match="toy has no chat template"):
        run(target, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_settings_outside_their_range_are_refused(target, tmp_path):
    with pytest.raises(ValueError, match="rows_per_shard = 0: must be 1 or more"):
        GenerationSettings(rows_per_shard=0)
    with pytest.raises(ValueError, match="max_length = 513: the context of toy ends at 512"):
        run(target, tmp_path, settings=replace(SETTINGS, max_length=513))


def test_an_answerer_that_leaves_prompts_out_is_an_error(target, tmp_path):
    def lazy(requests):
        yield from list(ToyAnswerer(target.tokenizer)(requests))[:-1]

    with pytest.raises(RuntimeError, match="1 of 3 prompts were not answered"):
        run(target, tmp_path, lazy)


def test_the_runtime_answers_and_its_rows_are_the_targets_own_greedy_text(tmp_path):
    """In process, with the real engine on a tiny random model, against HF generate."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from drafters.target import Target
    from inference.generate import SpeculativeEngine

    tokenizer = make_tokenizer(TEMPLATES["chatml"])
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
        initializer_range=0.2,
    )
    target = Target(LlamaForCausalLM(config), tokenizer, "tiny")
    settings = GenerationSettings(SamplingParams(max_new_tokens=8), rows_per_shard=4)
    engine = SpeculativeEngine(target, batch_size=3)
    run(target, tmp_path, engine_answerer(engine), rows=prompts(5), settings=settings)
    template = ChatTemplate(tokenizer, target.eos_token_ids, "tiny")
    dataset = AnsweredDataset(tmp_path, target.identity, template)
    assert len(dataset) >= 5
    for document in dataset:
        mask, ids = document.loss_mask.tolist(), document.input_ids.tolist()
        assert supervised_texts(template, ids, mask)
        start = mask.index(True)
        end = start + mask[start:].index(False) if False in mask[start:] else len(mask)
        expected = target.model.generate(
            torch.tensor([ids[:start]]),
            attention_mask=torch.ones(1, start, dtype=torch.long),
            max_new_tokens=8,
            do_sample=False,
        )
        assert expected[0].tolist() == ids[:end]


def test_a_run_out_of_time_is_whole_and_is_gone_on_with(target, tmp_path, monkeypatch):
    whole = tmp_path / "whole"
    run(target, whole)
    clock = iter(range(0, 10_000, 40))  # every look at the clock is 40 s later
    monkeypatch.setattr("data_recipes.generate.time.monotonic", lambda: next(clock))
    settings = {"progress": False, "max_minutes": 1.0}
    folder, answerer = tmp_path / "cut", ToyAnswerer(target.tokenizer)
    manifest = generate_answers(target, prompts(), folder, answerer, SETTINGS, **settings)
    shards = manifest["shards"]
    assert 0 < shards["finished"] == shards["total"] < read_manifest(whole)["shards"]["total"]
    answered = manifest["counts"]["prompts"]
    assert manifest["dropped"]["out_of_time"] == len(prompts()) - answered > 0
    assert len(AnsweredDataset(folder)) == answered
    run(target, folder)
    assert files(folder) == files(whole)
