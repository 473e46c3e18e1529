"""Buffers (rotary tables, batch-norm statistics) are whole on every rank, and rank 0's when a forward begins.

As under DistributedDataParallel (torch/nn/parallel/distributed.py, ``_sync_buffers``): before a forward of the whole
model, if the one before it trained and was synchronised, every rank gets rank 0's. What a forward writes stays this
rank's own until then. DDP sends all buffers each time; here those that would arrive as what they are stay at home.
See [Note: which buffers are sent].

[Note: which buffers are sent]
All ranks have a list of what is sent, the same one. A buffer is on it if it belongs to the state (persistent: batch
norm's statistics, codebooks), or if ranks' values differed when they last compared them. The others (tables, masks) are
equal everywhere and each rank watches its own: its identity, its version, its address. A rank sees news when one of
them has moved, or when a buffer of any kind has come, gone or taken another shape. Whether any rank has news is asked
before each sending, in one bit that goes between hosts: through memory between ranks of one machine, through gloo
otherwise (a quarter of a millisecond through sockets of one machine; no device waits for it, so a GPU with work queued
does not notice). Only then do ranks exchange names and shapes and make a new list. Messages therefore always have the
size that all ranks expect.

What has no version (batch norm's own kernel, writes through ``.data``) is noticed by comparing values: ranks review the
list after the first training pass, and 1, 2, 4, 8... sendings later.

A buffer whose shape differs between ranks cannot be sent. If it belongs to the state all ranks raise; if not, it is a
cache that each rank keeps as long as it needs, and stays each rank's own until the shapes are the same again.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from streamshard.comm.ranks import Ranks
from streamshard.errors import RankMismatchError, ShardingError
from streamshard.plan.structure import is_meta

__all__ = ["BufferSync", "buffers_of", "check_buffers", "describe_state", "digest"]

_ALIGNMENT = 16  # bytes, of each buffer in a message: the largest element


class _Form(NamedTuple):
    """What a message of a buffer looks like.

    Attributes:
        shape: without what is only repeated: 1 along a dimension of stride 0.
        dtype: of its elements.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Of its elements."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class _Row(NamedTuple):
    """What one rank says of one buffer when ranks make a list.

    Attributes:
        form: of its message.
        problem: why it cannot be sent; "" if it can.
        is_persistent: whether it belongs to the state.
        is_news: whether it has moved since ranks last made a list, as far as can be seen; at first all have.
        digest: of its value; "" if values are not compared this time.
    """

    form: _Form
    problem: str
    is_persistent: bool
    is_news: bool
    digest: str


class _Outside(NamedTuple):
    """What a buffer looks like from outside: if that changes, the list does not fit any more."""

    shape: torch.Size
    dtype: torch.dtype
    stride: tuple[int, ...] | None  # None: it is not strided

    @classmethod
    def of(cls, buffer: torch.Tensor) -> _Outside:
        return cls(buffer.shape, buffer.dtype, _stride_of(buffer))

    def fits(self, buffer: torch.Tensor) -> bool:
        return self.shape == buffer.shape and self.dtype is buffer.dtype and self.stride == _stride_of(buffer)


class _Inside(NamedTuple):
    """Which value a buffer has, as far as can be seen without reading it.

    The object too: what takes the place of one that is gone often has its address, and is as new as that one was.
    """

    tensor: weakref.ref[torch.Tensor]
    version: int
    address: int

    @classmethod
    def of(cls, buffer: torch.Tensor) -> _Inside:
        return cls(weakref.ref(buffer), _version_of(buffer), buffer.data_ptr())

    def fits(self, buffer: torch.Tensor) -> bool:
        is_same = self.tensor() is buffer and self.address == buffer.data_ptr()
        return is_same and self.version == _version_of(buffer)


