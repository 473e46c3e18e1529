"""The models that exports are tried on, and what is in files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from streamshard import StreamShard
from streamshard.checkpoint.export import FileNames, StoredDirectory
from streamshard.checkpoint.safetensors_file import read_ranges
from streamshard.checkpoint.storage import Location
from tests.families import bert, dinov2, gpt2, llama, mixtral, t5, vit
from tests.reference import FP32

MODELS = [llama, gpt2, bert, t5, mixtral, vit, dinov2]


def filled(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> Any:
    """A model whose every element is different, norms and biases too."""
    torch.manual_seed(0)
    model = make()
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape))
    return model.to(dtype)


class Plain(nn.Module):
    """Not of transformers: a batch norm's buffers, a tied weight, a scalar, a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.last = nn.Linear(5, 7)
        self.last.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("counts", torch.arange(6).view(2, 3).t())
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


def sharded(model: nn.Module) -> Any:
    """`model` on these ranks. Layers that could be found are none of a `Plain`'s."""
    return StreamShard(model, ["norm"] if isinstance(model, Plain) else None, precision=FP32)


def assert_same_files(ours: Path, theirs: Path) -> None:
    """Both directories have the same files with the same bytes."""
    assert names_in(ours) == names_in(theirs)
    for path in theirs.iterdir():
        assert (ours / path.name).read_bytes() == path.read_bytes(), path.name


def stored_bytes(directory: Path) -> dict[str, bytes] | None:
    """All tensors of an export as `from_pretrained` would find them; None if there is none to find."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.exists():
        return {name: _bytes(tensor) for name, tensor in load_file(single).items()}
    if not index.exists():
        return None
    found = {}
    for name, file in json.loads(index.read_text())["weight_map"].items():
        with safe_open(directory / file, "pt") as opened:
            found[name] = _bytes(opened.get_tensor(name))
    return found


def read_by_us(directory: Location) -> dict[str, bytes]:
    """All tensors of an export as `load_safetensors` finds them."""
    tensors = StoredDirectory(directory, FileNames("model")).tensors
    parts = read_ranges([(each, 0, each.numel) for each in tensors.values()])
    return {name: _bytes(part) for name, part in zip(tensors, parts, strict=True)}


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).numpy())


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir()) if directory.exists() else []
