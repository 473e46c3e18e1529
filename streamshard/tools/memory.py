"""``model.memory_report()``, the summary in ``print(model)``, and the report of a run that is out of memory."""

from __future__ import annotations

import atexit
import contextlib
import gc
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from streamshard.build import Accepted, plan_engine
from streamshard.comm.communicator import PlannedRanks
from streamshard.core.engine import Engine
from streamshard.core.module_state import handle_of
from streamshard.errors import is_of_this_rank, log, uncaught
from streamshard.planning.memory import Category
from streamshard.planning.structure import list_of, modules_inside


@dataclass(frozen=True)
class MemoryReport:
    """Bytes that the engine holds on this rank, by category.

    Attributes:
        held_bytes: counted on the live tensors, by category.
        numel: elements of all parameters of the model.
        padded_numel: elements of all flat parameters, with alignment and padding.
        world_size: N.
        adam_bytes: Adam's two moments on this rank, which an optimizer holds, not the engine.
        slots: the numbers of slots, and the reason for them.
    """

    held_bytes: Mapping[str, int]
    numel: int
    stored_numel: int
    padded_numel: int
    world_size: int
    adam_bytes: int
    slots: str

    @property
    def total_bytes(self) -> int:
        """The sum over all categories."""
        return sum(self.held_bytes.values())

    def __str__(self) -> str:
        padding = self.padded_numel / self.stored_numel - 1 if self.stored_numel else 0
        lines = [f"memory of one rank of {self.world_size}; {self.numel:,} parameters in all, padded by {padding:.2%}"]
        rows = {**self.held_bytes, "total": self.total_bytes, "(Adam's moments)": self.adam_bytes}
        for name, held in rows.items():
            if not held:
                continue
            per_param = held / max(self.numel, 1)
            lines.append(f"  {name:<18}{held / 2**20:>12.2f} MiB {per_param:>8.2f} bytes/param")
        return "\n".join([*lines, f"  {self.slots}"])


def report_memory(engine: Engine) -> MemoryReport:
    """The bytes that `engine` holds. See [Note: memory] in `streamshard.planning.memory`."""
    layouts, ledger = [unit.layout for unit in engine.units], engine.ledger
    held_bytes = {category.value: ledger.held_bytes(category) for category in Category}
    trained_numel = sum(flat.main_grads.numel() for unit in engine.units for flat in unit.flat_params)
    return MemoryReport(
        held_bytes=held_bytes,
        numel=sum(layout.numel for layout in layouts),
        stored_numel=sum(layout.stored_numel for layout in layouts),
        padded_numel=sum(layout.padded_numel for layout in layouts),
        world_size=engine.ranks.world_size,
        adam_bytes=8 * trained_numel,
        slots=engine.why_slots,
    )


def summarise(engine: Engine, root: nn.Module) -> list[str]:
    """Units, ranks, slots and dtypes of the model `root`, in two lines."""
    handles = {module: handle_of(module) for module in modules_inside(root)}
    layers = Counter(type(module).__name__ for module, handle in handles.items() if handle and handle.unit)
    units = [f"{count} x {layer}" if count > 1 else layer for layer, count in layers.items()]
    units = [", ".join(units)] * bool(units) + ["the root unit"]
    names = [unit.name for unit in engine.resident]
    lists = Counter(map(list_of, names))
    resident = ", ".join(dict.fromkeys(found if lists[found := list_of(name)] > 1 else name for name in names))
    size, precision = engine.ranks.world_size, engine.precision
    dtypes = (precision.param_dtype, precision.slot_grad_dtype, precision.reduce_dtype)
    compute, gradients, sums = (str(dtype or "the parameters' own").removeprefix("torch.") for dtype in dtypes)
    numel = sum(unit.layout.numel for unit in engine.units)
    replicas = engine.ranks.total_size // size
    return [
        f"StreamShard: {numel:,} parameters over {size} rank{'s' * (size > 1)}"
        + f" in each of {replicas} replicas" * (replicas > 1)
        + f"; units: {' and '.join(units)}"
        + f"; resident: {resident}" * bool(resident),
        f"{engine.why_slots.partition(':')[0]}; computes in {compute}, gradients in {gradients}, summed in {sums}",
    ]


def log_summary(engine: Engine, root: nn.Module) -> None:
    """Log units, ranks, slots, dtypes and memory of the sharded model, in one line."""
    held = report_memory(engine).total_bytes / 2**30
    backend = dist.get_backend_config(engine.ranks.users_group)
    log.info("%s; %s; %.2f GiB per rank; %s", *summarise(engine, root), held, backend)


# -- out of memory ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def explaining_out_of_memory(accepted: Accepted) -> Iterator[None]:
    """If the body, which shards the model, is out of memory, log the bytes that the engine would hold."""
    try:
        yield
    except BaseException as error:
        if _is_out_of_memory(error):
            kind = "nccl" if accepted.ranks.streams.has_streams else "sockets"
            planned = PlannedRanks(accepted.ranks.world_size, kind)
            log.error("%s", explain_out_of_memory(plan_engine(accepted.checked, planned), "would hold"))
        raise


@atexit.register
def _report_at_exit() -> None:
    """If the process ends because it is out of memory, log the bytes that each engine holds."""
    if _is_out_of_memory(uncaught()):
        for engine in [each for each in gc.get_objects() if type(each) is Engine]:
            log.error("%s", explain_out_of_memory(engine, "holds"))


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Whether this rank could not allocate memory, on its device or its host."""
    if error is None or not is_of_this_rank(error):
        return False
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def explain_out_of_memory(engine: Engine, holds: str) -> str:
    """The engine's bytes by category, torch's allocations on the device, and settings that make room.

    Args:
        engine: alive, or planned on the meta device.
        holds: the verb of the message: "holds", or "would hold" for a planned engine.
    """
    streams, allocated = engine.streams, ""
    if streams.has_streams:
        most, total = streams.module.max_memory_allocated(streams.device), streams.module.mem_get_info(streams.device)
        allocated = f"torch has allocated at most {most / 2**30:.2f} GiB, of {total[1] / 2**30:.2f} GiB\n"
    ways = "fewer slots, more ranks, smaller batches, activation checkpointing"
    return f"out of memory. StreamShard {holds}:\n{report_memory(engine)}\n{allocated}what makes room: {ways}"
