"""Objects of the user's with pieces in their state, such as averages of weights: saved and loaded on any ranks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from streamshard import CheckpointError, StreamShard, load_checkpoint, save_checkpoint
from tests.models import Stack, TinyLM
from tests.ranks import RankContext, on_ranks
from tests.reference import EXACT, FP32, assert_same, full_weights, seed, sgd, sharded_model, train_stack


class Average:
    """As diffusers' EMAModel and torch_ema: a list of averages, in the order of the parameters."""

    def __init__(self, model: Any) -> None:
        self.shadows = [param.detach().clone() for param in model.parameters()]
        self.steps, self.own = 0, 0

    @torch.no_grad()
    def step(self, model: Any) -> None:
        self.steps += 1
        for shadow, param in zip(self.shadows, model.parameters(), strict=True):
            shadow.sub_(0.5 * (shadow - param))

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(copy.deepcopy(state))

    @torch.no_grad()
    def full(self, model: Any) -> dict[str, Tensor]:
        """The averages as full tensors, by way of the model."""
        for shadow, param in zip(self.shadows, model.parameters(), strict=True):
            param.data.copy_(shadow)
        return full_weights(model)


def _saved(context: RankContext, path: Path) -> dict[str, Tensor]:
    model = sharded_model()
    average, optimizer = Average(model), sgd(model)
    for step in range(3):
        train_stack(model, optimizer, first=step, steps=1)
        average.step(model)
    save_checkpoint(path, model, optimizer, {"average": average})
    return average.full(model)


def _loaded(context: RankContext, path: Path, wanted: dict[str, Tensor]) -> None:
    seed(2)
    model: Any = StreamShard(Stack(), precision=FP32)
    average = Average(model)
    load_checkpoint(path, model, None, {"average": average})
    assert average.steps == 3
    average.step(model)  # pieces of these ranks: elementwise operations work
    load_checkpoint(path, model, None, {"average": average})
    assert_same(average.full(model), wanted, "averages", EXACT)


def test_averages_of_weights_load_on_other_numbers_of_ranks(ranks: Any, tmp_path: Path) -> None:
    """To the bit, from two ranks to one and three."""
    wanted = ranks(2).run(_saved, tmp_path)[0]
    for size in (1, 3):
        ranks(size).run(_loaded, tmp_path, wanted)


@on_ranks(2)
def test_pieces_that_cannot_be_saved_or_loaded_are_refused(context: RankContext, tmp_path: Path) -> None:
    """Beside values of one rank, or on one rank only; of a parameter that is not there; a norm that is not summed."""
    model = sharded_model()
    average = Average(model)
    average.own = context.rank
    one = {"weight": next(model.parameters()).detach() if context.rank == 0 else None}
    norm = {"norm": next(model.parameters()).detach().norm()}
    for name, each, told in (
        ("average", average, "extra.average has pieces of parameters, and other values that differ"),
        ("one", one, "extra.one has pieces of parameters, and other values that differ"),
        ("norm", norm, r"extra.norm.norm is a norm of this rank's pieces: give float\(value\)"),
    ):
        with pytest.raises(CheckpointError, match=told):
            save_checkpoint(tmp_path / "own", model, extra={name: each})
    average.own = 0
    other: Any = StreamShard(TinyLM(), precision=FP32)
    save_checkpoint(tmp_path / "two", {"a": model, "b": other}, extra={"average": average})
    with pytest.raises(CheckpointError, match=r"extra.average: 'extra.average.shadows\[0\]' is cut as parameter '.*'"):
        load_checkpoint(tmp_path / "two", {"b": other}, extra={"average": Average(other)})
