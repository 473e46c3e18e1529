"""State of optimizers: plain PyTorch's, on and from any number of ranks, in state dicts and checkpoints."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_with_path

from streamshard import full_optimizer_state_dict, load_checkpoint, load_optimizer_state_dict, save_checkpoint
from streamshard.errors import CheckpointError, ShardingError
from streamshard.optim import WholeParameterOptimizer
from tests.compare import EXACT, NEAR, assert_same, assert_same_state, full_weights
from tests.models import Stack
from tests.optim.test_optimizers import OPTIMIZERS, _two_groups
from tests.optim.test_whole_parameters import Mixed, _adafactor, _muon_and_adamw, muon_in_fp32, whole
from tests.ranks import RankContext, RankPool, on_ranks
from tests.reference import built, sharded_model, train_stack


def assert_near_state(found: Any, wanted: Any) -> None:
    """The same containers, numbers and tensors, the latter up to rounding."""

    def compare(path: Any, other: Any, one: Any) -> None:
        assert type(one) is type(other), path
        if isinstance(other, Tensor):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=str(path))
        else:
            assert one == other or abs(one - other) < 1e-9, path

    tree_map_with_path(compare, wanted, found)


class Odd(torch.optim.SGD):
    """Keeps state of many kinds: rows, columns, lists, numbers, nothing, and a count that belongs to no parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.state["count"] = self.state.get("count", 0) + 1  # type: ignore[index]
        for group in self.param_groups:
            group["beta"] = group.get("beta", 0.5) * 0.9
            for param in group["params"]:
                if param.grad is None or param.ndim < 2:
                    continue
                state = self.state[param]
                state.setdefault("rows", torch.zeros(param.shape[0])).add_(param.grad.flatten(1).square().sum(1))
                state["step"] = state.get("step", 0) + 1
                state["one"] = torch.full((1,), float(state["step"]))
                state["nested"] = {"last": [param.grad.mean(), (state["step"], "text")]}
                scale = state["rows"].sqrt().add(1.0).view(-1, *[1] * (param.ndim - 1))
                param.sub_(param.grad / scale, alpha=group["lr"] * group["beta"] * self.state["count"])  # type: ignore[operator]
        return None


def _odd(model: nn.Module) -> Any:
    return whole(model, model.parameters(), Odd, lr=0.02)


@torch.compile(backend="eager", fullgraph=True, dynamic=False)
def _stacked_step(params: torch.Tensor, grads: torch.Tensor, buffer: torch.Tensor, lr: float) -> None:
    """Each matrix of [K, rows, columns] by its own norm."""
    buffer.mul_(0.9).add_(grads)
    params.sub_(lr * buffer / buffer.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-6))


class Stacked(torch.optim.Optimizer):
    """Steps a group's matrices together, compiled, and keeps their momentum with the first, as nanochat's MuonAdamW.

    Its constructor accepts no further option, as SingleDeviceMuonWithAuxAdam's.
    """

    def __init__(self, groups: Any) -> None:
        if any(set(group) != {"params", "kind", "lr"} for group in groups):
            raise ValueError(f"{groups}: wanted params, kind and lr")
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if group["kind"] == "plain":
                for param in params:
                    param.sub_(param.grad, alpha=group["lr"])
            elif params:
                state, grads = self.state[params[0]], torch.stack([param.grad for param in params])
                state.setdefault("buffer", torch.zeros_like(grads))
                stack = torch.stack(params)
                _stacked_step(stack, grads, state["buffer"], group["lr"])
                torch._foreach_copy_(params, list(stack.unbind()))


def _stacked(model: nn.Module) -> Any:
    by_shape: dict[Any, list[nn.Parameter]] = {}
    for name, param in model.named_parameters():
        by_shape.setdefault(param.shape if param.ndim == 2 and "unused" not in name else None, []).append(param)
    kinds = {shape: {"kind": "plain" if shape is None else "stacked", "lr": 0.02} for shape in by_shape}
    groups = [{"params": params, **kinds[shape]} for shape, params in by_shape.items()]
    optimizer = whole(model, groups, Stacked)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


BUILD: dict[str, Callable[[nn.Module], Any]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.01),  # has no state
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.01, eps=1e-3),  # before its first step
    "NAdam": lambda model: torch.optim.NAdam(model.parameters(), lr=0.01, eps=1e-3),  # numbers beside moments
    "a part by AdamW": lambda model: torch.optim.AdamW(
        list(model.parameters())[:3], lr=torch.tensor(0.01), amsgrad=True, foreach=False
    ),
    "fused AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3, fused=True),
    "adafactor": _adafactor,
    "odd": _odd,
    "muon and adamw": _muon_and_adamw,
    "stacked": _stacked,
}


