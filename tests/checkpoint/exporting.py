"""Ranks simulated by threads, what each would own of a model, and the models that exports are tried on."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from streamshard.checkpoint.export import export_shards
from streamshard.comm.objects import RankGroup
from streamshard.errors import CheckpointError
from streamshard.planning.layout import ParamLayout, plan_flat_param
from streamshard.unit.shard import ParamShard
from tests.families import bert, dinov2, gpt2, llama, mixtral, t5, vit

T = TypeVar("T")


class ThreadGroup(RankGroup):
    """One of several threads of this process that act as ranks."""

    def __init__(self, rank: int, barrier: threading.Barrier, told: list[Any]) -> None:
        super().__init__()
        self.rank = self.number = rank
        self.is_first = rank == 0
        self.replica = 0
        self.world_size = self.total_size = len(told)
        self._barrier = barrier
        self._told = told

    def gather_bytes(self, data: bytes, *, with_replicas: bool = True) -> list[bytes]:
        self._told[self.rank] = data
        self._barrier.wait()
        everyone = list(self._told)
        self._barrier.wait()
        return everyone


def on_threads(world_size: int, action: Callable[[ThreadGroup], T]) -> list[T | BaseException]:
    """What `action` returned or raised on each of `world_size` simulated ranks."""
    barrier = threading.Barrier(world_size, timeout=30)
    told: list[Any] = [None] * world_size
    outcomes: list[Any] = [None] * world_size

    def run(rank: int) -> None:
        try:
            outcomes[rank] = action(ThreadGroup(rank, barrier, told))
        except BaseException as error:
            outcomes[rank] = error
            if not isinstance(error, CheckpointError):
                barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def succeed(outcomes: Sequence[T | BaseException]) -> list[T]:
    """The outcomes; raises the first that is an error."""
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return list(outcomes)  # type: ignore[arg-type]  # none is an exception


def shards_for(model: nn.Module, rank: int, world_size: int) -> list[ParamShard]:
    """What `rank` would own of `model`, laid out as one unit in fp32."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    sizes = [ParamLayout(own[0], tuple(param.shape)) for param, own in names.items()]
    unit = plan_flat_param(sizes, world_size, element_bytes=2, align_pieces_to=1)
    flat = torch.zeros(unit.shard_numel)
    shards = []
    for (param, own), layout in zip(names.items(), unit.params, strict=True):
        local = unit.local_range(layout, rank)
        piece = flat.narrow(0, local.shard_offset, local.numel)
        piece.copy_(param.detach().reshape(-1)[local.start : local.stop])
        names, whole = (own[0], tuple(own[1:])), nn.Parameter(piece)
        shards.append(ParamShard(*names, whole, layout, local, param.dtype, piece, None))  # type: ignore[arg-type]
    return shards


def export(
    model: nn.Module, directory: Path, world_size: int, dtype: Any = None, max_shard_size: int | str = "5GB"
) -> list[str]:
    """Export `model` as `world_size` simulated ranks would; what they agree they wrote."""

    def action(group: ThreadGroup) -> list[str]:
        shards = shards_for(model, group.rank, group.world_size)
        return export_shards(model, shards, group, directory, dtype, max_shard_size)

    written = succeed(on_threads(world_size, action))
    assert all(names == written[0] for names in written)
    return written[0]


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


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).numpy())


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir()) if directory.exists() else []
