"""The systems that `muon_step` compares, and what their steps send and compute.

All of them train matrices of layers with `torch.optim.Muon`'s arithmetic and everything else with AdamW, on fp32 main
weights, with bf16 parameters in forward and backward and gradients reduced in fp32 (torchtitan's defaults).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

__all__ = ["SYSTEMS", "Counts", "MuonSystem", "count_step", "element_traffic", "newton_schulz_flops"]

MUON = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95}
ADAMW = {"lr": 1e-3}
COEFFICIENTS, NS_STEPS, EPS = (3.4445, -4.7750, 2.0315), 5, 1e-7  # the defaults of torch.optim.Muon


class MuonSystem(NamedTuple):
    """A sharded model ready to train.

    Attributes:
        model: maps tokens to logits.
        optimizers: stepped one after another.
        full_weights: fp32 weights on every rank, by name. Collective.
        trains: whether there is anything but the step; else gradients are in place for ever.
    """

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    full_weights: Callable[[], dict[str, torch.Tensor]]
    trains: bool = True

    def step(self) -> None:
        """From gradients in place to new weights in place."""
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        """Drop gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def matrices_of_layers(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """What Muon trains, and everything else: embeddings, head, norms."""
    named = list(model.named_parameters())
    are_matrices = [param.ndim == 2 and "blocks." in name for name, param in named]
    matrices = [param for (_, param), is_matrix in zip(named, are_matrices, strict=True) if is_matrix]
    return matrices, [param for (_, param), is_matrix in zip(named, are_matrices, strict=True) if not is_matrix]


def newton_schulz_flops(shape: Sequence[int]) -> int:
    """Of one matrix [m, n] with m <= n: each iteration multiplies m x n x m, m x m x m and m x m x n."""
    short, long = min(shape), max(shape)
    return NS_STEPS * (4 * short * short * long + 2 * short**3)


# -- the systems -------------------------------------------------------------------------------------------------------


def _streamshard(model: nn.Module, blocks: Sequence[nn.Module], **settings: Any) -> MuonSystem:
    from streamshard import Precision, StreamShard
    from streamshard.optim import WholeParameterOptimizer

    sharded = StreamShard(model, precision=Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    matrices, others = matrices_of_layers(sharded)
    groups = [{"params": matrices}, {"params": others, "optimizer_class": torch.optim.AdamW, **ADAMW}]
    optimizer = WholeParameterOptimizer(
        groups, torch.optim.Muon, cost=lambda param: newton_schulz_flops(param.shape), **MUON, **settings
    )
    return MuonSystem(sharded, [optimizer], lambda: sharded.full_state_dict(rank0_only=False))


class GatheredMuon(torch.optim.Optimizer):
    """Muon under FSDP2 as people write it: momentum is sharded, every rank runs Newton-Schulz on every matrix.

    Args:
        params: DTensors, sharded along dimension 0.
        at_once: one all-gather of all matrices; else each matrix's own ``full_tensor()``.
    """

    def __init__(self, params: Sequence[nn.Parameter], *, at_once: bool) -> None:
        super().__init__(params, dict(MUON))
        self._at_once = at_once

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Elementwise on shards, Newton-Schulz on whole matrices."""
        for group in self.param_groups:
            updates = [self._momentum(param, group["momentum"]) for param in group["params"]]
            gather = _gather_at_once if self._at_once else _gather_one_by_one
            for param, whole in zip(group["params"], gather(group["params"], updates), strict=True):
                ortho = _zeropower_via_newtonschulz(whole, COEFFICIENTS, NS_STEPS, EPS)
                own, rows = param.to_local(), _rows(param)
                start = dist.get_rank() * rows
                own.mul_(1 - group["lr"] * group["weight_decay"])
                own.add_(ortho[start : start + len(own)], alpha=-_adjust_lr(group["lr"], None, param.shape))

    def _momentum(self, param: Any, momentum: float) -> torch.Tensor:
        """Nesterov's, of this rank's rows."""
        grad, state = param.grad.to_local(), self.state[param]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        buffer: torch.Tensor = state["momentum_buffer"]
        buffer.lerp_(grad, 1 - momentum)
        return grad.lerp(buffer, momentum)


def _rows(param: torch.Tensor) -> int:
    """Of each rank but the last ones."""
    return -(-len(param) // dist.get_world_size())


def _gather_one_by_one(params: Sequence[Any], updates: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    for param, update in zip(params, updates, strict=True):
        yield DTensor.from_local(
            update, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
        ).full_tensor()


def _gather_at_once(params: Sequence[Any], updates: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    numels = [_rows(param) * param.shape[1] for param in params]
    own = torch.zeros(sum(numels), device=updates[0].device)
    for part, update in zip(own.split(numels), updates, strict=True):
        part[: update.numel()].copy_(update.view(-1))
    received = torch.empty(dist.get_world_size(), len(own), device=own.device)
    _all_gather(received.view(-1), own)
    parts = zip(*(row.split(numels) for row in received), strict=True)
    return [torch.cat(part)[: param.numel()].view(param.shape) for param, part in zip(params, parts, strict=True)]


def _fsdp2(model: nn.Module, blocks: Sequence[nn.Module], *, at_once: bool = False) -> MuonSystem:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in blocks:
        fully_shard(block, mp_policy=precision)
    fully_shard(model, mp_policy=precision)
    matrices, others = matrices_of_layers(model)

    def full_weights() -> dict[str, torch.Tensor]:
        found: dict[str, Any] = dict(model.named_parameters())
        return {name: param.detach().full_tensor() for name, param in found.items()}

    return MuonSystem(
        model, [GatheredMuon(matrices, at_once=at_once), torch.optim.AdamW(others, **ADAMW)], full_weights
    )


def _fsdp2_at_once(model: nn.Module, blocks: Sequence[nn.Module]) -> MuonSystem:
    return _fsdp2(model, blocks, at_once=True)


def _alone(model: nn.Module, blocks: Sequence[nn.Module]) -> MuonSystem:
    """What one rank computes at least: Muon on the matrices that it would own, AdamW on its share of the rest."""
    from streamshard.optim.rounds import assign_owners

    rank, size = dist.get_rank(), dist.get_world_size()
    matrices, others = matrices_of_layers(model)
    owners = assign_owners([float(newton_schulz_flops(matrix.shape)) for matrix in matrices], [0.0] * size)
    own = [matrix for matrix, owner in zip(matrices, owners, strict=True) if owner == rank]
    shares = [nn.Parameter(other.detach().flatten().chunk(size)[rank].clone()) for other in others]
    for param in (*own, *shares):
        param.grad = torch.randn_like(param)
    optimizers = [torch.optim.Muon(own, **MUON), torch.optim.AdamW(shares, **ADAMW)]
    return MuonSystem(model, optimizers, dict, trains=False)


# Newer torch warns of the older name.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

SYSTEMS: dict[str, Callable[..., MuonSystem]] = {
    "streamshard": _streamshard,
    "fsdp2": _fsdp2,  # full_tensor() of each matrix
    "all-gather": _fsdp2_at_once,  # FSDP2, one all-gather of all matrices
    "alone": _alone,  # no ranks talk: what cannot be beaten
}


# -- what a step sends and computes ------------------------------------------------------------------------------------


class Traffic(TorchDispatchMode):
    """Counts what this rank sends to other ranks.

    Attributes:
        sent_bytes, messages: so far. An all-gather is counted as one message to each other rank.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self.sent_bytes = 0
        self.messages = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        namespace, _, operator = name.partition("::")
        if namespace in ("c10d", "_c10d_functional"):
            others = dist.get_world_size() - 1
            match operator:
                case "send":
                    self._count(args[0][0], 1)
                case "_allgather_base_":
                    self._count(args[1], others)
                case "alltoall_base_":  # the chunk of this rank stays
                    stays = args[4][dist.get_rank()]
                    self._count(args[1][stays:], 1)
                case "all_gather_into_tensor":
                    self._count(args[0], others)
                case "recv_" | "wait_tensor" | "_wrap_tensor_autograd":
                    pass
                case _:
                    raise NotImplementedError(f"a step calls {name}, of which it is not known what it sends")
        return func(*args, **(kwargs or {}))

    def _count(self, tensor: torch.Tensor, times: int) -> None:
        self.sent_bytes += times * tensor.numel() * tensor.element_size()
        self.messages += times


class Counts(NamedTuple):
    """Of one optimizer step on this rank."""

    sent_bytes: int
    messages: int
    matmul_flops: int


def count_step(system: MuonSystem) -> Counts:
    """Run an optimizer step and count. Do not time it."""
    with FlopCounterMode(display=False) as flops, Traffic() as traffic:
        system.step()
    return Counts(traffic.sent_bytes, traffic.messages, flops.get_total_flops())


def element_traffic(system: MuonSystem) -> int:
    """Elements of matrices that are not where they are stepped, of all ranks. Collective."""
    model: Any = system.model
    whole: Any = system.optimizers[0]
    ranges, rank = model.local_ranges(), dist.get_rank()
    matrices = {name: param for name, param in model.named_parameters() if whole.owner_of(param) is not None}
    stay = torch.tensor(sum(ranges[name].numel for name, each in matrices.items() if whole.owner_of(each) == rank))
    dist.all_reduce(stay)
    return sum(math.prod(param.shape) for param in matrices.values()) - int(stay)
