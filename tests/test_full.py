"""Inside `summon_full_params`: reads and changes of full parameters are right, and everything else raises."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from streamshard import LocalSGD, StreamShard, export_safetensors, full, load_safetensors
from streamshard.core.engine import Engine
from streamshard.core.params import Param
from streamshard.errors import ConfigError, RankMismatchError, ShardingError, StreamShardError
from streamshard.full import gather_full
from streamshard.integrations import peft
from streamshard.integrations.peft import save_on_first
from tests.compare import EXACT, assert_same
from tests.models import DIM, Stack, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import FP32, adamw, stack_step, train_stack


@on_ranks(1, 2)
def test_passes_steps_and_collecting_raise_inside_summon_full_params(context: RankContext, tmp_path: Path) -> None:
    model: Any = StreamShard(Stack(), precision=FP32)
    optimizer = adamw(model)
    x = vector_batch(0, context.rank)
    stack_step(model, context.call(0))

    def in_a_thread() -> None:
        with ThreadPoolExecutor(1) as threads:
            threads.submit(model, x).result()

    refused: dict[str, Callable[[], object]] = {
        "a forward inside": in_a_thread,
        "a forward.* outside of": lambda: model.layers[0](x),
        "AdamW.step": optimizer.step,
        "clip_grad_norm_": lambda: model.clip_grad_norm_(1.0),
        "export_safetensors": lambda: export_safetensors(model, tmp_path),
        "load_safetensors": lambda: load_safetensors(model, tmp_path),
        "full_state_dict": model.full_state_dict,
        "summon_full_params": lambda: model.summon_full_params().__enter__(),
    }
    with model.summon_full_params():
        for what, call in refused.items():
            with pytest.raises(ShardingError, match=rf"{what}.*summon_full_params"):
                call()
    optimizer.step()
    stack_step(model, context.call(1))


_WRITES: dict[str, Callable[[nn.Parameter, torch.Tensor], object]] = {
    "copy_": torch.no_grad()(lambda param, value: param.copy_(value)),
    "data.copy_": lambda param, value: param.data.copy_(value),
    "detach().copy_": lambda param, value: param.detach().copy_(value),
    "a row at a time": lambda param, value: [row.copy_(to) for row, to in zip(param.data, value, strict=True)],
    "_foreach_copy_": lambda param, value: torch._foreach_copy_([param.data], [value]),
    "data =": lambda param, value: setattr(param, "data", value.clone()),
    "data = of another dtype, transposed": lambda param, value: setattr(param, "data", value.double().t().clone().t()),
}


@on_ranks(1, 2)
@pytest.mark.parametrize("write", _WRITES)
def test_every_write_inside_summon_full_params_is_kept(context: RankContext, write: str) -> None:
    model = StreamShard(Stack(), precision=FP32)
    before = model.full_state_dict(rank0_only=False)
    wanted = {name: value.flip(-1) if value.dim() == 2 else value for name, value in before.items()}
    with model.summon_full_params():
        for name, param in model.named_parameters():
            _WRITES[write](param, wanted[name]) if param.dim() == 2 else param.data.copy_(wanted[name])
    assert_same(model.full_state_dict(rank0_only=False), wanted, "weights", EXACT)


@on_ranks(2)
def test_changes_that_differ_between_ranks_raise_on_all(context: RankContext) -> None:
    model = StreamShard(Stack(), precision=FP32)
    before = model.full_state_dict(rank0_only=False)
    head = model.head.weight
    torch.manual_seed(context.rank)
    for change in (
        lambda: context.rank == 0 and model.head.bias.data.fill_(2.0),
        model.head.reset_parameters,
        lambda: head.data.copy_(head.data[:, torch.randperm(DIM)]),
    ):
        with (
            pytest.raises(RankMismatchError, match=r"'head\.\w+' has other values on rank 1 than on rank 0.*same seed"),
            model.summon_full_params(),
        ):
            change()
        assert_same(model.full_state_dict(rank0_only=False), before, "weights", EXACT)
    kind, message = (KeyError, "mine") if context.rank == 0 else (ShardingError, "rank 0: KeyError: 'mine'")
    with pytest.raises(kind, match=message), model.summon_full_params():
        model.head.bias.data.fill_(2.0)
        if context.rank == 0:
            raise KeyError("mine")
    assert_same(model.full_state_dict(rank0_only=False), before, "weights", EXACT)


@on_ranks(4)
def test_replicas_of_local_sgd_change_their_own_weights_in_full(context: RankContext) -> None:
    """Replicas differ between two averages. Ranks of one replica must not."""
    model = StreamShard(Stack(), precision=FP32, mesh=init_device_mesh("cpu", (2, 2)))
    optimizer = LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), model, period=4, warmup_steps=1)
    train_stack(model, optimizer, context, steps=2)
    before = model.head.bias.detach().clone().as_subclass(torch.Tensor)
    with model.summon_full_params():
        model.head.bias.data.mul_(2.0)
    assert torch.equal(model.head.bias.detach().as_subclass(torch.Tensor), 2 * before)
    with pytest.raises(RankMismatchError, match=r"'head\.bias' has other values"), model.summon_full_params():
        model.head.bias.data.fill_(context.rank % 2)


@on_ranks(1, 2)
def test_changes_that_would_be_lost_raise_at_the_end(context: RankContext) -> None:
    model = StreamShard(Stack(), precision=FP32)
    stack_step(model, context.call(0))
    full = model.full_state_dict(rank0_only=False)

    head = model.head.weight
    for change, message in (
        (lambda: head.square().sum().backward(), r"parameter 'head\.weight' got a gradient inside summon_full_params"),
        (lambda: setattr(head, "data", torch.zeros(2, DIM)), r"head\.weight.*\(2, 16\), wanted \(1, 16\)"),
        (lambda: setattr(model.head, "weight", nn.Parameter(torch.zeros(1, DIM))), r"head\.weight.*replaced"),
    ):
        with pytest.raises(ShardingError, match=message), model.summon_full_params():
            model.layers[0].linear.weight.data.zero_()
            change()
        model.head._parameters["weight"] = head
        assert_same(model.full_state_dict(rank0_only=False), full, "weights")
    with pytest.raises(KeyError), model.summon_full_params():
        model.head.weight.data.zero_()
        raise KeyError("mine")
    assert_same(model.full_state_dict(rank0_only=False), full, "weights after an exception")


@on_ranks(2)
def test_the_rank_that_cannot_keep_full_tensors_raises_on_all(context: RankContext, tmp_path: Path) -> None:
    """It takes part in all all-gathers first, so the ranks go on together. No file is written."""
    model: Any = StreamShard(Stack(), precision=FP32)
    taken = []

    def take(shard: Param, tensor: torch.Tensor) -> torch.Tensor:
        taken.append(shard.name)
        raise MemoryError("no room")

    def without_room(engine: Engine, _: Any, *wanted: Any) -> Any:
        return gather_full(engine, take if context.rank == 0 else None, *wanted)

    calls = (model.full_state_dict, lambda: save_on_first(model, tmp_path / "out", print))
    with pytest.MonkeyPatch.context() as patch:
        for module in (full, peft):
            patch.setattr(module, "gather_full", without_room)
        for call in calls:
            with pytest.raises(StreamShardError, match="rank 0: MemoryError: no room"):
                call()
    assert len(taken) == (2 if context.rank == 0 else 0)
    assert not [*(tmp_path / "out").glob("*")]
    stack_step(model, context.call(0))

    save_on_first(model, tmp_path / "out", lambda to: torch.save(model.state_dict(), Path(to) / "weights"))
    assert_same(torch.load(tmp_path / "out" / "weights"), model.full_state_dict(rank0_only=False), "full", EXACT)


@on_ranks(1, 2)
def test_a_largest_norm_or_an_order_that_is_no_number_is_refused(context: RankContext) -> None:
    """Gradients would point away from the minimum, or become nan. A rank without elements has no smallest one."""
    model = StreamShard(Stack(), precision=FP32)
    for order in (-float("inf"), 0, float("nan")):
        with pytest.raises(ConfigError, match="norm_type=.*wanted a number above 0, or inf"):
            model.clip_grad_norm_(1.0, order)
    for wrong in (-1.0, float("nan"), "1"):
        with pytest.raises(ConfigError, match="max_norm=.*wanted a number of at least 0"):
            model.clip_grad_norm_(wrong)  # type: ignore[arg-type]
