"""The number of slots is the dial from ZeRO-3 to ZeRO-1: the same numbers everywhere, other bytes and messages."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import nn

from streamshard import Precision, StreamShard
from streamshard.errors import ShardingError
from streamshard.planning.memory import Category
from tests.compare import EXACT, assert_same, full_grads, piece_of
from tests.counts import counted_collectives, engine_inside
from tests.faults import Trouble, case
from tests.models import Layer, TinyConfig, TinyLM, stack_of
from tests.ranks import RankContext, everywhere, on_ranks
from tests.reference import ALL_SLOTS, FP32, adamw, built, lm_step, no_sync, sharded_model, stack_step
from tests.scenarios import PRECISIONS as BASE
from tests.scenarios import over_sockets

PRECISIONS = {**BASE, "fp16": Precision(param_dtype=torch.float16, grad_dtype=torch.float16)}


def _even() -> Any:
    """Eight layers and a head whose sizes need no padding at 1 to 4 ranks."""
    stack = stack_of(lambda: Layer(48, bias=False), 8)()
    stack.head = nn.Linear(48, 24, bias=False)
    return stack


# Bytes per trained parameter with Adam, for N ranks, without what slots add; "all" slots are in the formula.
FORMULAS: dict[str, tuple[str, dict[str, Any], float, float]] = {
    "ZeRO-1, fp16, fp16 gradients": ("fp16", ALL_SLOTS, 4, 16),
    "ZeRO-1, bf16, fp32 gradients": ("bf16", ALL_SLOTS, 6, 12),
    "ZeRO-3, bf16": ("bf16", {}, 0, 16),
    "ZeRO-3, bf16, over sockets": ("bf16", {}, 0, 16),
    "ZeRO-3, bf16, half of it frozen": ("bf16", {}, 0, 16),
}


@on_ranks(1, 3)
def test_bytes_per_parameter_are_those_of_the_formula(context: RankContext) -> None:
    """Counted on live tensors, the optimizer's included. Frozen parameters have two bytes over N."""
    size, layer, head = context.world_size, 48 * 48, 24 * 48
    for name, (precision, settings, constant, sharded_bytes) in FORMULAS.items():
        sockets, frozen = "sockets" in name, 4 * layer * ("frozen" in name)
        plain = _even()
        if frozen:
            plain.layers[2:6].bfloat16().requires_grad_(False)
        with case(name), over_sockets() if sockets else contextlib.nullcontext():
            model: Any = StreamShard(plain, precision=PRECISIONS[precision], **settings)
            optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad])
            for _ in range(2):
                model(torch.ones(4, 48)).float().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            report = model.memory_report()
            held = report.total_bytes - report.held_bytes["flags"]
            held += sum(m.nbytes for state in optimizer.state.values() for m in state.values() if m.ndim)
            numel = report.numel - frozen
            if size == 1:  # no slots beside the shards
                assert held == 18 * numel + 2 * frozen
                continue
            slots = 2.0 * 2 * layer
            if settings.get("grad_slots") == "all":
                slots = 0.0
            elif sockets:  # gradients have their own, the head's too, and the other ranks' chunks scratch
                slots = slots * (2 + (size - 1) / size) + 2 * head
            assert held == pytest.approx((constant + sharded_bytes / size) * numel + 2 * frozen / size + slots, abs=0.5)


@on_ranks(2)
def test_main_grads_get_memory_of_their_own_when_a_backward_adds_to_earlier_ones(context: RankContext) -> None:
    """Until then they lie in the slots. The sum is right, and a gradient that was kept from before raises."""
    model = sharded_model(_even, **ALL_SLOTS)
    for number in range(2):
        assert model.memory_report().held_bytes["main grads"] == 0
        model.zero_grad()
        with model.no_sync():
            model(torch.full((4, 48), 0.1 * context.rank)).sum().backward()
        model(torch.full((4, 48), 0.2 + number)).sum().backward()
    first, kept = full_grads(model), next(model.parameters()).grad
    model(torch.full((4, 48), 1.2)).sum().backward()
    assert model.memory_report().held_bytes["main grads"] == 4 * model.memory_report().numel / 2
    model.zero_grad()
    model(torch.full((4, 48), 1.2)).sum().backward()
    second = full_grads(model)
    model.zero_grad()
    for shift in (0.0, 1.0):
        with no_sync(model, not shift):
            model(torch.full((4, 48), 0.1 * context.rank if not shift else 1.2)).sum().backward()
    assert_same(full_grads(model), first, "waiting gradients", EXACT)
    for _ in range(2):
        model(torch.full((4, 48), 1.2)).sum().backward()
    for name, grad in full_grads(model).items():
        torch.testing.assert_close(grad, first[name] + 2 * second[name])
    with pytest.raises(ShardingError, match="kept from an earlier backward"):
        kept.norm()


