"""Sharded parameters outside of passes: what they answer for the full tensor, and what raises."""

from __future__ import annotations

import copy
import functools
import io
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch import nn

from streamshard import ShardingError, StreamShard
from tests.compare import EXACT, assert_same, full_grads, piece_of
from tests.faults import case
from tests.models import Stack, vector_batch
from tests.ranks import Call, RankContext, on_ranks
from tests.reference import assert_trains_like_plain, sharded_model

DIM = 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)) * self.scale


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Layer(), Layer())


sharded = functools.partial(sharded_model, build)


# Of a model's parameters, one number each; what a loss may add, or a log line may show.
PENALTIES: dict[str, Callable[[Any], torch.Tensor]] = {
    "logged": lambda model: sum(_logged(p.norm()) for p in model.parameters()),
    "compiled": lambda model: torch.compile(_some, backend="aot_eager")(model),
    "total norm": lambda model: nn.utils.get_total_norm(list(model.parameters())),
    "L1": lambda model: sum(p.abs().sum() for p in model.parameters()),
    "L2": lambda model: sum(torch.sum(p**2) for p in model.parameters()),
    "orders": lambda model: sum(torch.norm(p, 3) + torch.linalg.vector_norm(p, ord=1) for p in model.parameters()),
    "in a wider dtype": lambda model: sum(torch.norm(p, dtype=torch.float64).float() for p in model.parameters()),
    "norm of zeros": lambda model: sum((p - p.detach()).norm() for p in model.parameters()),
    "distance": lambda model: sum((p - _copies(model)[n]).norm() for n, p in model.named_parameters()),
    "weighed squares": lambda model: sum(
        (_copies(model)[n].square() * (p - 1.0).square()).sum() for n, p in model.named_parameters()
    ),
    "by size": lambda model: sum(p.square().sum() / p.numel() + p.norm() / p.shape[0] for p in model.parameters()),
    "of two weights": lambda model: model.layers[0].linear.weight.sum() * model.layers[2].linear.bias.norm().log(),
    "of alike weights": lambda model: (model.layers[0].linear.weight - model.layers[1].linear.weight).norm(),
    "through data": lambda model: (
        model.layers[0].linear.weight.data.norm() * model.layers[0].linear.bias.square().sum()
    ),
}


def _copies(model: Any) -> dict[str, torch.Tensor]:
    """Made when it is first asked: what L2-SP, elastic penalties and EWC keep."""
    if "copies" not in model.__dict__:
        model.__dict__["copies"] = {name: param.detach().clone() for name, param in model.named_parameters()}
    return model.__dict__["copies"]  # type: ignore[no-any-return]


def _some(model: Any) -> torch.Tensor:
    return sum((p.square().sum() + 0.5 * p.norm() for p in model.parameters()), torch.zeros(()))


