"""Imported last by the process from which test processes are forked: they inherit its settings.

Garbage collection skips everything imported so far. In each process it would take 0.2 s and 90 MiB, because the
collector writes to pages and so copies them.

Ranks do not take a core from each other when a message comes, but when their time is up. gloo's thread wakes up when
the peer answers, while a rank still holds the connection to send, and asks again and again until it is let go of: on
two cores that was a third of the CPU time of a test.

fsync does nothing. Unsynced data is lost if the machine crashes, not if a process does.
"""

from __future__ import annotations

import contextlib
import gc
import os

os.fsync = lambda descriptor: None
gc.collect()
gc.freeze()
if hasattr(os, "SCHED_BATCH"):
    with contextlib.suppress(OSError):  # a container may forbid it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