class BufferSync:
    """Keeps buffers equal. Owns nothing.

    Args:
        root: the model.
        ranks: of all ranks that have them.
    """

    def __init__(self, root: nn.Module, ranks: Ranks) -> None:
        self._root_of = weakref.ref(root)  # which holds the engine that holds this
        self._ranks = ranks
        self._is_needed = False
        self._is_due = True
        self._sent: dict[str, _Form] = {}  # in the order of messages
        self._outside: dict[str, _Outside] = {}  # all buffers of this rank, as of the latest list
        self._inside: dict[str, _Inside] = {}  # of those that are equal on all ranks and not sent
        self._has_tables = False  # some are not persistent
        self._has_trained = False
        self._until_review = 0  # sendings; 0: the next one, if there has been a training pass
        self._interval = 1

    @property
    def _root(self) -> nn.Module:
        root = self._root_of()
        if root is None:
            raise ShardingError("a part of a model is called whose whole is gone")
        return root

    def start(self, *, send: bool) -> set[str]:
        """Make the first list, of everything. A model that has no buffers on any rank never sends one, as under DDP.

        Args:
            send: let all ranks have rank 0's now.

        Returns:
            The names of those that are rank 0's now.

        Raises:
            RankMismatchError, ShardingError: on all ranks; see `check_buffers`.
        """
        buffers = buffers_of(self._root)
        self._is_needed = self._ranks.total_size > 1 and self._ranks.any_rank(bool(buffers))
        if self._is_needed:
            self._make_list(buffers, compares=False)
            if send:
                self._send(buffers, source=0)
                return set(self._sent)
        return set()

    def before_pass(self, *, trains: bool, source: int) -> None:
        """A forward of the whole model begins: if the last one trained, every rank gets the source's buffers.

        Args:
            trains: this one has gradients, and is not inside ``no_sync()``.
            source: number of the rank whose buffers count.

        Raises:
            RankMismatchError, ShardingError: on all ranks: a buffer has become one that cannot be sent.
        """
        if not self._is_needed:
            return
        if self._is_due:
            self.sync(source)
        self._is_due = trains
        self._has_trained = self._has_trained or trains

    def sync(self, source: int) -> None:
        """Every rank gets the buffers of rank number `source` now. Collective."""
        if not self._is_needed:
            return
        buffers = buffers_of(self._root)
        is_review = self._has_trained and self._has_tables and self._until_review == 0
        if is_review:
            self._until_review, self._interval = self._interval, 2 * self._interval
        has_news = self._ranks.any_rank(self._has_news(buffers))  # asked first: it hears of ranks that are gone
        if is_review or has_news:
            self._make_list(buffers, compares=is_review)
        self._until_review = max(self._until_review - 1, 0)
        self._send(buffers, source)

    def equal_ones(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Buffers that have to be equal on all ranks now: not those that the next forward takes from the source."""
        for name, buffer in buffers_of(self._root).items():
            is_equal = name in self._inside or (name in self._sent and not self._is_due)
            if is_equal and not _problem_with(buffer):
                yield name, buffer

    # -- the list -------------------------------------------------------------------------------------------------

    def _has_news(self, buffers: dict[str, torch.Tensor]) -> bool:
        """Whether what this rank knows and others do not makes a new list necessary."""
        return buffers.keys() != self._outside.keys() or any(self._is_news(*found) for found in buffers.items())

    def _is_news(self, name: str, buffer: torch.Tensor) -> bool:
        outside, inside = self._outside.get(name), self._inside.get(name)
        return outside is None or not outside.fits(buffer) or (inside is not None and not inside.fits(buffer))

    def _make_list(self, buffers: dict[str, torch.Tensor], *, compares: bool) -> None:
        """What is sent from now on. The decision is a function of what all ranks say, so it is the same on all."""
        gathered: list[dict[str, _Row]] = self._ranks.gather_objects(self._rows(buffers, compares=compares))
        sent: dict[str, _Form] = {}
        equal: list[str] = []
        for name in sorted({name for rows in gathered for name in rows}):
            rows = [theirs.get(name) for theirs in gathered]
            _refuse_together(name, rows)
            found = [row for row in rows if row is not None]
            if len(found) < len(rows) or len({row.form for row in found}) > 1:
                continue  # a cache: each rank has its own
            differs = len({row.digest for row in found}) > 1 if compares else name in self._sent
            if differs or any(row.is_persistent or row.is_news for row in found):
                sent[name] = found[0].form
            else:
                equal.append(name)
        self._has_tables = any(not row.is_persistent for rows in gathered for row in rows.values())
        # By dtype: copies of one dtype go in one kernel.
        self._sent = dict(sorted(sent.items(), key=lambda item: (str(item[1].dtype), item[0])))
        self._outside = {name: _Outside.of(buffer) for name, buffer in buffers.items()}
        self._inside = {name: _Inside.of(buffers[name]) for name in equal}

    def _rows(self, buffers: dict[str, torch.Tensor], *, compares: bool) -> dict[str, _Row]:
        rows = {}
        for name, buffer in buffers.items():
            problem = _problem_with(buffer)
            form = _Form((), buffer.dtype) if problem else _Form(tuple(_once(buffer).shape), buffer.dtype)
            is_persistent = _is_persistent(self._root, name)
            is_compared = compares and not problem and not is_persistent
            value = digest(buffer) if is_compared else ""
            rows[name] = _Row(form, problem, is_persistent, self._is_news(name, buffer), value)
        return rows

    # -- messages -------------------------------------------------------------------------------------------------

    def _send(self, buffers: dict[str, torch.Tensor], source: int) -> None:
        """One broadcast. Written behind autograd's back: a graph may have saved what is overwritten, as under DDP."""
        starts, nbytes = [], 0
        for form in self._sent.values():
            starts.append(nbytes)
            nbytes += -(-form.nbytes // _ALIGNMENT) * _ALIGNMENT
        if not nbytes:
            return
        with torch.no_grad(), torch.inference_mode(any(buffers[name].is_inference() for name in self._sent)):
            message = torch.empty(nbytes, dtype=torch.uint8, device=self._ranks.streams.device)
            own: dict[torch.dtype, list[torch.Tensor]] = {}
            sent: dict[torch.dtype, list[torch.Tensor]] = {}
            for (name, form), start in zip(self._sent.items(), starts, strict=True):
                if form.nbytes:
                    part = message.narrow(0, start, form.nbytes).view(form.dtype).view(form.shape)
                    own.setdefault(form.dtype, []).append(_once(buffers[name].data))
                    sent.setdefault(form.dtype, []).append(part)
            is_source = self._ranks.number == source
            if is_source:
                for dtype, parts in sent.items():
                    torch._foreach_copy_(parts, own[dtype])
            self._ranks.broadcast(message, source)
            if not is_source:
                for dtype, parts in sent.items():
                    torch._foreach_copy_(own[dtype], parts)


def check_buffers(root: nn.Module) -> None:
    """Raise if a buffer is none that ranks can keep equal. One on the meta device will be.

    Raises:
        ShardingError: it is sparse, quantized, not initialised, or a tensor made of tensors.
    """
    for name, buffer in buffers_of(root).items():
        if problem := _problem_with(buffer, accepts_meta=True):
            raise ShardingError(f"buffer {name!r} {problem}")


def describe_state(root: nn.Module) -> list[str]:
    """The name, shape and dtype of each buffer that belongs to the state: the same on all ranks."""
    state = {name: buffer for name, buffer in buffers_of(root).items() if _is_persistent(root, name)}
    return [f"buffer {name} {tuple(buffer.shape)} {buffer.dtype}" for name, buffer in state.items()]


def digest(tensor: torch.Tensor) -> str:
    """A hash of the elements of a dense `tensor`, of any shape and dtype. On CUDA the host waits for them."""
    data = tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()


def _refuse_together(name: str, rows: Sequence[_Row | None]) -> None:
    for rank, row in enumerate(rows):
        if row is not None and row.problem:
            raise ShardingError(f"buffer {name!r} on rank {rank} {row.problem}")
    if not any(row is not None and row.is_persistent for row in rows):
        return
    forms = ["missing" if row is None else f"{row.form.shape} {row.form.dtype}" for row in rows]
    for rank, form in enumerate(forms):
        if form != forms[0]:
            raise RankMismatchError(
                f"buffer {name!r} is {forms[0]} on rank 0 and {form} on rank {rank}: it belongs to the model's state, "
                "of which rank 0's counts for all. Give it the same shape on all ranks, or register it with "
                "persistent=False if it is a cache of which each rank keeps its own"
            )


def _problem_with(buffer: torch.Tensor, *, accepts_meta: bool = False) -> str:
    """Why ranks cannot send it to each other; "" if they can."""
    if is_lazy(buffer):
        return "is not initialised: call the model once before it is sharded"
    if buffer.layout is not torch.strided or buffer.is_quantized or is_traceable_wrapper_subclass(buffer):
        kind = "quantized" if buffer.is_quantized else str(buffer.layout)
        return (
            f"is a {type(buffer).__name__} ({kind}), and ranks keep buffers equal by sending them to each other, which "
            "works for dense ones (nor does DistributedDataParallel take it). Register its dense parts (a sparse "
            "one's indices and values) and put it together in forward, or keep it as a plain attribute"
        )
    if is_meta(buffer) and not accepts_meta:
        return "is on the meta device: give it values, or assign it before StreamShard(model), which makes room for it"
    return ""


def buffers_of(root: nn.Module) -> dict[str, torch.Tensor]:
    """What ``dict(root.named_buffers())`` gives, in less time: it is asked before every training pass."""
    found: dict[str, torch.Tensor] = {}
    _find_buffers(root, "", found, set())
    return found


def _find_buffers(module: nn.Module, prefix: str, found: dict[str, torch.Tensor], known: set[int]) -> None:
    known.add(id(module))
    for key, buffer in module._buffers.items():
        if buffer is not None and id(buffer) not in known:
            known.add(id(buffer))
            found[prefix + key] = buffer
    for key, child in module._modules.items():
        if child is not None and id(child) not in known:
            _find_buffers(child, f"{prefix}{key}.", found, known)


def _is_persistent(root: nn.Module, name: str) -> bool:
    owner, _, key = name.rpartition(".")
    return key not in root.get_submodule(owner)._non_persistent_buffers_set


def _once(buffer: torch.Tensor) -> torch.Tensor:
    """A view of it without what is only repeated: where many elements are one in memory, that one is sent."""
    if 0 in (strides := buffer.stride()):
        for dim, stride in enumerate(strides):
            if stride == 0 and buffer.shape[dim] > 1:
                buffer = buffer.narrow(dim, 0, 1)
    return buffer


def _stride_of(buffer: torch.Tensor) -> tuple[int, ...] | None:
    return buffer.stride() if buffer.layout is torch.strided else None


def _version_of(buffer: torch.Tensor) -> int:
    # Inference tensors have no version: writes into them are found when values are compared.
    return 0 if buffer.is_inference() else buffer._version
