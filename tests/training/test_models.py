"""Models: units given in every form, layers of unequal sizes, shared weights, recurrent layers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from streamshard import StreamShard
from tests.models import Block, Layer, Stack, TinyLM
from tests.ranks import RankContext, on_ranks
from tests.reference import Call, assert_trains_like_plain, case, engine_inside, lm_step, stack_step


def _units(model: nn.Module) -> list[str]:
    return [unit.name for unit in engine_inside(model).units[1:]]


BLOCKS = [f"blocks.{index}" for index in range(4)]
UNITS_OF: dict[str, Callable[[Any], Any]] = {
    "class": lambda model: [Block],
    "class by name": lambda model: "Block",
    "modules": lambda model: list(model.blocks),
    "names": lambda model: BLOCKS,
}


@on_ranks(2)
def test_units_can_be_given_in_every_form(context: RankContext) -> None:
    """Each form selects the four blocks. Other modules can be units as well, whatever is left is the root unit."""
    for form, units_of in UNITS_OF.items():
        with case(form):
            model: nn.Module = TinyLM()
            assert _units(StreamShard(model, units=units_of(model))) == BLOCKS
    mixed = ["head", "blocks.1", "blocks.2.attention"]
    model = assert_trains_like_plain(context, TinyLM, lm_step, units=mixed)
    assert sorted(_units(model)) == sorted(mixed)


@on_ranks(1, 2)
def test_a_model_without_repeated_layers_is_one_unit_and_warns(context: RankContext) -> None:
    """It trains right, and the user hears why it saves less memory than it could."""

    class NoLayers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 8), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.second(torch.tanh(self.first(x)))
            return out

    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        assert_trains_like_plain(context, NoLayers, stack_step)
    assert len(heard) == (context.rank == 0)
    for warning in heard:
        assert "NoLayers" in str(warning.message)
        assert "units" in str(warning.message)


def _smaller_than_ranks() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 1), *(Layer(1, 1, bias=False) for _ in range(3)), nn.LayerNorm(1))


class WeightShared(Stack):
    """Layers 0 and 3 have the same weight, layers 1 and 2 the same linear layer."""

    def __init__(self) -> None:
        super().__init__()
        layers: Any = self.layers
        layers[3].linear.weight = layers[0].linear.weight
        layers[2].linear = layers[1].linear


class RootUsesParts(nn.Module):
    """The root's forward reads parameters of its own and of modules that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((16,), 1.2))
        self.table = nn.Embedding(4, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.extras = nn.ParameterDict({"scale": nn.Parameter(torch.tensor(0.7))})
        self.list = nn.ParameterList([nn.Parameter(torch.randn(16)), nn.Parameter(torch.randn(16))])
        self.out = nn.Linear(16, 1)
        self.register_buffer("angles", torch.linspace(0.0, 1.0, 16), persistent=False)
        self.angles: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """[rows, 16] -> [rows, 1]"""
        x = x * self.gain * self.angles.cos() + self.table.weight[1]
        for layer in self.layers:
            x = layer(x) * self.extras["scale"]
        x = x + self.list[0] * self.list[1]
        return F.linear(x, self.out.weight, self.out.bias)


class Detaching(Stack):
    """Every layer's input is detached; outputs are summed. Autograd chooses the order of layers itself."""

    def forward(self, x: Tensor) -> Tensor:
        """[rows, 16] -> [rows, 1]"""
        total = torch.zeros_like(x)
        for layer in self.layers:
            x = layer(x.detach())
            total = total + x
        out: Tensor = self.head(total)
        return out


SHAPES: dict[str, Callable[[], nn.Module]] = {
    "layers smaller than the number of ranks": _smaller_than_ranks,
    "a weight of two layers": WeightShared,
    "parameters that the root reads": RootUsesParts,
    "detached inputs": Detaching,
}


@on_ranks(1, 2, 3)
def test_models_of_every_shape_train_like_plain_pytorch(context: RankContext) -> None:
    """Slots fit the largest layer; what lies outside of the layers belongs to the root unit."""
    for name, build in SHAPES.items():
        with case(name):
            assert_trains_like_plain(context, build, stack_step)


class Flat(nn.LSTM):
    """Does on the CPU what flatten_parameters() does with cuDNN: its weights become views of a buffer of their own."""

    def flatten_parameters(self) -> None:
        """See torch.nn.RNNBase."""
        weights: list[Any] = self._flat_weights
        if any(not isinstance(weight, Tensor) for weight in weights) or len(weights) != len(self._flat_weights_names):
            return
        with torch.no_grad():
            flat = torch.cat([weight.reshape(-1) for weight in weights])
            for weight, part in zip(weights, flat.split([weight.numel() for weight in weights]), strict=True):
                weight.set_(part.view(weight.shape))


class Recurrent(nn.Module):
    """A recurrent layer with a residual connection, which asks for flat weights as many models do."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.rnn = layer
        self.out = nn.Linear(16 if layer.bidirectional else 8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, 8] -> the same"""
        self.rnn.flatten_parameters()
        out, _ = self.rnn(x)
        return torch.tanh(x + self.out(out))


class Tagger(nn.Module):
    """Recurrent layers, one of them outside of the units."""

    def __init__(self, build: Callable[[], nn.RNNBase]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Recurrent(build()) for _ in range(3))
        self.last = Flat(8, 8, batch_first=True)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, 8] -> [batch, time, 1]"""
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(self.last(x)[0])
        return out


RECURRENT: dict[str, Callable[[], nn.RNNBase]] = {
    "GRU of two directions": lambda: nn.GRU(8, 8, 2, batch_first=True, bidirectional=True),
    "flat weights": lambda: Flat(8, 8, batch_first=True),
    "a weight made of others": lambda: weight_norm(nn.LSTM(8, 8, batch_first=True), "weight_hh_l0"),
}


@on_ranks(1, 2)
def test_recurrent_layers_compute_with_the_weights_of_the_step(context: RankContext) -> None:
    """Although they hold their weights in a list as well, and on GPUs lay them out for cuDNN."""

    def step(model: nn.Module, call: Call) -> Tensor:
        torch.manual_seed(100 * call.step + call.rank)
        return call.backward(model(torch.randn(3, 5, 8)).square().mean())

    for name, build in RECURRENT.items():
        with case(name):
            model: Any = assert_trains_like_plain(
                context,
                lambda build=build: Tagger(build),
                step,
                weight_slots=2,  # type: ignore[misc]
            )
            if name != "a weight made of others":  # which would be made outside of a forward
                model.to("cpu")  # resets what recurrent layers know of their weights
            step(model, Call(9, context.rank, context.world_size, 1.0))
