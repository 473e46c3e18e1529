"""The device on which a model trains, and torch's module for it. No other module names ``torch.cuda``.

Nothing here is a collective. Results depend on this rank's machine and on its process group's backends.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import get_device_module

from streamshard.errors import warn_user
from streamshard.torch_private import backend_of, current_raw_stream

TRIED = ("cpu", "cuda")  # torch calls ROCm's devices cuda, too

WITHOUT_STREAMS = ("cpu", "meta")  # on the CPU the calling thread runs kernels; on meta nothing runs


def module_of(device: torch.device) -> Any:
    """torch's module for `device`, such as ``torch.cuda``: streams, events and memory."""
    return get_device_module(device.type)


def raw_stream_of(device: torch.device) -> Callable[[int], int] | None:
    """A function from a device's index to the address of its current stream; None: `device` has no such function."""
    return current_raw_stream if device.type == "cuda" else None


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` the current one of this thread."""
    return contextlib.nullcontext() if device.type == "cpu" else module_of(device).device(device)


def generators_of(device: torch.device) -> list[torch.Generator]:
    """torch's default random number generators of the host and of `device`."""
    own = [] if device.type in WITHOUT_STREAMS else [module_of(device).default_generators[device.index or 0]]
    return [torch.default_generator, *own]


def has_streams(device: torch.device) -> bool:
    """Whether kernels run asynchronously, in streams."""
    return device.type not in WITHOUT_STREAMS


def serves(group: dist.ProcessGroup, kind: str) -> bool:
    """Whether `group` has a backend for tensors on devices of type `kind`.

    gloo does not count for GPUs: it copies their tensors through the host. The public name of the group's backend does
    not help: it may be "undefined", or name several backends.
    """
    try:
        backend = backend_of(group, torch.device(kind))
    except RuntimeError:
        return False
    return kind == "cpu" or backend.name() != "gloo"


def training_device(params: torch.device, group: dist.ProcessGroup | None, wanted: str | None) -> torch.device:
    """The device on which a model trains: its parameters' device, or this rank's accelerator if they are on the CPU.

    Args:
        params: the device of the model's parameters.
        group: the group of the model's ranks; None: a group for the device will be made.
        wanted: the device type of the user's mesh; None: there is no mesh.
    """
    if params.type != "cpu":
        return params
    kind = accelerator()
    # An accelerator that was never tried is taken only if the parameters are there.
    if kind not in TRIED or kind == "cpu" or wanted == "cpu":
        return params
    module = get_device_module(kind)
    if group is not None and not serves(group, kind):
        if dist.get_rank(group) > 0:  # the first rank warns
            return params
        what = f"its process group ({dist.get_backend_config(group)}) has no backend for {module.device_count()} {kind}"
        how = "call init_process_group() without a backend, or give a CPU mesh"
        warn_user(f"the model trains on the CPU: {what} devices: {how}")
        return params
    return torch.device(kind, _own_index(module.current_device(), module.device_count()))


def accelerator() -> str | None:
    """The type of this machine's accelerator, such as "cuda"; None if it has none."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None else device.type


def _own_index(current: int, count: int) -> int:
    """The number of this rank's device, of `count`: the current device if the user set one (not 0), else LOCAL_RANK.

    Without LOCAL_RANK, as under `srun python`: Slurm's SLURM_LOCALID.
    """
    local = int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0")
    return local if current == 0 and local < count else current


def warn_if_untested(device: torch.device) -> None:
    """Warn if StreamShard has never been tested on this type of device."""
    if device.type not in TRIED:
        what = f"the parameters are on {device}: StreamShard has been tried on {' and '.join(TRIED)} devices only"
        warn_user(f"{what}. Compare the first losses with a run on one process")
