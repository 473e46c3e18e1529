"""Processes with torchrun's environment variables. They are forked, which is faster than torchrun.

A fresh interpreter would take seconds to import torch.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import runpy
import signal
import socket
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tests.ranks import forkserver, warnings_are_errors

ROOT = Path(__file__).parents[1]
_PR_SET_PDEATHSIG = 1


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launched_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The environment variables that a launcher sets for a rank."""
    sizes = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    return {**sizes, **ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}


def run_script(script: str) -> None:
    """As ``python -W error -c`` does."""
    warnings_are_errors()
    exec(compile(textwrap.dedent(script), "<script>", "exec"), {"__name__": "__main__"})


def run_file(arguments: list[str]) -> None:
    """As ``python`` does in the root of the repository: a file and its arguments. Warnings are shown as ever."""
    os.chdir(ROOT)
    sys.path.insert(0, str((ROOT / arguments[0]).parent))
    sys.argv = arguments
    warnings.resetwarnings()
    runpy.run_path(arguments[0], run_name="__main__")


class Launched:
    """Owns processes that it has started, each of which calls `target`.

    Args:
        world_size: how many ranks; 0 is one process that was not launched.
        directory: holds their output.
        start: what starts them. "fork" in a process that was started so: its server would import everything anew.
    """

    def __init__(
        self,
        world_size: int,
        directory: Path,
        target: Callable[..., None],
        *args: Any,
        start: BaseContext | None = None,
    ) -> None:
        port = free_port()
        self._outputs = [directory / f"output of rank {rank}" for rank in range(max(world_size, 1))]
        self.processes: list[BaseProcess] = []
        for rank, output in enumerate(self._outputs):
            environment = launched_environment(rank, world_size, port) if world_size else {}
            process = (start or forkserver()).Process  # type: ignore[attr-defined]  # each context has one
            self.processes.append(process(target=_run, args=(environment, output, target, *args)))
            self.processes[-1].start()

    def end(self, awaited: Iterable[int] | None = None, timeout_s: float = 60.0) -> list[tuple[int | None, str]]:
        """Wait for the `awaited` ranks (default: all), kill the others. Returns exit code and output of each rank."""
        try:
            for rank in range(len(self.processes)) if awaited is None else awaited:
                self.processes[rank].join(timeout_s)
                assert self.processes[rank].exitcode is not None, f"rank {rank} hangs"
            codes = [process.exitcode for process in self.processes]
            return [(code, output.read_text()) for code, output in zip(codes, self._outputs, strict=True)]
        finally:
            self.kill()

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def run_by_torchrun(ranks: int, target: Callable[..., object], *args: Any) -> None:
    """Call `target` on ranks that torchrun's own code starts, and restarts up to three times. They are forked.

    Raises:
        ChildFailedError: a rank has failed once more.
    """

    def run_rank() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # torchrun's own processes are not forked
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        torch.set_num_threads(1)
        target(*args)

    config = LaunchConfig(1, 1, ranks, rdzv_backend="c10d", rdzv_endpoint="localhost:0", start_method="fork")
    elastic_launch(config, run_rank)()


def in_child(function: Callable[[], object]) -> tuple[int, str]:
    """Call `function` in a forked child: its exit code, or minus a signal's number, and what is returned or raised."""
    inward, outward = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forks beside threads
        child = os.fork()
    if child == 0:
        faulthandler.disable()  # it would tell of signals
        try:
            answer = str(function())
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(outward, answer.encode())
        os._exit(0)
    os.close(outward)
    with open(inward) as pipe:
        answer = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), answer


def _run(environment: dict[str, str], output: Path, target: Callable[..., None], *args: Any) -> None:
    os.environ.update(environment)
    for stream in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT), stream)
    target(*args)