@on_ranks(2)
@pytest.mark.parametrize(
    ("name", "loads_itself"),
    [("Adagrad", True), ("fused AdamW", True), ("adafactor", True), ("odd", False), ("stacked", False)],
)
def test_the_full_state_is_plain_pytorchs_and_goes_both_ways(
    context: RankContext, name: str, loads_itself: bool
) -> None:
    """Collected from any number of ranks, loaded by plain PyTorch, and back; training goes on alike.

    The optimizer may load the full state itself: each rank keeps what it owns or has pieces of.
    """
    build = BUILD[name]
    plain, sharded = built(Mixed), sharded_model(Mixed)
    its, ours = build(plain), build(sharded)
    train_stack(plain, its, steps=2)
    train_stack(sharded, ours, steps=2)
    state = full_optimizer_state_dict(sharded, ours, rank0_only=False)
    assert_near_state(state, its.state_dict())
    first_only = full_optimizer_state_dict(sharded, ours)
    assert_near_state(first_only, state if context.rank == 0 else {})

    other = built(Mixed)
    other.load_state_dict(full_weights(sharded))
    other_optimizer = build(other)
    other_optimizer.load_state_dict(copy.deepcopy(state))
    again = sharded_model(Mixed)
    again_optimizer = build(again)
    if name == "fused AdamW":  # of the others nobody knows yet
        train_stack(again, again_optimizer, first=7, steps=1)
    again.load_state_dict(full_weights(sharded))
    if loads_itself:
        again_optimizer.load_state_dict(copy.deepcopy(its.state_dict()))
    else:
        load_optimizer_state_dict(again, again_optimizer, its.state_dict() if context.rank == 0 else None)
    for model, optimizer in ((sharded, ours), (other, other_optimizer), (again, again_optimizer)):
        train_stack(model, optimizer, first=2, steps=2)
    assert_same(full_weights(other), full_weights(sharded), "weights of plain PyTorch", NEAR)
    assert_same(full_weights(again), full_weights(sharded), "weights after loading", NEAR)


@on_ranks(2)
def test_zero_redundancy_optimizer_and_streamshard_read_each_others_state(context: RankContext) -> None:
    """Both ways, on the same weights, with steps before and after."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    kind, settings = OPTIMIZERS["AdamW"]
    ddp, again = (DistributedDataParallel(built()) for _ in range(2))
    zero, other = (ZeroRedundancyOptimizer(each.parameters(), kind, **settings) for each in (ddp, again))
    train_stack(ddp, zero)
    zero.consolidate_state_dict(to=0)
    model = sharded_model()
    model.load_state_dict(ddp.module.state_dict())
    optimizer = kind(model.parameters(), **settings)  # type: ignore[call-arg]
    load_optimizer_state_dict(model, optimizer, zero.state_dict() if context.rank == 0 else None)
    train_stack(model, optimizer, first=3)
    train_stack(ddp, zero, first=3)
    assert_same(full_weights(model), dict(ddp.module.state_dict()), "weights", NEAR)

    again.module.load_state_dict(full_weights(model))
    other.load_state_dict(full_optimizer_state_dict(model, optimizer, rank0_only=False))
    train_stack(again, other, first=6)
    train_stack(model, optimizer, first=6)
    assert_same(full_weights(model), dict(again.module.state_dict()), "weights", NEAR)


@on_ranks(2)
def test_state_that_does_not_fit_is_refused_on_all_ranks(context: RankContext) -> None:
    """Another model, or parameters in another order; nothing is changed."""
    model = sharded_model()
    optimizer = _two_groups("AdamW")(model)
    train_stack(model, optimizer)
    before = full_optimizer_state_dict(model, optimizer, rank0_only=False)
    plain = Stack()
    reordered = torch.optim.AdamW(list(plain.parameters())[::-1])
    train_stack(plain, reordered, steps=1)
    fewer = torch.optim.AdamW([nn.Parameter(torch.ones(2))])
    for other, words in ((reordered, r"exp_avg.*has shape.*same parameters"), (fewer, "is of 1 parameters")):
        with pytest.raises(ShardingError, match=words):
            load_optimizer_state_dict(model, optimizer, other.state_dict())
    assert_same_state(full_optimizer_state_dict(model, optimizer, rank0_only=False), before)


@on_ranks(2)
@pytest.mark.parametrize("name", ["AdamW", "Muon"])
def test_pieces_of_state_are_not_saved_as_if_they_were_whole(context: RankContext, name: str) -> None:
    """`accelerator.save_state` writes rank 0's state for all; copies of a state dict can still be loaded again."""
    model = sharded_model(Mixed)
    optimizer = _muon_and_adamw(model) if name == "Muon" else _two_groups(name)(model)
    train_stack(model, optimizer)
    with pytest.raises(ShardingError, match="full_optimizer_state_dict"):
        torch.save(optimizer.state_dict(), io.BytesIO())
    backup, weights = copy.deepcopy(optimizer.state_dict()), full_weights(model)
    train_stack(model, optimizer, first=3)
    wanted = full_weights(model)
    model.load_state_dict(weights)
    optimizer.load_state_dict(backup)
    assert {type(v) for values in optimizer.state.values() for v in values.values()} == {Tensor}
    train_stack(model, optimizer, first=3)
    assert_same(full_weights(model), wanted, "weights", EXACT)


