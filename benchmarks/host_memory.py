"""Models larger than the GPU: training with state in host memory, beside the same model that computes alone.

    python benchmarks/host_memory.py --within 240 --output DIR/host_memory.json
    python benchmarks/host_memory.py --only link 3B.alone 3B.streamshard         # some of it
    python benchmarks/host_memory.py --rehearse         # tiny, on a device that the CPU plays or simulates

One GPU, Llamas of 3B and 6B parameters that are made from their sizes, 4k to 64k tokens in a step of one micro-batch,
bf16, AdamW, clipping by the exact norm, layers recomputed in backward. Systems:

    alone            forward and backward, with all layers on the device; no step
    streamshard      ``offload="state"``; streamshard-40: with 40 % of the state on the device
    fsdp2            ``CPUOffloadPolicy``
    deepspeed        ZeRO-Offload

Each part is a process of its own with a limit of its own, the most valuable part first. So a part that fails or hangs
takes nothing from the others. Results are written after each cell.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import importlib
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _jobs import ROOT
from _measure import RESULTS, environment, write_json

K = 1024
LEAST_S = 12.0  # a part is not begun with less
DONE = "done"  # what a part tells last
STACKS_S = 1.0  # before a part is ended, it says where it is
ALONE, OWN = "alone", ("link", "streamshard", "streamshard-40")
CONFIG = {
    "ranks": 1,
    "param_dtype": "bfloat16",
    "gradients": "fp32, clipped by their exact norm",
    "optimizer": 'AdamW (fused), fp32 main weights; none in "alone"',
    "recomputed": "each layer, and the logits",
}
TARGETS = {  # share of the speed of computing alone
    ("streamshard", 64 * K): 0.90,
    ("streamshard", 16 * K): 0.55,
    ("streamshard-40", 16 * K): 0.70,
}


class Part(NamedTuple):
    """What one process measures.

    Attributes:
        name: "link", or "size.system".
        counts: tokens of a step, one after the other.
        limit_s: it is ended after so many seconds.
    """

    name: str
    counts: tuple[int, ...]
    limit_s: float

    @property
    def size(self) -> str:
        """Of the model."""
        return self.name.split(".")[0]

    @property
    def system(self) -> str:
        """What trains it."""
        return self.name.split(".")[-1]

    def cell(self, tokens: int) -> str:
        """The name of a row of results."""
        return f"{self.size}, {f'{tokens // K}k' if tokens >= K else tokens} tokens"


FIRST, LATER = (16 * K, 4 * K), (64 * K, 32 * K, 8 * K)  # 64k tokens take as long as all else that is first
SOME, LARGE = (16 * K, 4 * K, 64 * K), (16 * K, 64 * K)
PARTS = (
    Part("link", (), 25.0),
    Part("3B.alone", FIRST, 30.0),
    Part("3B.streamshard", FIRST, 60.0),
    Part("3B.fsdp2", SOME, 75.0),
    Part("3B.alone", LATER, 50.0),
    Part("3B.streamshard", LATER, 90.0),
    Part("3B.deepspeed", SOME, 75.0),
    Part("3B.streamshard-40", SOME, 75.0),
    Part("6B.alone", LARGE, 50.0),
    Part("6B.streamshard", LARGE, 80.0),
    Part("6B.fsdp2", LARGE, 80.0),
)
REHEARSED = tuple(  # the same, as small as it can be
    part._replace(name=part.name.replace("3B", "tiny"), counts=tuple(tokens // 512 for tokens in part.counts))
    for part in PARTS
    if part.size != "6B"
)


def main() -> None:
    """Measure all parts, save what is known again and again, print."""
    # Parts are forked from this process, so it should not start CUDA. This lets torch look for a GPU without CUDA.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    end = time.monotonic()
    parts, arguments = _parse()
    end += arguments.within
    _import_once()
    results = Results(parts, arguments.output)
    for part in parts:
        left_s = end - time.monotonic()
        if left_s >= LEAST_S:
            results.begin(part)
            _run(part, min(part.limit_s, left_s), results, is_rehearsal=arguments.rehearse)
    results.print()
    sys.exit(1 if results.has_failed else 0)


def _parse() -> tuple[list[Part], argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--within", type=float, default=240.0, metavar="S", help="seconds for all parts together")
    parser.add_argument("--only", nargs="+", metavar="PART", help=f"some of {' '.join(part.name for part in PARTS)}")
    parser.add_argument("--rehearse", action="store_true", help="tiny: whether it runs at all")
    parser.add_argument("--output", type=Path, default=RESULTS / "host_memory.json")
    arguments = parser.parse_args()
    parts = REHEARSED if arguments.rehearse else PARTS
    if unknown := set(arguments.only or ()) - {part.name for part in parts}:
        parser.error(f"--only {' '.join(sorted(unknown))}: wanted some of {' '.join(part.name for part in parts)}")
    return [part for part in parts if not arguments.only or part.name in arguments.only], arguments


def _import_once() -> None:
    """What takes seconds to import, and every part needs. The models of transformers would look for a GPU."""
    for name in ("_host_link", "_host_systems", "torch.distributed.fsdp", "transformers"):
        importlib.import_module(name)


@functools.cache
def _context() -> Any:
    """How processes start: as forks, which have imported everything; anew, if an import has started CUDA here."""
    probe = multiprocessing.get_context("fork").Process(target=_exit_if_forks_cannot_start_cuda)
    probe.start()
    probe.join()
    return multiprocessing.get_context("spawn" if probe.exitcode else "fork")


def _exit_if_forks_cannot_start_cuda() -> None:
    sys.exit(int(torch.cuda._is_in_bad_fork()))


# -- one part ----------------------------------------------------------------------------------------------------------


def _run(part: Part, limit_s: float, results: Results, *, is_rehearsal: bool) -> None:
    """Measure `part` in a process of its own, and take over what it finds."""
    end = time.monotonic() + limit_s
    ours, theirs = _context().Pipe(duplex=False)
    process = _context().Process(target=_measure, args=(part, limit_s, is_rehearsal, theirs))
    process.start()
    theirs.close()
    try:
        while ours.poll(max(end - time.monotonic(), 0.0)):
            what, facts = ours.recv()
            if what == DONE:
                break
            results.take(part, what, facts)
        else:
            results.fail(part, f"out of time after {limit_s:.0f} s")
    except EOFError:
        process.join()
        results.fail(part, f"ended with exit code {process.exitcode}")
    process.kill()  # its end might take long: the kernel frees its memory faster
    process.join()
    results.end(part)


def _measure(part: Part, limit_s: float, is_rehearsal: bool, pipe: Connection) -> None:
    """In the part's process: measure, and tell through `pipe`."""
    import _host_link
    import _host_systems

    def tell(what: str, facts: Any) -> None:
        pipe.send((what, facts))

    faulthandler.dump_traceback_later(max(limit_s - STACKS_S, STACKS_S))
    try:
        with _device(is_rehearsal) as device:
            tell("environment", environment(device))
            if part.name == "link":
                _host_link.measure(device, _host_link.TINY if is_rehearsal else _host_link.SIZES, tell)
            else:
                _host_systems.measure(part.size, part.system, part.counts, device, tell)
    except _host_systems.NotRunError as error:
        tell("not_run", str(error))
    except Exception as error:
        traceback.print_exc()
        tell("failed", f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
    tell(DONE, None)


@contextlib.contextmanager
def _device(is_rehearsal: bool) -> Iterator[torch.device]:
    """A GPU and a process group of this process alone; for a rehearsal without a GPU, a simulated one."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    is_gpu = torch.cuda.is_available()
    backend, store = "cpu:gloo,cuda:nccl" if is_gpu else "gloo", torch.distributed.HashStore()
    torch.distributed.init_process_group(backend, rank=0, world_size=1, store=store)
    if is_gpu:
        torch.cuda.set_device(0)
        yield torch.device("cuda:0")
    elif is_rehearsal:
        sys.path.insert(0, str(ROOT))
        from tests.simulated import simulated_device

        with simulated_device():
            yield torch.device("cpu")
    else:
        raise RuntimeError("no GPU: --rehearse shows whether the benchmark runs")


# -- the result --------------------------------------------------------------------------------------------------------


class Results:
    """What is known so far. Owns the file, which is whole at every moment.

    Args:
        parts: all that are wanted.
        path: of the file.

    Attributes:
        has_failed: something of StreamShard's own has failed. A peer that fails is a result.
    """

    def __init__(self, parts: list[Part], path: Path) -> None:
        self.has_failed = False
        self._path = path
        self._missing = {part: list(part.counts) for part in parts}
        self._known: dict[str, Any] = {"benchmark": "host_memory", "environment": None, "config": CONFIG}
        self._known |= {"cells": {}, "built": {}, "targets": [], "not_run": {}}
        for part in parts:
            self._leave_out(part, "no time was left")

    def begin(self, part: Part) -> None:
        """The part is about to run."""
        self._leave_out(part, "running")

    def take(self, part: Part, what: str, facts: Any) -> None:
        """Take over what the part tells: "environment", "built", "cell", "not_run", "failed", or a group of facts."""
        known = self._known
        if what == "environment":
            known["environment"] = known["environment"] or facts
        elif what == "cell":
            self._take_cell(part, **facts)
        elif what == "not_run":
            self._leave_out(part, facts)
        elif what == "failed":
            self.fail(part, facts)
        else:
            known.setdefault(what, {}).update({part.name: facts} if part.counts else facts)
            print(f"{part.name}: {what} {facts}", flush=True)
        write_json(known, self._path)

    def fail(self, part: Part, why: str) -> None:
        """The part has failed."""
        print(f"{part.name}: {why}", flush=True)
        self.has_failed = self.has_failed or part.system in OWN
        self._leave_out(part, why)

    def end(self, part: Part) -> None:
        """The part has ended by itself."""
        if self._known["not_run"].get(part.name) == "running":  # its facts have no cells
            del self._known["not_run"][part.name]
        write_json(self._known, self._path)

    def _take_cell(self, part: Part, tokens: int, not_run: str | None = None, **facts: Any) -> None:
        cell, name = part.cell(tokens), part.system
        if not_run is not None:
            self._known["not_run"][f"{cell}, {name}"] = not_run
            return
        self._missing[part].remove(tokens)
        del self._known["not_run"][f"{cell}, {name}"]
        row = self._known["cells"].setdefault(cell, {})
        row[name] = facts
        if ALONE in row and name != ALONE:
            share = facts["share_of_alone"] = row[ALONE]["step_ms"]["median"] / facts["step_ms"]["median"]
            if wanted := TARGETS.get((name, tokens)):
                target = {
                    "target": f"{cell}, {name}: speed, share of computing alone",
                    "at_least": wanted,
                    "found": share,
                }
                self._known["targets"].append({**target, "met": share >= wanted})
        print(_line(cell, name, facts), flush=True)

    def _leave_out(self, part: Part, why: str) -> None:
        missing = [f"{part.cell(tokens)}, {part.system}" for tokens in self._missing[part]]
        self._known["not_run"].update(dict.fromkeys(missing if part.counts else [part.name], why))
        write_json(self._known, self._path)

    def print(self) -> None:
        """What was not measured, and targets."""
        for what, why in self._known["not_run"].items():
            print(f"{what}: not run: {why}")
        for target in self._known["targets"]:
            verdict = "met" if target["met"] else "NOT met"
            print(f"target {verdict}: {target['target']} {target['found']:.3f}, at least {target['at_least']}")


def _line(cell: str, name: str, facts: dict[str, Any]) -> str:
    """A row of the table."""
    share = f"{facts['share_of_alone']:.3f} of alone" if "share_of_alone" in facts else ""
    rates = f"{facts['step_ms']['median']:9.1f} ms {facts['tokens_per_s']:9.0f} tokens/s {facts['tflops']:6.1f} TFLOPS"
    held = f"{facts['peak_device_bytes'] / 1e9:6.1f} GB device {facts['host_bytes'] / 1e9:6.1f} GB host"
    return f"{cell:18} {name:12} {rates} {held} {share}"


if __name__ == "__main__":
    main()
