"""The memory and communication of a training run, before it starts, with its activations; and what fits a budget.

`streamshard.tools.planner` plans the ranks. `streamshard.tools.fit` compares their bytes, and activations, with a
budget.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from streamshard.config import parse_bytes
from streamshard.errors import ConfigError
from streamshard.planning.discovery import ResidentArgument, UnitsArgument
from streamshard.tools.activations import Activations, Build
from streamshard.tools.fit import Fit, Stage, choose, fewest_ranks
from streamshard.tools.host_time import Step, StepTime
from streamshard.tools.planner import BuildOnMesh, PlannedUnit, Planner, Ranks, planning

_WORTH = 1.05  # times as long a loop has to take: estimates are no better


@dataclasses.dataclass(frozen=True)
class Plan:
    """The result of `plan`. Printable; `dataclasses.asdict` makes a dict for JSON.

    Attributes:
        model: the name of the model's class.
        numel: elements of all parameters.
        world_size: the number of ranks of one replica.
        tp, ep: over how many of them matrices, or experts, are cut.
        transport: the transport between the ranks.
        replicas: the number of replicas.
        units: the units, root unit first.
        stages: from ZeRO-3 to ZeRO-1; with ``offload``, without "all" slots.
        activation_bytes: at most, without checkpointing and with layers checkpointed; None: not known.
        activations_unknown: why they are not known; "" if they are, or if nobody needs them.
        fit: what fits the budget; None: no budget is given.
        step: the time of a step of the stage `timed`; None: no machine is given.
        accumulate: the number of micro-batches that ``model.accumulate`` takes; None: no accumulation.
        loop: the time of the same step in a loop; None: no machine is given, or it is the same.
    """

    model: str
    numel: int
    world_size: int
    tp: int
    ep: int
    transport: str
    replicas: int
    units: Sequence[PlannedUnit]
    stages: Sequence[Stage]
    activation_bytes: Activations | None
    activations_unknown: str
    fit: Fit | None
    step: StepTime | None
    accumulate: int | None
    loop: StepTime | None = None

    @property
    def timed(self) -> Stage:
        """The stage to take; without a budget, or if none fits, the last one without "all" slots."""
        choice = None if self.fit is None else self.fit.choice
        few = [stage for stage in self.stages if stage.weight_slots != "all"]
        return next((stage for stage in self.stages if stage.name == choice), few[-1])

    def __str__(self) -> str:
        unit_name, unit_bytes = ("GiB", 2**30) if self.stages[-1].total_bytes >= 2**30 else ("MiB", 2**20)

        def size(n_bytes: int) -> str:
            return f"{n_bytes / unit_bytes:.2f}"

        def row(name: str, cells: Iterable[object]) -> str:
            return f"{name:<24}" + "".join(f"{cell!s:>12}" for cell in cells)

        ranks = f"{self.world_size} rank{'s' * (self.world_size > 1)}"
        ranks += f" (tensor parallel over {self.tp})" * (self.tp > 1) + f" (experts over {self.ep})" * (self.ep > 1)
        ranks += f" in each of {self.replicas} replicas" * (self.replicas > 1)
        counted = self.fit is None or self.activation_bytes is not None or bool(self.activations_unknown)
        lines = [] if counted else ["activations are not counted: give batch and seq"]
        lines += [f"{self.model}: {self.numel:,} parameters on {ranks}, over {self.transport}", ""]
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
        count, of_all = self.accumulate, "" if self.accumulate is None else f" of {self.accumulate} micro-batches"
        lines += [
            f"\nsent by a rank in a step{of_all}" + ", activations aside" * (self.tp * self.ep > 1),
            row(f"  {unit_name}", (size(stage.sent_bytes) for stage in self.stages)),
        ]
        if count is not None:
            lines.append(row(f"  {unit_name} in a loop", (size(each.loop.sent_bytes(count)) for each in self.stages)))
        lines += [
            "\narguments of StreamShard",
            row("  weight_slots", (stage.weight_slots for stage in self.stages)),
            row("  grad_slots", (stage.grad_slots for stage in self.stages)),
        ]
        if self.activation_bytes is not None:
            lines += [
                f"\nactivations{of_all}, {unit_name} per rank, at most",
                row("  without checkpointing", [size(self.activation_bytes.without)]),
                row("  layers checkpointed", [size(self.activation_bytes.checkpointed)]),
            ]
        elif self.activations_unknown:
            lines.append(f"\nactivations: unknown, because {self.activations_unknown}")
        if self.fit is not None:
            is_known = self.activation_bytes is not None
            told = self.fit.lines(lambda n_bytes: f"{size(n_bytes)} {unit_name}", counts_activations=is_known)
            lines += ["", *told]
        lines += [f"\n{self.timed.name}, {step}" for step in (self.loop, self.step) if step is not None]
        if count is not None:
            lines.append(f"\n{self.verdict}")
        return "\n".join(lines)

    @property
    def verdict(self) -> str:
        """Whether ``model.accumulate`` pays in the stage `timed`."""
        # With offload one rank copies its weights to the device.
        is_alone = self.world_size == 1 and not self.timed.host_total_bytes
        if is_alone or all(unit.is_resident for unit in self.units):
            why = "one rank gathers nothing" if is_alone else "no layers take turns, so it runs the loop"
            return f"model.accumulate saves nothing: {why}"
        if self.step is None or self.loop is None:
            return "whether model.accumulate pays depends on the machine: give --seq and --machine"
        ours, loop = self.step.step_s, self.loop.step_s
        if loop < _WORTH * ours:
            return f"model.accumulate does not pay: a step takes {ours:.4g} s, in a loop {loop:.4g} s"
        return (
            f"model.accumulate pays: a step takes {ours:.4g} s, in a loop {loop:.4g} s, {loop / ours:.2f} times as long"
        )

    def _memory(self) -> dict[str, list[dict[str, int]]]:
        """By place, a table of each stage: bytes by name."""
        moments, chunks = "Adam's moments", "Adam's chunks"
        here, on_host = [], []
        drops = any(stage.memory.dropped_bytes for stage in self.stages)
        for stage, memory in ((stage, stage.memory) for stage in self.stages):
            ours = {moments: memory.adam_bytes, chunks: memory.chunk_bytes, "total": stage.total_bytes}
            start = {"start of backward": stage.start_bytes} if drops else {}
            here.append({**memory.held_bytes, **ours, **start})
            on_host.append({**memory.host_bytes, moments: memory.host_adam_bytes, "total": stage.host_total_bytes})
        return {"per rank": here, **({"of host memory": on_host} if self.stages[0].memory.host_bytes else {})}


def plan(
    model: nn.Module | Build | BuildOnMesh,
    world_size: int | None = None,
    units: UnitsArgument = None,
    *,
    resident: ResidentArgument = (),
    tp: int = 1,
    ep: int = 1,
    transport: str = "nccl",
    replicas: int = 1,
    weight_slots: int | None = None,
    budget: int | str | None = None,
    batch: int | None = None,
    seq: int | None = None,
    step: Step | None = None,
    accumulate: int | None = None,
    **given: Any,
) -> Plan:
    """Plan training with AdamW, from ZeRO-3 to ZeRO-1. Needs no process group and no memory.

    Args:
        model: not sharded, on any device; or a function that builds the model, which is called on the meta device.
        world_size: the number of ranks that share one replica of the model, those of tensor parallelism too. None:
            the fewest that `budget` suffices for; if no number does, the fewest that `tp` and `ep` allow.
        units, resident: as for `StreamShard`.
        tp, ep: over how many ranks DTensors of tensor parallelism, or of experts, are cut. A function that builds the
            model gets their mesh as its argument. Sizes are of the mesh's first rank, whose parts are the largest.
        transport: "nccl" (GPUs), "sockets" (CPUs of several machines) or "shared-memory" (CPUs of one machine).
        replicas: how many groups of `world_size` ranks train the model together, on a 2-D mesh.
        weight_slots: add a stage with this number of weight slots.
        budget: memory of a rank: bytes, or text such as "80GiB".
        batch, seq: shape of a rank's tokens, for its activations. Without `batch`, one sequence.
        step: with ``offload`` or `accumulate`, predict the time of this step (see `streamshard.tools.host_time`).
        accumulate: plan steps of so many micro-batches, each of `batch` and `seq`, by ``model.accumulate``: with its
            sums, activations of all micro-batches, and beside it what a loop sends and how long its step takes.
        **given: other arguments of `StreamShard`: precision, min_unit_size, align_pieces_to, offload, device_budget.

    Raises:
        ConfigError: an argument cannot be used.
        ShardingError, UnitError: as from `StreamShard`.
    """
    budget_bytes = None if budget is None else parse_bytes("budget", budget)
    if world_size is None and budget is None:
        raise ConfigError("world_size=None: wanted the number of ranks, or a budget, for the fewest ranks that fit")
    fewest = tp * ep if world_size is None else world_size
    tokens, ranks = _tokens_of(batch, seq), Ranks(fewest, tp, ep, transport, replicas)
    step = None if step is None else _step_of(step, ranks, tokens, accumulate)
    # A plan's mesh of DTensors exists only inside.
    with planning(model, ranks, units, resident, given, accumulate) as planner:
        return _plan(planner, weight_slots, budget_bytes, tokens, step, on_fewest=world_size is None)


def _step_of(step: Step, ranks: Ranks, tokens: tuple[int, int] | None, accumulate: int | None) -> Step:
    """`step` with `accumulate` micro-batches. For errors see `plan`."""
    if tokens is None or ranks.tp * ranks.ep * ranks.replicas > 1:
        raise ConfigError(
            "the time of a step is predicted with batch and seq, and without tp, ep and replicas, whose exchanges no "
            "plan knows"
        )
    if accumulate is None:
        return step
    if step.micro_batches not in (1, accumulate):  # 1: not given
        raise ConfigError(f"micro_batches={step.micro_batches}, accumulate={accumulate}: wanted one of the two")
    return dataclasses.replace(step, micro_batches=accumulate)


def _plan(
    planner: Planner,
    weight_slots: int | None,
    budget_bytes: int | None,
    tokens: tuple[int, int] | None,
    step: Step | None,
    *,
    on_fewest: bool,
) -> Plan:
    """See `plan`. With `on_fewest` on the fewest multiple of the ranks of `planner` that fits."""
    (activations, unknown), ranks = planner.activations(tokens), planner.ranks  # the same on any number of ranks

    def fit_of(stages: Sequence[Stage]) -> Fit | None:
        return None if budget_bytes is None else choose(stages, budget_bytes, activations, on_gpus=ranks.on_gpus)

    def fits(count: int) -> bool:
        fit = fit_of(planner.on_ranks(count * ranks.world_size).stages(None))
        return fit is not None and fit.choice is not None

    if on_fewest and (count := fewest_ranks(fits)) is not None:
        planner = planner.on_ranks(count * ranks.world_size)
    stages, units = planner.stages(weight_slots), planner.units()
    numel, fit = sum(unit.count * unit.numel for unit in units), fit_of(stages)
    name, accumulate = type(planner.model).__name__, planner.accumulate
    planned = Plan(name, numel, *planner.ranks, units, stages, activations, unknown, fit, None, accumulate)
    if step is None or tokens is None:
        return planned
    *loop, timed = planner.times(step, tokens, planned.timed)
    return dataclasses.replace(planned, step=timed, loop=loop[0] if loop else None)


def _tokens_of(batch: int | None, seq: int | None) -> tuple[int, int] | None:
    """The shape of a rank's tokens, if it is given. Without `batch`, one sequence.

    Raises:
        ConfigError: there is no `seq`, or a number is not positive.
    """
    if batch is None and seq is None:
        return None
    tokens = 1 if batch is None else batch, seq or 0
    if min(tokens) < 1:
        raise ConfigError(f"batch={batch}, seq={seq}: wanted positive numbers, or neither")
    return tokens
