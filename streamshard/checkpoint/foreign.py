"""Directories that people take for checkpoints and that are none: what each is, by the names of its files."""

from __future__ import annotations

from pathlib import Path

from streamshard.checkpoint.safetensors_file import INDEX_NAME, SINGLE_NAME

__all__ = ["METADATA_NAME", "MODEL_DIRECTORY", "OPTIMIZER_DIRECTORY", "holds_weights", "what_is"]

METADATA_NAME = ".metadata"
"""Of the file that a directory of torch.distributed.checkpoint has, and nobody else."""

MODEL_DIRECTORY = "pytorch_model_fsdp"
"""Of Accelerate's directory of a model, without its number."""

OPTIMIZER_DIRECTORY = "optimizer"
"""Of that of an optimizer."""

_KINDS = (  # one of these files, what it is, what to do
    (
        (METADATA_NAME, f"{MODEL_DIRECTORY}_0/{METADATA_NAME}"),
        "a directory of torch.distributed.checkpoint (FSDP2's, for one)",
        "streamshard convert {} OUT --from dcp makes a checkpoint of it",
    ),
    (
        (SINGLE_NAME, INDEX_NAME),
        "a Hugging Face directory, as exports are",
        "from_pretrained and load_safetensors read it, streamshard inspect {} verifies it",
    ),
    (
        ("adapter_model.safetensors", "adapter_model.bin"),
        "a directory of PEFT's, with adapters",
        "its from_pretrained reads them",
    ),
    (
        ("pytorch_model.bin", "pytorch_model.bin.index.json"),
        "a Hugging Face directory with pickled weights",
        "from_pretrained reads it",
    ),
)


def what_is(directory: Path) -> str | None:
    """What `directory` is instead of a checkpoint, and what to do with it; None if that is unknown."""
    for files, kind, advice in _KINDS:
        if any((directory / file).is_file() for file in files):
            return f"{directory} is {kind}, no checkpoint of save_checkpoint: {advice.format(directory)}"
    return None


def holds_weights(directory: Path) -> bool:
    """Whether it is a Hugging Face directory of safetensors files."""
    return any((directory / name).is_file() for name in (SINGLE_NAME, INDEX_NAME))
