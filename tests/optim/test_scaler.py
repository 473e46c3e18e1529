"""Loss scaling: an overflow anywhere skips the step everywhere, and the scale has torch's, or Megatron's, history."""

from __future__ import annotations

import copy
import math
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from streamshard import ConfigError, GradScaler, Precision, ShardingError, StreamShard
from tests.models import Stack, TinyLM, next_token_loss, token_batch, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import (
    EXACT,
    FP32,
    Call,
    Tolerance,
    adamw,
    assert_same,
    full_grads,
    full_weights,
    lm_step,
    piece_of,
    stack_step,
)

FP16 = Precision(param_dtype=torch.float16)
SCALERS: dict[str, type[torch.amp.GradScaler]] = {"torch's": torch.amp.GradScaler, "ours": GradScaler}
SLOTS: dict[str, dict[str, Any]] = {
    "ZeRO-3": {},
    "ZeRO-2": {"weight_slots": "all"},
    "ZeRO-1": {"weight_slots": "all", "grad_slots": "all"},
}
WAYS: dict[str, dict[str, Any]] = {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


class Tiny(nn.Module):
    """Units of one element each: with two ranks or more, all pieces of the last rank are empty."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """[rows, 16] -> [rows, 1]"""
        x = x[:, :1]
        for layer in self.layers:
            x = x + layer(x)
        return x


def _sharded(build: Callable[[], nn.Module], **settings: Any) -> Any:
    torch.manual_seed(7)
    return StreamShard(build(), **{"precision": FP16, **settings})


def _backward(model: Any, scaler: torch.amp.GradScaler, rank: int, number: int = 0) -> None:
    loss = model(vector_batch(number, rank)).float().square().mean()
    scaler.scale(loss).backward()  # type: ignore[no-untyped-call]


def _copied(optimizer: Optimizer) -> dict[str, Tensor]:
    """The optimizer's state on this rank."""
    return {
        f"{number}.{name}": value.detach().clone()
        for number, values in enumerate(optimizer.state.values())
        for name, value in values.items()
    }


# -- skipping -----------------------------------------------------------------------------------------------------


# World size, build, slots, clips: unscaled by itself or by the step; pieces of which some are empty, on one rank or on
# two; main grads in slots; nobody to ask.
_OVERFLOWING: list[tuple[int, type[nn.Module], str, bool]] = [
    (2, Stack, "ZeRO-3", False),
    (2, Stack, "ZeRO-3", True),
    (2, Stack, "ZeRO-1", False),
    (2, Tiny, "ZeRO-3", False),
    (3, Tiny, "ZeRO-1", True),
    (1, Stack, "ZeRO-3", False),
]


@on_ranks()
@pytest.mark.parametrize("scaler_name", SCALERS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("world_size", "build", "slots", "clips"), _OVERFLOWING)
def test_an_overflow_in_one_piece_skips_the_step_on_all_ranks(
    context: RankContext, scaler_name: str, way: str, slots: str, build: type[nn.Module], clips: bool
) -> None:
    """Weights and optimizer state stay what they were; the step before and the step after do not skip."""
    model = _sharded(build, **SLOTS[slots])
    if build is Tiny and context.rank > 0:
        assert not any(piece_of(p).numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **WAYS[way])
    scaler = SCALERS[scaler_name]("cpu", init_scale=8.0)
    last_owner = 0 if build is Tiny else context.world_size - 1
    for number, scale in enumerate((8.0, 4.0, 4.0)):
        weights, state = full_weights(model), _copied(optimizer)
        _backward(model, scaler, context.rank, number)
        if number == 1 and context.rank == last_owner:
            piece_of(next(p for p in model.parameters() if piece_of(p).numel()).grad)[...] = math.inf
        if clips:
            scaler.unscale_(optimizer)
            model.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == scale
        after, state_after = full_weights(model), _copied(optimizer)
        if number == 1:
            assert_same(after, weights, "weights after a skipped step", EXACT)
            assert_same(state_after, state, "optimizer state after a skipped step", EXACT)
        else:
            assert all(value.isfinite().all() for value in after.values())
            assert any(not after[name].equal(weights[name]) for name in after), "nothing was trained"


@on_ranks(2)
@pytest.mark.parametrize("slots", SLOTS)
def test_a_loss_that_overflows_on_one_rank_skips_the_step_on_all(context: RankContext, slots: str) -> None:
    """fp16 itself overflows here: the scale is too large for one rank's batch."""
    model = _sharded(Stack, **SLOTS[slots])
    optimizer, scaler = adamw(model), GradScaler("cpu", init_scale=2.0**10)
    before = full_weights(model)
    large = 1e3 if context.rank == 0 else 1e-3
    scaler.scale(model(vector_batch(0, context.rank)).square().mean().float() * large).backward()  # type: ignore[no-untyped-call]
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**9
    assert_same(full_weights(model), before, "weights after a skipped step", EXACT)
    assert not optimizer.state


@on_ranks(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", [0, 3])
def test_gradients_that_wait_in_slots_are_not_unscaled(context: RankContext, way: str, place: int) -> None:
    """Inside `no_sync` with ZeRO-1 there is nothing to check yet, even if most parameters have gradients already."""
    model = _sharded(Stack, **SLOTS["ZeRO-1"])
    optimizer, scaler = torch.optim.AdamW(model.parameters(), **WAYS[way]), GradScaler("cpu", init_scale=8.0)
    _backward(model, scaler, context.rank)
    with model.no_sync():
        scaler.scale(model.layers[place](vector_batch(1, 0)).float().sum()).backward()  # type: ignore[no-untyped-call]
        with pytest.raises(ShardingError, match="has not been reduced"):
            scaler.step(optimizer)
        assert not optimizer.state
        optimizer.zero_grad()
    model.layers[place](vector_batch(1, 0)).float().sum().backward()
    wanted = _sharded(Stack, **SLOTS["ZeRO-1"])
    wanted.layers[place](vector_batch(1, 0)).float().sum().backward()
    assert_same(full_grads(model), full_grads(wanted), "gradients", EXACT)


# -- the scale's history ------------------------------------------------------------------------------------------


def _overflows(seed: int, steps: int) -> list[bool]:
    choose = random.Random(seed)
    return [choose.random() < 0.3 for _ in range(steps)]


@on_ranks(2)
@pytest.mark.parametrize("scaler_name", SCALERS)
@pytest.mark.parametrize(("growth_factor", "backoff_factor", "growth_interval"), [(2.0, 0.5, 3), (1.7, 0.3, 2)])
def test_the_scale_has_the_history_it_has_without_sharding(
    context: RankContext, scaler_name: str, growth_factor: float, backoff_factor: float, growth_interval: int
) -> None:
    """Thirty steps, overflows now and then on some rank: equal to the bit, and so what is trained."""
    settings: dict[str, Any] = {
        "init_scale": 1000.0,
        "growth_factor": growth_factor,
        "backoff_factor": backoff_factor,
        "growth_interval": growth_interval,
    }
    size = context.world_size
    torch.manual_seed(7)
    plain = Stack()
    model = _sharded(Stack, precision=FP32)
    optimizer, plain_optimizer = adamw(model), adamw(plain)
    scaler, plain_scaler = SCALERS[scaler_name]("cpu", **settings), torch.amp.GradScaler("cpu", **settings)
    history = [scaler.get_scale()]
    for number, overflows in enumerate(_overflows(growth_interval, 30)):
        factors = [math.inf if overflows and rank == number % size else 1.0 for rank in range(size)]
        for rank in range(size):
            loss = plain(vector_batch(number, rank)).square().mean() * factors[rank] / size
            plain_scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        loss = model(vector_batch(number, context.rank)).square().mean() * factors[context.rank]
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        for its_scaler, its_optimizer in ((scaler, optimizer), (plain_scaler, plain_optimizer)):
            its_scaler.step(its_optimizer)
            its_scaler.update()
            its_optimizer.zero_grad()
        assert scaler.get_scale() == plain_scaler.get_scale(), f"step {number}"
        history.append(scaler.get_scale())
    changes = [after - before for before, after in zip(history[:-1], history[1:], strict=True)]
    assert min(changes) < 0.0 < max(changes)
    assert_same(full_weights(model), full_weights(plain), "weights", Tolerance(1e-4, 1e-6))


def _fed(scaler: torch.amp.GradScaler, overflows: list[bool]) -> Iterator[float]:
    """The scale after each step of a model of one weight."""
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for overflow in overflows:
        scaler.scale((weight * (math.inf if overflow else 1.0)).sum()).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        yield scaler.get_scale()


@pytest.mark.parametrize("interval", [1, 2, 4])
@pytest.mark.parametrize("hysteresis", [1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_hysteresis_is_megatrons(interval: int, hysteresis: int, seed: int) -> None:
    """Against the rule in plain Python."""
    overflows = _overflows(seed, 60)
    scale, left, clean, wanted = 4096.0, hysteresis, 0, []
    for overflow in overflows:
        if overflow:
            clean, left = 0, left - 1
            scale *= 0.5 if left <= 0 else 1.0
        else:
            clean += 1
            if clean == interval:
                clean, left, scale = 0, hysteresis, scale * 2.0
        wanted.append(scale)
    scaler = GradScaler("cpu", 4096.0, growth_interval=interval, hysteresis=hysteresis)
    assert list(_fed(scaler, overflows)) == wanted


def test_overflows_need_not_be_in_a_row() -> None:
    """The third overflow backs off although steps between went well, and so does each one until the scale has grown."""
    scaler = GradScaler("cpu", 64.0, growth_interval=4, hysteresis=3)
    overflows = [True, False, True, False, False, True, True, *[False] * 4, True, True, True]
    scales = [64.0, 64.0, 64.0, 64.0, 64.0, 32.0, 16.0, 16.0, 16.0, 16.0, 32.0, 32.0, 32.0, 16.0]
    assert list(_fed(scaler, overflows)) == scales


def _again_by_state(scaler: GradScaler) -> GradScaler:
    other = GradScaler("cpu", hysteresis=7)
    other.load_state_dict(scaler.state_dict())
    return other


def _again_by_state_in_use(scaler: GradScaler) -> GradScaler:
    other = GradScaler("cpu", hysteresis=7)
    list(_fed(other, [True, False]))
    other.load_state_dict(scaler.state_dict())
    return other


@pytest.mark.parametrize(
    "again",
    [_again_by_state, _again_by_state_in_use, copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))],
    ids=["state", "state, in use", "deepcopy", "pickle"],
)
def test_the_scalers_whole_state_travels(again: Callable[[GradScaler], GradScaler]) -> None:
    """Interrupted anywhere, the history goes on as if it had not been."""
    overflows = _overflows(3, 40)
    wanted = list(_fed(GradScaler("cpu", 4096.0, growth_interval=3, hysteresis=3), overflows))
    for stop in range(0, 40, 3):
        scaler = GradScaler("cpu", 4096.0, growth_interval=3, hysteresis=3)
        assert list(_fed(scaler, overflows[:stop])) == wanted[:stop]
        assert list(_fed(again(scaler), overflows[stop:])) == wanted[stop:], f"after {stop} steps"


def test_the_state_is_read_by_and_from_torchs_own_scaler() -> None:
    """Runs can begin with the one and go on with the other."""
    overflows = _overflows(1, 12)
    ours, theirs = GradScaler("cpu", 256.0, growth_interval=3), torch.amp.GradScaler("cpu", 256.0, growth_interval=3)
    assert list(_fed(ours, overflows)) == list(_fed(theirs, overflows))
    swapped, other = torch.amp.GradScaler("cpu"), GradScaler("cpu", hysteresis=2)
    swapped.load_state_dict(ours.state_dict())
    other.load_state_dict(theirs.state_dict())
    assert list(_fed(swapped, [False, True])) == list(_fed(theirs, [False, True]))
    assert other.get_scale() == ours.get_scale()
    assert other.state_dict()["hysteresis"] == other.state_dict()["_hysteresis_tracker"] == 2


def test_a_scale_set_by_hand_leaves_the_count_alone() -> None:
    """`update(new_scale)` is torch's."""
    scaler = GradScaler("cpu", 64.0, hysteresis=2)
    list(_fed(scaler, [True]))
    scaler.update(8.0)
    assert scaler.get_scale() == 8.0
    assert list(_fed(scaler, [True])) == [4.0]


def test_a_disabled_scaler_does_nothing() -> None:
    """And has no state, as torch's."""
    scaler = GradScaler("cpu", enabled=False, hysteresis=2)
    assert list(_fed(scaler, [False, False])) == [1.0, 1.0]
    assert scaler.state_dict() == {}
    assert not copy.deepcopy(scaler).is_enabled()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"init_scale": 0.0}, "init_scale=0.0: wanted a number between 0 and inf"),
        ({"init_scale": math.inf}, "init_scale=inf"),
        ({"init_scale": "65536"}, "init_scale='65536'"),
        ({"growth_factor": 1.0}, "growth_factor=1.0: wanted a number between 1 and inf"),
        ({"growth_factor": math.nan}, "growth_factor=nan"),
        ({"backoff_factor": 1.0}, "backoff_factor=1.0: wanted a number between 0 and 1"),
        ({"backoff_factor": 0.0}, "backoff_factor=0.0"),
        ({"growth_interval": 0}, "growth_interval=0: wanted a positive integer"),
        ({"growth_interval": 2.0}, "growth_interval=2.0"),
        ({"hysteresis": 0}, "hysteresis=0: wanted a positive integer"),
        ({"hysteresis": True}, "hysteresis=True"),
    ],
)
def test_a_setting_out_of_range_is_refused(setting: dict[str, Any], message: str) -> None:
    """By name, when the scaler is made."""
    with pytest.raises(ConfigError, match=message):
        GradScaler("cpu", **setting)


