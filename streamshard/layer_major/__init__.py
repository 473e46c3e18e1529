"""Accumulation that gathers each layer once per step: all micro-batches run through a layer before the next layer.

`step` runs forward and backward of a step, `micro_batch` pauses a micro-batch's forward between layers and cuts its
graph into segments, `sums` are the fp32 slots in which the gradients of all micro-batches are added.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch

from streamshard.core.engine import Engine
from streamshard.core.reductions import has_hooks
from streamshard.errors import ConfigError, ShardingError
from streamshard.layer_major.own_state import Attributes
from streamshard.layer_major.step import LayerMajorStep, can_run
from streamshard.layer_major.sums import Sums
from streamshard.nested import tensors_in

HAS_DTENSORS = "the model has DTensors (tensor or expert parallelism)"


def accumulate(
    engine: Engine, model: Any, micro_batches: Iterable[Any], loss_of: Callable[[Any, Any], torch.Tensor]
) -> list[torch.Tensor]:
    """See `StreamShard.accumulate`. `engine` is the model's."""
    if engine.ranks.n_parts > 1 or any(flat.kind.is_expert for unit in engine.units for flat in unit.flat_params):
        refuse_accumulation(HAS_DTENSORS)
    if engine.inputs is not None:
        refuse_accumulation("it runs inside Join")
    if any(map(has_hooks, engine.units)):
        refuse_accumulation("a parameter has a hook of register_post_accumulate_grad_hook, called in every backward")
    given = list(micro_batches)  # all take turns, and may come from a generator
    if not given:
        raise ConfigError("model.accumulate: got no micro-batches, and other ranks would wait: give all ranks as many")
    losses = [functools.partial(_loss_of_one, loss_of, model, micro_batch) for micro_batch in given]
    # Else one after the other: a single one gains nothing, and the first steps show the order.
    if len(losses) > 1 and can_run(engine):
        if any(tensor.grad_fn is not None for tensor in tensors_in(given)):
            raise ShardingError(
                "accumulate: a micro-batch has a tensor that was computed with gradients before the call: compute it "
                "in loss_of, or loop over micro-batches with loss.backward()"
            )
        # Not when the model is sharded: these slots are fp32, and most models never accumulate in this way.
        if engine.sums is None:
            engine.sums = Sums(engine)
        return LayerMajorStep(engine, engine.sums, Attributes(model), losses).run()
    made = []
    try:
        for loss_of_one in losses:
            loss = loss_of_one()
            loss.backward()
            # With its graph it would keep the nodes of all micro-batches until the step ends.
            made.append(loss.detach())
    except BaseException:
        torch.nn.Module.zero_grad(model)  # as `LayerMajorStep`: earlier micro-batches leave no gradients
        raise
    return made


def _loss_of_one(loss_of: Callable[[Any, Any], torch.Tensor], model: Any, micro_batch: Any) -> torch.Tensor:
    loss = loss_of(model, micro_batch)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        what = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ConfigError(f"accumulate: loss_of returned {what}: wanted a loss, a tensor with one element")
    return loss


def refuse_accumulation(why: str) -> NoReturn:
    """Raise a ConfigError, because of `why`."""
    raise ConfigError(f"model.accumulate: {why}, which needs one pass after the other: loop with loss.backward()")
