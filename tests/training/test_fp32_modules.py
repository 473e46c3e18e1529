"""Parts of a half-precision model that compute in fp32: listed ones, a class's own, norms with statistics."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from streamshard import ConfigError, Precision, StreamShard
from tests import families
from tests.models import DIM, NormStack, Stack, token_batch, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import Call, Tolerance, assert_same, built, engine_inside, full_grads, sharded_model, stack_step
from tests.scenarios import BF16

HALF = torch.bfloat16
NEAR = Tolerance(5e-2, 5e-3)  # bf16 in most layers


class Normed(nn.Module):
    """A residual layer with a norm, and a gate of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.linear = nn.Linear(DIM, DIM)
        self.gate = nn.Linear(DIM, DIM, bias=False)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        """[rows, DIM] -> [rows, DIM]"""
        y = self.norm(x)
        self.seen = [x.dtype, y.dtype, self.norm.weight.dtype, self.linear.weight.dtype, self.gate.weight.dtype]
        return x + torch.tanh(self.linear(y)) * torch.sigmoid(self.gate(y))


class Gated(Stack):
    """Of such layers."""

    def __init__(self) -> None:
        super().__init__((DIM,) * 5)
        self.layers = nn.ModuleList(Normed() for _ in range(4))


def in_fp32(model: nn.Module) -> set[str]:
    """Parameters that the layers see in fp32."""
    units = engine_inside(model).units
    pairs = [(param, param.unsharded) for unit in units for param in unit.params]
    return {param.name for param, view in pairs if view.dtype is torch.float32}


LISTED: list[tuple[Any, list[str]]] = [
    (["norm"], ["norm"]),
    (("gate", nn.LayerNorm), ["gate", "norm"]),
    (["layers.1.gate"], ["layers.1.gate"]),
    (["head"], ["head"]),
]


@on_ranks(2)
def test_listed_modules_compute_in_fp32(context: RankContext) -> None:
    """By whole words of names, of modules and parameters, and by class. They train."""
    for entries, parts in LISTED:
        model = StreamShard(Gated(), precision=Precision(fp32_modules=entries))
        assert in_fp32(model) == {name for name, _ in model.named_parameters() if any(part in name for part in parts)}
        stack_step(model, Call(0, context.rank, 2, 1.0))
    for entry, said in (("nor", "'nor'"), ("layers.9", "'layers.9'"), (nn.BatchNorm1d, "of class BatchNorm1d")):
        with pytest.raises(ConfigError, match=f"Gated has no module or parameter {said}"):
            StreamShard(Gated(), precision=Precision(fp32_modules=[entry]))
    for wrong in ("norm", [3], [""], nn.LayerNorm):
        with pytest.raises(ConfigError, match="fp32_modules=.*: wanted a list or tuple of names and of module classes"):
            Precision(fp32_modules=wrong)  # type: ignore[arg-type]


@on_ranks(1, 2)
def test_a_listed_module_takes_fp32_and_returns_the_dtype_of_its_input(context: RankContext) -> None:
    """Inside a layer nothing else notices. Gradients are near those of fp32."""
    precision = Precision(fp32_modules=[nn.LayerNorm, "gate"])
    plain: Any = built(Gated)
    model: Any = sharded_model(Gated, precision=precision)
    single = sharded_model(Gated)
    inputs = vector_batch(0, context.rank)
    found = model(inputs)
    with torch.no_grad():
        x = inputs.to(HALF)
        plain.to(HALF)
        for layer in plain.layers:
            y = layer.norm.float()(x.float()).to(HALF)
            x = x + torch.tanh(layer.linear(y)) * torch.sigmoid(layer.gate.float()(y.float()).to(HALF))
        wanted = plain.head(x)
    assert_same({"outputs": found}, {"outputs": wanted}, "forward", Tolerance(1e-2, 1e-2))
    assert all(layer.seen == [HALF, HALF, torch.float32, HALF, torch.float32] for layer in model.layers)
    found.square().mean().backward()
    single(inputs).square().mean().backward()
    assert_same(full_grads(model), full_grads(single), "gradients", NEAR)


@on_ranks(1, 2)
def test_batch_norm_trains_in_a_half_precision_model(context: RankContext) -> None:
    """Its weights and statistics are fp32 without being listed."""
    plain: Any = built(NormStack)
    model: Any = sharded_model(NormStack, precision=BF16)
    assert in_fp32(model) == {name for name, _ in model.named_parameters() if name.startswith("norms")}
    call = Call(0, context.rank, context.world_size, 1.0)
    stack_step(model, call)
    stack_step(plain, call)
    means = {name: buffer for name, buffer in model.named_buffers() if "running_mean" in name}
    assert {buffer.dtype for buffer in means.values()} == {torch.float32}
    assert_same(means, {name: dict(plain.named_buffers())[name] for name in means}, "statistics", NEAR)


@on_ranks(2)
def test_modules_that_a_transformers_class_keeps_in_fp32_are_kept(context: RankContext) -> None:
    """T5's output projections in fp16, not in bf16; its code casts."""
    for dtype in (torch.float16, HALF):
        model: Any = StreamShard(families.t5(), precision=Precision(param_dtype=dtype))
        kept = {name for name, _ in model.named_parameters() if ".wo." in name}
        assert len(kept) == 4
        assert in_fp32(model) == (kept if dtype is torch.float16 else set())
        tokens = token_batch(0, context.rank)
        model(input_ids=tokens, decoder_input_ids=tokens).logits.float().square().mean().backward()
        assert all(param.grad is not None for param in model.parameters())


@on_ranks(2)
def test_gradients_of_several_dtypes_are_copied_by_one_call_for_each(context: RankContext) -> None:
    """On a device, one call for mixed dtypes would launch a kernel for each tensor."""
    model = StreamShard(Gated(), precision=Precision(fp32_modules=["norm"]))
    copy, calls = torch._foreach_copy_, []

    def noting(places: list[Tensor], values: list[Tensor]) -> None:
        calls.append({(place.dtype, value.dtype) for place, value in zip(places, values, strict=True)})
        copy(places, values)

    with mock.patch.object(torch, "_foreach_copy_", noting):
        stack_step(model, Call(0, context.rank, context.world_size, 1.0))
    in_bf16, in_fp32 = {(HALF, HALF)}, {(torch.float32, torch.float32)}
    assert (calls.count(in_bf16), calls.count(in_fp32), len(calls)) == (5, 4, 9)  # four layers, and the head
