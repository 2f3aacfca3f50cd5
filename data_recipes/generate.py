"""The target answers the prompts: resumable shards of token ids and loss masks as generated.

Prompts are cut into shards of a fixed size. Within a shard the first turns of all conversations are
answered, then the second turns, and so on; a finished shard appears by rename and is never written
again, so a stopped run loses at most the shard it was at.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data_recipes.chat import ChatTemplate
from data_recipes.conversation import Answer, Conversation
from data_recipes.prompts import PromptRow, prompts_hash
from data_recipes.shards import (
    SCHEMA_VERSION,
    Counts,
    add_counts,
    read_counts,
    read_manifest,
    refuse_difference,
    shard_path,
    write_manifest,
    write_shard,
)
from drafters.target import Target
from inference.params import SamplingParams

Request = tuple[list[int], SamplingParams]
# Answers requests in any order: yields (index of the request, Answer), each exactly once.
Answerer = Callable[[Sequence[Request]], Iterator[tuple[int, Answer]]]


@dataclass(frozen=True)
class GenerationSettings:
    """What decides the rows, apart from target and prompts; a run is resumed only with the same.

    Attributes:
        sampling: how each answer is decoded; its seed is the global seed, from which every answer's
            own is made.
        max_length: longest row in tokens; None is the target's context.
        rows_per_shard: prompts a shard; a stopped run loses at most one. 256 is eight fillings of a
            batch of 32: a shard's last answers leave rows of the batch empty, so it is not smaller.
        template_kwargs: variables for the chat template.
    """

    sampling: SamplingParams = SamplingParams()
    max_length: int | None = None
    rows_per_shard: int = 256
    template_kwargs: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in ("max_length", "rows_per_shard"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} = {value}: must be 1 or more")


def engine_answerer(engine: Any) -> Answerer:
    """Answers in process, with a SpeculativeEngine."""

    def answer(requests: Sequence[Request]) -> Iterator[tuple[int, Answer]]:
        prompts, params = [ids for ids, _ in requests], [params for _, params in requests]
        for index, generation in engine.generate_many(prompts, params):
            yield index, Answer(list(generation.token_ids), generation.finish_reason)

    return answer


def generate_answers(
    target: Target,
    prompts: Sequence[PromptRow],
    folder: Path,
    answer: Answerer,
    settings: GenerationSettings | None = None,
    dropped: Counter[str] | None = None,
    progress: bool = True,
    max_minutes: float = 0.0,
) -> dict[str, Any]:
    """Answers prompts into a folder of shards; goes on where a stopped run was.

    Args:
        prompts: rows of `read_prompts`; answers they hold are kept.
        answer: who answers; see `engine_answerer`.
        dropped: rows that reading the prompts dropped, by reason, for the manifest.
        progress: show a progress bar on stderr.
        max_minutes: after so long no new shard is begun (0: never); the folder is finished as it
            is, the prompts left over are counted as dropped under "out_of_time", and the same call
            goes on with them.
    Returns:
        The manifest, as written to manifest.json.
    Raises:
        ValueError: no prompt; a template without an assistant marker; a folder made with other
            settings (names the field); not one row that could be used (names the reasons).
        OSError: names the file that could not be written; finished shards stay.
    """
    settings = settings or GenerationSettings()
    if not prompts:
        raise ValueError(f"there is no prompt to answer; dropped: {dict(dropped or {})}")
    template = ChatTemplate(
        target.tokenizer, target.eos_token_ids, target.name, settings.template_kwargs
    )
    max_length = settings.max_length or target.max_length
    if max_length > target.max_length:
        raise ValueError(
            f"max_length = {max_length}: the context of {target.name} ends at {target.max_length}"
        )
    settings = replace(settings, max_length=max_length)
    size = settings.rows_per_shard
    pieces = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    begun = _open_folder(folder, target, prompts, settings, dropped or Counter())
    counts = {
        index: read_counts(path)
        for index in range(len(pieces))
        if (path := shard_path(folder, index)).exists()
    }
    turns = [sum(m["role"] == "user" for row in piece for m in row.messages) for piece in pieces]
    done = sum(turns[index] for index in counts)
    started = time.monotonic()
    with tqdm(
        total=sum(turns), initial=done, desc="answers", unit="turn", disable=not progress
    ) as bar:
        for index, piece in enumerate(pieces):
            if index in counts:
                continue
            if counts and 0 < max_minutes * 60 <= time.monotonic() - started:
                begun = _ended_here(begun, pieces[index:])
                break
            path = shard_path(folder, index)
            _answer_shard(path, piece, template, answer, settings, bar)
            done += turns[index]
            bar.update(done - bar.n)  # turns of conversations that ended early
            counts[index] = read_counts(path)
            write_manifest(folder, _with_counts(begun, counts))
    manifest = _with_counts(begun, counts)
    if manifest != read_manifest(folder):  # killed between the last shard and its manifest
        write_manifest(folder, manifest)
    if not manifest["counts"]["rows"]:
        raise ValueError(f"not one prompt could be answered; dropped: {manifest['dropped']}")
    return manifest


def _open_folder(
    folder: Path,
    target: Target,
    prompts: Sequence[PromptRow],
    settings: GenerationSettings,
    dropped: Counter[str],
) -> dict[str, Any]:
    """A manifest without the counts of shards; refuses a folder that other settings made."""
    sampling = asdict(settings.sampling)
    sampling["stop"] = list(sampling["stop"])
    made_with = {
        "target": target.identity,
        "dtype": str(target.dtype).removeprefix("torch."),
        "template_kwargs": settings.template_kwargs or {},
        "sampling": sampling,
        "max_new_tokens": settings.sampling.max_new_tokens,
        "max_length": settings.max_length,
        "rows_per_shard": settings.rows_per_shard,
        "prompts": {"count": len(prompts), "hash": prompts_hash(prompts)},
    }
    before = read_manifest(folder)
    if before is not None:
        refuse_difference(folder, before["made_with"], made_with)
    elif folder.exists() and any(folder.glob("shard-*.parquet")):
        raise ValueError(f"{folder} has shards but no manifest.json; give another folder")
    num_shards = -(-len(prompts) // settings.rows_per_shard)
    manifest = {
        "schema_version": SCHEMA_VERSION,
        "made_with": made_with,
        "shards": {"total": num_shards, "finished": 0},
        "counts": {},
        "dropped": dict(sorted(dropped.items())),
    }
    if before is None:
        folder.mkdir(parents=True, exist_ok=True)
        write_manifest(folder, manifest)
    return manifest


def _answer_shard(
    path: Path,
    prompts: Sequence[PromptRow],
    template: ChatTemplate,
    answer: Answerer,
    settings: GenerationSettings,
    bar: tqdm,
) -> None:
    assert settings.max_length is not None
    conversations = [
        Conversation(row, template, settings.max_length, settings.sampling.seed) for row in prompts
    ]
    while waiting := [c for c in conversations if c.prompt is not None]:
        requests = [(c.prompt, replace(settings.sampling, seed=c.seed)) for c in waiting]
        missing = set(range(len(requests)))
        for index, said in answer(requests):
            missing.remove(index)
            waiting[index].take(said)
            bar.update()
        if missing:
            raise RuntimeError(f"{len(missing)} of {len(requests)} prompts were not answered")
    rows = [row for c in conversations for row in c.rows]
    for row in rows:
        template.prove(row.input_ids, row.loss_mask, row.id)
    write_shard(path, rows, _shard_counts(conversations))


def _shard_counts(conversations: Sequence[Conversation]) -> Counts:
    rows = [row for c in conversations for row in c.rows]
    ended = [c for c in conversations if c.end_reason]
    return {
        "prompts": len(conversations),
        "rows": len(rows),
        "answers": sum(len(row.finish_reasons) for row in rows),
        "tokens": sum(len(row.input_ids) for row in rows),
        "supervised_tokens": sum(sum(row.loss_mask) for row in rows),
        "split_conversations": sum(len(c.rows) > 1 for c in conversations),
        "rows_by_task": Counter(row.task for row in rows),
        "finish_reasons": Counter(reason for row in rows for reason in row.finish_reasons),
        "dropped": Counter(c.end_reason for c in ended if not c.rows),
        "ended_early": Counter(c.end_reason for c in ended if c.rows),
    }


def _ended_here(begun: dict[str, Any], left: Sequence[Sequence[PromptRow]]) -> dict[str, Any]:
    """The manifest of a run that ends before the shards that are left."""
    shards = begun["shards"] | {"total": begun["shards"]["total"] - len(left)}
    dropped = begun["dropped"] | {"out_of_time": sum(map(len, left))}
    return begun | {"shards": shards, "dropped": dict(sorted(dropped.items()))}


def _with_counts(begun: dict[str, Any], shards: dict[int, Counts]) -> dict[str, Any]:
    """The manifest with the counts of the finished shards."""
    total: Counts = {"dropped": begun["dropped"]}
    for index in sorted(shards):
        total = add_counts(total, shards[index])
    dropped = total.pop("dropped")
    finished = begun["shards"] | {"finished": len(shards)}
    return begun | {"shards": finished, "counts": total, "dropped": dropped}
