"""Frozen is cheap: what does not train is kept and gathered in the dtype that it came in, and never reduced."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from streamshard import StreamShard, load_checkpoint, save_checkpoint
from streamshard.comm.streams import Collective, Observer, StreamName
from streamshard.errors import GradientError, ShardingError
from streamshard.inspect import engine_inside
from streamshard.inspect.adversary import make_adversarial
from streamshard.inspect.races import detect_races
from tests.models import DIM, Adapter, Stack, TinyLM, vector_batch
from tests.ranks import RankContext, RankPool, on_ranks
from tests.reference import (
    EXACT,
    Call,
    assert_same,
    assert_trains_like_ddp,
    assert_trains_like_plain,
    full_weights,
    lm_step,
    stack_step,
)
from tests.scenarios import BF16, PRECISIONS, over_sockets

HALF = torch.bfloat16
ONE_EACH: dict[str, Any] = {"weight_slots": "all", "grad_slots": "all"}
SETTINGS: dict[str, dict[str, Any]] = {
    "ZeRO-3": {},
    "ZeRO-2": {"weight_slots": "all"},
    "ZeRO-1": ONE_EACH,
    "pairs": {"min_unit_size": 3000},
    "blocks": {"align_pieces_to": 24},
    "padded": {"pad_units_to": 256},
}
WAYS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "shared memory": contextlib.nullcontext,
    "sockets": over_sockets,
}


def adapted(dtype: torch.dtype = HALF) -> nn.Module:
    """Layers of which only adapters train, the rest of them, and the head, in `dtype`."""
    model = Stack()
    layers: Any = model.layers
    for layer in layers:
        layer.linear = Adapter(layer.linear)
    model.head.requires_grad_(False)
    for param in model.parameters():
        if not param.requires_grad:
            param.data = param.to(dtype)
    return model


def trainable_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Of what needs gradients when it is made."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-3)


# -- the same numbers ---------------------------------------------------------------------------------------------


def partly_frozen() -> nn.Module:
    """A transformer with units that train, that do not, and that do in part."""
    model = TinyLM()
    names = ("blocks.0.", "blocks.1.attention", "blocks.2.up.bias", "norm", "embedding")
    for name, param in model.named_parameters():
        param.requires_grad_(not name.startswith(names))
    return model


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_model_that_is_frozen_in_part_trains_like_plain_pytorch(context: RankContext, setting: str) -> None:
    """At every position of the dial, in units of several layers, with pieces of other shapes."""
    assert_trains_like_plain(context, partly_frozen, lm_step, **SETTINGS[setting])


@on_ranks(2)
@pytest.mark.parametrize("way", WAYS)
def test_a_model_that_is_frozen_in_part_trains_like_ddp(context: RankContext, way: str) -> None:
    """Through shared memory and over sockets."""
    with WAYS[way]():
        assert_trains_like_ddp(context, partly_frozen, lm_step)


@on_ranks(1, 2)
@pytest.mark.parametrize("precision", ["bf16", "16-bit wire", "16-bit"])
@pytest.mark.parametrize("setting", ["ZeRO-3", "ZeRO-1"])
def test_frozen_weights_are_computed_with_as_if_they_were_kept_in_fp32(
    context: RankContext, setting: str, precision: str
) -> None:
    """To the bit, against the same model whose base is frozen after it was sharded, and in fp32 main weights."""
    found = []
    for frozen_first in (True, False):
        torch.manual_seed(3)
        model = adapted()
        trains = [param.requires_grad for param in model.parameters()]
        model.requires_grad_(True) if not frozen_first else None
        model = StreamShard(model, precision=PRECISIONS[precision], **SETTINGS[setting])
        for param, is_trained in zip(model.parameters(), trains, strict=True):
            param.requires_grad_(is_trained)
        optimizer = trainable_adamw(model)
        with make_adversarial(model), detect_races(model) as races:
            for number in range(3):
                stack_step(model, Call(number, context.rank, context.world_size, 1.0))
                optimizer.step()
                optimizer.zero_grad()
        assert races.accesses > 20
        found.append(full_weights(model))
    assert_same(*found, "weights", EXACT)


@on_ranks(2)
@pytest.mark.parametrize("slots", [{}, ONE_EACH], ids=["ZeRO-3", "ZeRO-1"])
def test_gradients_of_adapters_accumulate(context: RankContext, slots: dict[str, Any]) -> None:
    """Inside `no_sync`, beside frozen weights."""

    def step(model: Any, call: Call) -> Tensor:
        with model.no_sync() if isinstance(model, StreamShard) else contextlib.nullcontext():
            stack_step(model, call._replace(step=2 * call.step))
        return stack_step(model, call._replace(step=2 * call.step + 1))

    build = lambda: adapted(torch.float32)  # noqa: E731  # torch adds up no tensors of two dtypes
    assert_trains_like_plain(context, build, step, optimizer=trainable_adamw, **slots)


# -- what it costs ------------------------------------------------------------------------------------------------


class _Bytes(Observer):
    """How many are read by collectives, by kind."""

    def __init__(self) -> None:
        self.sent = dict.fromkeys(Collective, 0)

    def on_collective(
        self,
        stream: StreamName,
        collective: Collective,
        tag: int | None,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
    ) -> None:
        self.sent[collective] += sum(tensor.nbytes for tensor in reads)


def _padded(numels: Sequence[int], element_bytes: int, world_size: int) -> int:
    """Elements of a segment: starts aligned to 16 bytes, padded to as many aligned shards as there are ranks."""
    align = 16 // element_bytes
    end = 0
    for numel in numels:
        end = -(-end // align) * align + numel
    return -(-end // (align * world_size)) * align * world_size


@on_ranks(2)
@pytest.mark.parametrize("way", WAYS)
def test_what_is_reduced_and_held_is_what_trains(context: RankContext, way: str) -> None:
    """Bytes of a step and of the report, against arithmetic: 2/N for a frozen parameter, and nothing else."""
    with WAYS[way]():
        model: Any = StreamShard(adapted(), precision=BF16)
    engine = engine_inside(model)
    optimizer = trainable_adamw(model)
    stack_step(model, Call(0, context.rank, 2, 1.0))
    trained = _padded([2 * DIM, 2 * DIM], 2, 2)  # of each of four layers
    frozen = _padded([DIM * DIM, DIM], 2, 2)
    head = _padded([DIM, 1], 2, 2)
    counted = _Bytes()
    with engine.streams.observed_by(counted):
        stack_step(model, Call(1, context.rank, 2, 1.0))
    assert counted.sent[Collective.REDUCE_SCATTER] == 4 * 4 * trained
    optimizer.step()
    report = model.memory_report()
    flags = 3 * len(list(model.parameters()))
    slots = 2 * (2 * (trained + frozen)) + 2 * head
    assert dict(report.held_bytes) == dict(report.formula_bytes)
    assert {name: size for name, size in report.held_bytes.items() if name != "scratch"} == {
        "main weights": 4 * 4 * trained // 2,
        "main grads": 4 * 4 * trained // 2,
        "frozen weights": 2 * (4 * frozen + head) // 2,
        "compute shards": 2 * 4 * trained // 2,
        "weight slots": slots,
        "grad slots": 2 * 4 * trained,
        "flags": flags,
        "optimizer rounds": 0,
    }
    assert report.held_bytes["scratch"] == (2 * 4 * trained // 2 if way == "sockets" else 0)
    held = sum(value.nbytes for state in optimizer.state.values() for value in state.values() if value.ndim)
    assert held <= report.adam_bytes == 8 * 4 * trained // 2


@on_ranks(2)
def test_a_frozen_weight_that_came_in_fp32_loses_nothing(context: RankContext) -> None:
    """It is kept as it came, and cast for layers that compute in half precision."""
    torch.manual_seed(3)
    model: Any = adapted(torch.float32)
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    model = StreamShard(model, precision=BF16)
    stack_step(model, Call(0, context.rank, 2, 1.0))
    assert_same(full_weights(model), wanted, "weights", EXACT)
    report = model.memory_report()
    assert report.held_bytes["frozen weights"] == 4 * sum(
        segment.layout.shard_numel for segment in engine_inside(model).segments if not segment.kind.trains
    )


@on_ranks(1, 2)
def test_the_budget_knows_that_what_is_frozen_has_no_moments(context: RankContext) -> None:
    """What fits is more than of a model that trains as a whole."""
    sizes = []
    for build in (adapted, lambda: adapted().requires_grad_(True)):
        model: Any = StreamShard(build(), precision=BF16, memory_budget="1GiB")
        sizes.append(float(model.memory_report().slots.split(":")[1].split()[0]))
        report = model.memory_report()
        total = report.total_bytes + report.adam_bytes
        assert sizes[-1] == pytest.approx(total / 2**20, abs=0.01)
    assert sizes[0] < sizes[1]


# -- what others see ----------------------------------------------------------------------------------------------


@on_ranks(1, 2)
def test_frozen_parameters_are_of_the_dtype_that_they_are_kept_in(context: RankContext) -> None:
    """Wherever they are seen; values are what they were."""
    torch.manual_seed(3)
    model: Any = adapted()
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    dtypes = {name: param.dtype for name, param in model.named_parameters()}
    model = StreamShard(model, precision=BF16)
    assert {name: param.dtype for name, param in model.named_parameters()} == dtypes
    stack_step(model, Call(0, context.rank, context.world_size, 1.0))
    state = full_weights(model)
    assert {name: value.dtype for name, value in state.items()} == dtypes
    assert_same(state, wanted, "weights", EXACT)
    with model.summon_full_params(writeback=True):
        for name, param in model.named_parameters():
            assert param.dtype is dtypes[name]
            assert torch.equal(param, wanted[name])
            if not param.requires_grad:
                param.data.mul_(2)
    doubled = {name: value * (2 if dtypes[name] is HALF else 1) for name, value in wanted.items()}
    assert_same(full_weights(model), doubled, "weights after writing", EXACT)
    model.load_state_dict(wanted)
    model.check_weights()
    assert_same(full_weights(model), wanted, "weights after loading", EXACT)


@on_ranks(2)
@pytest.mark.parametrize("slots", [{}, {"weight_slots": "all"}], ids=["ZeRO-3", "ZeRO-2"])
def test_a_frozen_weight_that_is_changed_between_steps_is_computed_with(
    context: RankContext, slots: dict[str, Any]
) -> None:
    """What is gathered is the parameter's own memory: nobody reads it any more when a forward is over."""
    torch.manual_seed(3)
    model: Any = StreamShard(adapted(), precision=BF16, **slots)
    inputs = vector_batch(0, context.rank).to(HALF)
    plain: Any = None
    with make_adversarial(model), detect_races(model):
        for number in range(3):
            with torch.no_grad():
                for name, param in model.named_parameters():
                    if name.endswith("base.weight"):
                        param.mul_(0.5)
            weights = full_weights(model)
            plain = adapted()
            plain.load_state_dict(weights)
            found = model(inputs) if number < 2 else model(inputs).detach()
            with torch.no_grad():
                wanted = plain.to(HALF)(inputs)
            assert_same({"outputs": found.detach()}, {"outputs": wanted}, f"step {number}", EXACT)
            if number < 2:
                found.sum().backward()
                model.zero_grad()


