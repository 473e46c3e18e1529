"""Any elementwise optimizer of torch.optim gives what it gives on the unsharded model.

If a scaled loss overflows on one rank, all ranks skip the step. While an optimizer steps it sees the gradients that
have elements.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from streamshard import Precision, full_optimizer_state_dict, load_checkpoint, save_checkpoint
from streamshard.errors import ConfigError, ShardingError
from streamshard.optim import WholeParameterOptimizer, elementwise
from tests.compare import EXACT, NEAR, assert_same, full_weights, piece_of
from tests.faults import case
from tests.models import Layer, Stack, vector_batch
from tests.ranks import Call, RankContext, everywhere, on_ranks
from tests.reference import ALL_SLOTS, assert_trains_like_plain, built, sharded_model, stack_step, train_stack

OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "SGD, nesterov": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "eps": 1e-3}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "eps": 1e-3}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01, "eps": 1e-3}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01, "eps": 1e-3}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.01, "eps": 1e-3}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "eps": 1e-3, "momentum": 0.5, "centered": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05, "eps": 1e-3}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 1.0, "eps": 1e-3}),
    # Rprop looks at signs of gradients: what rounding leaves of a gradient that is zero moves a weight by a whole step.
    "Rprop": (torch.optim.Rprop, {"lr": 1e-3}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.05, "t0": 1}),
}


def _two_groups(name: str, **options: Any) -> Callable[[nn.Module], Optimizer]:
    """Matrices with weight decay, the rest without and at another learning rate."""
    kind, settings = OPTIMIZERS[name]

    def build(model: nn.Module) -> Optimizer:
        matrices = [param for param in model.parameters() if param.ndim > 1]
        others = [param for param in model.parameters() if param.ndim <= 1]
        decays = {"weight_decay": 0.01} if kind is not torch.optim.Rprop else {}
        groups = [{"params": matrices, **decays}, {"params": others, "lr": settings["lr"] / 2}]
        optimizer: Optimizer = kind(groups, **settings, **options)  # type: ignore[call-arg]
        return optimizer

    return build


WAYS: dict[str, dict[str, Any]] = {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


@on_ranks(2)
def test_an_optimizer_trains_like_on_the_unsharded_model(context: RankContext) -> None:
    fused = [(name, "fused") for name in ("SGD, nesterov", "AdamW", "Adagrad")]
    for name, way in (*((name, "foreach") for name in OPTIMIZERS), *fused, ("AdamW", "plain")):
        optimizer = _two_groups(name, **WAYS[way])
        with case((name, way)):
            assert_trains_like_plain(context, Stack, stack_step, optimizer=optimizer, tolerance=NEAR, checked=())


@on_ranks(1)
def test_one_rank_has_whole_parameters(context: RankContext) -> None:
    """So every optimizer works there."""
    for kind in (torch.optim.LBFGS, torch.optim.Muon, torch.optim.Adafactor):
        model = sharded_model()
        optimizer: Any = kind([param for param in model.parameters() if param.ndim == 2])
        stack_step(model, Call(0, 0, 1, 1.0))
        grads = [param.grad for param in model.parameters()]
        optimizer.step(lambda: 0.0)
        assert all(grad is param.grad for grad, param in zip(grads, model.parameters(), strict=True))
        assert all(weight.isfinite().all() for weight in full_weights(model).values())


class Tiny(Stack):
    """Units of one element each: with two ranks or more, all pieces of the last rank are empty."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(1, bias=False) for _ in range(3))
        self.head = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, :1])


def _copied(optimizer: Optimizer) -> dict[str, Tensor]:
    states = enumerate(optimizer.state.values())
    return {f"{number}.{name}": value.detach().clone() for number, its in states for name, value in its.items()}


# Unscaled by itself, or by the step; main grads in slots; pieces of which some are empty.
_OVERFLOWING: list[tuple[type[nn.Module], dict[str, Any], bool, str]] = [
    (Stack, {}, False, "foreach"),
    (Stack, {}, True, "plain"),
    (Stack, ALL_SLOTS, False, "fused"),
    (Tiny, {}, False, "fused"),
]


@on_ranks(2)
@pytest.mark.parametrize(("build", "slots", "clips", "way"), _OVERFLOWING)
def test_an_overflow_in_one_piece_skips_the_step_on_all_ranks(
    context: RankContext, way: str, slots: dict[str, Any], build: type[nn.Module], clips: bool
) -> None:
    """Weights and optimizer state stay what they were; the step before and the step after do not skip."""
    model = sharded_model(build, precision=Precision(param_dtype=torch.float16), **slots)
    if build is Tiny and context.rank > 0:
        assert not any(piece_of(p).numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **WAYS[way])
    scaler = GradScaler("cpu", init_scale=8.0)
    last_owner = 0 if build is Tiny else context.world_size - 1
    for number, scale in enumerate((8.0, 4.0, 4.0)):
        weights, state = full_weights(model), _copied(optimizer)
        scaler.scale(model(vector_batch(number, context.rank)).float().square().mean()).backward()  # type: ignore[no-untyped-call]
        if number == 1 and context.rank == last_owner:
            piece_of(next(p for p in model.parameters() if piece_of(p).numel()).grad)[...] = math.inf
        if clips:
            scaler.unscale_(optimizer)
            model.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == scale
        after, state_after = full_weights(model), _copied(optimizer)
        if number == 1:
            assert_same(after, weights, "weights after a skipped step", EXACT)
            assert_same(state_after, state, "optimizer state after a skipped step", EXACT)
        else:
            assert all(value.isfinite().all() for value in after.values())
            assert any(not after[name].equal(weights[name]) for name in after), "nothing was trained"


