"""The reduced vocabulary: most frequent answer tokens, tied to what made them."""

import pytest
import torch

from train.draft_vocab import choose_draft_vocab, count_answer_tokens


def test_only_tokens_of_answers_are_counted():
    rows = [
        (torch.tensor([5, 5, 5, 2, 3]), torch.tensor([False, False, False, True, True])),
        (torch.tensor([1, 3]), torch.tensor([False, True])),
    ]
    assert count_answer_tokens(rows, 7).tolist() == [0, 0, 1, 2, 0, 0, 0]


def test_the_most_frequent_tokens_are_kept_lower_ids_first_among_equals():
    counts = torch.tensor([4, 0, 9, 4, 4, 1])
    vocab = choose_draft_vocab(counts, 3, "t")
    assert vocab.ids.tolist() == [0, 2, 3]
    assert vocab.coverage == pytest.approx(17 / 22)
    many = torch.ones(5000, dtype=torch.int64)
    assert choose_draft_vocab(many, 2000, "t").ids.tolist() == list(range(2000))


def test_the_hash_follows_answers_tokenizer_and_size():
    counts = torch.tensor([4, 1, 9, 4, 4, 1])
    made = {
        choose_draft_vocab(counts, 3, "t").made_from,
        choose_draft_vocab(counts, 4, "t").made_from,
        choose_draft_vocab(counts, 3, "u").made_from,
        choose_draft_vocab(counts + torch.eye(6, dtype=torch.int64)[1], 3, "t").made_from,
    }
    assert len(made) == 4
    assert choose_draft_vocab(counts.clone(), 3, "t").made_from in made


def test_a_short_corpus_fills_up_by_id_and_says_so():
    counts = torch.tensor([0, 0, 9, 0, 4, 0])
    with pytest.warns(UserWarning, match="2 distinct tokens; 2 more are taken by id"):
        vocab = choose_draft_vocab(counts, 4, "t")
    assert vocab.ids.tolist() == [0, 1, 2, 4]


@pytest.mark.parametrize("size", [0, -1, 7])
def test_impossible_sizes_are_refused(size):
    with pytest.raises(ValueError, match=f"draft_vocab_size is {size}; it must be within 1 and 6"):
        choose_draft_vocab(torch.ones(6, dtype=torch.int64), size, "t")


def test_a_corpus_without_answers_is_refused():
    with pytest.raises(ValueError, match="hold not one token"):
        choose_draft_vocab(torch.zeros(6, dtype=torch.int64), 2, "t")
