"""Models: recurrent layers, small layers put together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from streamshard import Precision, StreamShard
from streamshard.errors import ConfigError, RankMismatchError
from tests.models import Stack
from tests.ranks import RankContext, on_ranks
from tests.reference import FP32, Call, assert_trains_like_plain, case, counted_collectives, engine_inside, stack_step
from tests.scenarios import BF16, RoutedStack


def _units(model: nn.Module) -> list[str]:
    return [unit.name for unit in engine_inside(model).units[1:]]


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


# -- small layers put together into one unit ---------------------------------------------------------------------------

LAYER_BYTES = 4 * (16 * 16 + 16)  # of a `Layer` in fp32
PAIRS = 2 * LAYER_BYTES


def _layers(size: int | str, precision: Precision = FP32) -> list[str]:
    return _units(StreamShard(Stack((16,) * 8), precision=precision, min_unit_size=size))


@on_ranks(2)
def test_the_size_is_in_bytes_of_param_dtype(context: RankContext) -> None:
    """A number or text, the same on all ranks. A unit is called by its first layer and its last."""
    pairs = ["layers.0 .. layers.1", "layers.2 .. layers.3", "layers.4 .. layers.5", "layers.6"]
    assert _layers(0) == _layers(LAYER_BYTES) == _layers("1KiB") == [f"layers.{k}" for k in range(7)]
    assert _layers(LAYER_BYTES + 1) == _layers(PAIRS) == _layers("2KB") == _layers(LAYER_BYTES, BF16) == pairs
    assert _layers("1GiB") == ["layers.0 .. layers.6"]
    for size in (-1, "small", 1.5, True, None):
        with pytest.raises(ConfigError, match=f"min_unit_size={size!r}: wanted 0 or more bytes, or text"):
            _layers(size)  # type: ignore[arg-type]
    with pytest.raises(RankMismatchError, match="different settings: rank 0 has min_unit_size="):
        _layers(context.rank)


@on_ranks(2)
def test_tiny_layers_do_not_pay_a_collective_each(context: RankContext) -> None:
    """A unit is gathered twice, but for the two that stay at the turn, and reduced once, in whatever order it runs."""
    for order in ([1, 0, 3, 2, 5, 4, 7, 6], [0, 1, 0, 1, 2, 3, 4, 4, 6]):
        model: Any = StreamShard(RoutedStack(8), precision=FP32, min_unit_size=PAIRS)
        for number in range(3):
            model.route = order if number == 2 else range(8)
            with counted_collectives(model) as counts:
                stack_step(model, context.call(number))
        assert counts["all_gather"] == 2 * 4 - 2 + 1 + 1, order  # the root unit, the flags
        assert counts["reduce_scatter"] == 4 + 1, order
