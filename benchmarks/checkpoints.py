"""Saving and loading a training run, against torch.distributed.checkpoint of FSDP2: one model, one disk, in turn.

    python benchmarks/checkpoints.py

Both hold fp32 weights and AdamW's moments, cut over the ranks. A round saves, loads and exports with each system in an
order drawn anew, after the disk has taken what was written before. Times are the slowest rank's; memory, in rounds of
its own, is what a rank has at the peak beside what it had before (anonymous and shared memory, not the file system's
cache), the most of all ranks. Export: what lies on the disk is Hugging Face's layout; FSDP2's weights are gathered on
rank 0 and given to ``save_file``. A pause is how long a save in the background takes to return; with a step: how much
longer that and the next step take than a step. Ratios are within a round.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _measure import RESULTS, Noise, environment, save, seeded_order, summary
from _models import Preset, Transformer, next_token_loss
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

from streamshard import Precision, StreamShard, export_safetensors, load_checkpoint, save_checkpoint

SAMPLE_S = 0.001
MEMORY_ROUNDS = 3  # which begin with nothing that was freed; others keep it, as training does, and are timed


def main() -> None:
    """Start ranks if nobody did, measure, and let rank 0 report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--directory", type=Path, help="on the disk that is measured; default: a temporary one")
    parser.add_argument("--output", type=Path, default=RESULTS / "checkpoints-cpu.json")
    arguments = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ["BENCHMARK_DIRECTORY"] = tempfile.mkdtemp(dir=arguments.directory)
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        os.execv(sys.executable, [*launcher, str(arguments.ranks), *sys.argv])
    torch.set_num_threads(1)
    root = Path(os.environ["BENCHMARK_DIRECTORY"])
    dist.init_process_group("gloo")
    try:
        _compare(arguments, root)
    finally:
        dist.destroy_process_group()
        if os.environ["LOCAL_RANK"] == "0":
            shutil.rmtree(root, ignore_errors=True)


class System:
    """A model and its optimizer after one step, and how it is saved and loaded.

    Args:
        root: where its files go.
        model, optimizer: sharded.
        tokens: [1, n] int64 of the step that fills the optimizer's state.
    """

    def __init__(self, root: Path, model: Any, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> None:
        self.root, self.model, self.optimizer, self._tokens = root, model, optimizer, tokens
        self.step()

    def step(self) -> None:
        """Train."""
        next_token_loss(self.model(self._tokens), self._tokens).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self) -> None:
        """Everything that training needs."""
        raise NotImplementedError

    def save_in_background(self) -> Callable[[], object]:
        """The same; what is returned waits for it."""
        raise NotImplementedError

    def load(self) -> None:
        """What `save` has written."""
        raise NotImplementedError

    def export(self) -> None:
        """The weights for other people."""
        raise NotImplementedError

    def clear(self) -> None:
        """Remove the files, and let the disk come to rest."""
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(self.root, ignore_errors=True)
            os.sync()
        dist.barrier()


class Ours(System):
    """StreamShard."""

    def save(self) -> None:
        save_checkpoint(self.root, self.model, self.optimizer)

    def save_in_background(self) -> Callable[[], object]:
        return save_checkpoint(self.root, self.model, self.optimizer, wait=False).wait

    def load(self) -> None:
        load_checkpoint(self.root, self.model, self.optimizer)

    def export(self) -> None:
        export_safetensors(self.model, self.root / "export")


class Theirs(System):
    """FSDP2 and torch.distributed.checkpoint."""

    _group: dist.ProcessGroup | None = None

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self) -> None:
        dcp.save(self._state(), checkpoint_id=self.root)

    def save_in_background(self) -> Callable[[], object]:
        if self._group is None:  # its thread must not share one with what goes on beside it
            self._group = dist.new_group()
        return dcp.async_save(self._state(), checkpoint_id=self.root, process_group=self._group).result

    def load(self) -> None:
        state = self._state()
        dcp.load(state, checkpoint_id=self.root)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def export(self) -> None:
        state = get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if dist.get_rank() == 0:
            (self.root / "export").mkdir(parents=True)
            save_file(state, self.root / "export" / "model.safetensors", {"format": "pt"})
            with open(self.root / "export" / "model.safetensors", "rb+") as file:
                os.fsync(file.fileno())  # as ours is, and DCP's


def _build(root: Path, arguments: argparse.Namespace) -> dict[str, System]:
    tokens = torch.randint(256, (1, 32), generator=torch.Generator().manual_seed(dist.get_rank()))

    def plain() -> Transformer:
        torch.manual_seed(0)
        return Transformer(Preset(layers=arguments.layers, width=arguments.width, vocabulary=4096, sequence=32, rows=1))

    ours: Any = StreamShard(plain(), precision=Precision(param_dtype=torch.float32))
    theirs: nn.Module = plain()
    for block in theirs.blocks:  # type: ignore[union-attr]
        fully_shard(block)
    fully_shard(theirs)
    return {
        "streamshard": Ours(root / "streamshard", ours, torch.optim.AdamW(ours.parameters()), tokens),
        "fsdp2": Theirs(root / "fsdp2", theirs, torch.optim.AdamW(theirs.parameters()), tokens),
    }


