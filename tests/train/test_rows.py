"""Training and held-out rows: split, packed, named, hashed."""

import pytest

from data_recipes.answered import Document
from tests.train.conftest import document, documents
from train.rows import collate_named, hash_documents, split_held_out


def test_held_out_rows_are_a_seeded_part_and_no_row_is_lost():
    rows = documents(20)
    training, held_out = split_held_out(rows, 5, seed=1)
    assert len(held_out) == 5
    assert sorted(d.id for d in training + held_out) == sorted(d.id for d in rows)
    assert [d.id for d in split_held_out(rows, 5, seed=1)[1]] == [d.id for d in held_out]
    assert [d.id for d in split_held_out(rows, 5, seed=2)[1]] != [d.id for d in held_out]


def test_parts_of_one_conversation_stay_on_one_side():
    rows = [document(f"talk-{i}#turn-{turn}", 3, 4) for i in range(10) for turn in (1, 2)]
    training, held_out = split_held_out(rows, 5, seed=0)
    sides = [{d.id.split("#")[0] for d in side} for side in (training, held_out)]
    assert not sides[0] & sides[1] and len(held_out) == 6


def test_no_held_out_rows_is_a_choice_and_nothing_to_train_on_an_error():
    assert split_held_out(documents(3), 0, seed=0)[1] == []
    with pytest.raises(ValueError, match="heldout_rows is 32, but there are only 3 rows"):
        split_held_out(documents(3), 32, seed=0)


def test_a_batch_names_the_documents_of_each_row():
    a, b, c = documents(3)
    assert collate_named([[a, b], [c]])["row_ids"] == [["row-0", "row-1"], ["row-2"]]


def test_the_data_hash_follows_tokens_mask_names_and_order():
    rows = documents(3)
    changed = [Document(d.id, d.task, d.input_ids.copy(), d.loss_mask.copy()) for d in rows]
    assert hash_documents(changed) == hash_documents(rows)
    changed[1].loss_mask[-1] = False
    other = [changed, rows[::-1], rows[:2]]
    assert hash_documents(rows) not in [hash_documents(variant) for variant in other]
