"""The late step of ``offload="state"``: in which settings and with which hooks it runs, and what it costs the host."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

from streamshard import StreamShard
from streamshard.nested import map_tensors
from streamshard.optim import elementwise
from tests.models import Stack, TinyConfig, TinyLM, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import EXACT, FP32, Call, adamw, assert_same, built, full_weights, lm_step, stack_step
from tests.scenarios import BF16, sharded
from tests.simulated import simulated_device

OFFLOAD: dict[str, Any] = {"offload": "state"}


@on_ranks(1)
def test_loaded_moments_lie_in_pinned_memory_from_the_next_step_on(context: RankContext) -> None:
    """Copies from other memory would block the host in each step."""
    with simulated_device() as device:
        model: Any = sharded("clipping", BF16, **OFFLOAD)
        optimizer = adamw(model)
        for step in range(2):
            stack_step(model, Call(step, 0, 1, 1.0))
            optimizer.step()
            state = optimizer.state_dict()
            moments = [own[key] for own in state["state"].values() for key in ("exp_avg", "exp_avg_sq")]
            assert moments and all(map(device.is_pinned, moments))
            optimizer.load_state_dict(map_tensors(state, torch.clone))


class _TwoPaths(Stack):
    """Each of two outputs needs its own layers."""

    def forward(self, x: Any) -> Any:
        """[rows, DIM] -> twice [rows, DIM]"""
        first, second, third, fourth = self.layers
        return fourth(third(x)), second(first(x))


@on_ranks(1, 2)
def test_a_backward_after_a_step_leaves_it_the_gradients_of_other_layers(context: RankContext) -> None:
    """Every backward reduces all layers, and writes zeros to the main grads of those that it does not need."""
    found = []
    with simulated_device():
        for settings in ({"weight_slots": 2}, OFFLOAD):
            model: Any = StreamShard(built(_TwoPaths), precision=FP32, **settings)
            optimizer = adamw(model)
            for step in range(3):
                for loss in [output.square().mean() for output in model(vector_batch(step, context.rank))]:
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
            found.append(full_weights(model))
    assert_same(found[1], found[0], "weights", EXACT)


class _Operators(TorchDispatchMode):
    """Counts operators."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def _operators(depth: int, settings: dict[str, Any]) -> int:
    """Of one step of a model with so many layers."""
    model: Any = StreamShard(TinyLM(TinyConfig(depth=depth)), precision=BF16, **settings)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for step in range(3):  # the first one makes the state, the second one carries it out
        with _Operators() as operators:
            lm_step(model, Call(step, 0, 1, 1.0))
            optimizer.step()
            optimizer.zero_grad()
    return operators.count


@on_ranks(1)
def test_offload_adds_few_operators_for_each_layer(context: RankContext) -> None:
    """Copies are of whole flat parameters: the 12 parameters of a layer, one by one, would need 150 of them."""
    with simulated_device():
        resident, offloaded = (
            (_operators(7, settings) - _operators(5, settings)) // 2 for settings in ({"weight_slots": 2}, OFFLOAD)
        )
    assert offloaded - resident < 110


def _torch_settings() -> tuple[Any, ...]:
    is_autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    return is_autocast, torch.is_inference_mode_enabled(), torch.get_default_dtype(), torch.get_default_device()


class _Noting(torch.optim.AdamW):
    """Notes in which settings it steps parameters."""

    seen: ClassVar[list[tuple[Any, ...]]] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """See `torch.optim.AdamW`."""
        self.seen += [_torch_settings() for group in self.param_groups if group["params"]]
        return super().step(closure)


@contextlib.contextmanager
def _in_double_precision() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


_CONTEXTS: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", torch.float16),
    "inference mode": torch.inference_mode,
    "default dtype": _in_double_precision,
    "default device": lambda: torch.device("cpu", 0),
}


@on_ranks(1)
@pytest.mark.parametrize("name", _CONTEXTS)
def test_a_late_step_runs_in_the_settings_of_its_call(context: RankContext, name: str) -> None:
    """Neither in those of the next forward nor in those of a reader."""
    elementwise(_Noting)
    nothing = contextlib.nullcontext
    with simulated_device():
        model: Any = StreamShard(built(), precision=FP32, **OFFLOAD)
        optimizer = _Noting(model.parameters(), lr=0.01)
        for at_call, afterwards in ((nothing, nothing), (nothing, _CONTEXTS[name]), (_CONTEXTS[name], nothing)):
            for read in (lambda: model(vector_batch(0, 0)), lambda: next(model.parameters()).norm()):
                optimizer.zero_grad()
                stack_step(model, Call(0, 0, 1, 1.0))
                _Noting.seen.clear()
                with at_call():
                    wanted = _torch_settings()
                    optimizer.step()
                with afterwards():
                    read()
                assert _Noting.seen and {*_Noting.seen} == {wanted}
        for state in optimizer.state.values():
            state["step"].add_(1)  # no inference tensor


class _Extended(torch.optim.AdamW):
    """Calls the step of a class that torch has put hooks around."""

    def step(self, closure: Any = None) -> Any:
        """See `torch.optim.AdamW`."""
        return super().step(closure)


@on_ranks(1)
def test_hooks_run_as_often_as_without_offload(context: RankContext) -> None:
    """An optimizer's own hooks and those of all optimizers, around the step of a class and of the class it extends."""
    adamw(built())
    elementwise(_Extended)
    counts = []
    with simulated_device():
        for settings in ({"weight_slots": 2}, OFFLOAD):
            model: Any = StreamShard(built(), precision=FP32, **settings)
            optimizer, seen = _Extended(model.parameters()), []
            optimizer.register_step_post_hook(lambda *_, seen=seen: seen.append("own"))
            handle = register_optimizer_step_post_hook(lambda *_, seen=seen: seen.append("all"))
            stack_step(model, Call(0, 0, 1, 1.0))
            optimizer.step()
            stack_step(model, Call(1, 0, 1, 1.0))
            handle.remove()
            counts.append(seen)
    assert counts[0] == counts[1] == ["own", "all"] * 2
