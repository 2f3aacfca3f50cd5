"""The benchmark's figures: rates, ratios, τ, identity and near-ties, computed another way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmark import BenchmarkConfig, stratified
from contenders import Contender, check_identity, hf_greedy, near_ties
from record import acceptance_of, format_table, record_rows, tau_of, tokens_per_second, write_record
from tiny_models import tiny_target

from data_recipes.prompts import PromptRow
from inference.generate import SpeculativeEngine
from inference.row import Generation, GenerationStats


def answer(rounds: int, accepted: list[int], emitted: int) -> Generation:
    stats = GenerationStats(rounds=rounds, emitted_tokens=emitted, accepted_by_depth=accepted)
    return Generation([1] * emitted, "", "length", stats, "greedy", True)


def contender(method: str, seconds: list[list[float]], tokens: list[int]) -> Contender:
    made = Contender(method, 0.0, lambda prompt, seed: ([], None), "greedy")
    made.seconds, made.tokens = seconds, tokens
    return made


def test_rates_are_tokens_over_the_median_passs_seconds() -> None:
    one = contender("plain", [[1.0, 1.0], [2.0, 3.0], [9.0, 9.0]], [10, 20])
    assert tokens_per_second(one, [0, 1]) == 30 / 5
    assert tokens_per_second(one, [1]) == 20 / 3


def test_speedup_is_over_plain_of_the_same_prompts() -> None:
    plain = contender("plain", [[2.0, 4.0]], [10, 10])
    drafted = contender("medusa1", [[1.0, 4.0]], [10, 10])
    drafted.generations = [answer(4, [2, 1], 8), answer(5, [0, 0], 5)]
    rows = record_rows([plain, drafted], ["chat", "code"], "float32", {"medusa1": True})
    by_key = {(row["method"], row["task"]): row for row in rows}
    assert by_key["medusa1", "chat"]["speedup"] == 2.0
    assert by_key["medusa1", "code"]["speedup"] == 1.0
    assert by_key["medusa1", "all"]["tau"] == round(13 / 9, 3)
    assert by_key["medusa1", "all"]["acceptance_by_depth"] == [round(2 / 9, 3), 0.5]
    assert by_key["medusa1", "all"]["identical"] is True
    assert "medusa1" in format_table(rows)


def test_tau_counts_all_rounds_not_answers() -> None:
    answers = [answer(1, [1], 2), answer(9, [0], 9)]
    assert tau_of(answers) == 1.1
    assert acceptance_of(answers) == [0.1]


def test_prompts_are_taken_from_the_tasks_in_turn() -> None:
    rows = [PromptRow(f"{i}", ({"role": "user", "content": "x"},), "ab"[i > 3]) for i in range(6)]
    assert [row.id for row in stratified(rows, 5)] == ["0", "4", "1", "5", "2"]


def test_identity_finds_a_wrong_token() -> None:
    target = tiny_target()
    prompts = [[5, 6, 7], [8, 9]]
    engine = SpeculativeEngine(target)
    assert check_identity(target, {"plain": engine}, prompts, 12)[0] == {"plain": True}

    class Wrong(SpeculativeEngine):
        def generate_many(self, *args, **kwargs):
            for index, generation in super().generate_many(*args, **kwargs):
                generation.token_ids[3] += 1
                yield index, generation

    assert check_identity(target, {"bad": Wrong(target)}, prompts, 12)[0] == {"bad": False}


def test_padded_prompts_give_hfs_unpadded_answers() -> None:
    target = tiny_target()
    prompts = [[5, 6, 7, 8, 9, 10], [8, 9]]
    assert hf_greedy(target, prompts, 9) == [hf_greedy(target, [p], 9)[0] for p in prompts]


def test_near_ties_report_the_margin_of_the_first_difference() -> None:
    target = tiny_target()
    greedy = hf_greedy(target, [[5, 6]], 4)[0]
    same = near_ties(target, [[5, 6]], [greedy], [greedy])
    assert same == {"prompts": 1, "different": 0, "largest_margin": 0.0}
    other = [*greedy[:2], greedy[2] + 1, greedy[3]]
    found = near_ties(target, [[5, 6]], [other], [greedy])
    assert found["different"] == 1 and found["largest_margin"] > 0


def test_a_record_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "record.json"
    write_record(path, {"rows": []})
    assert json.loads(path.read_text()) == {"rows": []}
    assert [p.name for p in path.parent.iterdir()] == ["record.json"]


def test_bad_sizes_are_named() -> None:
    with pytest.raises(ValueError, match="passes is 0"):
        BenchmarkConfig(drafter="d", prompts=["p"], passes=0)
