"""Starts a script on several ranks of this machine, as torchrun does, but in this process's group and without torch.

python benchmarks/_ranks.py 2 benchmarks/parity.py --output parity.json

What ends this process's group ends all ranks. If one rank fails, the others may wait for it for ever: they are killed.
Rank 0 prints at once. What other ranks have printed follows at the end, so that no stacks of two ranks are mixed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import IO

POLL_S = 0.1
GRACE_S = 3.0  # in which the other ranks may write what they know


def main() -> None:
    """Start ranks and wait for them."""
    signal.signal(signal.SIGABRT, lambda *_: None)  # ranks that are asked for their stacks end before this process
    size, command = int(sys.argv[1]), [sys.executable, *sys.argv[2:]]
    with contextlib.ExitStack() as files:
        told = [files.enter_context(tempfile.TemporaryFile()) for _ in range(1, size)]
        codes = _run(command, _environments(size), told)
        for number, file in enumerate(told, start=1):
            print(f"--- rank {number}", flush=True)
            file.seek(0)
            shutil.copyfileobj(file, sys.stdout.buffer)
            sys.stdout.flush()
    if failed := {number: code for number, code in enumerate(codes) if code}:
        sys.exit("; ".join(f"rank {number} ended with exit code {code}" for number, code in failed.items()))


def _environments(size: int) -> list[dict[str, str]]:
    """What a launcher tells each rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [{**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


def _run(command: list[str], environments: list[dict[str, str]], told: Sequence[IO[bytes]]) -> list[int | None]:
    """Exit codes when the first rank has failed, or all have ended; None: it was still running, and is killed."""
    ranks = [
        subprocess.Popen(command, env=each, stdout=file, stderr=None if file is None else subprocess.STDOUT)
        for each, file in zip(environments, [None, *told], strict=True)
    ]
    while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
        time.sleep(POLL_S)
    for rank in ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):
            rank.wait(GRACE_S)
        rank.kill()
    return codes


if __name__ == "__main__":
    main()
