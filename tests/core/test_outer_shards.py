"""State that is cut over all ranks of a 2-D mesh: the numbers of a 1-D mesh, fewer bytes between replicas."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.func import functional_call

from streamshard import (
    ConfigError,
    LocalSGD,
    Precision,
    StreamShard,
    export_safetensors,
    load_checkpoint,
    load_safetensors,
    save_checkpoint,
)
from streamshard.optim import WholeParameterOptimizer
from streamshard.planning.memory import Category
from tests.core.test_replicas import assert_like_one_group
from tests.models import Layer, Stack, stack_of, vector_batch
from tests.ranks import Call, RankContext, on_ranks
from tests.reference import (
    ALL_SLOTS,
    EXACT,
    FP32,
    NEAR,
    Trouble,
    adamw,
    assert_same,
    case,
    engine_inside,
    failing,
    full_weights,
    mesh_2d,
    sharded_model,
    stack_step,
    train_stack,
)
from tests.scenarios import BF16, SCENARIOS, sharded, train
from tests.simulated import checking_streams, late, simulated_device

# What happens on both levels, in any order and in part; all else is cut over whole replicas alone.
ON_BOTH = ("no_sync", "layers unused on some ranks", "a kept graph", "a backward that fails")
BETWEEN = ("tied", "evaluation between steps", "freezing", "clipping", "summoning", "a forward that fails")


def outer(replicas: int, shards: int) -> dict[str, Any]:
    return {"mesh": mesh_2d(replicas, shards), "shard_over_replicas": True}


@on_ranks()
@pytest.mark.parametrize(("world_size", "shape"), [(4, (2, 2)), (2, (2, 1))])
def test_every_way_of_training_equals_one_shard_group(context: RankContext, shape: tuple[int, int]) -> None:
    """Sums in rank order have the same bits, too."""
    for number, way in enumerate(ON_BOTH if shape[1] > 1 else BETWEEN):
        slots = ALL_SLOTS if number % 3 == 2 else {}
        assert_like_one_group(context, way, **outer(*shape), **slots)
    in_order = Precision(param_dtype=torch.bfloat16, sums_in_rank_order=True)
    assert_like_one_group(context, "micro-batches", in_order, EXACT, **outer(*shape))


@on_ranks(4)
def test_a_device_waits_for_both_levels(context: RankContext) -> None:
    """Each operation is on the stream that is its own, and collectives are as late as waits allow."""
    with simulated_device() as device:
        for way, precision in (("no_sync", FP32), ("tied", BF16)):
            wanted = sharded(way, precision, **outer(2, 2))
            train(wanted, way, context)
            model = sharded(way, precision, **outer(2, 2))
            with late(model):
                train(model, way, context)
                found = full_weights(model)
            assert_same(found, full_weights(wanted), "weights", EXACT)
        with checking_streams(device) as streams:
            model = sharded("unequal layers", BF16, **outer(2, 2))
            with streams.of(model):
                train(model, "unequal layers", context)


def _accumulated_layer_by_layer(model: Any, context: RankContext) -> None:
    optimizer = adamw(model)
    for step in range(3):
        parts = [vector_batch(3 * step + part, context.rank) for part in range(3)]
        model.accumulate(parts, lambda model, part: model(part).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def _stepped_whole(model: Any, context: RankContext) -> None:
    """By one of all ranks."""
    optimizer = WholeParameterOptimizer(model.parameters(), torch.optim.Adafactor, lr=0.01)
    train_stack(model, optimizer, context, steps=2)


def _fails_inside_no_sync(model: Any, context: RankContext) -> None:
    """The next step has no gradient of it; gradients from before ``no_sync()`` count."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    call = Call(0, context.rank, 4, 1.0)
    with model.no_sync():
        stack_step(model, call)
        with pytest.raises(Trouble), failing(model.layers[0]):
            stack_step(model, call)
    for step in range(2):
        stack_step(model, call._replace(step=step))
        with model.no_sync():
            stack_step(model, call._replace(step=step + 1))
    stack_step(model, call)
    optimizer.step()


