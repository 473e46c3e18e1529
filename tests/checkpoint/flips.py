"""Bits that flip in what lies on the disk: each is noticed, by the name of the file, before anything changes.

By hand, with as many flips as there is patience for: ``python -m tests.checkpoint.flips --times 1000``. The test is in
`test_flips.py`.

In turn in a file of a checkpoint that two ranks have written, which is loaded, and of an export in several files. Half
of the flips are in the first bytes of a file, where headers, names and offsets are.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from streamshard import export_safetensors, load_checkpoint, load_safetensors, save_checkpoint
from streamshard.checkpoint.safetensors_file import SUMS_NAME
from streamshard.errors import CheckpointError
from tests.checkpoint.runs import Run, start, steps
from tests.ranks import RankContext, open_pool

__all__ = ["flip_often", "main"]

FIRST_BYTES = 512
TIMES_A_RUN = 100  # of a pool, which ends one that takes long


def flip_often(context: RankContext, directory: Path, times: int, seed: int) -> Counter[str]:
    """Flip a bit `times` times, each in files that are as they were otherwise. A body for ranks.

    Args:
        context: the rank.
        directory: new, seen by all ranks.
        times: how many bits.
        seed: of which.

    Returns:
        How often it was noticed, by file.
    """
    run = start(0)
    steps(run, 0, 1)
    save_checkpoint(directory, *run, step=1)
    export_safetensors(run.model, directory / "export", max_shard_size="4KB")
    steps(run, 1, 2)
    before = _bytes_of(run)
    readers: dict[Path, Callable[[], object]] = {
        directory / "checkpoint-1": lambda: load_checkpoint(directory / "checkpoint-1", *run),
        directory / "export": lambda: load_safetensors(run.model, directory / "export"),
    }
    generator = random.Random(seed)
    noticed: Counter[str] = Counter()
    for number in range(times):
        root = list(readers)[number % 2]
        path = generator.choice(sorted(root.iterdir()))
        size = path.stat().st_size
        place = generator.randrange(min(size, FIRST_BYTES) if generator.random() < 0.5 else size)
        bit = 1 << generator.randrange(8)
        _flip(context, path, place, bit)
        what = f"bit {bit:#x} of byte {place} in {path.name}"
        try:
            readers[root]()
        except CheckpointError as error:
            # What one byte of the checksums says of another file may be wrong, or which file it says it of.
            names = [each.name for each in root.iterdir()] if path.name == SUMS_NAME else [path.name]
            assert any(name in str(error) for name in names), f"{what}: {error}"
        else:
            raise AssertionError(f"{what}: loaded without a word")
        assert _bytes_of(run) == before, f"{what}: noticed, but something has changed"
        noticed[path.name] += 1
        _flip(context, path, place, bit)
    for read in readers.values():  # everything is as it was
        read()
    return noticed


def _flip(context: RankContext, path: Path, place: int, bit: int) -> None:
    dist.barrier()
    if context.rank == 0:
        content = bytearray(path.read_bytes())
        content[place] ^= bit
        path.write_bytes(content)
    dist.barrier()


def _bytes_of(run: Run) -> list[bytes]:
    """What this rank has of weights, buffers and the optimizer's state."""
    values: list[Any] = [*run.model.parameters(), *run.model.buffers()]
    values += [value for state in run.optimizer.state.values() for value in state.values()]
    tensors = [value.detach().as_subclass(torch.Tensor) for value in values]
    return [tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors if tensor.numel()]


def main() -> None:
    """By hand."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    noticed: Counter[str] = Counter()
    with open_pool(run_timeout_s=600.0) as pool, tempfile.TemporaryDirectory() as directory:
        for first in range(0, args.times, TIMES_A_RUN):
            times = min(TIMES_A_RUN, args.times - first)
            noticed += pool(2).run(flip_often, Path(directory) / str(first), times, args.seed + first)[0]
    for name, count in sorted(noticed.items()):
        print(f"{name}: {count}")
    print(f"{noticed.total()} flips, each of them noticed")


if __name__ == "__main__":
    main()
