"""Objects of the user's with pieces in their state, such as averages of weights: saved and loaded on any ranks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from streamshard import CheckpointError, LocalSGD, StreamShard, load_checkpoint, save_checkpoint
from tests.models import Stack, TinyLM
from tests.ranks import RankContext, on_ranks
from tests.reference import FP32, Call, piece_of, seed, sgd, stack_step


class Average:
    """As diffusers' EMAModel and torch_ema: a list of averages, in the order of the parameters."""

    def __init__(self, model: Any) -> None:
        self.shadows = [param.detach().clone() for param in model.parameters()]
        self.steps, self.own = 0, 0

    def step(self, model: Any) -> None:
        self.steps += 1
        with torch.no_grad():
            for shadow, param in zip(self.shadows, model.parameters(), strict=True):
                shadow.sub_(0.5 * (shadow - param))

    def state_dict(self) -> dict[str, Any]:
        return {"shadows": self.shadows, "steps": self.steps, "own": self.own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadows, self.steps = copy.deepcopy(state["shadows"]), state["steps"]

    def full(self, model: Any) -> dict[str, Tensor]:
        """The averages as full tensors, by way of the model."""
        with torch.no_grad():
            for shadow, param in zip(self.shadows, model.parameters(), strict=True):
                param.data.copy_(shadow)
        return {name: each.clone() for name, each in model.full_state_dict(rank0_only=False).items()}


def _model(number: int = 1) -> Any:
    seed(number)
    return StreamShard(Stack(), precision=FP32)


def _saved(context: RankContext, path: Path) -> dict[str, Tensor]:
    model = _model()
    average, optimizer = Average(model), sgd(model)
    for step in range(3):
        stack_step(model, Call(step, 0, 1, 1.0))
        optimizer.step()
        optimizer.zero_grad()
        average.step(model)
    save_checkpoint(path, model, optimizer, {"average": average})
    return average.full(model)


def _loaded(context: RankContext, path: Path, wanted: dict[str, Tensor]) -> None:
    model = _model(2)
    average = Average(model)
    load_checkpoint(path, model, None, {"average": average})
    assert average.steps == 3
    average.step(model)  # pieces of these ranks: elementwise operations work
    load_checkpoint(path, model, None, {"average": average})
    for name, each in average.full(model).items():
        assert torch.equal(each, wanted[name]), name


def test_averages_of_weights_load_on_other_numbers_of_ranks(ranks: Any, tmp_path: Path) -> None:
    """To the bit, from two ranks to one and three, and from one, where they are full tensors, to two."""
    for saved_by, loaded_by in ((2, (1, 3)), (1, (2,))):
        wanted = ranks(saved_by).run(_saved, tmp_path)[0]
        for size in loaded_by:
            ranks(size).run(_loaded, tmp_path, wanted)


@on_ranks(4)
def test_each_replica_of_local_sgd_gets_its_own_averages(context: RankContext, tmp_path: Path) -> None:
    seed(1)
    model: Any = StreamShard(Stack(), precision=FP32, mesh=init_device_mesh("cpu", (2, 2)))
    optimizer = LocalSGD(sgd(model), model, period=100, warmup_steps=1)
    average = Average(model)
    for step in range(3):
        stack_step(model, Call(step, context.rank, 4, 1.0))
        optimizer.step()
        optimizer.zero_grad()
        average.step(model)
    save_checkpoint(tmp_path, model, optimizer, {"average": average})
    other = Average(model)
    load_checkpoint(tmp_path, model, optimizer, {"average": other})
    for wanted, found in zip(average.shadows, other.shadows, strict=True):
        assert torch.equal(piece_of(found), piece_of(wanted))


@on_ranks(2)
def test_pieces_that_cannot_be_saved_or_loaded_are_refused(context: RankContext, tmp_path: Path) -> None:
    """Beside values of one rank, or on one rank only; of a parameter that is not there; a norm that is not summed."""
    model = _model()
    average = Average(model)
    average.own = context.rank
    with pytest.raises(CheckpointError, match="extra.average has pieces of parameters, and other values that differ"):
        save_checkpoint(tmp_path / "own", model, extra={"average": average})
    one = {"weight": next(model.parameters()).detach() if context.rank == 0 else None}
    with pytest.raises(CheckpointError, match="extra.one has pieces of parameters, and other values that differ"):
        save_checkpoint(tmp_path / "own", model, extra={"one": one})
    norm = {"norm": next(model.parameters()).detach().norm()}
    with pytest.raises(CheckpointError, match=r"extra.norm.norm is a norm of this rank's pieces: give float\(value\)"):
        save_checkpoint(tmp_path / "norm", model, extra={"norm": norm})
    average.own = 0
    other: Any = StreamShard(TinyLM(), precision=FP32)
    save_checkpoint(tmp_path / "two", {"a": model, "b": other}, extra={"average": average})
    with pytest.raises(CheckpointError, match=r"extra.average: 'extra.average.shadows\[0\]' is cut as parameter '.*'"):
        load_checkpoint(tmp_path / "two", {"b": other}, extra={"average": Average(other)})
