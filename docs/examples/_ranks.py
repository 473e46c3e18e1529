"""The processes of the example job: joining them, checking that they are those launched, and ending together."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn, TypeVar

import psutil
import torch
import torch.distributed as dist
from accelerate import PartialState

T = TypeVar("T")

LAUNCH = (
    "accelerate launch --config_file docs/examples/two_processes.yaml [--num_processes N] docs/examples/train_llama.py"
)


class JobError(Exception):
    """The job cannot be done as asked; the message says why and what to do."""


def end_with_error(problem: JobError) -> NoReturn:
    """Exit with code 2, so that the error is what the user sees last.

    After whatever a process prints, torchrun prints its own traceback. The traceback ends with the file that the first
    failed process has written for torchrun: so each process writes the error there.
    """
    message = f"error: {problem}"
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        report = {"message": f"\n\n{message}\n", "timestamp": int(time.time())}
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(report))
    if os.environ.get("RANK", "0") == "0":
        print(message, file=sys.stderr, flush=True)
    sys.exit(2)


def join_ranks(device: str) -> Ranks:
    """Start or join the process group that was launched, and check that it is the one that was launched."""
    launched = os.environ.get("WORLD_SIZE")
    if launched is None:
        raise JobError(
            "this process was started alone, without a rank. (`accelerate launch --cpu` starts one process, whatever "
            f"--num_processes says.) Start it with\n    {LAUNCH}\nwhere N may be 1."
        )
    local_count = int(os.environ.get("LOCAL_WORLD_SIZE", launched))
    gpu_count = torch.cuda.device_count()
    if device == "cuda" and gpu_count < local_count:
        raise JobError(
            f"--device cuda: {gpu_count} GPU(s) for {local_count} processes; wanted one for each (--num_processes)"
        )
    on_cpu = device == "cpu" or gpu_count < local_count
    if on_cpu:
        torch.set_num_threads(max(core_count() // local_count, 1))  # the launcher asks for one, whatever there is
    # Asked for CPU, accelerate makes one gloo group of the launched processes. Not asked and without a GPU it would
    # leave each of them alone (DistributedType.NO).
    state = PartialState(cpu=on_cpu, timeout=timedelta(minutes=10))
    if not dist.is_initialized() or dist.get_world_size() != int(launched):
        found = dist.get_world_size() if dist.is_initialized() else 1
        raise JobError(
            f"{launched} processes were launched, but this one is in a group of {found} ({state.distributed_type})"
        )
    present = torch.ones((), device=state.device)
    dist.all_reduce(present)
    if present.item() != int(launched):
        raise JobError(f"{launched} processes were launched, but {present.item():.0f} answered")
    ranks = Ranks(state, dist.get_rank(), dist.get_world_size(), state.device)
    if on_cpu and device == "auto" and gpu_count:
        ranks.say(
            f"{gpu_count} GPU(s) for {local_count} processes: training on CPU; --num_processes {gpu_count} uses GPUs"
        )
    return ranks


def core_count() -> int:
    """Cores this process may use; two threads of one core count once."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(usable, psutil.cpu_count(logical=False) or usable)


@dataclass(frozen=True)
class Ranks:
    """The processes that train together, seen from one of them."""

    state: PartialState
    rank: int
    world_size: int
    device: torch.device

    def __str__(self) -> str:
        plural = "s" if self.world_size > 1 else ""
        return f"{self.world_size} rank{plural} on {self.device.type} ({dist.get_backend()})"

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def say(self, message: str) -> None:
        if self.is_first:
            print(message, flush=True)

    def mean(self, value: torch.Tensor) -> float:
        """The mean over ranks of a scalar."""
        value = value.detach().float().clone()
        dist.all_reduce(value)
        return value.item() / self.world_size

    def count_trained(self, steps: int) -> int:
        """How many ranks took `steps` steps: counted by the ranks themselves, not read from a setting."""
        counts = torch.zeros(self.world_size, device=self.device)
        counts[self.rank] = steps
        dist.all_reduce(counts)
        return int((counts == steps).sum().item()) if steps else 0

    def from_first(self, value: T) -> T:
        """What the first rank passed."""
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def stop_on_error(self, error: str | None) -> None:
        """Raise on all ranks when one of them has an error, so that none waits for it."""
        errors: list[str | None] = [None] * self.world_size
        dist.all_gather_object(errors, error)
        found = [(rank, message) for rank, message in enumerate(errors) if message is not None]
        if found:
            self.leave()
            rank, message = found[0]
            raise JobError(message if rank == 0 else f"rank {rank}: {message}")

    def leave(self) -> None:
        self.state.destroy_process_group()
