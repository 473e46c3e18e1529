"""State of whole parameters: plain PyTorch's, on and from any number of ranks, in state dicts and checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from streamshard import full_optimizer_state_dict, load_checkpoint, load_optimizer_state_dict, save_checkpoint
from streamshard.errors import CheckpointError, ShardingError
from tests.optim.muon import muon_in_fp32
from tests.optim.test_whole_parameters import NEAR, Mixed, _adafactor, _muon_and_adamw, whole
from tests.ranks import RankContext, RankPool, on_ranks
from tests.reference import EXACT, assert_same, built, full_weights, sharded_model, train_stack


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


class Stacked(Optimizer):
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


def _assert_state(found: Any, wanted: Any, path: str = "state") -> None:
    """The same containers, numbers and tensors, the latter up to rounding."""
    assert type(found) is type(wanted), path
    if isinstance(wanted, torch.Tensor):
        assert found.dtype is wanted.dtype and found.shape == wanted.shape, path
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5, msg=path)
    elif isinstance(wanted, dict):
        assert set(found) == set(wanted), path
        for key in wanted:
            _assert_state(found[key], wanted[key], f"{path}.{key}")
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted), path
        for place, (one, other) in enumerate(zip(found, wanted, strict=True)):
            _assert_state(one, other, f"{path}[{place}]")
    else:
        assert found == wanted or abs(found - wanted) < 1e-9, path


BUILD: dict[str, Callable[[nn.Module], Any]] = {
    "adafactor": _adafactor,
    "odd": _odd,
    "muon and adamw": _muon_and_adamw,
    "stacked": _stacked,
}


@on_ranks(2)
@pytest.mark.parametrize("name", ["adafactor", "odd", "stacked"])
def test_the_full_state_is_plain_pytorchs_and_goes_both_ways(context: RankContext, name: str) -> None:
    """Collected from any number of ranks, loaded by plain PyTorch, and back; training goes on alike."""
    build = BUILD[name]
    plain, sharded = built(Mixed), sharded_model(Mixed)
    its, ours = build(plain), build(sharded)
    train_stack(plain, its, steps=2)
    train_stack(sharded, ours, steps=2)
    state = full_optimizer_state_dict(sharded, ours, rank0_only=False)
    _assert_state(state, its.state_dict())
    first_only = full_optimizer_state_dict(sharded, ours)
    _assert_state(first_only, state if context.rank == 0 else {})

    other = built(Mixed)
    other.load_state_dict(full_weights(sharded))
    other_optimizer = build(other)
    other_optimizer.load_state_dict(copy.deepcopy(state))
    again = sharded_model(Mixed)
    again.load_state_dict(full_weights(sharded))
    again_optimizer = build(again)
    if name == "adafactor":  # each rank keeps what it owns or has pieces of
        again_optimizer.load_state_dict(copy.deepcopy(its.state_dict()))
    else:
        load_optimizer_state_dict(again, again_optimizer, its.state_dict() if context.rank == 0 else None)
    for model, optimizer in ((sharded, ours), (other, other_optimizer), (again, again_optimizer)):
        train_stack(model, optimizer, first=2, steps=2)
    assert_same(full_weights(other), full_weights(sharded), "weights of plain PyTorch", NEAR)
    assert_same(full_weights(again), full_weights(sharded), "weights after loading", NEAR)


@on_ranks(2)
def test_this_ranks_state_can_be_copied_and_loaded_and_not_be_saved(context: RankContext) -> None:
    """As pieces of elementwise optimizers."""
    model = sharded_model(Mixed)
    optimizer = _muon_and_adamw(model)
    train_stack(model, optimizer, steps=2)
    state, weights = copy.deepcopy(optimizer.state_dict()), full_weights(model)
    with pytest.raises(ShardingError, match="full_optimizer_state_dict"):
        torch.save(state, "/dev/null")
    train_stack(model, optimizer, first=2, steps=2)
    wanted = full_weights(model)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    train_stack(model, optimizer, first=2, steps=2)
    assert_same(full_weights(model), wanted, "weights", EXACT)


@muon_in_fp32()
def _save(context: RankContext, name: str, folder: str, *, background: bool) -> dict[str, torch.Tensor]:
    model = sharded_model(Mixed)
    optimizer = BUILD[name](model)
    train_stack(model, optimizer, steps=2)
    saving = save_checkpoint(folder, model, optimizer, wait=not background)
    train_stack(model, optimizer, first=2, steps=2)
    saving.wait()
    return full_weights(model)


@muon_in_fp32()
def _load(context: RankContext, name: str, folder: str) -> dict[str, torch.Tensor]:
    model = sharded_model(Mixed)
    optimizer = BUILD[name](model)
    load_checkpoint(folder, model, optimizer)
    train_stack(model, optimizer, first=2, steps=2)
    return full_weights(model)


@pytest.mark.ranks
@pytest.mark.parametrize(("name", "before", "after"), [("odd", 2, 2), ("muon and adamw", 1, 2)])
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
