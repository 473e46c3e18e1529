"""Imported last by what processes of tests are forked from: they inherit what is done here.

Garbage collection looks through nothing that was imported until then. It would in each process: 0.2 s and 90 MiB, as
pages are copied when the collector writes to them.

Ranks do not take a core from each other when a message comes, but when their time is up. gloo's thread wakes up when
the peer answers, while a rank still holds the connection to send, and asks again and again until it is let go of: on
two cores that was a third of the CPU time of a test.

Nothing waits for a disk. What was not synced is lost when a machine crashes, not when a process does.
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
