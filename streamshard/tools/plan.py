"""The memory and communication of a training run, before it starts, with its activations.

`plan` lets the engine allocate the model for ranks that do not exist, with buffers on the meta device. So a plan has
the bytes of ``model.memory_report()``. `streamshard.tools.fit` compares these, and activations, with a budget.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import operator
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from streamshard.build import Checked, check_model, plan_engine
from streamshard.comm.communicator import PlannedRanks
from streamshard.config import SlotCount, parse_bytes
from streamshard.core.engine import Engine
from streamshard.core.unit import Unit
from streamshard.dtensors import axes_of, mark_experts
from streamshard.errors import ConfigError
from streamshard.initialise import takes
from streamshard.planning.discovery import ResidentArgument, UnitsArgument
from streamshard.planning.structure import list_of
from streamshard.tools.activations import Activations, Build, estimate_activations
from streamshard.tools.fit import Fit, Room, Stage, choose, fewer_tokens, fewest_ranks, most_slots
from streamshard.tools.host_time import Load, Machine, StepTime, predict
from streamshard.tools.memory import report_memory
from streamshard.tools.plan_step import inputs_of, load_of, still_gathered
from streamshard.torch_private import fake_ranks

BuildOnMesh = Callable[[DeviceMesh], nn.Module]
"""A function that makes a model with DTensors on the mesh."""

_CHECKPOINTED = ", layers checkpointed"
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


@dataclasses.dataclass(frozen=True)
class Plan:
    """The result of `plan`. Printable; `dataclasses.asdict` makes a dict for JSON.

    Attributes:
        model: the name of the model's class.
        numel: elements of all parameters.
        world_size: the number of ranks.
        tp, ep: over how many of them matrices, or experts, are cut.
        transport: the transport between the ranks.
        units: the units, root unit first.
        stages: from ZeRO-3 to ZeRO-1; with ``offload``, without "all" slots.
        activation_bytes: at most, without checkpointing and with layers checkpointed; None: not known.
        activations_unknown: why they are not known; "" if they are, or if nobody needs them.
        fit: what fits the budget; None: no budget is given.
        step: the time of a step of the last stage; None: no machine is given.
    """

    model: str
    numel: int
    world_size: int
    tp: int
    ep: int
    transport: str
    units: Sequence[PlannedUnit]
    stages: Sequence[Stage]
    activation_bytes: Activations | None
    activations_unknown: str
    fit: Fit | None
    step: StepTime | None

    def __str__(self) -> str:
        unit_name, unit_bytes = ("GiB", 2**30) if self.stages[-1].total_bytes >= 2**30 else ("MiB", 2**20)

        def size(n_bytes: int) -> str:
            return f"{n_bytes / unit_bytes:.2f}"

        def row(name: str, cells: Iterable[object]) -> str:
            return f"{name:<24}" + "".join(f"{cell:>12}" for cell in cells)

        ranks = f"{self.world_size} rank{'s' * (self.world_size > 1)}"
        ranks += f" (tensor parallel over {self.tp})" * (self.tp > 1) + f" (experts over {self.ep})" * (self.ep > 1)
        lines = [f"{self.model}: {self.numel:,} parameters on {ranks}, over {self.transport}", ""]
        lines.append(f"{'unit':<32}{'parameters':>16}{'weights':>14}")
        for unit in self.units:
            name = f"{unit.count} x {unit.name}, each" if unit.count > 1 else unit.name
            kind = "resident" if unit.is_resident else "streamed"
            lines.append(f"{name:<32}{unit.numel:>16,}{size(unit.weight_bytes):>10} {unit_name}  {kind}")
        for place, tables in self._memory().items():
            lines += ["", row(f"{unit_name} {place}", (stage.name for stage in self.stages))]
            for name in tables[0]:
                sizes = [size(table[name]) for table in tables]
                if max(sizes) != "0.00":
                    lines.append(row(f"  {name}", sizes))
        lines += [
            "\nsent by a rank in a step" + ", activations aside" * (self.tp * self.ep > 1),
            row("  all-gathers", (stage.all_gathers for stage in self.stages)),
            row("  reductions", (stage.reductions for stage in self.stages)),
            row(f"  {unit_name}", (size(stage.sent_bytes) for stage in self.stages)),
            "\narguments of StreamShard",
            row("  weight_slots", (stage.weight_slots for stage in self.stages)),
            row("  grad_slots", (stage.grad_slots for stage in self.stages)),
        ]
        if self.activation_bytes is not None:
            lines += [
                f"\nactivations, {unit_name} per rank, at most",
                row("  without checkpointing", [size(self.activation_bytes.without)]),
                row("  layers checkpointed", [size(self.activation_bytes.checkpointed)]),
            ]
        elif self.activations_unknown:
            lines.append(f"\nactivations: unknown, because {self.activations_unknown}")
        if self.fit is not None:
            on_gpus = self.transport == "nccl"
            lines += ["", *self.fit.lines(lambda n_bytes: f"{size(n_bytes)} {unit_name}", on_gpus=on_gpus)]
        if self.step is not None:
            lines.append(f"\n{self.stages[-1].name}, {self.step}")
        return "\n".join(lines)

    def _memory(self) -> dict[str, list[dict[str, int]]]:
        """By place, a table of each stage: bytes by name."""
        moments, chunks = "Adam's moments", "Adam's chunks"
        here, on_host = [], []
        for stage, memory in ((stage, stage.memory) for stage in self.stages):
            ours = {moments: memory.adam_bytes, chunks: memory.chunk_bytes, "total": stage.total_bytes}
            here.append({**memory.held_bytes, **ours})
            on_host.append({**memory.host_bytes, moments: memory.host_adam_bytes, "total": stage.host_total_bytes})
        return {"per rank": here, **({"of host memory": on_host} if self.stages[0].memory.host_bytes else {})}


class _Ranks(NamedTuple):
    """The ranks of a plan, which do not exist.

    Attributes:
        world_size, tp, ep, transport: see `plan`.
    """

    world_size: int
    tp: int
    ep: int
    transport: str


def plan(
    model: nn.Module | Build | BuildOnMesh,
    world_size: int,
    units: UnitsArgument = None,
    *,
    resident: ResidentArgument = (),
    tp: int = 1,
    ep: int = 1,
    transport: str = "nccl",
    weight_slots: int | None = None,
    budget: int | str | None = None,
    batch: int | None = None,
    seq: int | None = None,
    machine: Machine | None = None,
    micro_batches: int = 1,
    is_checkpointed: bool = False,
    active: float | None = None,
    **given: Any,
) -> Plan:
    """Plan training with AdamW, from ZeRO-3 to ZeRO-1. Needs no process group and no memory.

    Args:
        model: not sharded, on any device; or a function that builds the model, which is called on the meta device.
        world_size: the number of ranks that share the model, those of tensor parallelism too.
        units, resident: as for `StreamShard`.
        tp, ep: over how many ranks DTensors of tensor parallelism, or of experts, are cut. A function that builds the
            model gets their mesh as its argument. Sizes are of the mesh's first rank, whose parts are the largest.
        transport: "nccl" (GPUs), "sockets" (CPUs of several machines) or "shared-memory" (CPUs of one machine).
        weight_slots: add a stage with this number of weight slots. None: with a budget that ZeRO-3 fits and ZeRO-2 does
            not, the largest number that fits.
        budget: memory of a rank: bytes, or text such as "80GiB".
        batch, seq: shape of a rank's tokens, for its activations.
        machine: with ``offload``, predict the time of a step on it (see `streamshard.tools.host_time`).
        micro_batches, is_checkpointed, active: of this step; see `load_of`.
        **given: other arguments of `StreamShard`: precision, min_unit_size, align_pieces_to, offload, device_budget.

    Raises:
        ConfigError: an argument cannot be used.
        ShardingError, UnitError: as from `StreamShard`.
    """
    if "mesh" in given:
        raise ConfigError("mesh: a plan is of the ranks that share one replica of the model, world_size says how many")
    budget_bytes = None if budget is None else parse_bytes("budget", budget)
    tokens = _tokens_of(batch, seq, predicts=machine is not None, parts=tp * ep)
    with _building(model, ranks := _Ranks(world_size, tp, ep, transport)) as build:
        with torch.device("meta"):
            built = build()
        cut_over = _check_parts(built, ranks)
        checked = check_model(built, units, resident, given)
        if ep > 1:
            checked = checked._replace(found=mark_experts(built, checked.found, cut_over))
        dtype, on_gpus = checked.settings.precision.param_dtype, transport == "nccl"
        again = None if built is model else build
        measure = partial(estimate_activations, built, checked.found, dtype, on_gpus=on_gpus, build=again)
        planner = _Planner(checked, ranks, measure)
        planned = planner.plan(type(built).__name__, weight_slots, budget_bytes, tokens)
        if machine is None or tokens is None:
            return planned
        load = load_of(built, checked.found, tokens, micro_batches, is_checkpointed, active)
        return dataclasses.replace(planned, step=planner.time(load, machine, planned.stages[-1].weight_slots))


def _tokens_of(batch: int | None, seq: int | None, *, predicts: bool, parts: int) -> tuple[int, int] | None:
    """The shape of a rank's tokens, if it is given. Raises if it cannot be used, or is needed to predict a time."""
    tokens = None if batch is None or seq is None else (batch, seq)
    if (batch is None) != (seq is None) or min(tokens or (1,)) < 1:
        raise ConfigError(f"batch={batch}, seq={seq}: wanted two positive numbers, or neither")
    if predicts and (tokens is None or parts != 1):
        raise ConfigError(
            "the time of a step is predicted with batch and seq, and without tp and ep, whose exchanges no plan knows"
        )
    return tokens


