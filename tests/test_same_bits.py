"""The same global batch gives the same bits on any number of ranks: losses, norms and weights.

Micro-batch i runs on rank i mod N, the order of accelerate's ``BatchSamplerShard``. Gradients are sums.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from streamshard import Precision, StreamShard, load_checkpoint, save_checkpoint
from streamshard.optim import WholeParameterOptimizer
from tests.compare import full_weights
from tests.models import Adapter, TinyConfig, TinyLM, token_batch
from tests.ranks import RankContext
from tests.reference import ALL_SLOTS, FP32, adamw, mesh_2d, sgd
from tests.scenarios import over_sockets
from tests.simulated import simulated_device

RANKS = (1, 2, 3, 4)
# Ways of training that run on all these numbers of ranks; others on one, and three or four, in turn.
EVERYWHERE = ("bf16, clipped", "sockets", "a device", "replicas")
STEPS = 2
TOKENS = token_batch(0, 0)[:, 1:].numel()  # of a micro-batch


class Case(NamedTuple):
    """One way to train.

    Attributes:
        clip: clips gradients, and returns the norm.
        within: the transport: its context.
        divides_at_the_end: by `set_gradient_divide_factor`, instead of each loss.
        micro_batches: in a step, on all ranks together.
        has_replicas: on a 2-D mesh, of as few replicas as the number of ranks allows.
    """

    build: Callable[[], nn.Module] = lambda: _model()
    settings: dict[str, Any] = {}  # noqa: RUF012  # never changed
    optimizer: Callable[[nn.Module], Any] = adamw
    clip: Callable[[Any], Tensor] | None = None
    scaler: bool = False
    within: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    divides_at_the_end: bool = False
    micro_batches: int = 12  # a multiple of each number of ranks
    accumulates: bool = False
    has_replicas: bool = False

    @property
    def tokens(self) -> int:
        return self.micro_batches * TOKENS


def _model(*, dim: int = 16, **options: Any) -> TinyLM:
    return TinyLM(TinyConfig(dim=dim, **options))


class _Checkpointed(TinyLM):
    def run_blocks(self, x: Tensor, mask: Tensor | None) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class _Skipping(TinyLM):
    def run_blocks(self, x: Tensor, mask: Tensor | None) -> Tensor:
        for block in self.blocks[:-1]:
            x = block(x)
        return x


def _frozen() -> nn.Module:
    model = _model()
    model.embedding.requires_grad_(False)
    model.blocks[1].requires_grad_(False)
    return model


def _adapted() -> nn.Module:
    model = _model()
    model.requires_grad_(False)
    for block in model.blocks:
        block.up = Adapter(block.up)
    return model


def _tied() -> nn.Module:
    return _model(dim=20, tied=True)


def _by_model(model: Any) -> Tensor:
    return model.clip_grad_norm_(0.2)


def _by_each_norm(model: Any) -> Tensor:
    norms = [param.grad.norm() for param in model.parameters() if param.grad is not None]
    for param, norm in zip((p for p in model.parameters() if p.grad is not None), norms, strict=True):
        param.grad.div_(norm + 1e-3)
    return torch.stack([norm * 1.0 for norm in norms])


def _average(model: Any) -> Tensor:
    """Nothing is clipped: a running average of the weights. Its digest, as a number."""
    average = model.__dict__.get("_average")
    if average is None:
        average = model.__dict__["_average"] = AveragedModel(_model(), multi_avg_fn=get_ema_multi_avg_fn(0.9))
        StreamShard(average.module)
    average.update_parameters(model)
    return torch.tensor(float(int(_digest(average.module), 16)), dtype=torch.float64)


def _muon(model: nn.Module) -> Any:
    hidden = [param for name, param in model.named_parameters() if "blocks" in name and param.ndim == 2]
    return WholeParameterOptimizer(hidden, torch.optim.Muon, lr=0.02)


FP16 = Precision(param_dtype=torch.float16)
BF16_GRADS = Precision(grad_dtype=torch.bfloat16)
IN_ORDER = Precision(sums_in_rank_order=True)
IN_ORDER_FP32 = Precision(param_dtype=torch.float32, sums_in_rank_order=True)
OFFLOADED = {"precision": IN_ORDER, "offload": "state"}
IN_ORDER_MIXED = Precision(sums_in_rank_order=True, fp32_modules=[nn.LayerNorm])

# Where nothing is clipped, norms are not compared. Each way of clipping goes with some setting, not with all.
WAYS = {
    "bf16, clipped": Case(clip=_by_model),
    "fp32, clipped": Case(settings={"precision": FP32}, clip=_by_model),
    "bf16 gradients on the wire": Case(settings={"precision": BF16_GRADS}),
    "all slots, clipped": Case(settings=ALL_SLOTS, clip=_by_model),
    "three slots": Case(settings={"weight_slots": 3}),
    "sockets": Case(within=over_sockets),
    "sockets, fp32": Case(settings={"precision": FP32}, within=over_sockets),
    "a device": Case(settings={"precision": IN_ORDER}, within=simulated_device, clip=_by_model),
    "a device, fp32, rows cut, tied": Case(_tied, {"precision": IN_ORDER_FP32}, within=simulated_device),
    "a device, norms in fp32": Case(settings={"precision": IN_ORDER_MIXED}, within=simulated_device),
    "a device, bf16 gradients on the wire": Case(settings={"precision": BF16_GRADS}, within=simulated_device),
    "a device, all slots": Case(settings={"precision": IN_ORDER, **ALL_SLOTS}, within=simulated_device),
    "a device, state in host memory": Case(settings=OFFLOADED, within=simulated_device, clip=_by_model),
    "replicas": Case(settings={"precision": IN_ORDER}, clip=_by_model, has_replicas=True),
    "replicas, fp32, all slots": Case(settings={"precision": IN_ORDER_FP32, **ALL_SLOTS}, has_replicas=True),
    "replicas, divided at the end": Case(
        _model, {"precision": IN_ORDER_FP32}, divides_at_the_end=True, has_replicas=True
    ),
    "replicas on a device": Case(_tied, {"precision": IN_ORDER}, within=simulated_device, has_replicas=True),
    "divided at the end": Case(divides_at_the_end=True),
    "tied, clipped by torch": Case(_tied, clip=lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.2)),
    "frozen": Case(_frozen),
    "an unused layer": Case(lambda: _Skipping(TinyConfig())),
    "dropout, checkpointed": Case(lambda: _Checkpointed(TinyConfig(dropout=0.1))),
    "adapters": Case(_adapted),
    "fp16 with a loss scaler": Case(settings={"precision": FP16}, scaler=True, clip=_by_model),
}
# Also with other code behind the gradients.
CASES = WAYS | {
    "SGD, clipped by torch": Case(optimizer=sgd, clip=lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.2)),
    "fused AdamW, clipped by the 1-norm": Case(
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True),
        clip=lambda model: model.clip_grad_norm_(1.0, norm_type=1.0),
    ),
    "Muon": Case(optimizer=_muon),
    "divided by each norm": Case(clip=_by_each_norm),
    "a running average": Case(clip=_average),
}


class Digests(NamedTuple):
    """What a run has computed: losses by step and micro-batch, norms by step, digests of weights by step."""

    losses: dict[tuple[int, int], float]
    norms: list[list[float]]
    weights: list[str]


def _digest(model: nn.Module) -> str:
    found = hashlib.sha256()
    for name, weight in sorted(full_weights(model).items()):
        found.update(name.encode() + weight.float().numpy().tobytes())
    return found.hexdigest()[:12]


def _train(context: RankContext, model: Any, optimizer: Any, case: Case, steps: range, found: Digests) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=case.scaler)
    for step in steps:

        def loss_of(model: Any, index: int, step: int = step) -> Tensor:
            torch.manual_seed(1000 * step + index)  # dropout falls alike, wherever the micro-batch runs
            tokens = token_batch(step, index)
            logits = model(tokens).float()
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
            return scaler.scale(loss / (1 if case.divides_at_the_end else case.tokens))

        indices = range(context.rank, case.micro_batches, context.world_size)
        if case.accumulates:
            losses = model.accumulate(indices, loss_of)
        else:
            losses = []
            for index in indices:
                losses.append(loss_of(model, index))
                losses[-1].backward()
        found.losses.update({(step, index): loss.item() for index, loss in zip(indices, losses, strict=True)})
        if case.scaler:
            scaler.unscale_(optimizer)
        if case.clip is not None:
            found.norms.append(case.clip(model).reshape(-1).tolist())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.weights.append(_digest(model))


def _made(case: Case, count: int) -> tuple[Any, Any]:
    torch.manual_seed(0)
    mesh = None
    if case.has_replicas and count > 1:
        replicas = next(each for each in range(2, count + 1) if count % each == 0)
        mesh = mesh_2d(replicas, count // replicas)
    model = StreamShard(case.build(), mesh=mesh, **case.settings)
    model.set_gradient_divide_factor(float(case.tokens) if case.divides_at_the_end else 1.0)
    return model, case.optimizer(model)


def run(context: RankContext, name: str, **changes: Any) -> Digests:
    """Train in the way `name`, on this rank, with some fields of the `Case` changed."""
    case, found = CASES[name]._replace(**changes), Digests({}, [], [])
    with case.within():
        model, optimizer = _made(case, context.world_size)
        _train(context, model, optimizer, case, range(STEPS), found)
    return found


def merged(runs: list[Digests]) -> Digests:
    """The digests of all ranks, which have the same norms and weights."""
    assert all(run.norms == runs[0].norms and run.weights == runs[0].weights for run in runs)
    losses = {place: loss for run in runs for place, loss in run.losses.items()}
    return runs[0]._replace(losses=dict(sorted(losses.items())))


@pytest.mark.parametrize("name", CASES)
def test_any_number_of_ranks_trains_to_the_same_bits(ranks: Any, name: str) -> None:
    counts = RANKS if name in EVERYWHERE else (1, 3 + [*CASES].index(name) % 2)
    micro_batches = 12 if name in EVERYWHERE else 2 * counts[-1]
    alone, *others = (merged(ranks(count).run(run, name, micro_batches=micro_batches)) for count in counts)
    assert len(alone.losses) == STEPS * micro_batches and len(set(alone.weights)) == STEPS
    assert (CASES[name].clip is None) is not alone.norms
    for count, other in zip(counts[1:], others, strict=True):
        assert other == alone, f"{count} ranks"


def _part(context: RankContext, directory: str, steps: tuple[int, int]) -> Digests:
    """Steps of a run that was stopped, or begins, in `directory`."""
    case, found = CASES["bf16, clipped"]._replace(build=lambda: _model(dim=20, dropout=0.1)), Digests({}, [], [])
    model, optimizer = _made(case, context.world_size)
    if steps[0]:
        load_checkpoint(directory, model, optimizer)
    _train(context, model, optimizer, case, range(*steps), found)
    save_checkpoint(directory, model, optimizer)
    return found


def test_a_run_that_goes_on_with_other_numbers_of_ranks_has_the_same_bits(ranks: Any, tmp_path: Path) -> None:
    whole = merged(ranks(1).run(_part, str(tmp_path / "whole"), (0, 4)))
    parts = [
        merged(ranks(count).run(_part, str(tmp_path / "parts"), (first, first + 1)))
        for count, first in ((4, 0), (3, 1), (1, 2), (2, 3))
    ]
    assert sum((part.weights for part in parts), []) == whole.weights
    assert sum((part.norms for part in parts), []) == whole.norms