@on_ranks(2)
def test_main_grads_have_memory_from_their_reduction_until_a_forward_finds_none(context: RankContext) -> None:
    """A gradient that is kept raises then. With `keep_main_grads` they always have memory, and with gradients left."""
    x, plain = torch.full((4, 48), 0.2), _even()
    model: Any = StreamShard(copy.deepcopy(plain), precision=FP32)
    whole = 4 * model.memory_report().numel // 2

    def main_grads(model: Any) -> int:
        return engine_inside(model).ledger.held_bytes(Category.MAIN_GRADS)

    assert (main_grads(model), model.memory_report().dropped_bytes) == (0, whole)
    model(x).sum().backward()
    kept = next(model.parameters()).grad
    assert main_grads(model) == whole == model.memory_report().held_bytes["main grads"]
    model(x).sum().backward()  # adds
    assert main_grads(model) == whole and kept is not None
    model.zero_grad()
    with torch.no_grad():
        model(x)
    assert main_grads(model) == 0
    with pytest.raises(ShardingError, match="kept from an earlier backward"):
        kept.norm()
    always: Any = StreamShard(plain, precision=FP32, keep_main_grads=True)
    assert (main_grads(always), always.memory_report().dropped_bytes) == (whole, 0)
    model(x).sum().backward()
    always(x).sum().backward()
    assert_same(full_grads(model), full_grads(always), "gradients", EXACT)


@on_ranks(2)
def test_more_weight_slots_save_gathers_and_micro_batches_of_zero_1_send_nothing(context: RankContext) -> None:
    """The floor is two gathers of a unit and one reduction, less one gather for each unit that is still in its slot."""
    depth, flags = 6, 1  # flags: the exchange of used parameters, once a backward

    def counts(number: int) -> tuple[int, int]:
        with counted_collectives(model) as counts:
            lm_step(model, context.call(number))
        return counts.get("all_gather", 0), counts.get("reduce_scatter", 0)

    for slots, kept in ((2, 2), (3, 3), ("all", depth)):
        model = sharded_model(lambda: TinyLM(TinyConfig(depth=depth)), **ALL_SLOTS | {"weight_slots": slots})
        lm_step(model, context.call(0))
        assert counts(1) == (1 + 2 * depth - kept + flags, 1 + depth), slots
    with contextlib.suppress(Trouble), model.no_sync():
        assert counts(1) == (1 + depth, 0)
        assert counts(2) == (0, 0)
        raise Trouble  # leaves the context too
    assert counts(3) == (1 + depth + flags, 1 + depth)


@on_ranks(2)
def test_using_unreduced_gradients_raises(context: RankContext) -> None:
    """They are this rank's alone: reading or scaling them raises and names a parameter."""
    model = sharded_model(**ALL_SLOTS)
    optimizer = adamw(model)
    with model.no_sync():
        stack_step(model, context.call(0))
        message = r"no_sync.*not been reduced"
        for use in (
            lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
            lambda: model.clip_grad_norm_(1.0),
            optimizer.step,
            lambda: model.head.weight.grad.norm(),
        ):
            with pytest.raises(ShardingError, match=message):
                use()
        with pytest.raises(ShardingError, match=r"'layers\.0\.linear\.weight'.*set_to_none=True\) drops"):
            optimizer.zero_grad(set_to_none=False)
        with pytest.raises(ShardingError, match="'head.weight'"):
            model.head.weight.grad = model.head.weight.grad
    stack_step(model, context.call(1))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


@on_ranks(3)
def test_every_element_is_owned_by_one_rank(context: RankContext) -> None:
    """`local_ranges` says which; cutting between blocks moves them. Main weights are fp32, also of a bf16 model."""
    for block in (1, 24):
        plain = built().bfloat16()
        whole = {name: param.detach().float() for name, param in plain.named_parameters()}
        model: Any = StreamShard(plain, precision=FP32, align_pieces_to=block)
        mine = {name: [*range(owned.start, owned.stop)] for name, owned in model.local_ranges().items()}
        stack_step(model, context.call(0))
        everyone = everywhere(mine)
        for name, param in model.named_parameters():
            assert param.dtype is torch.float32 and piece_of(param).ndim == whole[name].ndim
            assert torch.equal(piece_of(param).flatten(), whole[name].flatten()[mine[name]])
            assert sorted(place for ranges in everyone for place in ranges[name]) == list(range(param.numel()))
