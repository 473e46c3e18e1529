"""The systems that are compared, each built from the same model with the same precision and optimizer.

Every system has bf16 parameters in forward and backward, bf16 gradients on the wire, and AdamW on fp32 main weights.
FSDP1, FSDP2, DeepSpeed and StreamShard bring that with them. DDP and local training do not, so `MainWeights` does for
them what their users write by hand: a bf16 model, fp32 copies, two casts per step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

__all__ = ["OPTIMIZERS", "SYSTEMS", "MainWeights", "System", "build"]

OPTIMIZERS: dict[str, dict[str, Any]] = {"default": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}

LEARNING_RATE = 1e-3


class MainWeights:
    """fp32 copies of bf16 parameters and the AdamW that updates them: mixed precision by hand.

    Owns the fp32 weights and gradients. `step` reads the parameters' gradients and writes the parameters.

    Args:
        parameters: the model's parameters, in fp32; they are turned to bf16 here.
        options: keyword arguments of AdamW.
        shards: keep 1/N of AdamW's state on each rank (ZeroRedundancyOptimizer).
    """

    def __init__(self, parameters: Iterable[nn.Parameter], options: dict[str, Any], *, shards: bool = False) -> None:
        self._compute = list(parameters)
        self._main = [parameter.detach().clone() for parameter in self._compute]
        for parameter, main in zip(self._compute, self._main, strict=True):
            main.grad = torch.zeros_like(main)
            parameter.data = parameter.data.bfloat16()
        if shards:
            from torch.distributed.optim import ZeroRedundancyOptimizer

            self._optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(
                self._main, torch.optim.AdamW, lr=LEARNING_RATE, **options
            )
        else:
            self._optimizer = torch.optim.AdamW(self._main, lr=LEARNING_RATE, **options)

    def step(self) -> None:
        """Update main weights from the parameters' gradients, then the parameters from the main weights."""
        grads = [parameter.grad for parameter in self._compute if parameter.grad is not None]
        assert len(grads) == len(self._compute), "every parameter is used in every step"
        torch._foreach_copy_([main.grad for main in self._main], grads)
        self._optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self._compute, self._main)

    def zero_grad(self) -> None:
        """Drop the parameters' gradients."""
        for parameter in self._compute:
            parameter.grad = None


class System(NamedTuple):
    """A model ready to train.

    `forward` maps tokens to logits; `update` steps the optimizer and clears gradients; all micro-batches but the last
    run under `no_sync`. Or `accumulate` runs forward and backward of all of them, given the function of their losses.
    """

    forward: Callable[[torch.Tensor], torch.Tensor]
    update: Callable[[], None]
    no_sync: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    accumulate: Callable[..., list[torch.Tensor]] | None = None


def _with_optimizer(model: nn.Module, options: dict[str, Any]) -> System:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, **options)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return System(model, update, getattr(model, "no_sync", contextlib.nullcontext))


def _with_main_weights(model: nn.Module, main: MainWeights) -> System:
    def update() -> None:
        main.step()
        main.zero_grad()

    return System(model, update, getattr(model, "no_sync", contextlib.nullcontext))


def _in_fp32(model: nn.Module) -> bool:
    """Whether the model's preset computes in fp32, which CPUs without bf16 instructions do a hundred times faster."""
    return bool(getattr(model, "computes_in_fp32", False))


def _local(model: nn.Module, blocks: list[nn.Module], options: dict[str, Any]) -> System:
    if _in_fp32(model):
        return _with_optimizer(model, options)
    return _with_main_weights(model, MainWeights(model.parameters(), options))


def _ddp(model: nn.Module, blocks: list[nn.Module], options: dict[str, Any], *, shards: bool = False) -> System:
    if _in_fp32(model):
        return _with_optimizer(nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True), options)
    main = MainWeights(model.parameters(), options, shards=shards)  # first, so that DDP sees and reduces bf16
    return _with_main_weights(nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True), main)


def _ddp_zero(model: nn.Module, blocks: list[nn.Module], options: dict[str, Any]) -> System:
    return _ddp(model, blocks, options, shards=True)


def _fsdp1(model: nn.Module, blocks: list[nn.Module], options: dict[str, Any]) -> System:
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import CustomPolicy

    wanted = set(blocks)
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    sharded = FullyShardedDataParallel(
        model,
        auto_wrap_policy=CustomPolicy(lambda module: module in wanted),
        mixed_precision=precision,
        use_orig_params=True,
        device_id=next(model.parameters()).device,
    )
    return _with_optimizer(sharded, options)


def _two_replicas(model: nn.Module) -> DeviceMesh:
    shape, kind = (2, dist.get_world_size() // 2), next(model.parameters()).device.type
    return init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard"))


def _fsdp2(
    model: nn.Module,
    blocks: list[nn.Module],
    options: dict[str, Any],
    *,
    keep: bool = False,
    mesh: DeviceMesh | None = None,
) -> System:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dtype = None if _in_fp32(model) else torch.bfloat16
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=precision, reshard_after_forward=not keep)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    sharded: Any = model

    @contextlib.contextmanager
    def no_sync() -> Iterator[None]:
        sharded.set_requires_gradient_sync(False)
        yield
        sharded.set_requires_gradient_sync(True)

    return _with_optimizer(model, options)._replace(no_sync=no_sync)


