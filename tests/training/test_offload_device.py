"""Where code outside of the model finds it with ``offload="state"``: weights are in host memory, the model is not.

On the CPU, which plays a device with streams, these tests compare numbers. On a device of its own they also show that
no tensor of the one meets a tensor of the other.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.optim.swa_utils import get_ema_avg_fn, get_ema_multi_avg_fn
from torch.utils._python_dispatch import TorchDispatchMode

from streamshard import StreamShard
from streamshard.optim import update_parameters
from tests.integrations.models import make_model
from tests.models import DIM, Stack, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import EXACT, FP32, adamw, assert_same, built, case, engine_inside, full_grads, full_weights
from tests.training.test_offload_events import OFFLOAD, RESIDENT, device_of

META = torch.device("meta")


class Placed(Stack):
    """Asks its parameters where it is, as models of libraries do."""

    @property
    def device(self) -> torch.device:
        """Of the first parameter."""
        return next(self.parameters()).device

    def forward(self, x: Tensor) -> Tensor:
        """[rows, width] -> [rows, 1]"""
        return super().forward(x + torch.ones(DIM, device=self.device))


class Around(nn.Module):
    """A model around another one, which has a device of its own choice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Placed()
        self.device = "mine"

    def forward(self, x: Tensor) -> Tensor:
        """[rows, width] -> [rows, 1]"""
        out: Tensor = self.inner(x)
        return out


@on_ranks(1)
def test_the_device_of_a_model_is_where_it_computes(context: RankContext) -> None:
    """Its class has a property `device`. So has the class of the model inside; an attribute stays as it is."""
    with device_of(context):
        model: Any = StreamShard(built(Around), precision=FP32, **OFFLOAD)
        alone: Any = StreamShard(built(Placed), precision=FP32, **RESIDENT)
        host = engine_inside(model).host
        assert host is not None
        host.device = META  # a device that no parameter is on
        assert (model.inner.device, model.device, alone.device) == (META, "mine", context.device)
        assert next(model.parameters()).device.type == "cpu"