# -- what optimizers see while they step: gradients with elements ---------------------------------------------------


@elementwise
class _Foreign(Optimizer):
    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})
        self.seen: list[Tensor | None] = []  # gradients, of the last step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params = [param for group in self.param_groups for param in group["params"]]
        self.seen = [param.grad for param in params]
        self.update([param for param in params if param.grad is not None])
        return loss

    def update(self, params: list[Tensor]) -> None:
        for param in params:
            param.sub_(param.grad, alpha=self.defaults["lr"])


def _backward(model: nn.Module, number: int = 0) -> float:
    return float(stack_step(model, Call(number, 0, 1, 1.0)))


@on_ranks(2)
def test_empty_pieces_have_gradients_outside_of_steps(context: RankContext) -> None:
    """The same norms on every rank, before a step and after it; nothing is kept for them."""
    model = sharded_model()
    optimizer = _Foreign(model.parameters())
    for number in range(2):
        _backward(model, number)
        grads = [param.grad for param in model.parameters()]
        norms = [float(grad.norm()) for grad in grads]  # each is a collective
        assert everywhere(norms) == [norms] * 2
        optimizer.step()
        assert [grad is None for grad in optimizer.seen] == [not piece_of(param).numel() for param in grads]
        assert all(param.grad is grad for param, grad in zip(model.parameters(), grads, strict=True))
        assert [float(param.grad.norm()) for param in model.parameters()] == norms
        if number:
            adamw = torch.optim.AdamW(model.parameters())
            adamw.step()
            assert set(adamw.state) == {param for param in model.parameters() if piece_of(param).numel()}
        optimizer.zero_grad()
        assert all(param.grad is None for param in model.parameters())


@on_ranks(2)
def test_a_closure_sees_and_makes_all_gradients(context: RankContext) -> None:
    """It clips them; the step that called it sees those with elements."""
    model, plain = sharded_model(), Stack()
    plain.load_state_dict(full_weights(model))
    ours, theirs = (_Foreign(each.parameters()) for each in (model, plain))
    params, norms = list(model.parameters()), []

    def closure() -> float:
        ours.zero_grad()
        loss = _backward(model, number)
        assert not any(param.grad is None for param in params)
        norms.append(float(nn.utils.clip_grad_norm_(params, 0.1)))
        return loss

    for number in range(3):
        loss = ours.step(closure=closure) if number else ours.step(closure)
        assert [grad is None for grad in ours.seen] == [not piece_of(param).numel() for param in params]
        assert not any(param.grad is None for param in params)
        theirs.zero_grad()
        assert _backward(plain, number) == pytest.approx(loss)
        assert float(nn.utils.clip_grad_norm_(plain.parameters(), 0.1)) == pytest.approx(norms[-1])
        theirs.step()
    assert_same(full_weights(model), dict(plain.state_dict()), "weights")


@on_ranks(2)
def test_norms_that_bitsandbytes_is_asked_for_are_refused(context: RankContext) -> None:
    """Of an optimizer that else works element by element."""
    for asked in [{"max_unorm": 0.5}, {"percentile_clipping": 5}, {"block_wise": False}, {}]:
        with case(asked):
            model = sharded_model()
            optimizer = type("Adam", (_Foreign,), {"__module__": "bitsandbytes.optim.adam"})(model.parameters())
            defaults = {"max_unorm": 0.0, "percentile_clipping": 100, "block_wise": True}
            optimizer.args = SimpleNamespace(**defaults | asked)
            _backward(model)
            refused = pytest.raises(ShardingError, match="Adam with max_unorm, .* takes norms")
            with refused if asked else contextlib.nullcontext():
                optimizer.step()


@elementwise
class _KeepsGrads(_Foreign):
    """Uses the gradients of the last step. Its second group keeps copies."""

    def update(self, params: list[Tensor]) -> None:
        for param in params:
            assert param.grad is not None
            is_copy = any(param is each for each in self.param_groups[1]["params"])
            self.state[param]["previous"] = param.grad.clone() if is_copy else param.grad.view(-1)


@on_ranks(2)
def test_an_optimizer_that_keeps_gradients_in_its_state_is_refused(context: RankContext) -> None:
    """The next backward writes to their memory. A clone is the optimizer's own."""
    model = sharded_model()
    params = [*model.parameters()]
    _backward(model)
    _KeepsGrads([{"params": []}, {"params": params}]).step()
    with pytest.raises(ShardingError, match=r"keeps the gradient of '.*' in its state, as 'previous', .*clone\(\)"):
        _KeepsGrads([{"params": params[:1]}, {"params": params[1:]}]).step()


