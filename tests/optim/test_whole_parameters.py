"""`WholeParameterOptimizer`: optimizers of whole matrices give what they give on the unsharded model, to the bit."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import Optimizer

from streamshard import DistributedOptimizer, StreamShard
from streamshard.errors import ConfigError, OptimizerError, RankMismatchError
from streamshard.optim import WholeParameterOptimizer
from streamshard.optim.rounds import assign_owners, plan_rounds
from tests.adversary import make_adversarial
from tests.compare import EXACT, NEAR, assert_same, full_weights
from tests.models import DIM, Layer
from tests.races import detect_races
from tests.ranks import RankContext, on_ranks
from tests.reference import assert_trains_like_plain, sharded_model, stack_step, train_stack
from tests.scenarios import without_waits
from tests.simulated import checking_streams, late, simulated_device

# torch's Muon orthogonalises in bf16: the last bit of a gradient may be 1.6e-4 of a weight at a learning rate of 0.02.
muon_in_fp32 = mock.patch.object(Tensor, "bfloat16", Tensor.clone)


class MixedLayer(Layer):
    """A layer with a scalar, a vector of one element, and stacked experts."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.one = nn.Parameter(torch.ones(1))
        self.experts = nn.Parameter(torch.randn(3, DIM, DIM) / DIM)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.one + torch.einsum("bd,edf->bf", x, self.experts) * self.scale


