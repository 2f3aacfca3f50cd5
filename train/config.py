"""A script's settings: one flat dataclass, filled from a YAML file and then the command line.

The YAML is turned into command-line arguments, so that both are checked by the same parser and the
later wins.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn, TypeVar

import yaml
from transformers import HfArgumentParser

Config = TypeVar("Config")


def option(default: Any = dataclasses.MISSING, help: str = "") -> Any:
    """A dataclass field with its help text; without a default it must be given."""
    return field(default=default, metadata={"help": help})


@dataclass(kw_only=True)
class LoopConfig:
    """What every training script has: target, data, batches, optimizer, checkpoints, tracking."""

    target: str = option("default", "hub id, folder, .gguf file, or 'default' (SmolLM2-135M)")
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = option(
        "auto", "of the frozen target; auto: bfloat16 where the hardware has it, else float32"
    )
    data: str = option(help="folder of the target's answers, as scripts/generate_data.py writes it")
    eval_data: str | None = option(None, "folder of held-out answers; none: rows of `data`")
    heldout_rows: int = option(32, "rows of `data` kept out of training, when eval_data is none")
    output: str = option(help="folder of the finished drafter")
    run_folder: str | None = option(None, "checkpoints and tracker files; none: OUTPUT-run")
    max_length: int = option(2048, "tokens of a packed row; what is longer is cut, and counted")
    batch_size: int = option(8, "packed rows of one optimizer step, over all processes")
    micro_batch_size: int = option(8, "packed rows of one forward in one process")
    steps: int = option(0, "optimizer steps; 0: as many as `epochs` takes")
    epochs: float = option(1.0, "passes over the training rows, when steps is 0")
    learning_rate: float = option(1e-3, "peak, after warm-up")
    warmup_ratio: float = option(0.05, "share of the steps over which the learning rate rises")
    weight_decay: float = option(0.0, "AdamW's")
    adam_beta2: float = option(0.999, "AdamW's second beta; the first is 0.9")
    max_grad_norm: float = option(1.0, "gradients are scaled down to this norm; 0: never")
    seed: int = option(0, "of the order of the rows")
    log_every: int = option(10, "steps")
    eval_every: int = option(0, "steps; 0: only at the end")
    checkpoint_every: int = option(200, "steps; 0: only at the end")
    keep_last: int = option(2, "checkpoints that stay on disk")
    max_minutes: float = option(0.0, "training stops after so long, saved and exported; 0: never")
    resume: str = option("auto", "auto: go on from the newest checkpoint; none: refuse")
    tracker: Literal["none", "wandb", "tensorboard"] = option("none", "where the log goes")
    project: str = option("draftsmith", "the tracker's project")
    decode_rows: int = option(8, "held-out prompts decoded in each evaluation; 0: none")
    decode_tokens: int = option(64, "tokens of each such answer")

    # Settings that may change between two sittings of one run: they do not decide the weights.
    FREE: ClassVar[frozenset[str]] = frozenset(
        "target data eval_data output run_folder micro_batch_size log_every eval_every "
        "checkpoint_every keep_last max_minutes resume tracker project decode_rows "
        "decode_tokens".split()
    )

    def decisive(self) -> dict[str, Any]:
        """The settings that decide the weights; data and target are told by hashes instead."""
        return {name: value for name, value in vars(self).items() if name not in self.FREE}

    def __post_init__(self) -> None:
        if self.run_folder is None:
            self.run_folder = self.output.rstrip("/") + "-run"
        at_least = {"max_length": 2, "batch_size": 1, "micro_batch_size": 1, "steps": 0}
        at_least |= {"log_every": 1, "eval_every": 0, "checkpoint_every": 0, "keep_last": 1}
        at_least |= {"heldout_rows": 0, "decode_rows": 0, "decode_tokens": 2, "max_minutes": 0}
        at_least |= {"weight_decay": 0, "max_grad_norm": 0, "seed": 0}
        for name, least in at_least.items():
            _require(self, name, getattr(self, name) >= least, f"≥ {least}")
        _require(self, "learning_rate", self.learning_rate > 0, "> 0")
        _require(self, "warmup_ratio", 0 <= self.warmup_ratio < 1, "within 0 and 1")
        _require(self, "adam_beta2", 0 < self.adam_beta2 < 1, "within 0 and 1")
        _require(self, "epochs", self.steps > 0 or self.epochs > 0, "> 0 when steps is 0")
        _require(self, "resume", self.resume in ("auto", "none"), "'auto' or 'none'")
        _require(
            self,
            "batch_size",
            self.batch_size % self.micro_batch_size == 0,
            f"a multiple of micro_batch_size ({self.micro_batch_size})",
        )


def _require(config: Any, name: str, holds: bool, allowed: str) -> None:
    if not holds:
        raise ValueError(f"{name} is {getattr(config, name)!r}; it must be {allowed}")


class _Parser(HfArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))


def parse_config(config_class: type[Config], argv: Sequence[str] | None = None) -> Config:
    """The settings of a script from `--config file.yaml` and further `--key value`, the later wins.

    Args:
        argv: without the program's name; None takes the command line.
    Raises:
        ValueError: unknown key (the nearest known one is named), wrong type, value not allowed.
        SystemExit: after printing, for --help.
    """
    files, given = _split_config(list(sys.argv[1:] if argv is None else argv))
    parser = _Parser(config_class, allow_abbrev=False)
    known = [f.name for f in dataclasses.fields(config_class) if f.init]
    from_file = [word for path in files for word in _yaml_as_arguments(path, known)]
    config, rest = parser.parse_args_into_dataclasses(
        from_file + given, return_remaining_strings=True, look_for_args_file=False
    )
    for word in rest:
        if word.startswith("--"):
            key = word[2:].split("=")[0].replace("-", "_")
            raise ValueError(f"--{key} is no setting; {_nearest(key, known)}")
    if rest:
        raise ValueError(f"{rest[0]!r} on the command line belongs to no setting")
    return config


def _split_config(argv: list[str]) -> tuple[list[Path], list[str]]:
    """The files of --config, and everything else."""
    files, rest, words = [], [], iter(argv)
    for word in words:
        if word == "--config" or word.startswith("--config="):
            path = word[9:] if "=" in word else next(words, None)
            if not path:
                raise ValueError("--config needs a YAML file")
            files.append(Path(path))
        else:
            rest.append(word)
    if len(files) > 1:
        raise ValueError("--config is given twice; settings come from one file")
    return files, rest


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML keeps the last of two equal keys in silence; here that is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"key {key!r} appears twice")
        return super().construct_mapping(node, deep)


def _yaml_as_arguments(path: Path, known: list[str]) -> list[str]:
    try:
        settings = yaml.load(path.read_text(), Loader=_UniqueKeyLoader)
    except OSError as error:
        raise ValueError(f"config {path}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"config {path}: {' '.join(str(error).split())}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"config {path}: expected lines of `key: value`")
    words: list[str] = []
    for key, value in settings.items():
        if key not in known:
            raise ValueError(f"config {path}: {key!r} is no setting; {_nearest(str(key), known)}")
        if value is None or isinstance(value, dict):
            what = "empty" if value is None else "nested"
            raise ValueError(f"config {path}: {key} is {what}; give a value or leave the line out")
        if isinstance(value, list):
            words += [f"--{key}", *map(_word, value)]
        else:
            words.append(f"--{key}={_word(value)}")  # the = keeps a leading minus a value
    return words


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _nearest(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"


def run_script(main: Callable[[], None]) -> NoReturn:
    """Runs an entry point: what a user got wrong becomes one line and exit code 2.

    A run that broke down on its own (non-finite loss) ends with exit code 1 and one line too. Set
    DRAFTSMITH_TRACEBACK=1 to see where an error came from.
    """
    try:
        main()
    except (ValueError, OSError, ArithmeticError) as error:
        if os.environ.get("DRAFTSMITH_TRACEBACK"):
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1 if isinstance(error, ArithmeticError) else 2)
    sys.exit(0)
