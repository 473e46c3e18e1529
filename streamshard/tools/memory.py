"""``model.memory_report()``, the summary in ``print(model)``, and the report of a run that is out of memory."""

from __future__ import annotations

import atexit
import gc
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from streamshard.core.engine import Engine
from streamshard.core.late_step import chunk_bytes
from streamshard.core.module_state import handle_of
from streamshard.device import warn_if_untested
from streamshard.errors import is_of_this_rank, log, uncaught, warn_user
from streamshard.planning.memory import Category
from streamshard.planning.structure import list_of, modules_inside


@dataclass(frozen=True)
class MemoryReport:
    """Bytes that the engine holds on this rank, by category.

    Attributes:
        held_bytes: at the end of backward, by category; with ``offload``, on the device. Counted on the live tensors,
            but for main grads and scratch that have no memory now.
        dropped_bytes: main grads among them that have memory only from their reduction until ``zero_grad()``, and
            scratch that has memory only from the first reduction to the last one.
        numel: elements of all parameters of the model.
        padding: alignment and padding of all flat parameters, as a share of their other elements.
        world_size: N.
        adam_bytes: Adam's two moments on this rank, which an optimizer holds, not the engine.
        slots: the numbers of slots, and the reason for them.
        host_bytes, host_adam_bytes: the same in host memory; empty and 0 without ``offload``.
        chunk_bytes: with ``offload``, memory of the device for Adam's step, which the engine takes and frees.
    """

    held_bytes: Mapping[str, int]
    numel: int
    padding: float
    world_size: int
    adam_bytes: int
    slots: str
    host_bytes: Mapping[str, int]
    host_adam_bytes: int
    chunk_bytes: int
    dropped_bytes: int

    @property
    def total_bytes(self) -> int:
        """The sum over all categories; with ``offload``, on the device."""
        return sum(self.held_bytes.values())

    @property
    def start_bytes(self) -> int:
        """The same at the start of backward, where activations are largest, if no gradients are kept."""
        return self.total_bytes - self.dropped_bytes

    @property
    def host_total_bytes(self) -> int:
        """The sum over all categories, in host memory."""
        return sum(self.host_bytes.values())

    def __str__(self) -> str:
        what = f"{self.numel:,} parameters in all, padded by {self.padding:.2%}"
        lines = [f"memory of one rank of {self.world_size}; {what}"]
        moments, chunks = "(Adam's moments)", "(Adam's chunks)"
        here = {**self.held_bytes, "total": self.total_bytes, moments: self.adam_bytes, chunks: self.chunk_bytes}
        if self.dropped_bytes:
            here["start of backward"] = self.start_bytes
        on_host = {**self.host_bytes, "total": self.host_total_bytes, moments: self.host_adam_bytes}
        places = {"device  ": here, "host    ": on_host} if self.host_bytes else {"": here}
        for place, (name, held) in ((place, row) for place, rows in places.items() for row in rows.items()):
            if held:
                per_param = held / max(self.numel, 1)
                lines.append(f"  {place}{name:<18}{held / 2**20:>12.2f} MiB {per_param:>8.2f} bytes/param")
        return "\n".join([*lines, f"  {self.slots}"])


def report_memory(engine: Engine) -> MemoryReport:
    """The bytes that `engine` holds. See [Note: memory] in `streamshard.planning.memory`."""
    flats, ledger = [flat.layout for unit in engine.units for flat in unit.flat_params], engine.ledger
    held_bytes = {category.value: ledger.held_bytes(category) for category in Category}
    host_bytes = {category.value: ledger.held_bytes(category, is_on_host=True) for category in Category}
    adam_bytes, dropped = [0, 0], 0  # on the device, in host memory
    for flat in (flat for unit in engine.units for flat in unit.trained):
        numel = flat.layout.shard_numel
        adam_bytes[flat.is_on_host] += 8 * numel  # two moments in fp32
        if flat.may_drop:
            dropped += 4 * numel
            # It may have no memory now, and has it at the end of backward.
            held_bytes[Category.MAIN_GRADS.value] += 4 * numel - flat.main_grads.untyped_storage().nbytes()
    for scratch in {unit.grads.slot.scratch for unit in engine.units}:  # units share them
        if not scratch.keeps_memory:
            dropped += scratch.buffer.nbytes
            held_bytes[Category.SCRATCH.value] += scratch.buffer.nbytes - scratch.buffer.untyped_storage().nbytes()
    return MemoryReport(
        held_bytes=held_bytes,
        numel=sum(unit.layout.numel for unit in engine.units),
        padding=sum(flat.padded_numel - flat.numel for flat in flats) / max(sum(flat.numel for flat in flats), 1),
        world_size=engine.ranks.world_size,
        adam_bytes=adam_bytes[0],
        slots=engine.why_slots,
        host_bytes=host_bytes if engine.host is not None else {},
        host_adam_bytes=adam_bytes[1],
        chunk_bytes=chunk_bytes(unit for unit in engine.units if unit.is_on_host),
        dropped_bytes=dropped,
    )