def _generated(context: RankContext, **settings: Any) -> dict[str, Tensor]:
    """What a model that has trained generates and computes from inputs in different places."""
    model: Any = StreamShard(make_model("llama").to(context.device), precision=FP32, **settings)
    optimizer, tokens = adamw(model), torch.arange(2, 12).view(2, 5) + context.rank
    for _ in range(2):
        model(tokens.to(model.device), labels=tokens.to(model.device)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    greedy: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    found = {
        "greedy": model.generate(tokens.to(model.device), **greedy),
        "beams": model.generate(tokens.to(model.device), num_beams=2, **greedy),
        "from nothing": model.generate(**greedy),
    }
    if context.world_size == 1:  # else NCCL would get the tokens, with or without offload
        found["from host memory"] = model.generate(tokens, **greedy)
    model.eval()
    with torch.no_grad():
        beside = tokens.to(next(model.parameters()).device)
        found["logits"] = model(beside, attention_mask=torch.ones_like(beside)).logits
        assert found["logits"].device == model.device == context.device
    return {name: each.cpu() for name, each in found.items()}


@on_ranks(1, 2, backend="of accelerator")
def test_generate_and_evaluation_work_as_without_offload(context: RankContext) -> None:
    with device_of(context):
        resident = _generated(context, **RESIDENT)
        assert_same(_generated(context, **OFFLOAD), resident, "tokens and logits", EXACT)


class Lengths(Stack):
    """Takes lengths, which torch wants in host memory."""

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """[rows, length, DIM], [rows] -> [tokens, 1]"""
        packed: Any = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return super().forward(packed.data)


@on_ranks(1, backend="of accelerator")
def test_inputs_in_host_memory_stay_there_beside_others(context: RankContext) -> None:
    x, lengths = vector_batch(0, 0, rows=4).view(2, 2, DIM).to(context.device), torch.tensor([1, 2])
    with device_of(context):
        outputs = [
            StreamShard(built(Lengths).to(context.device), precision=FP32, **settings)(x, lengths=lengths).detach()
            for settings in (RESIDENT, OFFLOAD)
        ]
    assert torch.equal(*outputs)


class _Stop(Exception):
    """Ends a forward that has begun."""


class _Moves(TorchDispatchMode):
    """Notes of each copy to META whether nobody waits for it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self.are_non_blocking: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and kwargs.get("device") == META:
            self.are_non_blocking.append(kwargs.get("non_blocking", False))
        return func(*args, **(kwargs or {}))


@on_ranks(1)
def test_the_host_does_not_wait_until_inputs_are_on_the_device(context: RankContext) -> None:
    """It would wait for all kernels of the pass before."""

    def stop(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        raise _Stop(inputs[0].device)

    with device_of(context):
        model: Any = StreamShard(built(), precision=FP32, **OFFLOAD)
        model.register_forward_pre_hook(stop)
        host = engine_inside(model).host
        assert host is not None
        host.device = META  # else a copy to the played device is none
        with _Moves() as moves, pytest.raises(_Stop, match="meta"):
            model(vector_batch(0, 0))
    assert moves.are_non_blocking == [True]


def _averaged(context: RankContext, ours: dict[str, Any], theirs: dict[str, Any], **function: Any) -> dict[str, Tensor]:
    """The average of a model that trains with `ours`, in a model with `theirs`."""
    model: Any = StreamShard(built().to(context.device), precision=FP32, **ours)
    average: Any = StreamShard(built().to(context.device).requires_grad_(False), precision=FP32, **theirs)
    optimizer = adamw(model)
    for step in range(3):
        model(vector_batch(step, context.rank).to(context.device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        update_parameters(average, model, step, **function)
    return full_weights(average)


@on_ranks(1, 2, backend="of accelerator")
def test_an_average_may_be_in_other_memory_than_its_model(context: RankContext) -> None:
    """All of it, or, by their budgets, other layers than in the model."""
    functions: list[dict[str, Any]] = [{}, {"avg_fn": get_ema_avg_fn(0.9)}, {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}]
    places = (RESIDENT, OFFLOAD, OFFLOAD | {"device_budget": "9KB"})
    with device_of(context):
        wanted = [_averaged(context, RESIDENT, RESIDENT, **function) for function in functions]
        for (number, ours), (other, theirs) in itertools.product(enumerate(places), enumerate(places)):
            kind = (number + other) % 3
            with case((ours, theirs, functions[kind])):
                assert_same(_averaged(context, ours, theirs, **functions[kind]), wanted[kind], "the average", EXACT)


_LISTS: dict[str, Any] = {
    "a factor": lambda grads: torch._foreach_mul_(grads, torch.tensor(0.5, device=grads[0].piece.ranks.streams.device)),
    "a number": lambda grads: torch._foreach_mul_(grads, 0.5),
    "norms": lambda grads: [norm + 0.0 for norm in torch._foreach_norm(grads)],
    "sums": lambda grads: torch._foreach_add_(grads, grads),
}


def _from_lists(context: RankContext, *, is_reversed: bool, **settings: Any) -> dict[str, Tensor]:
    model: Any = StreamShard(built().to(context.device), precision=FP32, **settings)
    model(vector_batch(0, context.rank).to(context.device)).square().mean().backward()
    grads = [param.grad for param in model.parameters()]
    found: dict[str, Tensor] = {}
    for name, use in _LISTS.items():
        with case((name, settings)):
            used: Any = use(grads[::-1] if is_reversed else grads) or ()
            found |= {f"{name} {number}": each.detach().cpu() for number, each in enumerate(used) if name == "norms"}
    return found | {"clipped": model.clip_grad_norm_(0.1).cpu()} | full_grads(model)


@on_ranks(1, 2, backend="of accelerator")
@pytest.mark.parametrize("is_reversed", [False, True])
def test_lists_of_gradients_may_lie_on_both_sides(context: RankContext, is_reversed: bool) -> None:
    """The first one on the device, or in host memory."""
    with device_of(context):
        wanted = _from_lists(context, is_reversed=is_reversed, **RESIDENT)
        for budget in (0, "9KB"):
            found = _from_lists(context, is_reversed=is_reversed, **OFFLOAD, device_budget=budget)
            assert_same(found, wanted, f"norms and gradients, budget {budget}", EXACT)
