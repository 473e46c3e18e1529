"""Buffers, which are full on every rank. Persistent ones are broadcast from rank 0 before a forward.

As under DistributedDataParallel (torch/nn/parallel/distributed.py, ``_sync_buffers``), rank 0 broadcasts persistent
buffers before a forward of the whole model, if the forward before trained and was outside of ``no_sync()``. Until
then each rank keeps what its own forward has written (batch norm's statistics). Non-persistent buffers (rotary
tables, masks, caches) are broadcast once, when the model is sharded, and are each rank's own afterwards. So are
buffers that are registered later.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from streamshard.comm.communicator import Communicator
from streamshard.errors import ShardingError
from streamshard.plan.structure import is_meta
from streamshard.torch_private import is_traceable_wrapper_subclass

_ALIGNMENT = 16  # bytes, the start of each buffer in a message: the largest element (complex128) has 16


class _Place(NamedTuple):
    """Where a buffer is registered, and the shape and dtype that it has to keep."""

    owner: weakref.ref[nn.Module]
    key: str
    shape: torch.Size
    dtype: torch.dtype


class BufferSync:
    """Keeps persistent buffers equal on all ranks. Owns nothing.

    Args:
        root: the model.
        ranks: all ranks of the model, replicas included.
    """

    def __init__(self, root: nn.Module, ranks: Communicator) -> None:
        self._root_of = weakref.ref(root)  # weak: the model holds the engine, and the engine holds this object
        self._ranks = ranks
        self._state: dict[str, _Place] = {}
        self._is_due = True

    @property
    def _root(self) -> nn.Module:
        root = self._root_of()
        if root is None:
            raise ShardingError("a part of a model is called whose whole is gone")
        return root

    def start(self) -> set[str]:
        """Take over the model's buffers: rank 0 sends each that has the same shape and dtype on all ranks. Collective.

        Returns:
            The names of the buffers that were broadcast.
        """
        buffers = buffers_of(self._root)
        self._state = {name: self._place_of(name, buffers[name]) for name in _state_of(self._root, buffers)}
        if not self._ranks.any_rank(bool(buffers)) or self._ranks.total_size == 1:
            return set()
        forms = {name: (tuple(buffer.shape), buffer.dtype) for name, buffer in buffers.items() if not is_meta(buffer)}
        gathered = self._ranks.gather_objects(forms)
        same = {name: buffers[name] for name in forms if all(each.get(name) == forms[name] for each in gathered)}
        self._send(same, source=0)
        return set(same)

    def before_pass(self, *, trains: bool, source: int) -> None:
        """A forward of the whole model begins: if the last one trained, broadcast the source's persistent buffers.

        Args:
            trains: this forward has gradients, and is not inside ``no_sync()``.
            source: number of the rank whose buffers are broadcast.

        Raises:
            ShardingError: a persistent buffer was removed, or has another shape or dtype.
        """
        if self._ranks.total_size == 1:
            return
        if self._is_due:
            self.sync(source)
        self._is_due = trains

    def sync(self, source: int) -> None:
        """Broadcast the persistent buffers of rank number `source` now. Collective."""
        try:
            buffers = {name: self._find(name, place) for name, place in self._state.items()}
        except ShardingError as error:
            self._ranks.fail(str(error))  # others are about to broadcast
            raise
        self._send(buffers, source)

    def _place_of(self, name: str, buffer: torch.Tensor) -> _Place:
        owner, _, key = name.rpartition(".")
        return _Place(weakref.ref(self._root.get_submodule(owner)), key, buffer.shape, buffer.dtype)

    def _find(self, name: str, place: _Place) -> torch.Tensor:
        owner = place.owner()
        buffer = None if owner is None else owner._buffers.get(place.key)
        if buffer is None:
            raise ShardingError(
                f"buffer {name!r} of the model's state is gone, and ranks keep its state equal: keep the buffer, or "
                "register it with persistent=False before StreamShard(model)"
            )
        if (problem := _problem_with(buffer)) or buffer.shape != place.shape or buffer.dtype is not place.dtype:
            now = problem or f"has become {tuple(buffer.shape)} {buffer.dtype}"
            raise ShardingError(
                f"buffer {name!r} was {tuple(place.shape)} {place.dtype} when the model was sharded, and {now}: ranks "
                "broadcast the model's state. Keep its shape and dtype, or register it with persistent=False if each "
                "rank keeps its own"
            )
        return buffer

    def _send(self, buffers: Mapping[str, torch.Tensor], source: int) -> None:
        """Broadcast `buffers` in one message. Writes to ``.data``: a graph may have saved a buffer, as under DDP."""
        starts, nbytes = [], 0
        for buffer in buffers.values():
            starts.append(nbytes)
            nbytes += -(-buffer.nbytes // _ALIGNMENT) * _ALIGNMENT
        if not nbytes:
            return
        is_source = self._ranks.number == source
        with torch.no_grad():
            message = torch.empty(nbytes, dtype=torch.uint8, device=self._ranks.streams.device)
            own: dict[torch.dtype, list[torch.Tensor]] = {}
            sent: dict[torch.dtype, list[torch.Tensor]] = {}
            for buffer, start in zip(buffers.values(), starts, strict=True):
                if buffer.nbytes:
                    part = message.narrow(0, start, buffer.nbytes).view(buffer.dtype).view(buffer.shape)
                    own.setdefault(buffer.dtype, []).append(buffer.data)
                    sent.setdefault(buffer.dtype, []).append(part)
            for dtype in own if is_source else ():
                torch._foreach_copy_(sent[dtype], own[dtype])
            self._ranks.broadcast(message, source)
            for dtype in () if is_source else own:
                torch._foreach_copy_(own[dtype], sent[dtype])


def check_buffers(root: nn.Module) -> None:
    """Raise if ranks cannot send a buffer to each other. A buffer on the meta device is accepted.

    Raises:
        ShardingError: a buffer is sparse, quantized, expanded, lazy, or a tensor subclass made of other tensors.
    """
    for name, buffer in buffers_of(root).items():
        if problem := _problem_with(buffer):
            raise ShardingError(f"buffer {name!r} {problem}")


def describe_state(root: nn.Module) -> list[str]:
    """A line with name, shape and dtype of each persistent buffer, to compare ranks by."""
    buffers = buffers_of(root)
    return [f"buffer {name} {tuple(buffers[name].shape)} {buffers[name].dtype}" for name in _state_of(root, buffers)]


def _problem_with(buffer: torch.Tensor) -> str:
    """Why ranks cannot send `buffer` to each other; "" if they can."""
    if is_lazy(buffer):
        return "is not initialised: call the model once before it is sharded"
    if buffer.layout is not torch.strided or buffer.is_quantized or is_traceable_wrapper_subclass(buffer):
        kind = "quantized" if buffer.is_quantized else str(buffer.layout)
        return (
            f"is a {type(buffer).__name__} ({kind}), and ranks keep buffers equal by sending them to each other, which "
            "works for dense ones (nor does DistributedDataParallel take it). Register its dense parts (a sparse "
            "one's indices and values) and put it together in forward, or keep it as a plain attribute"
        )
    if any(stride == 0 and size > 1 for stride, size in zip(buffer.stride(), buffer.shape, strict=True)):
        return "is expanded: several of its elements are one in memory. Register a clone() of it"
    return ""


def buffers_of(root: nn.Module) -> dict[str, torch.Tensor]:
    """What ``dict(root.named_buffers())`` gives."""
    return dict(root.named_buffers())


def _state_of(root: nn.Module, buffers: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """The names of the persistent ones among `buffers`."""
    for name in buffers:
        owner, _, key = name.rpartition(".")
        if key not in root.get_submodule(owner)._non_persistent_buffers_set:
            yield name
