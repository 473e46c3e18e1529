"""Tests for GPUs: where they run, and what makes a run of them harder. ``benchmarks/gpu.py`` runs most of them.

By environment variables, because ranks are other processes:

- ``TEST_PLAYED_GPU=1``: the CPU plays the GPU (`tests.simulated`), with gloo's collectives. Shows that the
  tests themselves are right where there is no GPU.
- ``TEST_PLAYED_GPU=cuda``: tensors are on a device "cuda:0" that the CPU plays (`tests.played_cuda`), which
  has to be compiled. Shows that nothing takes one device for the other.
- ``TEST_ADVERSARY=1``: every model's collectives are slow, and spoil what must not be looked at meanwhile.
- ``TEST_SANITIZER=1``: torch's CUDA sanitizer follows streams and events, and raises at a race. It is
  switched on here and not by ``TORCH_CUDA_SANITIZER``, which would start CUDA in the process that ranks are forked of.
"""

from __future__ import annotations

import contextlib
import functools
import os
from typing import Any

import torch

IS_PLAYED = os.environ.get("TEST_PLAYED_GPU") == "1"
IS_PLAYED_CUDA = os.environ.get("TEST_PLAYED_GPU") == "cuda"

_until_exit = contextlib.ExitStack()


def has_gpu(*, may_be_played: bool = True) -> bool:
    """Whether ranks have a GPU, or a simulated one. Call it only in tests: it starts CUDA, which survives no fork."""
    return may_be_played if IS_PLAYED or IS_PLAYED_CUDA else torch.cuda.is_available()


@functools.cache
def enter_gpu() -> torch.device:
    """From now on this process computes on the GPU that ranks share, or plays one. Twice is once."""
    device = torch.device("cpu") if IS_PLAYED else torch.device("cuda", 0)
    if IS_PLAYED:
        from tests.simulated import simulated_device

        _until_exit.enter_context(simulated_device())
    else:
        if IS_PLAYED_CUDA:
            from tests.played_cuda import play

            play(devices=2)
        torch.cuda.init()  # a mesh that finds a device nobody has used chooses one itself, and warns
        torch.cuda.set_device(device)
        if os.environ.get("TEST_SANITIZER") == "1":
            from torch.cuda._sanitizer import enable_cuda_sanitizer

            enable_cuda_sanitizer()
    if os.environ.get("TEST_ADVERSARY") == "1":
        _let_collectives_be_late()
    return device


def _let_collectives_be_late() -> None:
    """Make collectives slow in all models that are sharded from now on."""
    from streamshard import build
    from tests.adversary import AdversarialTransport

    class LateRanks(build.Communicator):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.transport = AdversarialTransport(self)

    build.Communicator = LateRanks  # type: ignore[misc]