class Mixed(nn.Module):
    """Parameters of every kind, one that is frozen, and two that no rank uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MixedLayer() for _ in range(3))
        self.frozen = nn.Parameter(torch.ones(DIM), requires_grad=False)
        self.head = nn.Linear(DIM, 5)
        self.unused = nn.Linear(DIM, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x + self.frozen)


def _matrices(model: nn.Module, *, others: bool = False) -> list[nn.Parameter]:
    return [param for param in model.parameters() if (param.ndim == 2) is not others]


def whole(model: nn.Module, params: Any, kind: type[Optimizer], *, round_size: int = 1, **options: Any) -> Any:
    if isinstance(model, StreamShard):
        return WholeParameterOptimizer(params, kind, round_size=round_size, **options)
    return kind(params, **options)


def _muon_and_adamw(model: nn.Module) -> Any:
    """Muon for matrices, AdamW for the rest: one object if the model is sharded, two if not."""
    matrices, others = _matrices(model), _matrices(model, others=True)
    if isinstance(model, StreamShard):
        groups = [{"params": matrices}, {"params": others, "optimizer_class": torch.optim.AdamW, "lr": 0.01}]
        return WholeParameterOptimizer(groups, torch.optim.Muon, lr=0.02, round_size=1)
    muon, adamw = torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)
    return SimpleNamespace(
        step=lambda: (muon.step(), adamw.step()),
        zero_grad=lambda set_to_none=True: (muon.zero_grad(set_to_none), adamw.zero_grad(set_to_none)),
    )


def _adafactor(model: nn.Module) -> Any:
    return whole(model, model.parameters(), torch.optim.Adafactor, lr=0.05, round_size=1024)


class _Numbered(torch.optim.SGD):
    """Numbers parameters when it is made, as APOLLO does for its seeds; groups with a rank step by these numbers.

    It takes gradients away, as heavyball's classes do.
    """

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        params = [param for group in self.param_groups for param in group["params"]]
        for number, param in enumerate(params):
            self.state[param].update(number=number, last=torch.zeros_like(param))

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state["last"].add_(param.grad)
                    param.sub_(state["last"], alpha=group["lr"] * (1 + state["number"] * group.get("rank", 0)))
                    param.grad = None


def _numbered(model: nn.Module) -> Any:
    groups = [{"params": _matrices(model, others=True)}, {"params": []}, {"params": _matrices(model), "rank": 1}]
    return whole(model, groups, _Numbered, lr=0.001)


@on_ranks()
@pytest.mark.parametrize(("world_size", "build"), [(2, _numbered), (2, _adafactor), (3, _muon_and_adamw)])
@muon_in_fp32
def test_whole_matrices_train_like_on_the_unsharded_model(
    context: RankContext, build: Callable[[nn.Module], Any]
) -> None:
    """Scalars, vectors, matrices, experts, parameters that are frozen or that no rank uses, groups of none."""
    assert_trains_like_plain(context, Mixed, stack_step, optimizer=build, tolerance=NEAR, steps=4, checked=(1, 3))


@on_ranks(2)
@pytest.mark.parametrize("on_a_device", [False, True])
@muon_in_fp32
def test_exchanges_are_ordered_and_may_be_late(context: RankContext, on_a_device: bool) -> None:
    """No race, and the same numbers when every exchange takes as long as the waits allow."""
    wanted = sharded_model(Mixed)
    train_stack(wanted, _muon_and_adamw(wanted), context)
    with simulated_device() if on_a_device else contextlib.nullcontext():
        model = sharded_model(Mixed)
        optimizer = _muon_and_adamw(model)
        with late(model) if on_a_device else make_adversarial(model):
            with detect_races(model) as detector:
                train_stack(model, optimizer, context)
            assert detector.accesses
    # gloo's own sum, which plays a device's, adds in another order.
    assert_same(full_weights(model), full_weights(wanted), "weights", NEAR if on_a_device else EXACT)


@on_ranks(2)
@pytest.mark.parametrize(
    "what",
    ["pieces for owners", "pieces for owners, received", "new weights of owners", "new weights of owners, received"],
)
def test_each_wait_of_a_round_is_needed(context: RankContext, what: str) -> None:
    """Without it an exchange and the compute stream use memory at the same time. With all of them nothing does."""
    with simulated_device() as device:
        model = sharded_model(Mixed)
        optimizer = _muon_and_adamw(model)
        with checking_streams(device) as streams, streams.of(model):
            train_stack(model, optimizer, context, steps=1)
        with (
            pytest.raises(AssertionError),
            checking_streams(device) as streams,
            streams.of(model),
            without_waits(model, what),
        ):
            train_stack(model, optimizer, context, steps=1)


@on_ranks(2)
def test_an_error_on_one_owner_is_raised_on_all_ranks(context: RankContext) -> None:
    """By rank and cause, with a `DistributedOptimizer` around it: the exchanges are over then. Training can go on."""
    failing = list[int]()

    def fail(_: Any, params: list[Tensor]) -> None:
        if dist.get_rank() in failing and params[0].shape[0] == 5:
            raise FloatingPointError("singular matrix")

    model = sharded_model(Mixed)
    inner = WholeParameterOptimizer(_matrices(model), _sgd("_Picky", fail), lr=0.02, round_size=1)
    optimizer = DistributedOptimizer(inner, model)
    train_stack(model, optimizer, context, steps=1)
    owner = inner.owner_of(model.get_submodule("head").weight)
    failing.append(owner)
    with pytest.raises(OptimizerError, match=f"rank {owner}: FloatingPointError: singular matrix"):
        train_stack(model, optimizer, context, steps=1)
    failing.clear()
    train_stack(model, optimizer, context, steps=1)


@on_ranks(2)
@pytest.mark.parametrize("is_owner", [False, True])
@pytest.mark.parametrize("on_a_device", [False, True])
def test_ranks_that_disagree_about_a_gradient_raise_or_get_nan(
    context: RankContext, is_owner: bool, on_a_device: bool
) -> None:
    """A user clears one on one rank, the owner or another. On a device other parameters are stepped."""
    with simulated_device() if on_a_device else contextlib.nullcontext():
        model = sharded_model()
        optimizer = WholeParameterOptimizer(_matrices(model), torch.optim.Muon, lr=0.02, round_size=1)
        before, name = full_weights(model), "layers.1.linear.weight"
        stack_step(model, context.call(0))
        weight = dict(model.named_parameters())[name]
        owner = optimizer.owner_of(weight)
        if (context.rank == owner) is is_owner:
            weight.grad = None
        if on_a_device:
            optimizer.step()
            assert [each for each, value in full_weights(model).items() if value.isnan().any()] == [name]
            return
        having = [rank for rank in range(2) if (rank == owner) is not is_owner]
        with pytest.raises(RankMismatchError, match=re.escape(f"{name!r} had a gradient on ranks {having} only: noth")):
            optimizer.step()
        assert_same(full_weights(model), before, "weights", EXACT)
        optimizer.zero_grad()
        train_stack(model, optimizer, context, steps=1)


def _sgd(name: str, change: Callable[[Any, list[Tensor]], object]) -> type[Optimizer]:
    """SGD that changes something, given all parameters with a gradient, before each step."""

    @torch.no_grad()
    def step(self: Any, closure: Any = None) -> Any:
        change(self, [param for group in self.param_groups for param in group["params"] if param.grad is not None])
        return torch.optim.SGD.step(self, closure)

    return type(name, (torch.optim.SGD,), {"step": step})


def _grads(params: list[Tensor]) -> list[Tensor]:
    return [param.grad for param in params if param.grad is not None]


def _keep(optimizer: Any, params: list[Tensor]) -> None:
    """Momentum where no state dict has it."""
    for param, grad in zip(params, _grads(params), strict=True):
        param.momentum = grad.add_(getattr(param, "momentum", 0.0)).clone()  # type: ignore[attr-defined]


def _keep_grads(optimizer: Any, params: list[Tensor]) -> None:
    """Step by the last gradient, of which there is no copy."""
    for param in params:
        previous = optimizer.state[param].get("previous", param.grad)
        optimizer.state[param]["previous"], param.grad = param.grad, previous


def _estimate(optimizer: Any, params: list[Tensor]) -> None:
    """A rate from all gradients, not used at first, as Prodigy's."""
    for group in optimizer.param_groups:
        group["seen"] = group.get("seen", 0.0) + float(sum(grad.square().sum() for grad in _grads(params)))


