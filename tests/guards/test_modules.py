"""Every change of a model's modules is listed, and right for recurrent layers; guards change no number."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from streamshard import Precision, StreamShard, register_forward_method
from streamshard.core import backward as backward_module
from streamshard.core import edge, forward
from streamshard.guards import sharded_tensor
from streamshard.guards.loop import Members
from streamshard.guards.modules import HANDLE
from streamshard.guards.weights import WeightGuard
from streamshard.planning.structure import modules_of
from streamshard.torch_private import AsTensors
from tests.compare import EXACT, assert_same, full_weights
from tests.faults import case
from tests.models import Stack, TinyLM
from tests.ranks import RankContext, on_ranks
from tests.reference import Call, adamw, assert_trains_like_plain, lm_step, sharded_model, train_stack
from tests.simulated import simulated_device

_HOOKS = ("_load_state_dict_pre_hooks", "_state_dict_pre_hooks")


def _state_of(model: nn.Module) -> dict[tuple[str, str], Any]:
    """By name and key, each module's class and entries, and the number of its hooks."""
    state: dict[tuple[str, str], Any] = {}
    for name, module in modules_of(model):
        state[name, "class"] = type(module)
        state.update({(name, key): value for key, value in vars(module).items()})
        state[name, "hook"] = sum(len(state.pop((name, hooks))) for hooks in _HOOKS)
    return state


class Flat(nn.LSTM):
    """Does on the CPU what flatten_parameters() does with cuDNN: its weights become views of a buffer of their own."""

    def flatten_parameters(self) -> None:
        weights: list[Any] = self._flat_weights
        if any(not isinstance(weight, Tensor) for weight in weights) or len(weights) != len(self._flat_weights_names):
            return
        with torch.no_grad():
            flat = torch.cat([weight.reshape(-1) for weight in weights])
            for weight, part in zip(weights, flat.split([weight.numel() for weight in weights]), strict=True):
                weight.set_(part.view(weight.shape))


class Recurrent(nn.Module):
    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.rnn = layer

    def forward(self, x: Tensor) -> Tensor:
        self.rnn.flatten_parameters()
        return torch.tanh(x + self.rnn(x)[0])


def _recurrent() -> nn.Module:
    return nn.Sequential(*(Recurrent(nn.LSTM(8, 8)) for _ in range(3)))


@on_ranks(2)
@pytest.mark.parametrize(
    ("build", "more"),
    [(Stack, set()), (TinyLM, {"forward", "run_blocks"}), (_recurrent, {"flatten_parameters", "_flat_weight_refs"})],
)
def test_modules_change_in_a_few_places(context: RankContext, build: Callable[[], nn.Module], more: set[str]) -> None:
    """Classes, hooks, the dict of parameters, and methods that compute; of RNNs lists of weights too."""
    plain = build()
    before = _state_of(plain)
    model = StreamShard(plain, precision=Precision(fp32_modules=["norm"] if build is TinyLM else []))
    if build is TinyLM:
        register_forward_method(model, "run_blocks")
    after, missing = _state_of(model), object()
    changed = {place for place, value in after.items() if before.get(place, missing) is not value}
    assert {key for _, key in changed} == {"class", "hook", "_parameters", HANDLE} | more
    assert before.keys() <= after.keys()


RECURRENT: dict[str, Callable[[], nn.RNNBase]] = {
    "flat weights": lambda: Flat(8, 8, batch_first=True),
    "a weight made of others": lambda: weight_norm(nn.LSTM(8, 8, batch_first=True), "weight_hh_l0"),
}


@on_ranks(1, 2)
def test_recurrent_layers_compute_with_the_weights_of_the_step(context: RankContext) -> None:
    """Although they hold their weights in a list as well, and on GPUs lay them out for cuDNN."""

    def step(model: nn.Module, call: Call) -> Tensor:
        torch.manual_seed(100 * call.step + call.rank)
        return call.backward(model(torch.randn(3, 5, 8)).square().mean())

    for name, layer in RECURRENT.items():

        def build(layer: Callable[[], nn.RNNBase] = layer) -> nn.Module:
            last = Flat(8, 8, batch_first=True)  # outside of the units
            return nn.Sequential(*(Recurrent(layer()) for _ in range(3)), Recurrent(last), nn.Linear(8, 1))

        with case(name):
            units = ["0", "1", "2"]
            model: Any = assert_trains_like_plain(context, build, step, units=units, weight_slots=2)
            if name != "a weight made of others":  # which would be made outside of a forward
                model.to("cpu")  # resets what recurrent layers know of their weights
            step(model, context.call(9))


def _nothing(*_: Any, **__: Any) -> None:
    """Instead of a guard."""


def _as_tensor(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Pieces are ordinary tensors of this rank's elements."""
    with AsTensors():
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def without_guards() -> Iterator[None]:
    """Inside, nothing is refused: absent weights, writes, exchanged modules, operations on pieces."""
    with contextlib.ExitStack() as stack:
        for owner, names in (
            (WeightGuard, ["check", "set_classes", "set_present", "end_use", "end_pass", "mark_gone", "remember"]),
            (Members, ["check"]),
            (forward, ["refuse_transforms"]),
            (backward_module, ["refuse_changed"]),
            (edge, ["refuse_absent"]),
        ):
            for name in names:
                stack.enter_context(mock.patch.object(owner, name, _nothing))
        closed_list = classmethod(_as_tensor)
        stack.enter_context(mock.patch.object(sharded_tensor.ShardedTensor, "__torch_function__", closed_list))
        yield


def _trained(context: RankContext, **settings: Any) -> dict[str, Tensor]:
    """Losses, norms and weights of three clipped steps, the second one of two micro-batches."""
    model, found = sharded_model(TinyLM, **settings), dict[str, Tensor]()

    def step(model: Any, call: Call) -> None:
        if call.step == 1:
            with model.no_sync():
                lm_step(model, context.call(7))
        found[f"loss {call.step}"] = lm_step(model, call)
        found[f"norm {call.step}"] = model.clip_grad_norm_(1.0).clone()

    train_stack(model, adamw(model), context, step=step)
    return found | full_weights(model)


@on_ranks()
@pytest.mark.parametrize(
    ("world_size", "precision", "slots"), [(1, "bf16", {}), (2, "fp32", {}), (2, "bf16", {"offload": "state"})]
)
def test_without_guards_all_numbers_are_the_same(context: RankContext, precision: str, slots: dict[str, Any]) -> None:
    with simulated_device() if slots else contextlib.nullcontext():
        wanted = _trained(context, precision=precision, **slots)
        with without_guards():
            assert_same(_trained(context, precision=precision, **slots), wanted, "numbers", EXACT)