def _give_back_memory() -> None:
    """What was freed goes back to the system: it would be taken again, unseen."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # glibc's
        ctypes.CDLL(None).malloc_trim(0)


class Peak:
    """The most memory that a process has while the block runs, beside what it had before; in bytes."""

    def __enter__(self) -> Peak:
        self._before = self.bytes_now()
        self.bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *args: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self.bytes = max(self.bytes, self.bytes_now() - self._before)

    @staticmethod
    def bytes_now() -> int:
        """Anonymous and shared memory that is resident."""
        status = Path("/proc/self/status").read_text().splitlines()
        return sum(int(line.split()[1]) << 10 for line in status if line.startswith(("RssAnon", "RssShmem")))


def _timed(action: Callable[[], Any]) -> tuple[float, float, Any]:
    """Seconds and MiB of the rank that takes most, and this rank's result."""
    dist.barrier()
    with Peak() as peak:
        began = time.perf_counter()
        result = action()
        seconds = time.perf_counter() - began
    most = torch.tensor([seconds, peak.bytes / 2**20], dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return float(most[0]), float(most[1]), result


def _save_and_step(system: System) -> Callable[[], object]:
    """What of a save in the background is not seen in the call is seen here: the step waits, or shares the cores."""
    wait = system.save_in_background()
    system.step()
    return wait


def _compare(arguments: argparse.Namespace, root: Path) -> None:
    systems = _build(root, arguments)
    rows: dict[str, dict[str, list[float]]] = {name: {} for name in systems}

    def note(name: str, what: str, action: Callable[[], Any]) -> Any:
        if measures_memory:
            _give_back_memory()
        seconds, mib, result = _timed(action)
        own = rows[name]
        own.setdefault(f"{what}_mib" if measures_memory else f"{what}_s", []).append(
            mib if measures_memory else seconds
        )
        return result

    noise = Noise()
    for number in range(1 + arguments.rounds + MEMORY_ROUNDS):
        if number == 1:  # the first one warms up
            rows = {name: {} for name in systems}
        measures_memory = number > arguments.rounds
        noise.begin_round()
        for name in seeded_order(list(systems), number):
            system = systems[name]
            system.clear()
            note(name, "save", system.save)
            note(name, "load", system.load)
            system.clear()
            note(name, "export", system.export)
            system.clear()
            wait = note(name, "pause", system.save_in_background)
            note(name, "rest", wait)
            system.clear()
            system.step()
            note(name, "step", system.step)
            wait = note(name, "pause_and_step", lambda system=system: _save_and_step(system))
            wait()
            system.clear()
        noise.end_round()
    cpu_s: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(cpu_s, noise.own_cpu_s())
    if dist.get_rank() == 0:
        _report(arguments, rows, noise.foreign_cores(cpu_s)[1:])


def _report(
    arguments: argparse.Namespace,
    rows: dict[str, dict[str, list[float]]],
    foreign_cores: list[float],
) -> None:
    for own in rows.values():
        own["pause_with_step_s"] = [
            both - alone for both, alone in zip(own["pause_and_step_s"], own["step_s"], strict=True)
        ]
    ratios = {
        f"{what}_of_fsdp2": summary(
            [a / b for a, b in zip(rows["streamshard"][what], rows["fsdp2"][what], strict=True)]
        )
        for what in rows["fsdp2"]
        if what.endswith("_s")
    }
    for name, own in rows.items():
        for pause in ("pause", "pause_with_step"):
            shares = [a / b for a, b in zip(own[f"{pause}_s"], own["save_s"], strict=True)]
            ratios[f"{pause}_of_own_save, {name}"] = summary(shares)
    measured = {name: {what: summary(values) for what, values in own.items()} for name, own in rows.items()}
    for name, own in measured.items():
        print(name, {what: round(values["median"], 3) for what, values in own.items()})
    for what, values in ratios.items():
        print(f"{what}: {values['median']:.3f} ({values['median_low']:.3f} to {values['median_high']:.3f})")
    settings = {"layers": arguments.layers, "width": arguments.width, "ranks": arguments.ranks}
    device = torch.device("cpu")
    result = {"environment": environment(device), "settings": settings, "ratios": ratios, "measured": measured}
    save({**result, "rounds": rows, "foreign_cores": foreign_cores}, arguments.output)


if __name__ == "__main__":
    main()
