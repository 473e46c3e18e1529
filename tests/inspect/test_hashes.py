"""check_weights finds ranks that see other weights than the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from streamshard import RankMismatchError, StreamShard
from tests.models import NormStack, Stack, TinyLM
from tests.ranks import RankContext, on_ranks
from tests.reference import FP32, Call, lm_step, sgd, stack_step


@on_ranks(1, 2, 3)
def test_trained_models_pass(context: RankContext) -> None:
    """Tied weights, batch norm, bf16."""
    for model, step in ((StreamShard(TinyLM()), lm_step), (StreamShard(NormStack(), precision=FP32), stack_step)):
        optimizer = sgd(model)
        step(model, Call(0, context.rank, context.world_size, 1.0))
        optimizer.step()
        model.check_weights()


@on_ranks(4)
def test_a_replica_that_differs_is_named(context: RankContext) -> None:
    """One bit of one weight on one rank: both ranks of its replica gather it."""
    model: Any = StreamShard(Stack(), mesh=init_device_mesh("cpu", (2, 2)))
    model.check_weights()
    name = "layers.1.linear.weight"
    if context.rank == 2:
        weight = model.get_parameter(name).as_subclass(torch.Tensor).detach().view(torch.int32)  # this rank's
        weight.view(-1)[0] ^= 1
    with pytest.raises(RankMismatchError, match=rf"'{name}' is not the same.*\[2, 3\] have others"):
        model.check_weights()


@on_ranks(2)
def test_a_buffer_that_differs_is_named(context: RankContext) -> None:
    """Of any dtype. (After a forward that trains it need not be equal: the next one takes rank 0's.)"""
    model: Any = StreamShard(NormStack(), precision=FP32)
    with torch.no_grad():
        model(torch.ones(2, 16))
    model.norms[1].num_batches_tracked += context.rank == 1
    with pytest.raises(RankMismatchError, match=r"'norms.1.num_batches_tracked'.*\[1\] have"):
        model.check_weights()