@on_ranks(2)
def test_a_declared_optimizer_with_a_mean_over_each_parameter_is_refused(context: RankContext) -> None:
    """As timm's are with caution=True. With owners it runs; without caution as it is."""
    model = sharded_model()
    for caution in (True, False):
        kind: Any = type("Lion", (torch.optim.SGD,), {})
        _backward(model)
        whole = WholeParameterOptimizer([{"params": [*model.parameters()], "caution": caution}], kind, lr=0.1)
        whole.step()
        optimizer = elementwise(kind)([{"params": [*model.parameters()], "caution": caution}], lr=0.1)
        told = r"with caution=True takes a mean.*WholeParameterOptimizer, or leave caution away"
        with pytest.raises(ShardingError, match=told) if caution else contextlib.nullcontext():
            optimizer.step()


@elementwise
class _Careless(torch.optim.SGD):
    """Gives parameters new memory, and keeps momentum outside of its state, as much code of others does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.kept = getattr(self, "kept", {})
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                self.kept[param] = param.grad.add_(self.kept.get(param, 0.0), alpha=0.9).clone()
        super().step(closure)
        for param in self.param_groups[0]["params"]:
            param.data = param.data.clamp(-0.2, 0.2)


@on_ranks(2)
def test_an_optimizer_that_keeps_tensors_by_parameter_trains_like_on_the_unsharded_model(context: RankContext) -> None:
    """Also if parameters hold full tensors between two steps."""

    def make(model: nn.Module) -> Optimizer:
        return _Careless(model.parameters(), lr=0.1)

    assert_trains_like_plain(context, Stack, stack_step, optimizer=make, prepare=lambda model, _: full_weights(model))


class _Around(Optimizer):
    """SAM and Lookahead in one: steps another optimizer with gradients from elsewhere, and averages weights."""

    shares_state = False  # with the other one, as SAM of pytorch_optimizer does

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.inner = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.inner.param_groups
        if self.shares_state:
            self.state = self.inner.state

    @torch.no_grad()
    def step(self, closure: Any) -> None:  # type: ignore[override]
        params = [param for group in self.param_groups for param in group["params"]]
        norm = torch.stack([param.grad.norm() for param in params]).norm()
        for param in params:
            self.state[param].setdefault("slow", param.data.clone())
            self.state[param]["old"] = param.data.clone()
            param.add_(param.grad * (0.05 / norm))
        self.zero_grad()
        torch.enable_grad()(closure)()
        for param in params:
            param.data.copy_(self.state[param]["old"])
        self.inner.step()
        for param in params:
            param.data.copy_(self.state[param]["slow"].lerp_(param.data, 0.5))


@on_ranks(2)
@pytest.mark.parametrize("shares_state", [False, True])
def test_an_optimizer_around_another_one_trains_as_on_the_unsharded_model(
    context: RankContext, tmp_path: Path, shares_state: bool
) -> None:
    """Once it is declared: nothing else says that it shards nothing. A checkpoint wants all state."""
    kind: Any = type("Declared", (_Around,), {"shares_state": shares_state})

    def train(model: Any, optimizer: Any, *numbers: int) -> None:
        for number in numbers:
            _backward(model, number)
            optimizer.step(functools.partial(_backward, model, number))
            optimizer.zero_grad()

    models = sharded_model(), sharded_model(), built(Stack)
    (model, optimizer), (again, other), plain = ((each, kind(each.parameters())) for each in models)
    with pytest.raises(ShardingError, match=r"It is around another optimizer: .*elementwise\(Declared\)"):
        train(model, optimizer, 0)
    elementwise(kind)
    model.zero_grad()
    for each in ((model, optimizer), plain):
        train(*each, 0, 1, 2)
    assert_same(full_weights(model), full_weights(plain[0]), "weights", NEAR)
    if shares_state:
        save_checkpoint(tmp_path, model, optimizer)
        return
    with pytest.raises(ConfigError, match="optimizer is around a SGD, whose state is apart: give both"):
        save_checkpoint(tmp_path, model, optimizer)
    save_checkpoint(tmp_path, model, {"outer": optimizer, "inner": optimizer.inner})
    load_checkpoint(tmp_path, again, {"outer": other, "inner": other.inner})
    for each in ((model, optimizer), (again, other)):
        train(*each, 3)
    assert_same(full_weights(again), full_weights(model), "weights", EXACT)


@elementwise
class _Blocks(_Foreign):
    def update(self, params: list[Tensor]) -> None:
        for param in params:
            codes = torch.zeros_like(param, dtype=torch.uint8)
            self.state[param].update(codes=codes, scales=torch.ones(param.numel() // 4 + 2))


@on_ranks(2)
def test_state_that_is_not_one_number_for_each_element_is_not_put_together(context: RankContext) -> None:
    model = sharded_model()
    optimizer = _Blocks(model.parameters())
    train_stack(model, optimizer, steps=1)
    with pytest.raises(ShardingError, match="one number for each element.*which ranks cannot put together"):
        full_optimizer_state_dict(model, optimizer)
