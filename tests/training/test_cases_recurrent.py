"""Recurrent layers: they hold their weights in a list as well, and on GPUs lay them out for cuDNN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from streamshard import StreamShard
from tests.ranks import RankContext, on_ranks
from tests.reference import FP32, Call, assert_trains_like_plain, piece_of

DIM = 8


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

    def __init__(self, layer: nn.RNNBase, *, flattens: bool = False) -> None:
        super().__init__()
        self.rnn = layer
        self.flattens = flattens
        self.out = nn.Linear(2 * DIM if layer.bidirectional else DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, DIM] -> the same"""
        if self.flattens:
            self.rnn.flatten_parameters()
        out, _ = self.rnn(x)
        return torch.tanh(x + self.out(out))


class Tagger(nn.Module):
    """Recurrent layers, one of them outside of the units."""

    def __init__(self, build: Callable[[], nn.Module], last: nn.RNNBase) -> None:
        super().__init__()
        self.layers = nn.ModuleList(build() for _ in range(3))
        self.last = last
        self.head = nn.Linear(DIM, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, DIM] -> [batch, time, 1]"""
        for layer in self.layers:
            x = layer(x)
            x = x[0] if isinstance(x, tuple) else x
        out: Tensor = self.head(self.last(x)[0])
        return out


def _step(model: nn.Module, call: Call) -> Tensor:
    torch.manual_seed(100 * call.step + call.rank)
    return call.backward(model(torch.randn(3, 5, DIM)).square().mean())


KINDS: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: Recurrent(nn.LSTM(DIM, DIM, batch_first=True)),
    "two directions, two layers": lambda: Recurrent(nn.LSTM(DIM, DIM, 2, batch_first=True, bidirectional=True)),
    "GRU without bias": lambda: Recurrent(nn.GRU(DIM, DIM, batch_first=True, bias=False)),
    "RNN": lambda: Recurrent(nn.RNN(DIM, DIM, batch_first=True)),
    "a unit itself": lambda: nn.LSTM(DIM, DIM, batch_first=True),
    "flattens": lambda: Recurrent(Flat(DIM, DIM, batch_first=True)),
    "is told to": lambda: Recurrent(Flat(DIM, DIM, batch_first=True), flattens=True),
    "a unit that flattens": lambda: Flat(DIM, DIM, batch_first=True),
}


@on_ranks(1, 2)
@pytest.mark.parametrize("kind", list(KINDS))
def test_recurrent_layers_compute_with_the_weights_of_the_step(context: RankContext, kind: str) -> None:
    """Wherever cuDNN would have put them."""
    assert_trains_like_plain(
        context, lambda: Tagger(KINDS[kind], Flat(DIM, DIM, batch_first=True)), _step, weight_slots=2
    )


@on_ranks(2)
def test_moving_a_model_to_where_it_is_leaves_its_weights_where_they_are(context: RankContext) -> None:
    """Which resets what recurrent layers know of them."""
    torch.manual_seed(3)
    model: Any = StreamShard(Tagger(KINDS["is told to"], Flat(DIM, DIM, batch_first=True)), precision=FP32)
    before = [piece_of(param).data_ptr() for param in model.parameters()]
    _step(model, Call(0, context.rank, 2, 1.0))
    model.to("cpu")
    model.last.flatten_parameters()
    assert [piece_of(param).data_ptr() for param in model.parameters()] == before
    _step(model, Call(1, context.rank, 2, 1.0))