@on_ranks(2)
def test_a_frozen_weight_can_be_changed_as_soon_as_a_forward_is_over(context: RankContext) -> None:
    """A rank that is ahead does not change what the other has still to read."""
    torch.manual_seed(3)
    plain: Any = adapted().to(HALF)
    torch.manual_seed(3)
    model: Any = StreamShard(adapted(), precision=BF16)
    inputs = vector_batch(0, context.rank).to(HALF)
    with torch.no_grad():
        model(inputs)  # behind the first one ranks talk about what forwards have changed
    if context.rank:
        model.layers[1].register_forward_pre_hook(lambda *_: time.sleep(0.3))
    with torch.no_grad():
        found = model(inputs)
        for layer in model.layers:
            layer.linear.base.weight.mul_(3)
        assert_same({"outputs": found}, {"outputs": plain(inputs)}, "before the change", EXACT)
        for layer in plain.layers:
            layer.linear.base.weight.mul_(3)
        assert_same({"outputs": model(inputs)}, {"outputs": plain(inputs)}, "behind the change", EXACT)


def _run(seed: int) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = StreamShard(adapted(), precision=BF16)
    return model, trainable_adamw(model)


def _save_a_run(context: RankContext, path: Path) -> dict[str, Tensor]:
    model, optimizer = _run(1)
    for number in range(2):
        stack_step(model, Call(number, context.rank, context.world_size, 1.0))
        optimizer.step()
        optimizer.zero_grad()
    save_checkpoint(path, model, optimizer)
    return full_weights(model)


