"""One comparison of systems on one device: built, trained in turn, counted. See `one_device`, which runs it.

A result grows with every step that is known, and is written again and again.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from _measure import Clock, Memory, counted, measured_memory, runtime_calls, seeded_order, summary, write_json
from _models import LLAMAS, PRESETS, Transformer, flops_per_token, llama, next_token_loss
from _systems import System, build

from streamshard import StreamShard

__all__ = ["CASES", "REHEARSED", "Comparison", "free_memory"]

PHASES = ("forward", "backward", "update")
PREPARATION_STEPS = 3
TURNS = 2  # where systems are measured one after the other
ROOM = 0.92  # of the memory that steps may use: blocks of the allocator do not fit together without gaps


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """What is measured.

    Attributes:
        systems: which, see `_systems.SYSTEMS`.
        model: the name of its sizes.
        sequence: tokens of a row.
        most_rows: as many of them as fit, but no more.
        rounds: steps of each system.
        host_tokens: tokens of the steps in which the host's time is taken: so few that it does not wait for the device.
    """

    systems: tuple[str, ...]
    model: str
    sequence: int
    most_rows: int
    rounds: int
    host_tokens: int


CASES = {
    "llama": Case(
        systems=("local", "fsdp2", "streamshard"),  # DDP's memory as well would leave none of 80 GB to compute in
        model="1.1B",
        sequence=2048,
        most_rows=3,
        rounds=30,
        host_tokens=64,
    ),
    "small": Case(
        systems=("local", "fsdp2", "streamshard"),
        model="48x512-512",
        sequence=512,
        most_rows=1,
        rounds=60,
        host_tokens=512,
    ),
}
REHEARSED = {  # the same, as small as it can be
    "llama": dataclasses.replace(CASES["llama"], model="tiny", sequence=32, most_rows=2, rounds=2, host_tokens=8),
    "small": dataclasses.replace(CASES["small"], model="3x64-32", sequence=32, rounds=2, host_tokens=32),
}


class Built(NamedTuple):
    """A system that has trained, what building it took, and the bytes that it holds between steps."""

    system: System
    building: Memory
    held_bytes: int


class Step(NamedTuple):
    """One step: milliseconds of the device and of the host per phase, and the loss."""

    device_ms: list[float]
    host_ms: list[float]
    loss: float


class Comparison:
    """One case: its systems, their steps, and the result that grows meanwhile.

    Args:
        case: what is measured.
        arguments: of the command line.
        device: where.
        result: grows; has what the machine can do, and where it is, already.
    """

    def __init__(self, case: Case, arguments: argparse.Namespace, device: torch.device, result: dict[str, Any]) -> None:
        self._case = case
        self._arguments = arguments
        self._device = device
        self._result = result
        self._deadline = time.monotonic() + arguments.seconds
        self._steps: dict[str, list[Step]] = {name: [] for name in case.systems}
        self._host: dict[str, list[list[float]]] = {name: [] for name in case.systems}
        self._model_facts: dict[str, Any] = {}
        self._planned: dict[str, int] = {}  # by system, the bytes that it says it holds, Adam's moments included
        result["systems"] = {name: {} for name in case.systems}
        result["not_run"] = {}

    def together(self) -> None:
        """All systems live at once; every round trains each for one step, in an order drawn anew."""
        built = {name: made for name in self._case.systems if (made := self._build(name)) is not None}
        rows = self._fitting_rows({name: made.system for name, made in built.items()})
        self._describe(rows, is_apart=False)
        for name, made in built.items():
            self._note_memory(name, made, rows)
        self._rounds({name: made.system for name, made in built.items()}, rows, self._case.rounds)
        for name, made in built.items():
            self._note_steadiness(name, made.system, rows)
        self._summarize()

    def apart(self) -> None:
        """One system at a time, each built `TURNS` times."""
        rows = self._case.most_rows
        for name in self._case.systems:
            made = self._build(name)
            if made is not None:
                rows = min(rows, self._fitting_rows({name: made.system}))
            del made
            free_memory(self._device)
        self._describe(rows, is_apart=True)
        for turn in range(TURNS):
            for name in seeded_order(
                [name for name in self._case.systems if name not in self._result["not_run"]], turn
            ):
                made = self._build(name)
                if made is None:
                    continue
                self._note_memory(name, made, rows)
                self._rounds({name: made.system}, rows, -(-self._case.rounds // TURNS))
                self._note_steadiness(name, made.system, rows)
                del made
                free_memory(self._device)
                self._summarize()

    # -- one system -------------------------------------------------------------------------------------------------

    def _build(self, name: str) -> Built | None:
        """A system that has trained some steps of a row, so that all its state exists. None: it cannot run here."""
        free_memory(self._device)
        try:
            with self._measured_memory() as building:
                system = self._make(name)
            with self._measured_memory() as preparing:
                for index in range(PREPARATION_STEPS):
                    self._step(system, 1, index)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a peer that cannot run here is a result: it says why
            self._result["not_run"][name] = f"{type(error).__name__}: {error}"
            self._save()
            return None
        return Built(system, building, building.held_bytes + preparing.held_bytes)

    def _make(self, name: str) -> System:
        torch.manual_seed(0)
        if self._arguments.case == "llama":
            model = llama(self._case.model, self._device)
            layers, width, blocks = model.config.num_hidden_layers, model.config.hidden_size, model.model.layers
        else:
            preset = PRESETS[self._case.model]
            model = Transformer(preset).to(self._device)
            layers, width, blocks = preset.layers, preset.width, model.blocks
        self._model_facts = {
            "layers": layers,
            "width": width,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "flops_per_token": flops_per_token(model, layers=layers, width=width, sequence=self._case.sequence),
        }
        if self._arguments.compile:
            _compile(name, blocks, "eager" if self._arguments.rehearse else "inductor")
        system = build(name, model, list(blocks), "fused")
        if isinstance(system.forward, StreamShard):
            report = system.forward.memory_report()
            self._planned[name] = report.total_bytes + report.adam_bytes
        if self._arguments.case == "llama":
            of_whole: Any = system.forward
            system = system._replace(forward=lambda tokens: of_whole(input_ids=tokens, use_cache=False).logits)
        return system

    def _tokens(self, rows: int, index: int, sequence: int | None = None) -> torch.Tensor:
        """[rows, sequence] int64 of one round: the same for every system."""
        generator = torch.Generator().manual_seed(index)
        vocabulary = LLAMAS[self._case.model]["vocab_size"] if self._arguments.case == "llama" else None
        high = vocabulary or PRESETS[self._case.model].vocabulary
        shape = (rows, sequence or self._case.sequence)
        return torch.randint(high, shape, generator=generator).to(self._device)

    def _step(self, system: System, rows: int, index: int, sequence: int | None = None) -> Step:
        """Train one step."""
        tokens = self._tokens(rows, index, sequence)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        clocks = Clock(self._device), Clock(torch.device("cpu"))
        losses = []
        for clock in clocks:
            clock.lap()
        for _ in self._phases(system, tokens, losses):
            for clock in clocks:
                clock.lap()
        device_ms, host_ms = (clock.laps_ms() for clock in clocks)
        return Step(device_ms, host_ms, losses[0].item())

    def _phases(self, system: System, tokens: torch.Tensor, losses: list[torch.Tensor]) -> Iterator[str]:
        """Run a step, with a pause behind each of `PHASES`."""
        loss = next_token_loss(system.forward(tokens), tokens)
        losses.append(loss.detach())
        yield "forward"
        loss.backward()
        yield "backward"
        system.update()
        yield "update"

    def _fitting_rows(self, systems: dict[str, System]) -> int:
        """As many rows as fit beside what is held, by what one row and two take."""
        if self._case.most_rows == 1 or self._device.type == "cpu":
            return self._case.most_rows
        fitting = self._case.most_rows
        for system in systems.values():
            one, two = (self._peak(system, rows) for rows in (1, 2))
            free_memory(self._device)
            free, _ = torch.cuda.mem_get_info(self._device)
            each = max(two - one, 1)
            fitting = min(fitting, int((free * ROOM - (one - each)) // each))
        if fitting < 1:
            raise torch.OutOfMemoryError(f"no row of {self._case.sequence} tokens fits beside {', '.join(systems)}")
        return fitting

    def _measured_memory(self) -> contextlib.AbstractContextManager[Memory]:
        """Of a rehearsal nobody wants to know, and counting takes seconds on the CPU."""
        return contextlib.nullcontext(Memory()) if self._arguments.rehearse else measured_memory(self._device)

    def _peak(self, system: System, rows: int) -> int:
        """Bytes that a step takes beyond what is held."""
        with self._measured_memory() as step:
            self._step(system, rows, 0)
        return step.peak_bytes

    # -- what is measured -------------------------------------------------------------------------------------------

    def _note_memory(self, name: str, made: Built, rows: int) -> None:
        """Bytes: of building, planned and held between steps, and at the highest point of a step."""
        self._step(made.system, rows, 0)
        self._result["systems"][name]["memory"] = {
            "building_peak_bytes": made.building.peak_bytes,
            "planned_bytes": self._planned.get(name),
            "held_bytes": made.held_bytes,
            "step_peak_bytes": made.held_bytes + self._peak(made.system, rows),
        }
        self._save()

    def _rounds(self, systems: dict[str, System], rows: int, count: int) -> None:
        """Steps in turn; the host's time too, in steps of few tokens."""
        warmup = PREPARATION_STEPS
        for index in range(-warmup, count):
            if index > 0 and time.monotonic() > self._deadline:
                self._result["config"]["stopped_by_time"] = True
                break
            gc.collect()
            gc.disable()  # a collection would hit whichever system is running
            for name in seeded_order(list(systems), warmup + index):
                step = self._step(systems[name], rows, warmup + index)
                few = step
                if self._case.host_tokens < self._case.sequence:
                    few = self._step(systems[name], 1, warmup + index, self._case.host_tokens)
                if index >= 0:
                    self._steps[name].append(step)
                    self._host[name].append(few.host_ms)
            gc.enable()
            if index % 10 == 9:
                self._summarize()

    def _note_steadiness(self, name: str, system: System, rows: int) -> None:
        """What one step costs beyond computing, and what it calls."""
        tokens = self._tokens(rows, 0)

        def run() -> None:
            for _ in self._phases(system, tokens, []):
                pass

        for _ in range(2):
            run()
        with counted(self._device) as steady:
            run()
        calls = runtime_calls(self._device, run)
        waits = sum(count for call, count in calls.items() if "Synchronize" in call)
        entry = {**dataclasses.asdict(steady), "synchronizing_calls": waits, "runtime_calls": calls}
        self._result["systems"][name]["steady_step"] = entry
        self._summarize()

    # -- the result -------------------------------------------------------------------------------------------------

    def _describe(self, rows: int, *, is_apart: bool) -> None:
        self._result["config"] = {
            **dataclasses.asdict(self._case),
            **self._model_facts,
            "rows": rows,
            "tokens": rows * self._case.sequence,
            "ranks": dist.get_world_size(),
            "backend": dist.get_backend_config(),
            "compiled_layers": self._arguments.compile,
            "optimizer": "AdamW (fused), fp32 main weights",
            "param_dtype": "bfloat16",
            "warmup_rounds": PREPARATION_STEPS,
            "one_after_the_other": is_apart,
            "stopped_by_time": False,
        }
        self._save()

    def _summarize(self) -> None:
        """Steps so far to medians, ratios within rounds, and targets."""
        config, machine = self._result["config"], self._result["machine"]
        for name, steps in self._steps.items():
            if not steps:
                continue
            entry = self._result["systems"][name]
            entry["step_ms"] = summary([sum(step.device_ms) for step in steps])
            for place, phase in enumerate(PHASES):
                entry[f"{phase}_ms"] = summary([step.device_ms[place] for step in steps])["median"]
            seconds = entry["step_ms"]["median"] / 1e3
            entry["tokens_per_s"] = config["tokens"] / seconds
            tflops = entry["tokens_per_s"] * config["flops_per_token"] / 1e12
            entry["tflops"] = tflops
            sheet = machine["data_sheet_tflops"]
            entry["utilization_of_data_sheet"] = None if sheet is None else tflops / sheet
            entry["utilization_of_matmul"] = tflops / machine["matmul_tflops"]
            entry["host_us_per_layer"] = summary(_host_us(self._host[name], config["layers"]))
            entry["last_loss"] = steps[-1].loss
            entry["rounds_ms"] = [round(sum(step.device_ms), 3) for step in steps]
            for peer in ("local", "fsdp2"):
                self._compare(name, peer)
        self._result["targets"] = _targets(self._arguments.case, self._result["systems"])
        self._save()

    def _compare(self, name: str, peer: str) -> None:
        """Ratios to `peer` within rounds."""
        own, theirs = self._steps[name], self._steps.get(peer, [])
        entry = self._result["systems"][name]
        pairs = list(zip(own, theirs, strict=False))  # of as many rounds as both have had
        if not pairs:
            return
        entry[f"ratio_to_{peer}"] = summary([sum(a.device_ms) / sum(b.device_ms) for a, b in pairs])
        hosts = [_host_us(self._host[each], 1) for each in (name, peer, "local")]
        triples = list(zip(*hosts, strict=False))
        entry[f"host_ratio_to_{peer}"] = summary([a / b for a, b, _ in triples])
        if peer != "local" and triples:
            beyond = [(a - plain) / (b - plain) for a, b, plain in triples if b != plain]
            entry[f"host_ratio_to_{peer}_beyond_local"] = summary(beyond)

    def _save(self) -> None:
        write_json(self._result, self._arguments.output)


