"""What inspection shows is what the masks say."""

import pytest

from data_recipes.generate import GenerationSettings, generate_answers
from data_recipes.prompts import PromptRow
from inference.params import SamplingParams
from scripts.inspect_data import main
from tests.data_recipes.toy_chat import TEMPLATES, ToyAnswerer, ToyTarget, make_tokenizer


@pytest.fixture
def folder(tmp_path):
    tokenizer = make_tokenizer(TEMPLATES["chatml"])
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "config.json").write_text('{"model_type": "llama"}')
    target = ToyTarget(tokenizer, name=str(tmp_path / "tokenizer"))
    from drafters.identity import tokenizer_hash

    target.identity["tokenizer_hash"] = tokenizer_hash(tokenizer)
    rows = [
        PromptRow(f"p{i}", ({"role": "user", "content": "hello"},) * (i + 1), "one" if i else "two")
        for i in range(3)
    ]
    settings = GenerationSettings(SamplingParams(max_new_tokens=60))
    answer = ToyAnswerer(tokenizer)
    generate_answers(target, rows, tmp_path / "answers", answer, settings, progress=False)
    return tmp_path / "answers"


def test_supervised_text_is_marked_and_nothing_else(folder, capsys):
    main([str(folder), "--id", "p1"])
    shown = capsys.readouterr().out
    marked = [piece.split("⟧")[0] for piece in shown.split("⟦")[1:]]
    assert len(marked) == 2
    assert all(text.startswith("answer ") and text.endswith("<|im_end|>") for text in marked)
    assert "<|im_start|>assistant\n⟦answer" in shown and "⟧\n<|im_start|>user\nhello" in shown


def test_colours_stand_for_the_marks(folder, capsys):
    main([str(folder), "--rows", "1", "--color", "always"])
    shown = capsys.readouterr().out
    assert shown.count("\x1b[1;32manswer ") == 1 and "<|im_end|>\x1b[0m" in shown
    assert "⟦" not in shown


def test_the_table_has_each_tasks_share(folder, capsys):
    from data_recipes.answered import AnsweredDataset

    main([str(folder), "--rows", "0"])
    lines = capsys.readouterr().out.splitlines()
    documents = list(AnsweredDataset(folder))
    total = sum(d.loss_mask.sum() for d in documents)
    for task, chosen in (("one", documents[1:]), ("two", documents[:1]), ("all", documents)):
        (line,) = [line for line in lines if line.startswith(task)]
        tokens = sum(len(d) for d in chosen)
        supervised = sum(d.loss_mask.sum() for d in chosen)
        shares = [f"{supervised / tokens:.1%}", f"{supervised / total:.1%}"]
        assert line.split()[1:] == [str(len(chosen)), str(tokens), str(supervised), *shares]


def test_a_task_can_be_chosen(folder, capsys):
    main([str(folder), "--task", "two"])
    shown = capsys.readouterr().out
    assert "── p0 " in shown and "── p1 " not in shown


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--task", "none"], "no row of task 'none'; it has one, two"),
        (["--id", "p9"], "no row has the id 'p9'"),
        (["--rows", "-1"], "--rows is -1; it must be"),
        (["--tokenizer", "./nowhere"], "the tokenizer of ./nowhere cannot be loaded"),
        (["--wrong"], "unrecognized arguments: --wrong"),
    ],
)
def test_what_is_not_there_is_named(folder, argv, message):
    with pytest.raises(ValueError, match=message):
        main([str(folder), *argv])


def test_another_tokenizer_is_refused(folder, tmp_path):
    other = make_tokenizer(TEMPLATES["chatml"])
    other.add_tokens(["extra"])
    other.save_pretrained(tmp_path / "other")
    (tmp_path / "other" / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="is not the one that these rows were made with"):
        main([str(folder), "--tokenizer", str(tmp_path / "other")])


def test_a_folder_that_holds_no_answers_is_named(tmp_path):
    with pytest.raises(ValueError, match="no manifest.json there"):
        main([str(tmp_path)])