def _fsdp2_keep(model: nn.Module, blocks: list[nn.Module], options: dict[str, Any]) -> System:
    return _fsdp2(model, blocks, options, keep=True)


def _fsdp2_zero2(model: nn.Module, blocks: list[nn.Module], options: dict[str, Any]) -> System:
    """Whole weights, sharded gradients: every micro-batch is reduced, as in StreamShard's ZeRO-2."""
    return _fsdp2(model, blocks, options, keep=True)._replace(no_sync=contextlib.nullcontext)


def _fsdp2_each(model: nn.Module, blocks: list[nn.Module], options: dict[str, Any]) -> System:
    """Sharded weights and gradients: every micro-batch is gathered and reduced, as in ZeRO-3."""
    return _fsdp2(model, blocks, options)._replace(no_sync=contextlib.nullcontext)


def _streamshard(model: nn.Module, blocks: list[nn.Module], options: dict[str, Any], **settings: Any) -> System:
    from streamshard import Precision, StreamShard

    dtype = torch.float32 if _in_fp32(model) else torch.bfloat16
    precision = Precision(param_dtype=dtype, reduce_dtype=dtype)
    return _with_optimizer(StreamShard(model, precision=precision, **settings), options)


def _hsdp(model: nn.Module, blocks: list[nn.Module], options: dict[str, Any]) -> System:
    return _fsdp2(model, blocks, options, mesh=_two_replicas(model))


def _replicas(model: nn.Module, blocks: list[nn.Module], options: dict[str, Any]) -> System:
    return _streamshard(model, blocks, options, mesh=_two_replicas(model))


def _over_replicas(model: nn.Module, blocks: list[nn.Module], options: dict[str, Any]) -> System:
    return _streamshard(model, blocks, options, mesh=_two_replicas(model), shard_over_replicas=True)


def _layer_major(model: nn.Module, blocks: list[nn.Module], options: dict[str, Any]) -> System:
    system = _streamshard(model, blocks, options)
    sharded: Any = system.forward
    return system._replace(accumulate=sharded.accumulate)


def _one_edge(model: nn.Module, blocks: list[nn.Module], options: dict[str, Any]) -> System:
    return _streamshard(model, blocks, options, units=blocks)


def _zero2(model: nn.Module, blocks: list[nn.Module], options: dict[str, Any]) -> System:
    return _streamshard(model, blocks, options, weight_slots="all")


def _zero1(model: nn.Module, blocks: list[nn.Module], options: dict[str, Any]) -> System:
    return _streamshard(model, blocks, options, weight_slots="all", grad_slots="all")


def _coalesced(model: nn.Module, blocks: list[nn.Module], options: dict[str, Any]) -> System:
    return _streamshard(model, blocks, options, min_unit_size="512KiB")


def _deepspeed(model: nn.Module, blocks: list[nn.Module], options: dict[str, Any]) -> System:
    """ZeRO-3 with DeepSpeed's own sizes of buckets and prefetches; it has no use for `blocks`."""
    import deepspeed

    settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, **options)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)

    @contextlib.contextmanager
    def no_sync() -> Iterator[None]:
        engine.set_gradient_accumulation_boundary(False)
        yield
        engine.set_gradient_accumulation_boundary(True)

    return System(engine, engine.step, no_sync)


SYSTEMS: dict[str, Callable[[nn.Module, list[nn.Module], dict[str, Any]], System]] = {
    "local": _local,
    "ddp": _ddp,
    "ddp+zero": _ddp_zero,  # DistributedDataParallel with ZeroRedundancyOptimizer
    "fsdp1": _fsdp1,
    "fsdp2": _fsdp2,
    "fsdp2-keep": _fsdp2_keep,  # reshard_after_forward=False
    "fsdp2-each": _fsdp2_each,  # every micro-batch gathered and reduced: no whole weights and gradients are held
    "fsdp2-zero2": _fsdp2_zero2,  # and every micro-batch reduced: no whole gradients are held
    "hsdp": _hsdp,  # FSDP2 on a mesh of two replicas
    "deepspeed": _deepspeed,  # ZeRO-3; needs the package
    "streamshard": _streamshard,  # two slots of each kind: ZeRO-3
    "replicas": _replicas,  # StreamShard on a mesh of two replicas
    "over-replicas": _over_replicas,  # and with state cut over them too
    "layer-major": _layer_major,  # StreamShard's model.accumulate
    "one-edge": _one_edge,  # StreamShard with embedding and head in one unit with all that is no block
    "coalesced": _coalesced,  # StreamShard with units of at least 512 KiB
    "zero2": _zero2,  # StreamShard with all weight slots
    "zero1": _zero1,  # StreamShard with all slots of both kinds
}


def build(name: str, model: nn.Module, blocks: list[nn.Module], optimizer: str) -> System:
    """Make a model into a system.

    Args:
        name: a key of `SYSTEMS`.
        model: fp32 on the device it trains on, equal on all ranks; used up.
        blocks: the modules that are gathered and reduced together.
        optimizer: a key of `OPTIMIZERS`: which of AdamW's implementations.

    Returns:
        The system.
    """
    return SYSTEMS[name](model, blocks, OPTIMIZERS[optimizer])
