"""Random sequences of passes and of things done to buffers: on each rank, at each moment, what DDP makes of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from streamshard import StreamShard
from tests.models import DIM, Layer, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import FP32, assert_same, ddp_of

PROGRAMS = 8  # each of them a few hundred buffers compared
PASSES = ["train"] * 6 + ["evaluate", "no_sync", "evaluate with gradients", "two under one backward", "a part"]
ON_ALL_RANKS = ["grow", "other dtype", "register", "delete", "none", "same value"]
ON_ANY_RANK = ["in place", "in place", "in place", "replace", "other memory"]
NAMES = ["table", "state", "layers.0.own", "layers.1.own"]


class Edit(NamedTuple):
    """Something done to a buffer, if it is there.

    Attributes:
        kind: one of those above.
        name: of the buffer.
        rank: which alone does it; None: all.
        value: what it is filled with, the rank aside.
    """

    kind: str
    name: str
    rank: int | None
    value: float

    def apply(self, root: nn.Module) -> None:
        """Do it."""
        owner, _, key = self.name.rpartition(".")
        module: Any = root.get_submodule(owner)
        buffer: Tensor | None = getattr(module, key, None)
        value = self.value + (0 if self.kind == "same value" else dist.get_rank())
        if self.kind == "register":
            if hasattr(module, key):
                delattr(module, key)
            module.register_buffer(key, torch.full((DIM,), value), persistent=self.value < 0.5)
        if buffer is None or (self.rank is not None and self.rank != dist.get_rank()):
            return
        if self.kind in ("in place", "same value"):
            buffer.fill_(value)
        elif self.kind == "other memory":
            buffer.data = torch.full_like(buffer, value)
        elif self.kind == "delete":
            delattr(module, key)
        elif self.kind != "register":
            double = buffer.double() if buffer.dtype is torch.float32 else buffer.float()
            grown = torch.full((len(buffer) + 1,), value)
            others = {"replace": torch.full_like(buffer, value), "none": None, "grow": grown, "other dtype": double}
            setattr(module, key, others[self.kind])


class Model(nn.Module):
    """Buffers in the root and in layers, saved and not; forward edits them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        choose = random.Random(seed)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.norm = nn.BatchNorm1d(DIM)
        self.register_buffer("always", torch.zeros(2))  # DDP has an assertion for a model that has lost its buffers
        self.register_buffer("view", self.always[:1], persistent=False)
        self.edits: list[Edit] = []
        for name in NAMES:
            owner, _, key = name.rpartition(".")
            self.get_submodule(owner).register_buffer(key, torch.zeros(DIM), persistent=choose.random() < 0.4)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, 16] -> [rows, 16]"""
        for layer in self.layers:
            x = layer(x)
        edits, self.edits = self.edits, []
        for edit in edits:
            edit.apply(self)
        return self.norm(x)  # type: ignore[no-any-return]


def _edits(choose: random.Random, world_size: int) -> list[Edit]:
    edits = []
    for _ in range(choose.choice([0, 0, 1, 2])):
        kind = choose.choice([*ON_ALL_RANKS, *ON_ANY_RANK])
        rank = choose.choice([None, None, *range(world_size)]) if kind in ON_ANY_RANK else None
        edits.append(Edit(kind, choose.choice(NAMES), rank, choose.random()))
    return edits


def _run(seed: int, context: RankContext, wrap: Callable[[nn.Module], Any]) -> Iterator[dict[str, Tensor | None]]:
    """The buffers after each pass. Weights stay as they are: it is about buffers."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    model = Model(seed)
    wrapped = wrap(model)
    quiet = choose.choice([0, 2, 6])  # passes before anything happens
    for number in range(quiet + choose.randint(3, 10)):
        kind = choose.choice(PASSES)
        model.edits, after = (_edits(choose, context.world_size) if number >= quiet else [] for _ in range(2))
        x = vector_batch(number, context.rank)
        model.train("evaluate" not in kind and "two" not in kind)
        if kind == "a part":
            with torch.no_grad():
                model.layers[1](x)
        elif kind == "evaluate":
            with torch.no_grad():
                wrapped(x)
        elif kind == "no_sync":
            with wrapped.no_sync():
                wrapped(x).square().mean().backward()
        elif kind == "two under one backward":
            (wrapped(x).square().mean() + wrapped(x + 1).square().mean()).backward()
        else:
            loss = wrapped(x).square().mean()
            if kind == "train":
                loss.backward()
        yield {name: value.detach().clone() for name, value in model.named_buffers()}
        for edit in after:
            edit.apply(model)


def _sharded(model: nn.Module) -> Any:
    return StreamShard(model, precision=FP32)


@on_ranks()
@pytest.mark.parametrize(("world_size", "first"), [(2, 0), (2, PROGRAMS), (3, 2 * PROGRAMS)])
def test_random_programs_leave_buffers_as_ddp_does(context: RankContext, first: int) -> None:
    """Several programs in one test, because starting one is what takes time."""
    for seed in range(first, first + PROGRAMS):
        runs = zip(_run(seed, context, ddp_of), _run(seed, context, _sharded), strict=True)
        for number, (wanted, found) in enumerate(runs):
            assert_same(found, wanted, f"buffers on rank {context.rank} after pass {number} of program {seed}")