def _add_noise(optimizer: Any, params: list[Tensor]) -> None:
    torch._foreach_add_(_grads(params), [1e-3 * torch.randn_like(param) for param in params])


def _divide_by_norm(optimizer: Any, params: list[Tensor]) -> None:
    torch._foreach_div_(_grads(params), nn.utils.get_total_norm(_grads(params)))


def _take_first_rate(optimizer: Any, params: list[Tensor]) -> None:
    torch._foreach_mul_(_grads(params), optimizer.param_groups[0]["lr"])


def _decay(optimizer: Any, params: list[Tensor]) -> None:
    for param, start in zip(params, optimizer.starts, strict=True):
        param.add_(start - param, alpha=1e-3)


class _Decays(_sgd("_", _decay)):  # type: ignore[misc]
    """Decays weights to their first values, as fine-tuning with L2-SP does."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.starts = [param.detach().clone() for group in self.param_groups for param in group["params"]]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (_sgd("_Keeps", _keep), "does not step each parameter by itself: .* weight . differs"),
        (_sgd("_Estimates", _estimate), r"'seen' in the group of weight 0 differs. .*\(a norm or learning rate of all"),
        (_Decays, r"reads values of parameters in its constructor \(aten::clone"),
        (_sgd("_KeepsGrads", _keep_grads), r"on memory of gradients kept without clone\(\)"),
        (_sgd("_Coupled", _divide_by_norm), "It depends on other parameters or groups"),
        (_sgd("_Noisy", _add_noise), r"draws random numbers \(aten::randn_like"),
        (torch.optim.LBFGS, "raised TypeError: .*closure"),
        (torch.optim.SparseAdam, "tried on small parameters"),
    ],
)
def test_optimizers_that_cannot_be_separated_are_refused(kind: type[Optimizer], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        # At a rate of zero no optimizer changes anything: the trial takes another.
        WholeParameterOptimizer([nn.Parameter(torch.ones(4, 4))], kind, lr=0.0 if kind.__name__ == "_Coupled" else 0.1)
    assert kind.__name__ in str(caught.value)


def test_an_optimizer_that_reads_options_of_another_group_is_refused() -> None:
    kind, params = _sgd("_ReadsTheFirst", _take_first_rate), [nn.Parameter(torch.ones(4, 4)) for _ in range(2)]
    WholeParameterOptimizer(params, kind, lr=0.1)  # it has no other group
    with pytest.raises(ConfigError, match="It depends on other parameters or groups"):
        WholeParameterOptimizer([{"params": [param]} for param in params], kind, lr=0.1)


@on_ranks(2)
def test_optimizers_that_communicate_in_their_step_are_refused(context: RankContext) -> None:
    """By name, on each rank before anything is sent: owners do not step at the same time."""
    kind = _sgd("_Communicates", lambda _, params: dist.all_reduce(params[0].grad))
    with pytest.raises(ConfigError, match=r"_Communicates calls torch.distributed in its step \(c10d::allreduce_"):
        WholeParameterOptimizer(_matrices(sharded_model(Mixed)), kind, lr=0.02)


@pytest.mark.parametrize(
    ("groups", "kind", "options", "message"),
    [
        (None, torch.optim.Muon, {"round_size": "much"}, "round_size"),
        (None, torch.optim.Muon, {"beta": 0.9}, "torch.optim.Muon with the options .* raised TypeError: .*'beta'"),
        (None, torch.optim.Muon([nn.Parameter(torch.ones(2, 2))]), {}, "wanted a subclass of torch.optim.Optimizer"),
        ([{"optimizer_class": int}], torch.optim.Muon, {}, "wanted a subclass of torch.optim.Optimizer"),
    ],
)
def test_wrong_arguments_are_named(groups: Any, kind: Any, options: dict[str, Any], message: str) -> None:
    param = nn.Parameter(torch.ones(4, 4))
    groups = [param] if groups is None else [{**group, "params": [param]} for group in groups]
    with pytest.raises(ValueError, match=message):
        WholeParameterOptimizer(groups, kind, **options)


def _rounds(costs: Sequence[float], numels: Sequence[int], owners: Sequence[int], limit: int) -> list[list[int]]:
    params: list[Any] = []
    for index, (cost, numel, owner) in enumerate(zip(costs, numels, owners, strict=True)):
        piece = SimpleNamespace(place=SimpleNamespace(numel=numel))
        params.append(SimpleNamespace(index=index, cost=cost, owner=owner, piece=piece))
    return [[each.index for each in own] for own in plan_rounds(params, limit)]  # type: ignore[attr-defined]


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 9))
def test_no_rank_has_more_than_four_thirds_of_the_least_possible(costs: list[int], ranks: int) -> None:
    """It is at least the mean and the largest parameter, and two of the first N + 1 share a rank."""
    loads = [0.0] * ranks
    owners = assign_owners(costs, loads)
    assert loads == [sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == k) for k in range(ranks)]
    assert owners == assign_owners(list(costs), [0.0] * ranks)
    ordered = [*sorted(costs, reverse=True), *[0] * (ranks + 1)]
    least = max(sum(costs) / ranks, ordered[0], ordered[ranks - 1] + ordered[ranks])
    assert max(loads) <= 4 / 3 * least + 1e-9


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), max_size=40), st.integers(1, 5), st.integers(1, 80))
def test_no_rank_owns_more_in_a_round_than_fits(sizes: list[tuple[int, int]], ranks: int, limit: int) -> None:
    """Or a single parameter that is larger; each parameter is in one round."""
    costs, numels = [float(cost) for cost, _ in sizes], [numel for _, numel in sizes]
    owners = assign_owners(costs, [0.0] * ranks)
    rounds = _rounds(costs, numels, owners, limit)
    assert sorted(index for each in rounds for index in each) == list(range(len(sizes)))
    assert all(each == sorted(each) and each for each in rounds)
    for each in rounds:
        for rank in range(ranks):
            own = [numels[index] for index in each if owners[index] == rank]
            assert sum(own) <= limit or len(own) == 1


def test_all_ranks_work_in_each_round() -> None:
    """Sixteen equal matrices on four ranks, two to a round."""
    rounds = _rounds([1.0] * 16, [10] * 16, assign_owners([1.0] * 16, [0.0] * 4), 20)
    assert rounds == [list(range(8)), list(range(8, 16))]