def _host_us(rounds: list[list[float]], layers: int) -> list[float]:
    """The host's time of forward and backward, per layer."""
    return [sum(host_ms[:2]) * 1e3 / layers for host_ms in rounds]


def _compile(name: str, blocks: torch.nn.ModuleList, backend: str) -> None:
    """Each layer by itself, as each system wants it: FSDP2's hooks have to be around what is compiled."""
    for place, block in enumerate(blocks):
        if name == "fsdp2":
            blocks[place] = torch.compile(block, backend=backend)
        else:
            block.compile(backend=backend)


def free_memory(device: torch.device) -> None:
    """What nobody holds is the device's again."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# -- what was wanted --------------------------------------------------------------------------------------------------


def _targets(case: str, systems: dict[str, Any]) -> list[dict[str, Any]]:
    """Each target with what was found and whether it is met; None where a system did not run."""

    def of(name: str, *keys: str) -> Any:
        found: Any = systems.get(name, {})
        for key in keys:
            found = None if found is None else found.get(key)
        return found

    def target(what: str, most: float, found: float | None) -> dict[str, Any]:
        return {"target": what, "at_most": most, "found": found, "met": None if found is None else found <= most}

    if case == "small":
        return [
            target("host time, share of fsdp2's", 0.5, of("streamshard", "host_ratio_to_fsdp2", "median")),
        ]
    own, theirs = (of(name, "memory", "step_peak_bytes") for name in ("streamshard", "local"))
    found = [target("step time, share of local's", 1.01, of("streamshard", "ratio_to_local", "median"))]
    found += [target("peak memory, share of local's", 1.01, own / theirs if own and theirs else None)]
    for what in ("synchronizations", "synchronizing_calls", "device_allocations", "allocations"):
        counts = [of(name, "steady_step", what) for name in ("streamshard", "local")]
        beyond = None if None in counts else counts[0] - counts[1]
        found.append(target(f"{what} of a steady step beyond local's", 0, beyond))
    return found
