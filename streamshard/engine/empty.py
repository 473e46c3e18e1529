"""What is empty: weights and buffers of a model from the meta device, which have room on every rank and no values yet.

Whoever writes to one fills it: `load_safetensors`, `init_weights`, ``load_state_dict``, an assignment inside
``summon_full_params(writeback=True)``. That is seen by its version, which all of these move on every rank. Until the
last one is filled, whatever would compute with weights or give them away raises.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from streamshard.engine.buffer_sync import buffers_of
from streamshard.errors import ShardingError
from streamshard.plan.structure import is_meta
from streamshard.unit.shard import ParamShard

__all__ = ["Empty"]


class _Seen(NamedTuple):
    """A tensor as it was when room was made for it."""

    tensor: torch.Tensor
    version: int


class Empty:
    """The weights and buffers of one model that are empty. There is none for a model that is whole.

    Args:
        root: the model.
        shards: its parameters that are empty; their pieces hold NaN.
        buffers: names of its buffers that are empty; floating-point ones hold NaN.
    """

    def __init__(self, root: nn.Module, shards: Sequence[ParamShard], buffers: Collection[str]) -> None:
        self._root_of = weakref.ref(root)  # which holds the engine that holds this
        self._params = {shard.name: _Seen(shard.param, shard.param._version) for shard in shards}
        found = buffers_of(root)
        self._buffers = {name: _Seen(found[name], found[name]._version) for name in found if name in buffers}
        refuses_step = register_optimizer_step_pre_hook(_StepRefusal(self))
        weakref.finalize(self, refuses_step.remove)

    def params(self) -> list[str]:
        """The names of parameters that are empty."""
        self._params = {name: seen for name, seen in self._params.items() if seen.tensor._version == seen.version}
        return list(self._params)

    def buffers(self) -> list[str]:
        """The names of buffers that are empty; those that were filled or taken away on this rank are not."""
        root = self._root_of()
        now: Mapping[str, torch.Tensor] = {} if root is None else buffers_of(root)
        for name, seen in list(self._buffers.items()):
            buffer = now.get(name)
            is_same = buffer is seen.tensor and (buffer.is_inference() or buffer._version == seen.version)
            if not is_same and (buffer is None or not is_meta(buffer)):
                del self._buffers[name]
        return list(self._buffers)

    def fill(self, names: Collection[str]) -> None:
        """What is called so is not empty any more, although this rank may have had nothing to write."""
        for name in names:
            self._params.pop(name, None)
            self._buffers.pop(name, None)

    def renew(self, shards: Sequence[ParamShard], buffers: Mapping[str, torch.Tensor]) -> None:
        """These were empty, and what was written to them is no values of theirs: they are empty again."""
        for shard in shards:
            shard.main.fill_(torch.nan)
            self._params[shard.name] = _Seen(shard.param, shard.param._version)
        for name, buffer in buffers.items():
            self._buffers[name] = _Seen(buffer, buffer._version)

    def refuse(self, what: str) -> None:
        """Raise if anything is empty.

        Args:
            what: is about to be done.

        Raises:
            ShardingError: names the first parameter or buffer.
        """
        params, buffers = self.params(), self.buffers()
        if not params and not buffers:
            return
        more = len(params) + len(buffers) - 1
        rest = f", and {more} more," if more else ""
        if params:
            raise ShardingError(
                f"{what}, but parameter {params[0]!r}{rest} is empty: it was on the meta device, and StreamShard has "
                "made room for it, no more. Give it values first: streamshard.load_safetensors(model, directory), or "
                "streamshard.init_weights(model), on all ranks"
            )
        raise ShardingError(
            f"{what}, but buffer {buffers[0]!r}{rest} is empty: it was on the meta device, and nothing has computed it "
            "since. Give it values on all ranks: in place (model.get_buffer(name).copy_(..)), or by a function, "
            "streamshard.init_weights(model, function)"
        )


class _StepRefusal:
    """Before the step of any optimizer. Weak: torch holds it."""

    def __init__(self, empty: Empty) -> None:
        self._empty_of = weakref.ref(empty)

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        empty = self._empty_of()
        if empty is None:
            return
        params = {id(param) for group in optimizer.param_groups for param in group["params"]}
        if any(id(seen.tensor) in params for seen in empty._params.values()):
            empty.refuse(f"{type(optimizer).__name__}.step()")