def _load_a_run(context: RankContext, path: Path, wanted: dict[str, Tensor], *, trains: bool) -> None:
    torch.manual_seed(2)
    model: Any = adapted()
    if trains:
        model.requires_grad_(True)
    model = StreamShard(model, precision=BF16)
    optimizer = trainable_adamw(model)
    load_checkpoint(path, model, optimizer if not trains else None)
    found = full_weights(model)
    assert {value.dtype for value in found.values()} == ({torch.float32} if trains else {HALF, torch.float32})
    assert_same(found, wanted, "weights", EXACT)
    stack_step(model, Call(2, context.rank, context.world_size, 1.0))
    optimizer.step()


@pytest.mark.parametrize("trains", [False, True])
def test_a_checkpoint_with_a_frozen_base_is_loaded_on_other_ranks(
    ranks: Callable[[int], RankPool], tmp_path: Path, trains: bool
) -> None:
    """By one, from two; and where what was frozen trains."""
    wanted = ranks(2).run(_save_a_run, tmp_path)[0]
    ranks(1).run(_load_a_run, tmp_path, wanted, trains=trains)


# -- unfreezing ---------------------------------------------------------------------------------------------------


@on_ranks(1, 2)
def test_unfreezing_what_was_frozen_when_the_model_was_sharded_raises(context: RankContext) -> None:
    """Before a forward, or in one; frozen again, the model trains on."""
    model: Any = StreamShard(adapted(), precision=BF16)
    base = model.layers[1].linear.base
    unfreeze = model.layers[1].register_forward_pre_hook(lambda *_: base.bias.requires_grad_(True))
    for name in ("bias", "weight"):
        with pytest.raises(
            ShardingError,
            match=rf"'layers\.1\.linear\.base\.{name}' was frozen when .* Freeze it after StreamShard\(model\)",
        ):
            stack_step(model, Call(0, context.rank, context.world_size, 1.0))
        unfreeze.remove()
        base.requires_grad_(False)
        base.weight.requires_grad_(name == "bias")
    stack_step(model, Call(1, context.rank, context.world_size, 1.0))
    assert base.weight.grad is None and model.layers[1].linear.up.grad is not None


