"""The speed of a device and of collectives, and the part of a layer's communication that compute does not hide.

Training's own transport moves buffers of a unit's size. The layer has random weights, and the rest of the model has no
memory: a forward with fake tensors shows with which arguments the model calls the layer. The layer is measured alone
and beside its collectives. The difference is the communication that compute does not hide. Compute and communication
also slow each other: they share memory bandwidth and cores, and through shared memory the rank itself copies.
"""

from __future__ import annotations

import os
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from streamshard.comm.communicator import Communicator
from streamshard.comm.ranks import RankGroup
from streamshard.comm.streams import Fence, Rule, StreamName, Work
from streamshard.comm.transport import Gather, Reduction
from streamshard.config import Precision
from streamshard.device import has_streams, module_of
from streamshard.dtensors import axes_of
from streamshard.errors import ConfigError
from streamshard.nested import cast, map_tensors, tensors_in
from streamshard.pinned import PinnedMemory
from streamshard.planning.discovery import find_units
from streamshard.planning.layout import kind_of
from streamshard.tools.activations import Arguments, Build, copy_without_memory, run_without_memory

_SECONDS = 1.0  # for each measurement, if one repeat does not take longer
_MOST_REPEATS = 30
_COPIED_BYTES = 1 << 27  # more than the caches of a CPU

NO_DTENSORS = (
    "a layer with DTensors is not measured: give a model as large as a rank's part (heads and widths divided by the "
    "ranks of the mesh), and start only the ranks that shard it"
)


@dataclass(frozen=True)
class CollectiveSpeed:
    """A collective of one unit, alone.

    Attributes:
        name: "all-gather" or "reduction".
        unit_bytes: bytes of the whole unit: weights in the wire dtype, or gradients in the dtype that is sent. A rank
            sends (N - 1)/N of them.
        median_ms: from start to end.
        gb_s: 1e9 bytes of the unit per second.
    """

    name: str
    unit_bytes: int
    median_ms: float
    gb_s: float


@dataclass(frozen=True)
class LayerSpeed:
    """The model's largest layer; median times.

    Attributes:
        name: the layer's name.
        count: the number of layers of its class.
        forward_ms, backward_ms: compute alone.
        forward_beside_ms: a forward and an all-gather at the same time.
        backward_beside_ms: a backward, an all-gather and a reduction at the same time.
    """

    name: str
    count: int
    forward_ms: float
    backward_ms: float
    forward_beside_ms: float
    backward_beside_ms: float


def measure(
    ranks: Communicator, sizes: Sequence[tuple[int, int]], layer: Layer | None, precision: Precision
) -> tuple[list[CollectiveSpeed], LayerSpeed | None]:
    """Time each unit's collectives, and a layer alone and beside the collectives of the first unit. Collective.

    Args:
        ranks: connected, on the layer's device.
        sizes: by unit, the number of elements to all-gather, and of elements to reduce.
        layer: None: time only the units.
        precision: the dtypes.

    Raises:
        CommunicationError: on every rank: a rank has failed.
    """
    ranks.share_memory(sum(16 * (numel + 64 * ranks.world_size) for numel, _ in sizes), len(sizes))
    ranks.recorder.names = ["a measured unit"] * len(sizes)
    units = [_Unit(ranks, tag, *pair, precision) for tag, pair in enumerate(sizes)]
    medians = partial(medians_ms, ranks, ranks.streams.device)
    speeds = []
    for unit in units:
        times = medians(partial(unit.run, gather=True), partial(unit.run, reduce=True))
        for name, n_bytes, ms in zip(("all-gather", "reduction"), unit.bytes, times, strict=True):
            speeds.append(CollectiveSpeed(name, n_bytes, ms, n_bytes / ms / 1e6))
    if layer is None:
        return speeds, None
    forward = partial(units[0].run, layer.forward, gather=True)
    backward = partial(units[0].run, layer.backward, gather=True, reduce=True)
    times = medians(layer.forward, layer.backward, forward, backward)  # in turn, so that noise meets all alike
    return speeds, LayerSpeed(layer.name, layer.count, *times)


