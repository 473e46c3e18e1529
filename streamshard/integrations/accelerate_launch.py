"""Whether accelerate's processes are those that were launched, and whether StreamShard may shard over them."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType

from streamshard.comm.groups import make_default_group
from streamshard.device import accelerator as accelerator_kind
from streamshard.errors import ConfigError

__all__ = ["check_launch", "check_plugins", "check_processes", "group_of_one"]

_LAUNCH = "accelerate launch --multi_gpu --num_machines 1 --num_processes N script.py (on CPUs too), or torchrun"
_PLUGINS = {
    "fsdp_plugin": ("ACCELERATE_USE_FSDP", "FSDP"),
    "deepspeed_plugin": ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed"),
    "deepspeed_plugins": ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed"),
    "megatron_lm_plugin": ("ACCELERATE_USE_MEGATRON_LM", "Megatron-LM"),
    "torch_tp_plugin": ("ACCELERATE_USE_TP", "tensor parallelism"),
    "parallelism_config": ("ACCELERATE_USE_PARALLELISM_CONFIG", "ParallelismConfig"),
}
_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")


def check_plugins(given: dict[str, Any]) -> None:
    """Refuse what shards or replicates models itself.

    Args:
        given: keyword arguments for accelerate's `Accelerator`.

    Raises:
        ConfigError: names the plugin, and what asks for it.
    """
    for argument, (variable, name) in _PLUGINS.items():
        by_argument = given.get(argument) is not None
        if not by_argument and os.environ.get(variable, "false").lower() != "true":
            continue
        instead = (
            "mesh= says over which ranks (docs/guide/replicas.md)"
            if argument in ("torch_tp_plugin", "parallelism_config")
            else "docs/guide/accelerate.md says what to write for each of its options"
        )
        asked = (
            argument if by_argument else f"{variable}=true, from the options or the config file of accelerate launch"
        )
        raise ConfigError(
            f"{name} is asked for ({asked}), and StreamShard shards models itself: leave it away, and start with "
            f"{_LAUNCH}. {instead}"
        )
    for handler in given.get("kwargs_handlers") or ():
        hook = getattr(handler, "comm_hook", None)
        if hook is not None and getattr(hook, "value", hook) != "no":
            raise ConfigError(
                f"DistributedDataParallelKwargs(comm_hook={hook}) is DistributedDataParallel's, which is not used: for "
                "gradients that are sent in 16 bits give precision=Precision(grad_dtype=..)"
            )


def check_processes(given: dict[str, Any]) -> dict[str, Any]:
    """`given`, with ``cpu=True`` where several processes were launched and there is nothing else to train on.

    Without it accelerate would leave each of them alone.

    Raises:
        ConfigError: there are accelerators, but fewer than processes on this machine.
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if given.get("cpu") or "LOCAL_RANK" not in os.environ or os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true":
        return given
    kind = accelerator_kind()
    if kind is None or kind == "cpu":
        return {**given, "cpu": True}
    count = torch.get_device_module(kind).device_count()
    if count < local:
        raise ConfigError(
            f"{local} processes for {count} {kind} device(s): start one for each (--num_processes {count}), or train "
            "on CPUs with StreamShardAccelerator(cpu=True)"
        )
    return given


def check_launch(accelerator: Accelerator | None = None) -> None:
    """Raise if fewer processes train together than were launched.

    Args:
        accelerator: None: accelerate's own constructor has not been called yet.

    Raises:
        ConfigError: says what to run.
    """
    environment = os.environ
    alone = not dist.is_initialized() and not any(name in environment for name in _RANKS)
    if alone and "MASTER_PORT" in environment and "ACCELERATE_MIXED_PRECISION" in environment:
        raise ConfigError(
            "accelerate launch was told of several processes and has started one, which knows of no others (on CPUs "
            f"that is all it does without --multi_gpu): start them with {_LAUNCH}. If one is meant, unset MASTER_PORT, "
            "which accelerate launch sets for several"
        )
    if accelerator is None:
        return
    types = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)
    if accelerator.distributed_type in types:
        raise ConfigError(
            f"accelerate's state was made for {accelerator.distributed_type.value}, which shards models itself: leave "
            f"it away, and start with {_LAUNCH}"
        )
    launched = dist.get_world_size() if dist.is_initialized() else int(environment.get("WORLD_SIZE", "1"))
    if launched != accelerator.num_processes:
        made = " It had made its state before: make StreamShardAccelerator first." if PartialState().initialized else ""
        raise ConfigError(
            f"{launched} processes were started, and accelerate knows of {accelerator.num_processes} "
            f"({accelerator.distributed_type.value}).{made} Start them with {_LAUNCH}; where something else starts "
            "them, it sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; on CPUs ACCELERATE_USE_CPU=true"
        )


def group_of_one(device: torch.device) -> None:
    """The default process group of a script that was started alone, which accelerate trains without any."""
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]  # not re-exported in stubs
        make_default_group(device, store=store, rank=0, world_size=1)
