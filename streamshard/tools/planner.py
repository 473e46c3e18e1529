"""Memory and communication of ranks that do not exist, for `streamshard.tools.plan`.

The engine allocates the model for them, with buffers on the meta device. So a plan has the bytes of
``model.memory_report()``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from streamshard.build import Checked, check_model, plan_engine
from streamshard.comm.communicator import Communicator, PlannedRanks
from streamshard.config import GradSlots, SlotCount
from streamshard.core.engine import Engine
from streamshard.core.params import FlatParam
from streamshard.core.unit import Unit
from streamshard.dtensors import axes_of, mark_experts
from streamshard.errors import ConfigError
from streamshard.initialise import takes
from streamshard.layer_major import HAS_DTENSORS, refuse_accumulation
from streamshard.layer_major.sums import Sums
from streamshard.planning.discovery import FoundUnit, ResidentArgument, UnitsArgument
from streamshard.planning.structure import list_of, modules_inside
from streamshard.tools.activations import Activations, Build, estimate_activations
from streamshard.tools.fit import Stage
from streamshard.tools.host_time import Exchanged, HostBytes, Load, Step, StepTime, predict
from streamshard.tools.memory import report_memory
from streamshard.torch_private import fake_ranks

BuildOnMesh = Callable[[DeviceMesh], nn.Module]
"""A function that makes a model with DTensors on the mesh."""

_numbers = itertools.count(1)  # of plans


@dataclasses.dataclass(frozen=True)
class PlannedUnit:
    """A unit, or several equal units.

    Attributes:
        name: the name of the module. For several units: the class of streamed layers, or the list of resident ones.
        count: the number of units.
        numel: elements of each unit's parameters.
        weight_bytes: bytes of each unit in a weight slot.
        is_resident: the unit has a slot of its own, and stays unsharded until backward is over.
    """

    name: str
    count: int
    numel: int
    weight_bytes: int
    is_resident: bool


class Ranks(NamedTuple):
    """The ranks of a plan, which do not exist.

    Attributes:
        world_size, tp, ep, transport, replicas: see `plan`.
    """

    world_size: int
    tp: int
    ep: int
    transport: str
    replicas: int = 1

    @property
    def on_gpus(self) -> bool:
        """Whether the ranks have GPUs."""
        return self.transport == "nccl"


class Planner(NamedTuple):
    """Plans a model that has been checked.

    Attributes:
        model: built on the meta device.
        checked: its units and settings.
        ranks: see `Ranks`.
        measure: returns its activations, of a batch and a sequence.
        accumulate: see `plan`.
        is_layer_major: ``model.accumulate`` runs micro-batches layer by layer, because layers take turns in slots.
    """

    model: nn.Module
    checked: Checked
    ranks: Ranks
    measure: Callable[[int, int], Activations]
    accumulate: int | None
    is_layer_major: bool

    def activations(self, tokens: tuple[int, int] | None) -> tuple[Activations | None, str]:
        """The activations of a batch and a sequence, or why they are not known; "" without `tokens`."""
        try:
            return (None, "") if tokens is None else (self.measure(*tokens), "")
        except ConfigError as error:
            return None, str(error)

    def stages(self, weight_slots: int | None) -> list[Stage]:
        """From ZeRO-3 to ZeRO-1, with one of so many slots; with ``offload``, without "all" slots."""
        stages = [self.stage("ZeRO-3", 2)]
        if weight_slots not in (None, 2):
            stages.append(self.stage(f"{weight_slots} slots", weight_slots))
        if self.checked.settings.offload is None:
            stages += self.stage("ZeRO-2", "all"), self.stage("ZeRO-1", "all", "all")
        return stages

    def times(self, step: Step, tokens: tuple[int, int], stage: Stage) -> list[StepTime]:
        """The time of a step with micro-batches of such `tokens`: of a loop and, if it differs, by accumulation.

        Raises:
            ConfigError: nothing is copied from host memory, and nothing accumulated.
        """
        load = _load_of(self.model, self.checked.found, tokens, step)
        loads = [load, dataclasses.replace(load, is_layer_major=True)][: 1 + self.is_layer_major]
        # A machine has no more ranks than the run.
        machine = dataclasses.replace(step.machine, ranks=min(step.machine.ranks, self.ranks.world_size))
        if self.checked.settings.offload is not None:
            inputs = _host_bytes_of(self.engine(weight_slots=stage.weight_slots, grad_slots=None))
            return [predict(inputs, each, machine) for each in loads]
        if self.accumulate is None:
            told = 'a step without offload copies nothing from host memory: give offload="state", or accumulate'
            raise ConfigError(told)
        machine = dataclasses.replace(machine, host_memory=None, ranks=1)  # each rank's link to others is its own
        # Without layer-major accumulation there is one load.
        return [predict(*each, machine) for each in zip((stage.loop, stage.exchanged), loads, strict=False)]

    def on_ranks(self, world_size: int) -> Planner:
        """The planner of another number of ranks."""
        return self._replace(ranks=self.ranks._replace(world_size=world_size))

    def engine(self, **settings: Any) -> Engine:
        """The engine of rank 0, with some other settings."""
        ranks, changed = self.ranks, dataclasses.replace(self.checked.settings, **settings)
        experts = PlannedRanks(ranks.world_size // ranks.ep, ranks.transport) if ranks.ep > 1 else None
        others = PlannedRanks(ranks.world_size // ranks.tp, ranks.transport)
        replicas = PlannedRanks(ranks.replicas, ranks.transport) if ranks.replicas > 1 else None
        return plan_engine(self.checked._replace(settings=changed), others, experts, replicas, parts=ranks.tp > 1)

    def stage(self, name: str, weights: SlotCount, grads: GradSlots = None) -> Stage:
        """Memory and communication with so many slots."""
        engine = self.engine(weight_slots=weights, grad_slots=grads)
        exchanged = loop = _exchanged_of(engine)
        if self.is_layer_major:
            for flat in (flat for unit in engine.units for flat in unit.trained if flat.is_main_in_slot):
                flat.leave_slot()  # the first steps are loops, which add to main grads
            engine.sums = Sums(engine)
        report = report_memory(engine)
        if engine.sums is not None:
            engine.sums.swap()  # gradients are sent from there
            exchanged = _exchanged_of(engine)
        here = report.total_bytes + report.adam_bytes + report.chunk_bytes
        on_host = report.host_total_bytes + report.host_adam_bytes
        return Stage(name, weights, grads, report, here, on_host, exchanged.sent_bytes(1), exchanged, loop)

    def units(self) -> list[PlannedUnit]:
        """The units, root unit first. Equal streamed units of a class, or resident ones of a list, are one entry."""
        alike: dict[tuple[str, int, bool], list[Unit]] = {}
        for unit, found in zip(self.engine().units, self.checked.found, strict=True):
            name = type(found.modules[0]).__name__ if unit.is_streamed else list_of(unit.name)
            alike.setdefault((name, unit.layout.numel, unit.is_streamed), []).append(unit)
        planned = []
        for (name, numel, is_streamed), (first, *others) in alike.items():
            shown, count = (name, 1 + len(others)) if others else (first.name, 1)
            planned.append(PlannedUnit(shown, count, numel, first.layout.weight_bytes, not is_streamed))
        return planned


@contextlib.contextmanager
def planning(
    model: nn.Module | Build | BuildOnMesh,
    ranks: Ranks,
    units: UnitsArgument,
    resident: ResidentArgument,
    given: Mapping[str, Any],
    accumulate: int | None,
) -> Iterator[Planner]:
    """Inside, the planner that is yielded plans `model` for `ranks`. For arguments and errors see `plan`."""
    if "mesh" in given:
        what = "mesh: a plan is of the ranks that share one replica of the model, world_size says how many"
        raise ConfigError(f"{what}, and replicas how many replicas there are")
    if not isinstance(ranks.replicas, int) or ranks.replicas < 1:
        raise ConfigError(f"replicas={ranks.replicas!r}: wanted a positive number")
    if accumulate is not None and accumulate < 2:
        raise ConfigError(f"accumulate={accumulate}: wanted the number of micro-batches of a step, at least 2")
    if accumulate is not None and max(ranks.tp, ranks.ep) > 1:
        refuse_accumulation(HAS_DTENSORS)
    with _building(model, ranks) as build:
        with torch.device("meta"):
            built = build()
        cut_over = _check_parts(built, ranks)
        checked = check_model(built, units, resident, given)
        if ranks.ep > 1:
            checked = checked._replace(found=mark_experts(built, checked.found, cut_over))
        dtype, on_gpus = checked.settings.precision.param_dtype, ranks.on_gpus
        again = None if built is model else build  # a model that was given cannot be built again
        # If no layers take turns, `model.accumulate` runs the loop.
        at_once = 1 if accumulate is None or all(unit.is_resident for unit in checked.found) else accumulate
        how: dict[str, Any] = {"micro_batches": at_once, "on_gpus": on_gpus, "build": again}
        measure = partial(estimate_activations, built, checked.found, dtype, **how)
        yield Planner(built, checked, ranks, measure, accumulate, at_once > 1)


@contextlib.contextmanager
def _building(model: nn.Module | Build | BuildOnMesh, ranks: Ranks) -> Iterator[Build]:
    """Inside, the function that is yielded builds the model: on the mesh of its DTensors, if it has any.

    Raises:
        ConfigError: `ranks` do not divide evenly, the function takes no mesh, or this process has a process group.
    """
    name, size = max(("tp", ranks.tp), ("ep", ranks.ep), key=operator.itemgetter(1))
    for given, number in (("tp", ranks.tp), ("ep", ranks.ep)):
        if number != 1 and (number < 1 or ranks.world_size % number):
            raise ConfigError(f"{given}={number}: wanted a number that divides {ranks.world_size} ranks")
    if min(ranks.tp, ranks.ep) > 1:
        raise ConfigError(f"tp={ranks.tp}, ep={ranks.ep}: a plan is of one of the two")
    if isinstance(model, nn.Module):
        yield lambda: model
        return
    if not takes(model, *[None] * (size > 1)):
        what = f"{name}={size}: the function has to take" if size > 1 else "neither tp nor ep: the function takes"
        raise ConfigError(f"{what} the mesh of its DTensors, its only argument")
    if size == 1:
        yield cast(Build, model)
        return
    if dist.is_initialized():
        raise ConfigError(
            f"{name}={size}: this process has a process group: plan in a process without one, or give the model with "
            "its DTensors"
        )
    with fake_ranks(size):
        # torch keeps what it has learned of a mesh, with its group, for meshes of the same ranks and names.
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=(f"{name} of plan {next(_numbers)}",))
        yield partial(cast(BuildOnMesh, model), mesh)


def _check_parts(model: nn.Module, ranks: Ranks) -> Sequence[int]:
    """The ranks over which the DTensors are cut. Raises if they are not those of `ranks`."""
    axis, size = axes_of(model, ()).across, max(ranks.tp, ranks.ep)
    found = 1 if axis is None else len(axis.ranks)
    if found != size:
        what = "no DTensors" if axis is None else f"DTensors over {found} ranks"
        wanted = f"tp={found}, or ep={found} if they are experts" if found > 1 else "neither of the two"
        raise ConfigError(f"tp={ranks.tp}, ep={ranks.ep}: the model has {what}: wanted {wanted}")
    return () if axis is None else axis.ranks


# -- a step: see `streamshard.tools.host_time` ------------------------------------------------------------------------


def _load_of(model: nn.Module, found: Sequence[FoundUnit], tokens: tuple[int, int], step: Step) -> Load:
    """The load of a rank that trains `model`, with the units `found`, in a loop over micro-batches of `tokens`."""
    tables = [module for module in modules_inside(model) if isinstance(module, nn.Embedding)]
    # An embedding computes nothing. A tied one is the head's weight too.
    others = [module for module in modules_inside(model) if not isinstance(module, nn.Embedding)]
    params = {param for module in others for param in module._parameters.values() if param is not None}
    used = sum(param.numel() for param in params)
    trained = sum(param.numel() for param in params if param.requires_grad)
    share = 1.0 if step.active is None else step.active / used
    layers = sum(len(each.modules) for each in found if not each.is_resident)
    width = max((table.embedding_dim for table in tables), default=0)
    return Load(share * used, share * trained, layers, width, *tokens, step.micro_batches, step.is_checkpointed)


def _gathers_of(engine: Engine) -> tuple[list[Unit], list[Unit]]:
    """The units that a forward and a backward all-gather, from the second step on."""
    plan, units = engine.plan, engine.units
    content: dict[int, int] = {}
    for _ in range(2):
        # Frozen weights in host memory do not change. Gradients have taken the slots of trained units.
        content = {slot: unit for slot, unit in content.items() if units[unit].is_on_host and not units[unit].trained}
        forward = plan.gathers(range(len(units)), content)
        backward = plan.gathers(reversed(range(len(units))), content, plan.weightless)
    return [units[unit] for unit in forward], [units[unit] for unit in backward]


def _host_bytes_of(engine: Engine) -> HostBytes:
    """What the rank of a planned engine has in host memory."""
    forward, backward = _gathers_of(engine)

    def size(flats: Iterable[FlatParam]) -> int:
        return sum(flat.layout.shard_numel * flat.kind.wire_dtype.itemsize for flat in flats)

    def flats(units: Iterable[Unit]) -> Iterator[FlatParam]:
        return (flat for unit in units if unit.is_on_host for flat in unit.flat_params)

    trained = [flat for flat in flats(engine.units) if flat.kind.trains]
    return HostBytes(
        trained=sum(flat.layout.shard_numel for flat in trained),
        cast=size(flat for flat in trained if flat.kind.wire_dtype is not flat.kind.main_dtype),
        first_forward=size(flat for flat in flats(forward) if not flat.kind.trains),
        forward=size(flats(forward)),
        backward=size(flats(backward)),
    )


def _exchanged_of(engine: Engine) -> Exchanged:
    """What the rank of a planned engine sends inside its replica, with gradients in the slots that units have now."""

    def sent(flat: FlatParam, ranks: Communicator, dtype: torch.dtype) -> int:
        # Each other rank receives this rank's shards, and chunks of this rank's gradients.
        receivers, parts = flat.gather_ranks.world_size - 1, flat.ranks.world_size // ranks.world_size
        return receivers * parts * flat.layout.shard_numel * dtype.itemsize

    forward, backward = (
        sum(sent(flat, flat.gather_ranks, flat.kind.wire_dtype) for unit in units for flat in unit.flat_params)
        for units in _gathers_of(engine)
    )
    reduced = [flat for unit in engine.units for flat in unit.trained]
    grads = sum(
        sent(flat, flat.reduce_ranks, flat.reduce_ranks.transport.sent_dtype(flat.kind.mode, flat.grads.dtype))
        for flat in reduced
    )
    return Exchanged(forward, backward, grads, engine.plan.keeps_weights, engine.plan.keeps_grads)
