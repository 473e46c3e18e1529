"""Directories that people take for another kind than they are: what each is, by the names of its files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from streamshard.checkpoint.manifest import MANIFEST_NAME
from streamshard.checkpoint.safetensors_file import INDEX_NAME, SINGLE_NAME

__all__ = [
    "CHECKPOINT",
    "DCP",
    "HUGGING_FACE",
    "METADATA_NAME",
    "MODEL_DIRECTORY",
    "OPTIMIZER_DIRECTORY",
    "holds_weights",
    "what_is",
]

METADATA_NAME = ".metadata"
"""Of the file that a directory of torch.distributed.checkpoint has, and nobody else."""

MODEL_DIRECTORY = "pytorch_model_fsdp"
"""Of Accelerate's directory of a model, without its number."""

OPTIMIZER_DIRECTORY = "optimizer"
"""Of that of an optimizer."""

CHECKPOINT = "checkpoint of save_checkpoint"
DCP = "directory of torch.distributed.checkpoint"
HUGGING_FACE = "Hugging Face directory"


class _Kind(NamedTuple):
    """What directories have that are such.

    Attributes:
        files: patterns, one of which is there.
        kind: what they are.
        more: what is said about them besides.
        advice: what to do with one.
    """

    files: tuple[str, ...]
    kind: str
    more: str
    advice: str


_KINDS = (
    _Kind(
        (MANIFEST_NAME, f"checkpoint-*/{MANIFEST_NAME}"),
        CHECKPOINT,
        ", or holds such",
        "load_checkpoint reads it, streamshard export {} OUT writes its weights for from_pretrained",
    ),
    _Kind(
        (METADATA_NAME, f"{MODEL_DIRECTORY}_0/{METADATA_NAME}"),
        DCP,
        " (FSDP2's, for one)",
        "streamshard convert {} OUT --from dcp makes a checkpoint of it",
    ),
    _Kind(
        (SINGLE_NAME, INDEX_NAME),
        HUGGING_FACE,
        ", as exports are",
        "from_pretrained and load_safetensors read it, streamshard inspect {} verifies it",
    ),
    _Kind(
        ("adapter_model.safetensors", "adapter_model.bin"),
        "directory of PEFT's",
        ", with adapters",
        "its from_pretrained reads them",
    ),
    _Kind(
        ("pytorch_model.bin", "pytorch_model.bin.index.json"),
        "Hugging Face directory with pickled weights",
        "",
        "from_pretrained reads it",
    ),
)


def what_is(directory: Path, wanted: str) -> str | None:
    """What `directory` is instead of what is `wanted`, and what to do with it; None if that is unknown."""
    for files, kind, more, advice in _KINDS:
        if kind != wanted and any(os.path.isfile(path) for file in files for path in directory.glob(file)):
            return f"{directory} is a {kind}{more}, and no {wanted}: {advice.format(directory)}"
    return None


def holds_weights(directory: Path) -> bool:
    """Whether it is a Hugging Face directory of safetensors files."""
    return any(os.path.isfile(directory / name) for name in (SINGLE_NAME, INDEX_NAME))