class _Unit:
    """Buffers of one unit, as in the engine, and its collectives.

    Args:
        ranks: the ranks.
        tag: the unit's number; messages of different units must not be mixed up.
        numel: elements to all-gather.
        trained: elements to reduce.
        precision: the dtypes.
    """

    def __init__(self, ranks: Communicator, tag: int, numel: int, trained: int, precision: Precision) -> None:
        kind = kind_of(torch.float32, precision, trains=True, in_fp32=False)
        kind = kind._replace(grad_dtype=kind.compute_dtype)
        shard, part = (-(-count // ranks.world_size) for count in (numel, trained))
        self._ranks, transport, device = ranks, ranks.transport, ranks.streams.device
        sent = transport.sent_dtype(kind.mode, kind.grad_dtype)
        self.bytes = numel * kind.wire_dtype.itemsize, trained * sent.itemsize
        slot = torch.zeros(ranks.world_size * shard, dtype=kind.wire_dtype, device=device)
        self._gather = Gather(transport.allocate_visible(shard, kind.wire_dtype), slot, tag)
        grads = transport.allocate_visible(ranks.world_size * part, kind.grad_dtype)
        scratch_numel = transport.scratch_numel(part, kind.mode, kind.grad_dtype, grads.nbytes)
        scratch = torch.zeros(scratch_numel, dtype=kind.grad_dtype, device=device)
        self._reduction = Reduction(grads, torch.zeros(part, device=device), scratch, kind.mode, False, tag, 1.0)
        self._ready = Fence(ranks.streams, Rule.SHARDS_WRITTEN, StreamName.COMPUTE, "a measured unit")
        self._done = Fence(ranks.streams, Rule.RESULTS_ARRIVED, StreamName.COMM, "a measured unit")

    def run(self, compute: Callable[[], object] = int, *, gather: bool = False, reduce: bool = False) -> None:
        """Start the collectives, call `compute`, and let the compute stream wait for the collectives."""
        transport, works = self._ranks.transport, list[Work | None]()
        self._ready.record()
        self._ready.wait()
        if gather:
            works.append(transport.start_gather(self._gather))
        if reduce and self.bytes[1]:
            works.append(transport.start_reduce(self._reduction))
        self._done.record(*works)
        compute()
        self._done.wait()


class Layer:
    """The model's largest layer on this rank's device, with random weights and inputs. The constructor runs it once.

    Args:
        build: makes the model.
        dtype: the dtype of the layer's parameters.
        shape: [batch, seq] of the model's tokens.
        device: the layer's device.

    Attributes:
        name: the layer's name.
        count: the number of layers of its class.
        size: for `measure`: elements to all-gather, and to reduce.

    Raises:
        ConfigError: the model has no layers, or DTensors, or its forward cannot run with fake tensors.
    """

    def __init__(self, build: Build, dtype: torch.dtype, shape: tuple[int, int], device: torch.device) -> None:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # plan warns
            model = build()
            if axes_of(model, ()).across is not None:
                raise ConfigError(NO_DTENSORS)
            units = [unit for unit in find_units(model, None) if not unit.is_resident]
        if not units:
            raise ConfigError(f"{type(model).__name__} has no layers")
        unit = max(units, key=lambda unit: sum(param.numel() for param in unit.modules[0].parameters()))
        arguments = run_without_memory(model, *shape, partial(_arguments_of, unit.name, model, dtype))
        module = unit.modules[0]
        for param in module.parameters():
            param.data = param.data.to(dtype)
        self._module = module.to_empty(device=device).train()
        params = list(module.parameters())
        with torch.no_grad():
            for tensor in (*params, *module.buffers()):
                tensor.normal_(std=0.02) if tensor.is_floating_point() else tensor.zero_()
        self._args, self._kwargs = map_tensors(arguments, partial(_real, device=device))
        self._outputs: list[torch.Tensor] = []
        self.name = unit.name
        self.count = sum(type(other.modules[0]) is type(unit.modules[0]) for other in units)
        numel, trained = sum(p.numel() for p in params), sum(p.numel() for p in params if p.requires_grad)
        self.size = numel, trained
        self.forward()
        self.backward()

    def forward(self) -> None:
        """Compute the outputs."""
        outputs = tensors_in(self._module(*self._args, **self._kwargs))
        self._outputs = [output for output in outputs if output.requires_grad]

    def backward(self) -> None:
        """Add to the gradients of parameters and inputs."""
        torch.autograd.backward(self._outputs, [torch.ones_like(output) for output in self._outputs])


def _arguments_of(name: str, model: nn.Module, dtype: torch.dtype, inputs: Arguments) -> tuple[Any, Any]:
    """With which arguments a forward without memory calls the layer `name`."""
    copied, given = copy_without_memory(model, dtype), list[tuple[Any, Any]]()
    copied.get_submodule(name).register_forward_pre_hook(
        lambda _, args, kwargs: given.append((args, kwargs)), with_kwargs=True
    )
    inputs = cast(inputs, dtype)
    copied(*inputs.args, **inputs.kwargs)
    return given[0]


def _real(fake: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor like `fake` on `device`: random numbers, zeros, or True (a mask that hides nothing)."""
    if fake.is_floating_point():
        return torch.randn(fake.shape, dtype=fake.dtype, device=device).requires_grad_(fake.requires_grad)
    return torch.full(fake.shape, fake.dtype is torch.bool, dtype=fake.dtype, device=device)


def matmul_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """The speed of a square matmul, in 1e12 operations per second."""
    width = 1024 if device.type == "cpu" else 4096
    matrix = torch.randn(width, width, device=device).to(dtype)
    (ms,) = medians_ms(RankGroup(), device, lambda: matrix @ matrix)
    return float(2 * width**3 / ms / 1e9)


def host_gb_s() -> float:
    """1e9 bytes per second that torch's copies read and write in host memory, on all cores of this process."""
    threads, source = torch.get_num_threads(), torch.zeros(_COPIED_BYTES, dtype=torch.uint8)
    to = source.clone()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        (ms,) = medians_ms(RankGroup(), source.device, lambda: to.copy_(source))
    finally:
        torch.set_num_threads(threads)
    return 2 * _COPIED_BYTES / ms / 1e6


def link_gb_s(device: torch.device) -> list[float]:
    """1e9 bytes per second between pinned host memory and `device`: to the device, to the host, each way at once.

    Raises:
        HostMemoryError: memory cannot be pinned.
    """
    module, memory = module_of(device), PinnedMemory(device)
    on_host = [memory.allocate(_COPIED_BYTES, torch.uint8) for _ in range(2)]
    on_device = [torch.zeros_like(buffer, device=device) for buffer in on_host]
    ways = list(
        zip((on_device[0], on_host[1]), (on_host[0], on_device[1]), map(module.Stream, [device] * 2), strict=True)
    )

    def copy(*directions: int) -> None:
        for to, source, stream in (ways[direction] for direction in directions):
            with module.stream(stream):
                to.copy_(source, non_blocking=True)

    times = medians_ms(RankGroup(), device, partial(copy, 0), partial(copy, 1), partial(copy, 0, 1))
    return [_COPIED_BYTES / ms / 1e6 for ms in times]


def medians_ms(ranks: RankGroup, device: torch.device, *parts: Callable[[], object]) -> list[float]:
    """Run `parts` one after the other, several times, as often on all ranks. Returns each part's median time."""

    def once() -> list[float]:
        times = []
        for part in parts:
            start = time.perf_counter()
            with ranks.waiting("a measurement"):
                part()
                if has_streams(device):
                    module_of(device).synchronize(device)
            times.append(1e3 * (time.perf_counter() - start))
        return times

    once()
    repeats = ranks.of_first("agree on repeats", max(1, min(_MOST_REPEATS, int(1e3 * _SECONDS / sum(once())))))
    return [statistics.median(times) for times in zip(*(once() for _ in range(repeats)), strict=True)]