@contextlib.contextmanager
def _building(model: nn.Module | Build | BuildOnMesh, ranks: _Ranks) -> Iterator[Build]:
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


def _check_parts(model: nn.Module, ranks: _Ranks) -> Sequence[int]:
    """The ranks over which the DTensors are cut. Raises if they are not those of `ranks`."""
    axis, size = axes_of(model, ()).across, max(ranks.tp, ranks.ep)
    found = 1 if axis is None else len(axis.ranks)
    if found != size:
        what = "no DTensors" if axis is None else f"DTensors over {found} ranks"
        wanted = f"tp={found}, or ep={found} if they are experts" if found > 1 else "neither of the two"
        raise ConfigError(f"tp={ranks.tp}, ep={ranks.ep}: the model has {what}: wanted {wanted}")
    return () if axis is None else axis.ranks


class _Planner(NamedTuple):
    """Plans a model that has been checked.

    Attributes:
        checked: the model.
        ranks: see `_Ranks`.
        measure: returns its activations, of a batch and a sequence.
    """

    checked: Checked
    ranks: _Ranks
    measure: Callable[[int, int], Activations]

    def plan(
        self, name: str, weight_slots: int | None, budget_bytes: int | None, tokens: tuple[int, int] | None
    ) -> Plan:
        """Plan the model called `name`, without the time of a step. For the other arguments see `plan`."""
        stages = [self.stage("ZeRO-3", 2)]
        if self.checked.settings.offload is None:
            stages += self.stage("ZeRO-2", "all"), self.stage("ZeRO-1", "all", "all")
        activations, unknown = (None, "") if tokens is None else self._try(*tokens)
        on_gpus = self.ranks.transport == "nccl"
        room = None if budget_bytes is None else Room.of(budget_bytes, activations, on_gpus=on_gpus)
        if weight_slots is None and room is not None:
            streamed = sum(not unit.is_resident for unit in self.checked.found)
            weight_slots = most_slots(streamed, stages, lambda count: self.stage("", count).total_bytes, room)
        if weight_slots is not None and weight_slots != 2:
            stages.insert(1, self.stage(f"{weight_slots} slots", weight_slots))
        fit = None if room is None else choose(stages, room)
        if room is not None and fit is not None and fit.choice is None:
            smallest = min(stages, key=lambda stage: stage.total_bytes)
            fit = dataclasses.replace(fit, ways=self._ways(smallest, room, tokens))
        found = self._units()
        numel = sum(unit.count * unit.numel for unit in found)
        return Plan(name, numel, *self.ranks, found, stages, activations, unknown, fit, None)

    def _try(self, batch: int, seq: int) -> tuple[Activations | None, str]:
        """The activations, or why they are not known."""
        try:
            return self.measure(batch, seq), ""
        except ConfigError as error:
            return None, str(error)

    def _ways(self, smallest: Stage, room: Room, tokens: tuple[int, int] | None) -> list[str]:
        """The smallest number of ranks on which ZeRO-3 fits, and changes with which `smallest` does."""
        ranks, size = self.ranks, max(self.ranks.tp, self.ranks.ep)

        def on_ranks(count: int) -> int:
            return self._replace(ranks=ranks._replace(world_size=count * size)).stage("", 2).total_bytes

        ways = list[tuple[str, int]]()  # and bytes of the engine and the optimizer
        count = fewest_ranks(ranks.world_size // size, lambda count: room.fits(on_ranks(count)))
        if count is not None:
            ways.append((f"on {count * size} ranks", on_ranks(count)))
        ways.append(("with 8-bit Adam", smallest.total_bytes - smallest.memory.adam_bytes * 3 // 4))
        if self.checked.settings.offload is None and ranks.transport == "nccl" and ranks.ep == 1:
            offloaded = self.stage("", 2, offload="state")
            host = f"{offloaded.host_total_bytes / 2**30:.2f} GiB of host memory per rank"
            ways.append((f"with --offload state, which takes {host}", offloaded.total_bytes))
        words = [way + _CHECKPOINTED * room.needs_checkpointing(total) for way, total in ways if room.fits(total)]
        if tokens is not None and (shape := fewer_tokens(*tokens, room, smallest.total_bytes, self.measure)):
            words.append("with --batch {} --seq {}".format(*shape) + _CHECKPOINTED)
        return words

    def time(self, load: Load, machine: Machine, weight_slots: SlotCount) -> StepTime:
        """The time of a step of `load` on `machine`, with state in host memory.

        Raises:
            ConfigError: the state lies on the device.
        """
        if self.checked.settings.offload is None:
            raise ConfigError('a step without offload copies nothing from host memory: give offload="state"')
        inputs = inputs_of(self.engine(weight_slots=weight_slots, grad_slots=2))
        return predict(inputs, load, dataclasses.replace(machine, ranks=min(machine.ranks, self.ranks.world_size)))

    def engine(self, **settings: Any) -> Engine:
        """The engine of rank 0, with some other settings."""
        ranks, changed = self.ranks, dataclasses.replace(self.checked.settings, **settings)
        experts = PlannedRanks(ranks.world_size // ranks.ep, ranks.transport) if ranks.ep > 1 else None
        others = PlannedRanks(ranks.world_size // ranks.tp, ranks.transport)
        return plan_engine(self.checked._replace(settings=changed), others, experts)

    def stage(self, name: str, weights: SlotCount, grads: SlotCount = 2, **settings: Any) -> Stage:
        """Memory and communication with so many slots, and some other settings."""
        engine = self.engine(weight_slots=weights, grad_slots=grads, **settings)
        report, units = report_memory(engine), [unit.flat_params for unit in engine.units]
        present = [*still_gathered(engine)], engine.plan.left_by(range(len(units)))  # as forward and backward begin
        passes = [unit for there in present for number, unit in enumerate(units) if number not in there]
        gathered = [flat for unit in passes for flat in unit if flat.layout.params and flat.ranks.world_size > 1]
        reduced = [flat for unit in units for flat in unit if flat.kind.trains and flat.ranks.world_size > 1]
        sent = [(flat, flat.kind.wire_dtype) for flat in gathered] + [(flat, flat.kind.grad_dtype) for flat in reduced]
        # Each other rank receives this rank's shards, and chunks of this rank's gradients.
        sent_bytes = sum((flat.ranks.world_size - 1) * flat.layout.shard_numel * dtype.itemsize for flat, dtype in sent)
        here = report.total_bytes + report.adam_bytes + report.chunk_bytes
        on_host = report.host_total_bytes + report.host_adam_bytes
        return Stage(name, weights, grads, report, here, on_host, len(gathered), len(reduced), sent_bytes)

    def _units(self) -> list[PlannedUnit]:
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


def builder_of(source: str) -> Callable[..., nn.Module]:
    """A function that builds a model.

    Args:
        source: path of a transformers ``config.json``, or of its directory; or the name of a function whose only
            argument, if it has one, is the mesh of its DTensors: ``package.module:function``. The current directory is
            searched for the module too.

    Raises:
        ConfigError: there is no such file or function, or transformers does not know the architecture.
    """
    if os.path.exists(source):
        from streamshard.integrations.huggingface import builder_of_config  # only here: see `conventions`

        return builder_of_config(Path(source, "config.json") if os.path.isdir(source) else Path(source))
    module, colon, name = source.partition(":")
    if not colon:
        raise ConfigError(f"no file or directory {source!r}: wanted a config.json, or function package.module:function")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        build = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{source!r}: {error}") from error
    return cast(Callable[..., nn.Module], build)