def test_the_device_is_the_gpu_if_there_is_one() -> None:
    """So that the same script runs on both."""
    assert GradScaler()._device == ("cuda" if torch.cuda.is_available() else "cpu")


# -- in use -------------------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize(("slots", "way"), [("ZeRO-3", "plain"), ("ZeRO-1", "fused")])
def test_fp16_training_ends_near_fp32(context: RankContext, slots: str, way: str) -> None:
    """The first scale is far too large, and it grows again: several steps are skipped, on all ranks."""
    losses = {}
    for name, precision in (("fp32", FP32), ("fp16", FP16)):
        model = _sharded(TinyLM, precision=precision, **SLOTS[slots])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, **WAYS[way])
        scaler = GradScaler("cpu", init_scale=2.0**24, growth_interval=8, enabled=name == "fp16")
        skipped = 0
        steps = 0
        while steps < 12:
            tokens = token_batch(0, context.rank)
            loss = next_token_loss(model(tokens), tokens)
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            before = scaler.get_scale()
            scaler.unscale_(optimizer)
            model.clip_grad_norm_(1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            is_skipped = scaler.get_scale() < before
            skipped, steps = skipped + is_skipped, steps + (not is_skipped)
            losses[name] = loss.detach().float()
        assert (skipped > 3) == (name == "fp16")
        assert skipped < 30
    start = lm_step(_sharded(TinyLM, precision=FP32), Call(0, context.rank, context.world_size, 1.0))
    assert float(losses["fp32"]) < 0.8 * float(start), "fp32 itself does not train: nothing to compare with"
    assert_same({"loss": losses["fp16"]}, {"loss": losses["fp32"]}, "loss", Tolerance(relative=2e-2))


@on_ranks(2)
@pytest.mark.parametrize(("scaler_name", "slots"), [("torch's", "ZeRO-1"), ("ours", "ZeRO-3")])
def test_accelerates_use_of_the_scaler_is_right(context: RankContext, scaler_name: str, slots: str) -> None:
    """`step_was_skipped` on all ranks at once; steps that are not skipped are those of plain PyTorch."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    accelerator: Any = Accelerator(cpu=True)
    try:
        accelerator.scaler = SCALERS[scaler_name]("cpu", init_scale=8.0, growth_interval=2)
        torch.manual_seed(7)
        plain = Stack()
        model = _sharded(Stack, precision=FP32, **SLOTS[slots])
        plain_optimizer = adamw(plain)
        optimizer = accelerator.prepare(adamw(model))
        history = []
        for number, overflows in enumerate([False, True, False, False, True, True, False]):
            factor = math.inf if overflows and context.rank == 1 else 1.0
            accelerator.backward(model(vector_batch(number, context.rank)).square().mean() * factor)
            optimizer.step()
            history.append((optimizer.step_was_skipped, accelerator.scaler.get_scale()))
            optimizer.zero_grad()
            assert accelerator.optimizer_step_was_skipped is overflows
            if not overflows:
                for rank in range(2):
                    stack_step(plain, Call(number, rank, 2, 0.5))
                plain_optimizer.step()
                plain_optimizer.zero_grad()
        scales = [8.0, 4.0, 4.0, 8.0, 4.0, 2.0, 2.0]
        assert history == list(zip([False, True, False, False, True, True, False], scales, strict=True))
        assert_same(full_weights(model), full_weights(plain), "weights")
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
