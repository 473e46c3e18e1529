"""`StreamShard.accumulate` computes what a loop over micro-batches computes, and gathers each layer once per step."""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from streamshard import ConfigError, Precision, RankMismatchError, ShardingError, StreamShard, trace
from streamshard.comm.streams import Collective
from streamshard.errors import log
from tests.compare import EXACT, NEAR, assert_same, full_grads
from tests.counts import engine_inside, heard_collectives
from tests.faults import Trouble, case, failing, let_dynamo_look
from tests.models import DIM, Calling, Layer, Stack, TinyConfig, TinyLM, next_token_loss, token_batch, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import FP32, mesh_2d, sgd
from tests.scenarios import RoutedStack
from tests.simulated import checking_streams, late, simulated_device
from tests.test_same_bits import WAYS, run

# A tied weight's gradients, as a head and as an embedding, may be added in fp32. A divisor divides the sum.
OTHER_ROUNDING = ("divided at the end",)
BETWEEN_RANKS = ("replicas", "sockets")


@pytest.mark.parametrize("name", [each for each in WAYS if not each.startswith((*OTHER_ROUNDING, *BETWEEN_RANKS))])
def test_one_rank_trains_to_the_bits_of_a_loop(ranks: Any, name: str) -> None:
    loop, accumulated = (ranks(1).run(run, name, accumulates=each, micro_batches=4)[0] for each in (False, True))
    assert len(set(loop.weights)) == 2
    assert accumulated == loop


Forward = Callable[[Any, Tensor], Tensor]


def _of(forward: Forward, kind: type[nn.Module] = Stack) -> Callable[[], nn.Module]:
    return type("Model", (kind,), {"forward": forward})