def _logged(norm: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        assert norm.item() >= 0.0
    return norm


@on_ranks(2)
def test_penalties_are_those_of_full_parameters(context: RankContext) -> None:
    """Each rank has another factor: what comes of it is the mean, as of the loss."""
    for name, penalty in PENALTIES.items():

        def step(model: nn.Module, call: Call, penalty: Any = penalty) -> torch.Tensor:
            loss = model(vector_batch(call.step, call.rank)).square().mean()
            return call.backward(loss + 0.01 * (1 + call.rank) * penalty(model))

        with case(name):
            assert_trains_like_plain(context, Stack, step, steps=2, checked=(1,))


def _sizes(param: Any) -> tuple[Any, ...]:
    questions = (param.shape, param.size(), param.numel(), param.nelement(), param.dim(), param.ndim, param.stride())
    rest = (param.nbytes, param.data.shape, param.half().nbytes)
    fans = (len(param), *nn.init._calculate_fan_in_and_fan_out(param)) if param.ndim > 1 else ()
    return (*questions, *rest, *fans)


@on_ranks(2)
def test_sizes_are_those_of_the_full_tensor(context: RankContext) -> None:
    """Of weights, gradients, those that wait, and results of operations, on every rank."""
    model = sharded()
    wanted = [_sizes(param) for param in build().parameters()]
    model(torch.randn(4, DIM)).sum().backward()
    params = list(model.parameters())
    for of in (params, [p.grad for p in params], [2.0 * p.detach() for p in params], copy.deepcopy(params)):
        assert [_sizes(each) for each in of] == wanted
    with model.no_sync():
        model(torch.randn(4, DIM)).sum().backward()
        assert all(param.grad.shape == param.shape for param in model.parameters())


@on_ranks(1, 2)
def test_other_memory_under_a_parameter_raises(context: RankContext) -> None:
    """`param.data = ema`: collectives use the memory that they were given. It may be put back."""
    model: Any = StreamShard(build())
    x = torch.randn(4, DIM)
    kept, wanted = [param.data for param in model.parameters()], model(x)
    for param in model.parameters():
        param.data = param.data.clone()
    with pytest.raises(ShardingError, match=r"was given other memory.*param\.data\.copy_"):
        model(x)
    for param, data in zip(model.parameters(), kept, strict=True):
        param.data = data
    assert torch.equal(model(x), wanted)


@on_ranks(2)
def test_a_parameters_accumulate_grad_node_is_found_as_by_ddp(context: RankContext) -> None:
    """torch.autograd.graph, DDP and Megatron-LM find the node in this way."""
    weight = sharded()[0].linear.weight
    for view in (weight.expand_as(weight), weight.view_as(weight)):
        assert view.grad_fn.next_functions[0][0].variable is weight


_X = torch.ones(4, DIM)
# Of a weight or its gradient, a bias or its gradient, which is cut at other places, and all weights of the model.
REFUSED: dict[str, Callable[[Any, Any, dict[str, Any]], object]] = {
    "linear": lambda w, b, named: F.linear(_X, w),
    "an activation": lambda w, b, named: _X + w,
    "whole noise": lambda w, b, named: w.detach() + torch.ones(DIM, DIM),
    "a row that broadcasts": lambda w, b, named: w.detach() * torch.ones(DIM),
    "whole values": lambda w, b, named: w.data.copy_(torch.zeros(DIM, DIM)),
    "into whole ones": lambda w, b, named: torch.zeros(DIM, DIM).copy_(w),
    "data": lambda w, b, named: setattr(w, "data", torch.zeros(DIM, DIM)),
    "others' elements": lambda w, b, named: w * b,
    "a row": lambda w, b, named: w[0],
    "written rows": lambda w, b, named: w.data.__setitem__(slice(2), 0.0),
    "noise by its values": lambda w, b, named: torch.bernoulli(w.detach().abs()),
    "numpy": lambda w, b, named: w.detach().numpy(),
    "a number": lambda w, b, named: w.detach().item(),
    "noise": lambda w, b, named: torch.randn_like(w),
    "uniform noise": lambda w, b, named: torch.rand_like(w),
    "norm along a dimension": lambda w, b, named: w.detach().norm(dim=-1),
    "norm of negative order": lambda w, b, named: w.detach().norm(-1),
    "saved": lambda w, b, named: torch.save(w, io.BytesIO()),
    "a saved copy": lambda w, b, named: torch.save(w.detach().clone(), io.BytesIO()),
    "a copy by safetensors": lambda w, b, named: save({"w": w.detach().clone()}),
    "eye_": lambda w, b, named: nn.init.eye_(w),
}
# Of weights alone: gradients have no graph.
OF_PARAMETERS: dict[str, Callable[[Any, Any, dict[str, Any]], object]] = {
    "by a norm that needs a gradient": lambda w, b, named: w / w.norm(),
    "a count by a norm": lambda w, b, named: w.norm(0),
    "largest, with a graph": lambda w, b, named: w.max(),
    "largest norm, with a graph": lambda w, b, named: w.norm(math.inf),
    "backward": lambda w, b, named: w.square().backward(),
    "a hook": lambda w, b, named: (w * 2.0).register_hook(print),
    "gradients of copies": lambda w, b, named: torch.autograd.grad(w.sum(), [w.detach().requires_grad_()]),
    "saved by safetensors": lambda w, b, named: save(named),
}


ADVICE = {
    "norm along a dimension": r"in step\(\) of an optimizer that .*WholeParameterOptimizer runs, weights and gradients",
    "data": r"load_state_dict.*summon_full_params\(",
    "backward": r"call loss\.backward\(\) without inputs=",
    "gradients of copies": r"copy = weight\.clone\(\)",
    "a hook": "register_post_accumulate_grad_hook",
    "noise": r"torch\.zeros_like\(p\)\.normal_\(\)",
    "uniform noise": r"torch\.zeros_like\(p\)\.uniform_\(\)",
}
OF_GRADIENTS = {name: ADVICE[name] for name in ("noise", "uniform noise", "norm along a dimension")}


@on_ranks(2)
def test_other_operations_raise_by_the_parameters_name(context: RankContext) -> None:
    """Also where the shapes of pieces fit, through lists, with a graph and without; nothing has changed."""
    model = sharded()
    named = dict(model.named_parameters())
    model(torch.ones(4, DIM)).square().sum().backward()
    before = model.full_state_dict(rank0_only=False), full_grads(model)
    weight, bias = named["0.linear.weight"], named["1.linear.bias"]
    for of, given, table in (
        ("", (weight, bias), REFUSED | OF_PARAMETERS),
        ("of the gradient of ", (weight.grad, bias.grad), REFUSED),
    ):
        for name, use in table.items():
            with pytest.raises(ShardingError) as raised:
                use(*given, named)
                pytest.fail(f"{of}{name}")
            general = r"register_forward_method\(model, 'method'\).*summon_full_params\("
            advice = OF_GRADIENTS.get(name, "") if of else ADVICE.get(name, general)
            wanted = "one rank" if "save" in name or "copy" in name else rf"{of}parameter '[01]\.linear\..*{advice}"
            assert re.search(wanted, str(raised.value)), (of, name, raised.value)
    assert_same(model.full_state_dict(rank0_only=False), before[0], "weights", EXACT)
    assert_same(full_grads(model), before[1], "gradients", EXACT)


_INIT = "uniform_ normal_ trunc_normal_ xavier_uniform_ xavier_normal_ kaiming_uniform_ kaiming_normal_ ones_ zeros_"
_DRAWS: dict[str, Callable[[torch.Tensor], object]] = {
    **{name: getattr(nn.init, name) for name in _INIT.split()},
    "normal_ with numbers": functools.partial(nn.init.normal_, mean=1.0, std=2.0),
    "constant_": functools.partial(nn.init.constant_, val=3.0),
    "data.uniform_": lambda weight: weight.data.uniform_(-1.0, 2.0),
    "noise": lambda weight: weight.data.copy_(torch.zeros_like(weight).normal_()),
    "uniform noise": lambda weight: weight.data.copy_(torch.zeros_like(weight).uniform_()),
}


@on_ranks(2)
def test_random_numbers_are_those_that_the_full_tensor_would_get(context: RankContext) -> None:
    """A layer that is initialised again after sharding, without ``torch.no_grad()``, which nn.init sees to."""
    for name, draw in _DRAWS.items():
        with case(name):
            model, plain = sharded(), nn.Linear(DIM, DIM)
            for weight in (plain.weight, model[0].linear.weight):
                torch.manual_seed(5)
                draw(weight)
            assert torch.equal(model.full_state_dict(rank0_only=False)["0.linear.weight"], plain.weight)
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        model[0].linear.weight.normal_()


class Narrow(nn.Module):
    """Among four ranks two have pieces that are as long as a row, and parts of two."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.rows, self.last = (
            nn.Parameter(torch.randn(shape)) for shape in ((2 * DIM,), (3, 4 * DIM), (2 * DIM,))
        )

    def forward(self) -> None:
        """Not called."""


@on_ranks(4)
def test_a_row_as_long_as_a_piece_is_not_taken_for_one(context: RankContext) -> None:
    """Optimizers keep plain tensors of the shapes of pieces; a row of the same length would be another thing."""
    model = sharded_model(lambda: nn.Sequential(Narrow(), Narrow()))
    ours, start = model[0].rows, model.local_ranges()["0.rows"].start
    if context.rank in (1, 2):
        assert start % (4 * DIM) and piece_of(ours).shape == (1, 4 * DIM)
        with pytest.raises(ShardingError, match=r"0\.rows"):
            ours * torch.arange(4.0 * DIM)[None]
    else:
        assert torch.equal(piece_of(ours + piece_of(ours).clone()), 2.0 * piece_of(ours))