def summarise(engine: Engine, root: nn.Module) -> list[str]:
    """Units, ranks, slots and dtypes of the model `root`, in two lines."""
    handles = {module: handle_of(module) for module in modules_inside(root)}
    layers = Counter(type(module).__name__ for module, handle in handles.items() if handle and handle.unit)
    units = [f"{count} x {layer}" if count > 1 else layer for layer, count in layers.items()]
    units = [", ".join(units)] * bool(units) + ["the root unit"]
    tied = [f"{param.name} (tied)" for param in engine.units[0].params if param.aliases and param.sharded.dim() > 1]
    names = tied + [unit.name for unit in engine.resident]
    lists = Counter(map(list_of, names))
    resident = ", ".join(dict.fromkeys(found if lists[found := list_of(name)] > 1 else name for name in names))
    size, precision = engine.ranks.world_size, engine.precision
    dtypes = (precision.param_dtype, precision.sent_grad_dtype, precision.reduce_dtype)
    compute, gradients, sums = (str(dtype or "the parameters' own").removeprefix("torch.") for dtype in dtypes)
    numel = sum(unit.layout.numel for unit in engine.units)
    replicas, parts = engine.ranks.n_replicas, engine.ranks.n_parts
    return [
        f"StreamShard: {numel:,} parameters over {size} rank{'s' * (size > 1)}"
        + f" in each of {parts} parts" * (parts > 1)
        + f" in each of {replicas} replicas" * (replicas > 1)
        + f"; units: {' and '.join(units)}"
        + f"; resident: {resident}" * bool(resident),
        f"{engine.why_slots.partition(':')[0]}"
        + '; offload="state"' * (engine.host is not None)
        + f"; computes in {compute}, gradients in {gradients}, summed in {sums}",
    ]


def log_summary(engine: Engine, root: nn.Module) -> None:
    """Log units, ranks, slots, dtypes and memory of the sharded model, in one line. Warn if it does not stream."""
    warn_if_untested(engine.streams.device)
    if len(engine.units) == 1:
        warn_user(
            f"{type(root).__name__} has no repeated layers that StreamShard can find: it becomes one unit, whose "
            "weights are all-gathered at once. Name its layers with units=[...] to stream them"
        )
    report = report_memory(engine)
    memory = f"{report.total_bytes / 2**30:.2f} GiB per rank"
    memory += f" and {report.host_total_bytes / 2**30:.2f} GiB of host memory" * bool(report.host_bytes)
    backend = dist.get_backend_config(engine.ranks.users_group)
    log.info("%s; %s; %s; %s", *summarise(engine, root), memory, backend)


# -- out of memory ------------------------------------------------------------------------------------------------


@atexit.register
def _report_at_exit() -> None:
    """If the process ends because it is out of memory, log the bytes that each engine holds, and what makes room."""
    if _is_out_of_memory(uncaught()):
        # No list of engines is kept for this.
        for engine in [each for each in gc.get_objects() if type(each) is Engine]:  # isinstance runs code of proxies
            log.error("%s", explain_out_of_memory(engine))
        log.error("out of memory: `streamshard plan` says what a rank needs and what fits")


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Whether this rank could not allocate memory, on its device or its host."""
    if error is None or not is_of_this_rank(error):
        return False
    # The text is of torch's allocator for CPUs, whose error is a RuntimeError.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def explain_out_of_memory(engine: Engine) -> str:
    """The engine's bytes by category, torch's allocations on the device, and settings that make room."""
    streams, allocated = engine.streams, ""
    if streams.has_streams:
        most, total = streams.module.max_memory_allocated(streams.device), streams.module.mem_get_info(streams.device)
        allocated = f"torch has allocated at most {most / 2**30:.2f} GiB, of {total[1] / 2**30:.2f} GiB\n"
    to_host = 'offload="state", ' if streams.has_streams and engine.host is None else ""
    ways = f"fewer slots, {to_host}more ranks, smaller batches, activation checkpointing"
    return f"out of memory. StreamShard holds:\n{report_memory(engine)}\n{allocated}what makes room: {ways}"
