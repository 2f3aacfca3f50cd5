"""A folder of answered rows is read whole and unspoilt, or refused by name."""

import json

import pytest

from data_recipes.answered import AnsweredDataset
from data_recipes.conversation import AnsweredRow
from data_recipes.shards import read_manifest, shard_path, write_manifest, write_shard

MANIFEST = {
    "schema_version": 1,
    "made_with": {"target": {"name": "toy", "weights_hash": "w", "template_hash": "t"}},
    "shards": {"total": 2, "finished": 2},
}


def make_folder(folder, *rows, manifest=None):
    folder.mkdir(exist_ok=True)
    half = len(rows) // 2
    write_shard(shard_path(folder, 0), rows[:half], {"rows": half})
    write_shard(shard_path(folder, 1), rows[half:], {"rows": len(rows) - half})
    write_manifest(folder, manifest or MANIFEST)
    return folder


def row(name, mask, ids=None):
    mask = [bool(m) for m in mask]
    return AnsweredRow(name, "t", ids or list(range(5, 5 + len(mask))), mask, [1], ["eos"])


def test_rows_come_back_as_they_were_written(tmp_path):
    make_folder(tmp_path, row("a", [0, 1, 1]), row("b", [0, 0, 1, 0, 1]), row("c", [0, 1]))
    dataset = AnsweredDataset(tmp_path)
    assert [d.id for d in dataset] == ["a", "b", "c"] and len(dataset) == 3
    assert dataset[1].input_ids.tolist() == [5, 6, 7, 8, 9]
    assert dataset[1].loss_mask.tolist() == [False, False, True, False, True]
    assert dataset[1].task == "t" and dataset[1].finish_reasons == ("eos",)


def test_a_row_without_supervised_tokens_names_template_and_row(tmp_path):
    make_folder(tmp_path, row("a", [0, 1]), row("b", [0, 0]))
    with pytest.raises(ValueError, match="row b .chat template t of toy.: no token is supervised"):
        AnsweredDataset(tmp_path)


def test_a_row_that_begins_supervised_names_template_and_row(tmp_path):
    make_folder(tmp_path, row("a", [1, 1]))
    with pytest.raises(ValueError, match="row a .chat template t of toy.: the first token"):
        AnsweredDataset(tmp_path)


def test_with_a_template_every_mask_is_proven_again(tmp_path, chatml):
    prompt = chatml.encode("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
    ids = [*prompt, *chatml.encode("yes<|im_end|>")]
    mask = [i >= len(prompt) - 1 for i in range(len(ids))]  # one prompt token supervised
    make_folder(tmp_path, row("a", mask, ids))
    assert len(AnsweredDataset(tmp_path)) == 1
    with pytest.raises(ValueError, match=f"row a .chat template {chatml.hash}.*the prompt is"):
        AnsweredDataset(tmp_path, template=chatml)


def test_lengths_that_differ_name_the_row(tmp_path):
    make_folder(tmp_path, row("a", [0, 1], ids=[1, 2, 3]))
    with pytest.raises(ValueError, match="row a .*3 tokens, 2 mask values"):
        AnsweredDataset(tmp_path)


def test_an_unfinished_folder_is_refused_unless_asked_for(tmp_path):
    unfinished = MANIFEST | {"shards": {"total": 3, "finished": 2}}
    make_folder(tmp_path, row("a", [0, 1]), row("b", [0, 1]), manifest=unfinished)
    with pytest.raises(ValueError, match="2 of 3 shards are finished; run .*generate_data.py"):
        AnsweredDataset(tmp_path)
    assert len(AnsweredDataset(tmp_path, allow_unfinished=True)) == 2


def test_rows_of_another_target_are_refused_naming_the_field(tmp_path):
    make_folder(tmp_path, row("a", [0, 1]))
    identity = MANIFEST["made_with"]["target"]
    assert len(AnsweredDataset(tmp_path, identity | {"name": "elsewhere"})) == 1
    for field in ("weights_hash", "template_hash"):
        with pytest.raises(ValueError, match=f"was made with target.{field} = "):
            AnsweredDataset(tmp_path, identity | {field: "other"})


def test_a_folder_without_a_manifest_is_named(tmp_path):
    with pytest.raises(ValueError, match="nowhere: no manifest.json there"):
        AnsweredDataset(tmp_path / "nowhere")


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_a_damaged_manifest_is_named(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match="manifest.json: not a manifest of answered rows"):
        AnsweredDataset(tmp_path)


def test_a_manifest_of_another_version_is_refused(tmp_path):
    (tmp_path / "manifest.json").write_text(json.dumps(MANIFEST | {"schema_version": 9}))
    with pytest.raises(ValueError, match="schema version 9, this program reads 1"):
        read_manifest(tmp_path)


def test_missing_and_damaged_shards_are_named(tmp_path):
    make_folder(tmp_path, row("a", [0, 1]), row("b", [0, 1]))
    path = shard_path(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"shard-00001.parquet: not a readable shard"):
        AnsweredDataset(tmp_path)
    path.unlink()
    with pytest.raises(ValueError, match=r"shard-00001.parquet: the manifest counts this shard"):
        AnsweredDataset(tmp_path)