@on_ranks(4)
@pytest.mark.parametrize("work", [_accumulated_layer_by_layer, _stepped_whole, _fails_inside_no_sync])
def test_what_a_loop_does_equals_one_shard_group(context: RankContext, work: Any) -> None:
    models = [sharded_model(stack_of(Layer, 6), **settings) for settings in (outer(2, 2), {})]
    for model in models:
        work(model, context)
    assert_same(*map(full_weights, models), "weights", NEAR)


@on_ranks(4)
def test_weights_cross_between_replicas_once_per_optimizer_step(context: RankContext) -> None:
    """Not in evaluation, nor in later micro-batches. Frozen weights cross once in all."""
    for way in ("micro-batches", "evaluation between steps", "adapters"):
        model = sharded(way, BF16, **outer(2, 2))
        engine = engine_inside(model)
        transport = engine.outer.ranks.transport
        with mock.patch.object(transport, "start_gather", wraps=transport.start_gather) as start:
            train(model, way, context, steps=3)
        counts = Counter(call.args[0].tag for call in start.call_args_list)
        flats = [flat for unit in engine.units for flat in unit.flat_params]
        with case(way):
            assert counts == {flat.tag: 3 if flat.kind.trains else 1 for flat in flats}


class _Scaled(Stack):
    """Of its root unit, one number, only the first rank has an element."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.scale = nn.Identity(), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


@on_ranks(2)
@pytest.mark.parametrize("way", ["replicas", "replicas, frozen", "no_sync", "offload"])
def test_all_ranks_gather_weights_that_only_ranks_with_elements_have_written(
    context: RankContext, way: str, tmp_path: Path
) -> None:
    """By a load of one weight, and in place, as schedulefree does where an optimizer has state."""
    settings: dict[str, Any] = {"offload": "state"} if way == "offload" else {}
    settings |= outer(2, 1) if "replicas" in way else {}
    if context.rank == 0:
        save_file({"scale": torch.tensor(3.0)}, tmp_path / "model.safetensors")
    dist.barrier()
    batch = vector_batch(0, 0)
    with simulated_device() if way == "offload" else contextlib.nullcontext():
        scaled = _Scaled()
        scaled.scale.requires_grad_("frozen" not in way)
        model: Any = StreamShard(scaled, precision=FP32, **settings)
        model.set_requires_gradient_sync(way != "no_sync")

        def check() -> None:
            with torch.no_grad():
                torch.testing.assert_close(model(batch), functional_call(_Scaled(), full_weights(model), (batch,)))

        check()
        load_safetensors(model, tmp_path, strict=False)
        check()
        with torch.no_grad():
            for param in model.parameters():
                if param is not model.scale or context.rank == 0:
                    param.mul_(1.5)
        check()


@on_ranks(4)
def test_reductions_over_replicas_take_turns_in_two_buffers(context: RankContext) -> None:
    """None waits in the shard group until the one before has left its buffer."""
    model = sharded_model(stack_of(Layer, 6), **outer(2, 2))
    transport = engine_inside(model).outer.ranks.transport
    with mock.patch.object(transport, "start_reduce", wraps=transport.start_reduce) as start:
        stack_step(model, Call(0, context.rank, 4, 1.0))
    places = [call.args[0].slot.untyped_storage().data_ptr() for call in start.call_args_list]
    assert len(places) > 6 and len({*places}) == 2
    assert all(before != after for before, after in itertools.pairwise(places))


@on_ranks(4)
def test_memory_is_what_the_formula_says(context: RankContext) -> None:
    """4 bytes of main weights, and moments, over all ranks; 2 over the ranks of a replica; 4 for sums of no_sync()."""
    model = sharded_model(stack_of(Layer, 6), precision=BF16, **outer(2, 2))
    engine = engine_inside(model)
    optimizer = adamw(model)
    stack_step(model, Call(0, context.rank, 4, 1.0))
    optimizer.step()
    numel = sum(flat.layout.padded_numel for unit in engine.units for flat in unit.flat_params)
    held = engine.ledger.held_bytes
    assert held(Category.MAIN_WEIGHTS) == held(Category.MAIN_GRADS) == 4 * numel // 4
    assert held(Category.ALL_GATHER_INPUTS) == 2 * numel // 2
    moments = sum(state["exp_avg"].numel() for state in optimizer.state.values())
    assert moments <= numel // 4
    before = held(Category.STAGING)
    for _ in range(2):
        with model.no_sync():
            stack_step(model, Call(0, context.rank, 4, 1.0))
        stack_step(model, Call(0, context.rank, 4, 1.0))
        assert held(Category.STAGING) - before == 4 * numel // 2
        assert model.memory_report().held_bytes["staging"] == held(Category.STAGING)


@on_ranks(4)
def test_checkpoints_and_exports_are_those_of_any_mesh(context: RankContext, tmp_path: Path) -> None:
    """Saved on 2 x 2 and loaded on 1-D, and back."""
    shapes: list[dict[str, Any]] = [outer(2, 2), {}, outer(4, 1)]
    wanted: dict[str, Tensor] = {}
    for number, settings in enumerate(shapes):
        model = sharded("plain", FP32, **settings)
        optimizer = adamw(model)
        if number:
            load_checkpoint(tmp_path, model, optimizer)
            assert_same(full_weights(model), wanted, "weights", EXACT)
        for step in range(2):
            SCENARIOS["plain"].step(model, Call(step, context.rank, 4, 1.0))
            optimizer.step()
            optimizer.zero_grad()
        save_checkpoint(tmp_path, model, optimizer, step=number)
        wanted = full_weights(model)
        export_safetensors(model, tmp_path / f"export{number}")
        if context.rank == 0:
            exported = load_file(tmp_path / f"export{number}" / "model.safetensors")
            assert all(torch.equal(exported[name], wanted[name]) for name in exported)


@on_ranks(4)
def test_a_model_that_cannot_be_cut_over_replicas_is_refused(context: RankContext) -> None:
    mesh = outer(2, 2)["mesh"]
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "without replicas: give a 2-D mesh"),
        ({"mesh": mesh["shard"]}, "without replicas: give a 2-D mesh"),
        ({"mesh": DeviceMesh("cpu", [[0, 2], [1, 3]])}, "wanted a mesh whose ranks ascend, row by row"),
    ]
    for settings, message in cases:
        with pytest.raises(ConfigError, match=message):
            StreamShard(Stack(), shard_over_replicas=True, **settings)
    model = sharded_model(**outer(2, 2))
    with pytest.raises(ConfigError, match="LocalSGD averages over replicas, this model has one.*without shard_over"):
        LocalSGD(adamw(model), model, period=2)
    LocalSGD(adamw(plain := sharded_model(mesh=mesh)), plain, period=2)
    world = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tp"))
    cut = Stack()
    parallelize_module(cut, world["tp"], {"layers.*.linear": ColwiseParallel(output_layouts=Replicate())})
    in_order: dict[str, Any] = {"precision": Precision(sums_in_rank_order=True)}
    for name, settings in (("shard_over_replicas", {"shard_over_replicas": True}), ("sums_in_rank_order", in_order)):
        with pytest.raises(
            ConfigError, match=f"{name}=True.* the model has DTensors: leave it away, or give a 1-D mesh"
        ):
            StreamShard(cut, mesh=world["replicate", "shard"], **settings)
    stack_step(StreamShard(cut, mesh=world["replicate"], **in_order), Call(0, context.rank // 2, 2, 1.0))
    with simulated_device(), pytest.raises(ConfigError, match="offload=.state. on a 2-D mesh"):
        StreamShard(Stack(), offload="state", **outer(2, 2))