class _Parts(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale = nn.Linear(DIM, DIM), nn.Parameter(torch.ones(DIM))


class _Same(torch.autograd.Function):
    """Before torch 2.13 a graph does not live by a node of Python's, as kernels have (Liger)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


_same: Callable[[Tensor], Tensor] = _Same.apply


class _Functions(_Parts):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.register_forward_hook(lambda layer, args, out: _same(out))

    def forward(self, x: Tensor) -> Tensor:
        kept = _same(x * self.scale)
        return self.head(_run(self.layers, x, lambda layer, x: _same(layer(x)))) + _same(kept * kept).mean()


class _Normed(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM)

    def forward(self, x: Tensor) -> Tensor:
        """A batch norm between layers counts the micro-batches in order."""
        return _run(self.layers[1:], self.norm(self.layers[0](x)))


def _run(layers: Any, x: Tensor, call: Forward = lambda layer, x: layer(x)) -> Tensor:
    for layer in layers:
        x = call(layer, x)
    return x


def _number(x: Tensor) -> int:
    return int(x[0, 0].abs() * 1000)


def _skips(model: Any, x: Tensor) -> Tensor:
    kept = model.layers[0](x)
    return _run(model.layers[1:], kept, lambda layer, x: layer(x) + 0.1 * kept)


def _around(model: Any, x: Tensor) -> Tensor:
    kept = x * model.scale
    return model.head(_run(model.layers, x) * model.scale) + (kept * kept).mean()


def _routed(model: Any, x: Tensor) -> Tensor:
    number = _number(x)
    layers = [layer for place, layer in enumerate(model.layers) if place != number % 4]
    return _run(layers[: 2 + number % 2], x)


def _pairs(model: Any, x: Tensor) -> Tensor:
    x = checkpoint(lambda y: _run(model.layers[:2], y), x, use_reentrant=False)
    return _run(model.layers[2:], x)


def _pairs_conditioned(model: Any, x: Tensor) -> Tensor:
    """Backward of the second layer recomputes the first one, which also ran without gradients."""
    x = checkpoint(lambda y: _run(model.layers[:2], y), x, use_reentrant=False)
    with torch.no_grad():
        given = model.layers[0](x)
    return _run(model.layers[2:], x + given)


def _conditioned(model: Any, x: Tensor) -> Tensor:
    x = model.first(x)
    with torch.no_grad():
        given = model.layers[0](x)
    return _run(model.layers, x, lambda layer, x: layer(x) - 0.1 * given)


def _self_conditioned(model: Any, x: Tensor, at_times: bool = False) -> Tensor:
    """The whole model runs without gradients before, in each micro-batch or in every second one by chance."""
    if at_times and _number(x) % 2:
        return _run(model.layers, x)
    with torch.no_grad():
        given = _run(model.layers, x)
    return _run(model.layers, x + given)


def _dropping_layers(model: Any, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x) if random.random() + np.random.rand() < 1.4 else x
    return x


def _attributed(model: Any, x: Tensor) -> Tensor:
    if not hasattr(model, "mask"):
        model.mask = x.mean(1, keepdim=True).sign()
    model.outputs, model.level = [], getattr(model, "level", 0.0) + x.mean()
    for layer in model.layers:
        x = layer(x)
        model.outputs.append(x.float().square().mean())
    out: Tensor = model.head(x) * model.mask + model.level + sum(model.outputs)
    del model.mask
    model.level = 0.0
    return out


class _Way(NamedTuple):
    """A model, settings for `StreamShard`, and the context of its steps."""

    make: Callable[[], nn.Module]
    settings: dict[str, Any] = {}  # noqa: RUF012  # never changed
    around: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext


FP32_ONLY: dict[str, Any] = {"precision": FP32}
_twice = _of(lambda model, x: _run([*model.layers, *model.layers], x))
_noisy = _of(lambda model, x: _run(model.layers, x, lambda layer, x: F.dropout(layer(x), 0.2)))
MODELS = {
    "skips": _Way(_of(_skips)),
    "twice": _Way(_twice),
    "layers dropped by numbers of Python and NumPy": _Way(_of(_dropping_layers)),
    "self-conditioning": _Way(_of(_self_conditioned)),
    "self-conditioning at times": _Way(_of(lambda m, x: _self_conditioned(m, x, at_times=True))),
    "scaled": _Way(_of(lambda m, x: _run(m.layers, x, lambda layer, x: layer(x) * m.scale), _Parts)),
    "scaled before and behind": _Way(_of(_around, _Parts)),
    "routed": _Way(_of(_routed)),
    "residuals outside of layers": _Way(_of(lambda m, x: _run(m.layers, x, lambda layer, x: x + layer(x))), FP32_ONLY),
    "a layer left out in the first round": _Way(_of(lambda m, x: _run([*m.layers[_number(x) % 2 :], *m.layers], x))),
    "a layer without gradients first": _Way(_of(_conditioned, _Parts)),
    "attributes": _Way(_of(_attributed)),
    "a checkpoint around two layers": _Way(_of(_pairs)),
    "a checkpoint around a layer that ran without gradients": _Way(_of(_pairs_conditioned)),
    "a batch norm": _Way(_Normed),
    "functions in Python": _Way(_Functions),
    "several layers in a unit": _Way(Stack, {"min_unit_size": 2000}),
    "resident layers": _Way(Stack, {"resident": ["layers.1", "layers.2"]}),
    "a resident last layer": _Way(_of(_skips), {"resident": ["layers.3"]}),
    "a resident layer that runs twice": _Way(_twice, {"resident": ["layers.1"]}),
    "a narrow wire": _Way(Stack, {"precision": Precision(param_dtype=torch.float32, wire_dtype=torch.bfloat16)}),
    # Layers return bf16, which the next layer casts to fp32.
    "autocast": _Way(lambda: Stack((DIM, DIM + 2) * 3), FP32_ONLY, lambda: torch.autocast("cpu", torch.bfloat16)),
    "saved tensors in host memory": _Way(Stack, FP32_ONLY, torch.autograd.graph.save_on_cpu),
}

# Code beside a layer uses the layer's input too: gradients of both are added in another order.
ROUNDED = ("residuals outside of layers",)
# What these do between layers is one rank's own affair: the same layers run, in the same order.
ALONE = ("scaled", "attributes", "a checkpoint around two layers", "a layer without gradients first", *ROUNDED)


def _loss(model: Any, micro_batch: tuple[int, int]) -> Tensor:
    step, number = micro_batch
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(100 * step + number)  # type: ignore[operator]
    x = vector_batch(step, number, rows=3 + number % 3).to(next(model.parameters()).device)
    return _same((model(x).float() - x.cumsum(0)).square().mean() / 4)


def _loop(model: Any, micro_batches: Any, loss_of: Callable[..., Tensor] = _loss) -> list[Tensor]:
    losses = []
    for micro_batch in micro_batches:
        losses.append(loss_of(model, micro_batch))
        losses[-1].backward()
    return losses


def _accumulate(model: Any, micro_batches: Any, loss_of: Callable[..., Tensor] = _loss) -> list[Tensor]:
    return model.accumulate(micro_batches, loss_of)


def _trained(
    context: RankContext, way: _Way, run_step: Any, steps: int = 4, watched: Any = contextlib.nullcontext
) -> tuple[list[Any], dict[str, Tensor], int]:
    """Train inside ``watched(model)``: losses, gradients and buffers, and how many all-gathers the last step had."""
    torch.manual_seed(0)
    model: Any = StreamShard(way.make(), **way.settings)
    optimizer, losses, grads, gathers = sgd(model), [], {}, 0
    with watched(model):
        for step in range(steps):
            mine = [(step, context.world_size * number + context.rank) for number in range(4)]
            with way.around(), heard_collectives(engine_inside(model)) as heard:
                losses.append([loss.item() for loss in run_step(model, mine)])
            gathers = len(heard[Collective.ALL_GATHER])
            found = full_grads(model)
            grads.update({f"{name} of step {step}": grad.clone() for name, grad in found.items() if grad is not None})
            optimizer.step()
            optimizer.zero_grad()
    if context.rank == 0:  # other ranks get them before the next pass
        grads.update(model.named_buffers())
    return losses, grads, gathers


def _check(context: RankContext, way: _Way, *, is_exact: bool) -> None:
    loop, accumulated = (_trained(context, way, each) for each in (_loop, _accumulate))
    assert_same(accumulated[1], loop[1], "gradients", EXACT if is_exact else NEAR)
    torch.testing.assert_close(accumulated[0], loop[0], rtol=1e-3, atol=1e-4)
    if is_exact:
        assert accumulated[0] == loop[0]
        assert 2 * accumulated[2] <= loop[2]


@on_ranks()
@pytest.mark.parametrize(
    ("world_size", "name"), [*((1, name) for name in MODELS), *((2, name) for name in MODELS if name not in ALONE)]
)
def test_gradients_are_those_of_a_loop(context: RankContext, name: str) -> None:
    """With micro-batches of different lengths. On one rank to the bit."""
    _check(context, MODELS[name], is_exact=context.world_size == 1 and name not in ROUNDED)


@on_ranks(1, 2)
def test_a_model_whose_resident_last_layer_runs_twice_trains_in_a_loop(context: RankContext) -> None:
    way = _Way(_twice, {"resident": ["layers.3"]})
    loop, accumulated = (_trained(context, way, each) for each in (_loop, _accumulate))
    assert_same(accumulated[1], loop[1], "gradients", EXACT)
    assert (accumulated[0], accumulated[2]) == (loop[0], loop[2])


@on_ranks(2)
def test_a_trace_has_the_backward_of_each_layer_once(context: RankContext) -> None:
    model = _model_after()
    with trace(model) as found:
        _accumulate(model, [(1, 0), (1, 1)])
    assert [span.unit for span in found.spans if span.activity == "backward"] == [0, 4, 3, 2, 1]


@on_ranks(2)
def test_each_layer_is_gathered_twice_and_reduced_once(context: RankContext) -> None:
    model: Any = StreamShard(Stack((DIM,) * 8))
    for step, count in enumerate((2, 2, 5)):
        with heard_collectives(engine_inside(model)) as heard:
            model.accumulate([(step, number) for number in range(count)], _loss)
        model.zero_grad()
        if step:
            assert sorted(heard[Collective.REDUCE_SCATTER]) == list(range(8))  # type: ignore[type-var]  # the root unit is empty
            gathered = [unit for unit in heard[Collective.ALL_GATHER] if unit is not None]
            # The last two layers are still in the slots when backward begins.
            assert gathered == [*range(8), *range(5, 0, -1)]


def _model_after(make: Callable[[], nn.Module] = Stack, **settings: Any) -> Any:
    """A model whose order of layers is known, without gradients."""
    torch.manual_seed(0)
    model: Any = StreamShard(make(), **settings)
    _loop(model, [(0, 0), (0, 1)])
    model.zero_grad()
    return model


def _assert_next_step_is_that_of_a_loop(context: RankContext, model: Any) -> None:
    fresh = _model_after()
    for each, run_step in ((model, _accumulate), (fresh, _loop)):
        run_step(each, [(7, context.rank), (7, 2 + context.rank)])
    assert_same(full_grads(model), full_grads(fresh), "gradients", EXACT if context.world_size == 1 else NEAR)


# Before all, in the forward of a module, behind all, and in the backward of the head.
FAILURES = ("before", "layers.0", "layers.2", "layers.3", "behind", "backward")


def _failing(where: str, number: int) -> Callable[[Any, tuple[int, int]], Tensor]:
    """A loss that fails for the micro-batch with this number."""

    def loss_of(model: Any, micro_batch: tuple[int, int]) -> Tensor:
        if micro_batch[1] != number:
            return _loss(model, micro_batch)
        if where == "before":
            raise Trouble
        backward = where in ("behind", "backward")
        with failing(model.get_submodule("head" if backward else where), backward=backward):
            loss = _loss(model, micro_batch)
        if where == "behind":
            raise Trouble
        return loss

    return loss_of


@on_ranks()
@pytest.mark.parametrize(("world_size", "resident"), [(1, []), (2, []), (2, ["layers.1", "layers.3"])])
def test_an_exception_discards_the_steps_gradients(context: RankContext, resident: list[str]) -> None:
    """In any micro-batch and any place, on each rank another one. The next step is as if this one had not been."""
    model: Any = StreamShard(Stack(), resident=resident)
    with pytest.raises(Trouble):  # in a first step, which is a loop
        model.accumulate([(1, each) for each in range(4)], _failing("behind", 2))
    assert not any(param.grad is not None for param in model.parameters())
    model = _model_after(resident=resident)
    for where in FAILURES:
        for number in (0, 2, 1 + 2 * context.rank) if where in ("behind", "backward") else (0, 2):
            with case((where, number)):
                with pytest.raises(Trouble):
                    model.accumulate([(1, each) for each in range(4)], _failing(where, number))
                assert not any(param.grad is not None for param in model.parameters())
                assert engine_inside(model).phase is None
                _assert_next_step_is_that_of_a_loop(context, model)
                model.zero_grad()


@on_ranks(2)
def test_micro_batches_may_leave_out_layers_before_a_resident_one(context: RankContext) -> None:
    """On each rank other ones. They come to the resident layer before others have come to the layer that they skip."""

    def loss_of(model: Any, micro_batch: tuple[int, int]) -> Tensor:
        model.route = range(random.Random(f"{micro_batch} {context.rank}").randrange(2), 5)
        return _loss(model, micro_batch)

    grads = []
    for run_step in (_loop, _accumulate):
        model = _model_after(make=RoutedStack, resident=["layers.1"])
        for step in range(1, 5):
            run_step(model, [(step, 2 * part + context.rank) for part in range(3)], loss_of)
        grads.append(full_grads(model))
    assert engine_inside(model).sums is not None
    assert_same(*grads, "gradients", NEAR)


@on_ranks(1, 2)
def test_gradients_are_added_to_earlier_ones(context: RankContext) -> None:
    """Of a loop or of another call; `no_sync` and evaluation between change nothing."""
    grads = []
    for first, second in ((_loop, _loop), (_loop, _accumulate), (_accumulate, _accumulate)):
        model = _model_after()
        with model.no_sync():
            first(model, [(1, context.rank), (1, 2 + context.rank)])
        with torch.no_grad():
            model(vector_batch(0, 0))
        second(model, [(2, context.rank), (2, 2 + context.rank)])
        grads.append(full_grads(model))
    for each in grads[1:]:
        assert_same(each, grads[0], "gradients", NEAR)


@on_ranks(1)
def test_the_logits_of_one_micro_batch_exist_at_a_time(context: RankContext) -> None:
    model, alive = _model_after(), []

    def loss_of(model: Any, micro_batch: tuple[int, int]) -> Tensor:
        logits = model(vector_batch(*micro_batch))
        assert not any(each() is not None for each in alive)
        alive.append(weakref.ref(logits))
        return logits.float().exp().sum()

    model.accumulate([(1, number) for number in range(4)], loss_of)
    assert len(alive) == 4


@on_ranks(1)
def test_each_micro_batch_has_random_numbers_of_its_own(context: RankContext) -> None:
    """The first one has those of the loop's first one, and the next step others."""
    inputs = torch.ones(2, DIM)

    def loss_of(model: Any, number: int) -> Tensor:
        return model(inputs).float().sum()

    losses = []
    for run_step in (_loop, _accumulate):
        model = _model_after(make=_noisy)
        torch.manual_seed(5)
        losses.append([loss.item() for _ in range(2) for loss in run_step(model, [0, 1, 2], loss_of)])
        model.zero_grad()
    assert losses[0][0] == losses[1][0]
    assert len(set(losses[1])) == 6


_common: list[Tensor] = []


def _keeping(model: Any, x: Tensor) -> Any:
    _common.clear()
    for layer in model.layers:
        x = layer(x)
        _common.append(x.float().square().mean())
    return model.head(x) + torch.stack(_common).sum().to(x.dtype)


def _held(model: Any, x: Tensor) -> Tensor:
    scale = model.scale
    for layer in model.layers:
        x = x + layer(x) + scale
    return model.head(x)


class _ChangingLayer(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(F.leaky_relu_(x)))


def _hooked(model: Any, x: Tensor) -> Tensor:
    kept = model.layers[0](x)
    kept.register_hook(lambda grad: grad * 0.5)
    return model.head(_run(model.layers[1:], kept, lambda layer, x: layer(x + kept)))


def _hooked_sum(model: Any, x: Tensor) -> Tensor:
    """A residual that is added outside of layers."""
    for layer in model.layers:
        x = x + layer(x)
        if x.requires_grad:
            x.register_hook(lambda grad: grad * 0.5)
    return model.head(x)


def _hooked_later(model: Any, x: Tensor) -> Tensor:
    x = x + model.layers[0](x)
    y = model.layers[1](x)
    x.retain_grad()
    return model.head(_run(model.layers[2:], x + y))


def _differentiating(model: Any, x: Tensor) -> Tensor:
    x = x.requires_grad_()
    y = _run(model.layers, x)
    (slope,) = torch.autograd.grad(y.float().sum(), x, retain_graph=True, allow_unused=True)
    return model.head(y) * (1.0 if slope is None else slope.detach().mean())


class _TakingLayer(Layer):
    def forward(self, x: Tensor, taken: list[Tensor]) -> Tensor:  # type: ignore[override]
        taken.append(super().forward(x))
        return taken[-1]


class _Recording(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_TakingLayer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        taken: list[Tensor] = []
        returned: list[Tensor] = []
        for layer in self.layers:
            x = layer(x, taken)
            returned.append(x)
        return self.head(x) + sum(each.square().mean() for each in (*taken, *returned))


class _Filled(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.zeros(DIM))


def _filled(model: Any, x: Tensor) -> Tensor:
    model.offset.copy_(x.detach().mean(0))
    return _run(model.layers, x, lambda layer, x: layer(model.offset) + layer(x))


def _reentrant(model: Any, x: Tensor) -> Tensor:
    x = model.layers[0](x)
    return _run(model.layers[1:], x, lambda layer, x: checkpoint(layer, x, use_reentrant=True))  # type: ignore[no-any-return]


def _twice_in_a_loss(model: Any, micro_batch: tuple[int, int]) -> Tensor:
    return _loss(model, micro_batch) + _loss(model, (7, 7))


class _Refused(NamedTuple):
    make: Callable[[], nn.Module]
    said: str
    loss_of: Callable[..., Tensor] = _loss


REFUSED = {
    "a global list": _Refused(_of(_keeping), "depends on the forward of another one.*return them from the layers"),
    "a list of the forward": _Refused(_Recording, "computed from the other.*Return such tensors from layers"),
    "a hook": _Refused(_of(_hooked), "register_hook or retain_grad of a tensor between layers"),
    "a hook on a sum": _Refused(_of(_hooked_sum), "register_hook or retain_grad of a tensor between layers"),
    "a hook behind a layer": _Refused(_of(_hooked_later), "register_hook or retain_grad of a tensor between layers"),
    "a weight in a variable": _Refused(_of(_held, _Parts), "from the other.*a weight that code keeps in a variable"),
    "inputs changed in place": _Refused(
        lambda: Calling(_ChangingLayer, lambda layer, x: layer(2.0 * x)), "'layers.1' changes its input in place"
    ),
    # Before a forward pauses in one: greenlets that end inside torch's C++ code corrupt memory.
    "a buffer that all fill": _Refused(_of(_filled, _Filled), "gets a tensor that all micro-batches change in place"),
    "reentrant checkpoints": _Refused(_of(_reentrant), "'layers.1' is called inside a reentrant.*use_reentrant=False"),
    "a gradient through several layers": _Refused(_of(_differentiating), "inside loss_of goes through several layers"),
    "two calls": _Refused(Stack, "'layers.0' behind the layer that was the last one.*loop over", _twice_in_a_loss),
}


@on_ranks()
@pytest.mark.parametrize(
    ("world_size", "name"),  # two ranks have two slots: there a loop meets layers too whose weights have left
    [(size, name) for size in (1, 2) for name in REFUSED if size == 1 or name != "a gradient through several layers"],
)
def test_models_that_accumulation_cannot_run_are_refused(context: RankContext, name: str) -> None:
    make, said, loss_of = REFUSED[name]
    model = _model_after(make=make)
    with pytest.raises(ShardingError, match=said):
        model.accumulate([(1, 0), (1, 1)], loss_of)
    _loop(model, [(1, 0), (1, 1)], loss_of)
    assert all(param.grad is not None for name, param in model.named_parameters() if "layers" in name)


@on_ranks(1, 2)
def test_a_loss_through_another_model_trains_one(context: RankContext) -> None:
    """As a generator's through its discriminator."""
    model, other = _model_after(), _model_after()
    batches = [(1, context.rank), (1, 2 + context.rank)]

    def loss_of(model: Any, micro_batch: tuple[int, int]) -> Tensor:
        x = vector_batch(*micro_batch)
        return other(x + model(x)).sum()

    with pytest.raises(ShardingError, match="trains 'head.* of another sharded model too.*requires_grad_.False"):
        model.accumulate(batches, loss_of)
    other.requires_grad_(False)
    model.accumulate(batches, loss_of)
    found = full_grads(model)
    model.zero_grad()
    other.requires_grad_(True)
    _loop(model, batches, loss_of)
    assert_same(found, full_grads(model), "gradients", EXACT if context.world_size == 1 else NEAR)


@on_ranks(2)
def test_a_process_in_which_accumulation_cannot_run_is_refused(context: RankContext) -> None:
    """Without greenlet, inside Join, with hooks of parameters or DTensors. The loop, which messages name, trains."""
    model = _model_after()
    for around, said in (
        (lambda: mock.patch.dict(sys.modules, {"greenlet": None}), "pip install .*accumulate.*, or loop"),
        (lambda: Join([model], repeat=model.zero_grad), "runs inside Join.*loop with loss.backward"),
        (
            lambda: next(model.parameters()).register_post_accumulate_grad_hook(lambda param: None),
            "has a hook of register_post_accumulate_grad_hook.*loop with loss.backward",
        ),
    ):
        with around():
            with pytest.raises(ConfigError, match=said):
                _accumulate(model, [(1, 0), (1, 1)])
            _loop(model, [(1, 0), (1, 1)])
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    cut = Stack()
    parallelize_module(cut, mesh["tp"], {"layers.*.linear": ColwiseParallel(output_layouts=Replicate())})
    model = StreamShard(cut, mesh=mesh["dp"])
    with pytest.raises(ConfigError, match="has DTensors.*loop with loss.backward"):
        _accumulate(model, [(1, 0), (1, 1)])
    _loop(model, [(1, 0), (1, 1)])
    assert all(param.grad is not None for param in model.parameters())


@on_ranks(1)
def test_losses_and_micro_batches_that_accumulation_cannot_run_are_refused(context: RankContext) -> None:
    model, scale = _model_after(), torch.ones((), requires_grad=True)
    for loss, said in ((torch.zeros(2), r"returned \(2,\): wanted a loss"), (3.0, "returned float")):
        for each in (model, StreamShard(Stack())):  # in first steps too
            with pytest.raises(ConfigError, match=said):
                each.accumulate([0, 1], lambda model, number, loss=loss: loss)
    with pytest.raises(ConfigError, match="got no micro-batches"):
        model.accumulate([], lambda model, x: model(x).sum())
    with pytest.raises(ShardingError, match="computed with gradients before the call: compute it in loss_of"):
        model.accumulate([scale * vector_batch(1, number) for number in range(2)], lambda model, x: model(x).sum())
    model.accumulate(range(2), lambda model, number: model(scale * vector_batch(1, number)).sum())
    assert scale.grad is not None and scale.grad != 0.0


@on_ranks(1)
def test_an_error_of_the_models_own_says_that_a_loop_may_run(context: RankContext) -> None:
    """Torch's for a reentrant checkpoint in a layer, for one."""
    model: Any = _model_after()
    model.layers[1].forward = functools.partial(checkpoint, model.layers[1].forward, use_reentrant=True)
    with mock.patch.object(log, "error") as told, pytest.raises(RuntimeError, match="use_reentrant"):
        _accumulate(model, [(1, 0), (1, 1)])
    assert "if a loop with loss.backward() runs" in told.call_args.args[0]
    _loop(model, [(1, 0), (1, 1)])


@on_ranks(2)
def test_different_numbers_of_micro_batches_are_refused(context: RankContext) -> None:
    model = _model_after()
    for fewest in (1, 2):  # a single one runs as a loop
        with pytest.raises(RankMismatchError, match=f"got {fewest + 1} micro-batches on one rank and {fewest} on"):
            _accumulate(model, [(1, number) for number in range(fewest + context.rank)])
        model.zero_grad()
    _assert_next_step_is_that_of_a_loop(context, model)


@on_ranks(2)
def test_different_numbers_of_losses_that_use_no_layer_on_a_rank_are_refused(context: RankContext) -> None:
    model: Any = StreamShard(TinyLM(TinyConfig(vocabulary=2048)))  # embedding and head take turns with the layers
    tokens = token_batch(0, context.rank)
    for _ in range(3):
        next_token_loss(model(tokens), tokens).backward()
    with pytest.raises(RankMismatchError, match="got 2 micro-batches on one rank and 1 on"):
        if context.rank == 0:
            next_token_loss(model(tokens), tokens).backward()
        else:
            model.accumulate(range(2), lambda *_: torch.ones((), requires_grad=True) * 2.0)


@on_ranks(4)
def test_replicas_average_once(context: RankContext) -> None:
    _check(context, _Way(Stack, {"mesh": mesh_2d(2, 2)}), is_exact=False)


@on_ranks(1, 2)
@pytest.mark.parametrize("what", ["layers", "the model"])
def test_compiled_layers_and_models_accumulate(context: RankContext, what: str) -> None:
    found = []
    let_dynamo_look()
    for run_step in (_loop, _accumulate):
        model = _model_after()
        for module in model.layers if what == "layers" else (model,):
            module.compile(backend="eager")
        for step in range(2):
            model.zero_grad()
            run_step(model, [(step, context.rank), (step, 2 + context.rank)])
        found.append(full_grads(model))
    assert_same(found[1], found[0], "gradients", EXACT if context.world_size == 1 else NEAR)


@on_ranks(1)
def test_a_parameter_without_room_for_its_gradient_is_refused(context: RankContext) -> None:
    frozen = Stack()
    frozen.layers[1].requires_grad_(False)
    model: Any = StreamShard(frozen)
    _loop(model, [(0, 0), (0, 1)])
    model.layers[1].requires_grad_(True)
    with pytest.raises(ShardingError, match="'layers.1.linear.*' was frozen when .* Freeze it after StreamShard"):
        _accumulate(model, [(1, 0), (1, 1)])
    model = _model_after()
    model.layers[1].requires_grad_(False)
    _accumulate(model, [(1, 0), (1, 1)])
    model.zero_grad()
    model.layers[1].requires_grad_(True)
    _assert_next_step_is_that_of_a_loop(context, model)


@on_ranks(2)  # one rank has a slot for each unit's gradients
def test_sums_take_the_bytes_that_the_guide_says(context: RankContext) -> None:
    """4 for each element of the largest unit, of one layer, and of the root unit; allocated once."""
    model = _model_after()
    numels = [sum(flat.layout.padded_numel for flat in unit.trained) for unit in engine_inside(model).units]
    held = [model.memory_report().held_bytes["grad slots"]]
    for step in range(2):
        _accumulate(model, [(step, 0), (step, 1)])
        held.append(model.memory_report().held_bytes["grad slots"])
        model.zero_grad()
    assert held[1] - held[0] == 4 * (max(numels[1:]) + numels[1] + numels[0])
    assert held[2] == held[1]


@on_ranks(1, 2)
@pytest.mark.parametrize("settings", [{}, {"weight_slots": "all"}, {"offload": "state"}], ids=str)
def test_late_collectives_and_copies_change_nothing(context: RankContext, settings: dict[str, Any]) -> None:
    wanted, _, _ = _trained(context, _Way(Stack), _loop)
    with simulated_device():
        found, _, _ = _trained(context, _Way(Stack, settings), _accumulate, watched=late)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


@on_ranks(2)
@pytest.mark.parametrize("settings", [{}, {"weight_slots": "all", "grad_slots": "all"}, {"offload": "state"}], ids=str)
def test_events_order_everything(context: RankContext, settings: dict[str, Any]) -> None:
    with simulated_device() as device, checking_streams(device) as checker:
        way = _Way(Stack, {"keep_main_grads": not settings, **settings})
        _trained(context, way, _accumulate, watched=checker.of)


@pytest.mark.gpu
@on_ranks(1, 2, backend="nccl")
@pytest.mark.parametrize("settings", [{}, {"weight_slots": 2}, {"offload": "state"}], ids=str)
def test_a_gpu_has_the_gradients_of_a_loop(context: RankContext, settings: dict[str, Any]) -> None:
    def loss_of(model: Any, micro_batch: tuple[int, int]) -> Tensor:
        x = vector_batch(*micro_batch).to(context.device)
        return (model(x).float() - x.cumsum(0)).square().mean() / 4

    found = []
    for run_step in (_loop, _accumulate):
        torch.manual_seed(0)
        model: Any = StreamShard(Stack().to(context.device), **settings)
        for step in range(3):
            mine = [(step, 2 * number + context.rank) for number in range(3)]
            model.zero_grad()
            losses = run_step(model, mine, loss_of)
        found.append((full_grads(model), losses))
    assert_same(found[1][0], found[0][0], "gradients", EXACT if context.world_size == 1 else NEAR)
    torch.testing.assert_close(found[1][1], [loss.detach() for loss in found[0][1]])