@on_ranks(2)
def test_a_frozen_parameter_may_have_a_gradient_of_the_users(context: RankContext) -> None:
    """It stays as it is."""
    model: Any = StreamShard(adapted(), precision=BF16)
    param = model.layers[0].linear.base.weight
    param.grad = torch.ones_like(param)
    stack_step(model, Call(0, context.rank, 2, 1.0))
    assert param.grad.dtype is HALF
    assert bool((param.grad == 1).all())
    model.zero_grad()
    stack_step(model, Call(0, context.rank, 2, 1.0))
    assert param.grad is None


@on_ranks(2)
def test_nobody_has_to_hear_who_used_a_frozen_parameter(context: RankContext) -> None:
    """On a device the host waits for the answer if a parameter that counts was left out, as frozen ones always are."""
    model: Any = StreamShard(adapted(), precision=BF16, **ONE_EACH)
    with model.no_sync():
        stack_step(model, Call(0, context.rank, 2, 1.0))
    grads = [(unit.grads, grad) for unit in engine_inside(model).units for grad in unit.grads.params]
    assert any(unit_grads.waits for unit_grads, _ in grads)
    assert all(unit_grads.counts(grad) is grad.shard.param.requires_grad for unit_grads, grad in grads)
    stack_step(model, Call(1, context.rank, 2, 1.0))


@on_ranks(2)
def test_gradients_are_checked_of_what_trains(context: RankContext) -> None:
    """The first that is not finite is named, frozen ones have none."""
    model: Any = StreamShard(adapted(), precision=BF16, check_grads=True)
    stack_step(model, Call(0, context.rank, 2, 1.0))
    with pytest.raises(GradientError, match=r"layers\.0\.linear\.down"):
        (model(vector_batch(0, context.rank)) * float("inf")).sum().backward()