@on_ranks()
@pytest.mark.parametrize(("world_size", "name"), [(2, "NAdam"), (3, "Adagrad"), (2, "Adafactor")])
def test_state_from_before_sharding_is_taken_over(context: RankContext, name: str) -> None:
    """A model that has trained for a while is sharded; its optimizer goes on. The whole state is plain PyTorch's."""
    plain, model = built(), built()
    if name == "Adafactor":
        theirs = torch.optim.Adafactor(plain.parameters(), lr=0.05)
        ours = WholeParameterOptimizer(model.parameters(), torch.optim.Adafactor, lr=0.05, round_size=1024)
    else:
        theirs, ours = (_two_groups(name)(each) for each in (plain, model))
    for each, optimizer in ((plain, theirs), (model, ours)):
        train_stack(each, optimizer)
    model = sharded_model(lambda: model)
    for each, optimizer in ((plain, theirs), (model, ours)):
        train_stack(each, optimizer, first=3)
    assert_same(full_weights(model), dict(plain.state_dict()), "weights", NEAR)
    state = full_optimizer_state_dict(model, ours, rank0_only=False)
    assert_near_state(state, theirs.state_dict())
    assert state["param_groups"] == theirs.state_dict()["param_groups"]
    assert bool(full_optimizer_state_dict(model, ours)) == (context.rank == 0)
    if isinstance(ours, WholeParameterOptimizer):
        assert {ours.owner_of(param) for param in ours.state} <= {None, context.rank}, "state that other ranks own"


@muon_in_fp32
def _save(context: RankContext, name: str, folder: str, *, background: bool) -> dict[str, torch.Tensor]:
    model = sharded_model(Mixed)
    optimizer = BUILD[name](model)
    train_stack(model, optimizer, steps=0 if name == "Adagrad" else 2)
    saving = save_checkpoint(folder, model, optimizer, wait=not background)
    train_stack(model, optimizer, first=2, steps=2)
    saving.wait()
    return full_weights(model)


@muon_in_fp32
def _load(context: RankContext, name: str, folder: str) -> dict[str, torch.Tensor]:
    model = sharded_model(Mixed)
    optimizer = BUILD[name](model)
    train_stack(model, optimizer, first=7, steps=1)
    load_checkpoint(folder, model, optimizer)
    train_stack(model, optimizer, first=2, steps=2)
    return full_weights(model)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "before", "after"),
    [*((name, 2, 2) for name in ("SGD", "Adagrad", "NAdam", "a part by AdamW", "odd")), ("muon and adamw", 1, 2)],
)
def test_a_checkpoint_moves_between_numbers_of_ranks(
    ranks: RankPool, tmp_path: Path, name: str, before: int, after: int
) -> None:
    """In the background too; on as many ranks to the bit."""
    saved = ranks(before).run(_save, name, str(tmp_path), background=before == after)
    loaded = ranks(after).run(_load, name, str(tmp_path))
    for weights in loaded:
        assert_same(weights, saved[0], "weights", EXACT if before == after else NEAR)


@on_ranks(2)
def test_a_checkpoint_of_another_optimizer_is_refused(context: RankContext, tmp_path: Path) -> None:
    """The classes inside count."""
    model = sharded_model(Mixed)
    save_checkpoint(tmp_path, model, _adafactor(model))
    with pytest.raises(CheckpointError, match=r"Adafactor.*wanted .*WholeParameterOptimizer\(.*Odd\)"):
        load_checkpoint(tmp_path, model, _odd(model))
