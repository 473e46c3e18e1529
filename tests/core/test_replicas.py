"""Hybrid sharding: a replicate x shard mesh gives what DDP over all ranks gives, also where state is cut over all."""

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
    ShardingError,
    StreamShard,
    export_safetensors,
    full_optimizer_state_dict,
    load_checkpoint,
    load_safetensors,
    save_checkpoint,
)
from streamshard.optim import WholeParameterOptimizer
from streamshard.planning.memory import Category
from tests.adversary import make_adversarial
from tests.compare import EXACT, NEAR, assert_same, full_grads, full_weights
from tests.counts import engine_inside
from tests.faults import Trouble, case, failing
from tests.models import Layer, Stack, stack_of, vector_batch
from tests.races import detect_races
from tests.ranks import Call, RankContext, everywhere, on_ranks
from tests.reference import (
    ALL_SLOTS,
    FP32,
    adamw,
    assert_trains_like_plain,
    lm_step,
    mesh_2d,
    sharded_model,
    stack_step,
    train_stack,
)
from tests.scenarios import BF16, reference, sharded, train
from tests.simulated import checking_streams, late, simulated_device

# Replicas that are sharded over ranks, and whole ones, which have no slots.
MESHES = pytest.mark.parametrize(("world_size", "shape"), [(4, (2, 2)), (2, (2, 1))])


# What is averaged while a backward goes on, or given up in the middle of one; all else is a shard group's own affair.
SHARDED = ("layers unused on some ranks", "a kept graph", "freezing", "clipping", "a backward that fails")
# The rest of it, and what a rank that has whole weights does otherwise than one that has shards.
WHOLE = ("plain", "layers unused on some ranks", "tied", "two backwards", "evaluation between steps", "summoning")
# Where state is cut over replicas: what happens on both levels, in any order and in part; all else, of whole replicas.
ON_BOTH = ("no_sync", "layers unused on some ranks", "a kept graph", "a backward that fails")
BETWEEN = ("tied", "evaluation between steps", "freezing", "clipping", "summoning", "a forward that fails")


def outer(replicas: int, shards: int) -> dict[str, Any]:
    return {"mesh": mesh_2d(replicas, shards), "shard_over_replicas": True}


def assert_like_one_group(
    context: RankContext, scenario: str, precision: Any = FP32, tolerance: Any = NEAR, **settings: Any
) -> dict[str, Tensor]:
    """Train without races, however late collectives are; the weights are those of one shard group over all ranks."""
    model = sharded(scenario, precision, **settings)
    with detect_races(model), make_adversarial(model):
        train(model, scenario, context)
        found = full_weights(model)
    assert_same(found, reference(context, scenario, precision), scenario, tolerance)
    return found


@on_ranks()
@MESHES
def test_every_way_of_training_equals_one_shard_group(context: RankContext, shape: tuple[int, int]) -> None:
    """Gradients that wait in slots are summed in another order. All ranks hold the same bits."""
    for scenario in SHARDED if shape[1] > 1 else WHOLE:
        assert_like_one_group(context, scenario, mesh=mesh_2d(*shape))
    found = assert_like_one_group(context, "no_sync", mesh=mesh_2d(*shape), **ALL_SLOTS)
    for other in everywhere(found):
        assert_same(other, found, "rank", EXACT)


@on_ranks()
@MESHES
def test_state_cut_over_replicas_trains_in_every_way_as_one_group(context: RankContext, shape: tuple[int, int]) -> None:
    """Sums in rank order have the same bits, too."""
    for number, way in enumerate(ON_BOTH if shape[1] > 1 else BETWEEN):
        assert_like_one_group(context, way, **outer(*shape), **(ALL_SLOTS if number % 3 == 2 else {}))
    in_order = Precision(param_dtype=torch.bfloat16, sums_in_rank_order=True)
    for way in ("micro-batches", "clipping"):
        assert_like_one_group(context, way, in_order, EXACT, **outer(*shape))


@on_ranks()
@MESHES
@pytest.mark.parametrize("is_cut", [False, True])
def test_micro_batches_inside_no_sync_cross_once(context: RankContext, shape: tuple[int, int], is_cut: bool) -> None:
    """One collective for each flat parameter and step, and the numbers of one shard group over all ranks."""
    crossed: list[int] = []

    def step(model: nn.Module, call: Call) -> None:
        stack_step(model, call)
        model.zero_grad()  # drops what was averaged
        crossed.clear()
        with model.no_sync():
            model.route = (0, 2) if call.rank % 2 else (1, 2, 3)
            stack_step(model, call)
            model.zero_grad()  # drops what was not, some of it another rank's
            model.route = range(5)
            for part in range(3):
                stack_step(model, call._replace(step=4 * call.step + part))
            if shape[1] > 1 and engine_inside(model).reductions.over_replicas is not None:
                with pytest.raises(ShardingError, match="no_sync"):
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if call.step == 1:
            model.layers[2](vector_batch(call.step, call.rank)).sum().backward()
        else:
            stack_step(model, call._replace(step=4 * call.step + 3))

    def train(mesh: DeviceMesh | None) -> dict[str, Tensor]:
        model = sharded("no_sync", FP32, mesh=mesh, shard_over_replicas=is_cut and mesh is not None)
        engine = engine_inside(model)
        if (replicas := engine.reductions.over_replicas) is not None:
            name = "start_reduce" if is_cut else "start_average"
            start = getattr(replicas.ranks.transport, name)
            setattr(replicas.ranks.transport, name, lambda *args: crossed.append(1) or start(*args))
        optimizer = adamw(model)
        for number in range(3):
            train_stack(model, optimizer, context, first=number, steps=1, step=step)
            assert len(crossed) == (0 if mesh is None else sum(len(unit.flat_params) for unit in engine.units))
        return full_weights(model)

    assert_same(train(mesh_2d(*shape)), train(None), "weights", NEAR)


@on_ranks(4)
@pytest.mark.parametrize("is_cut", [False, True])
def test_what_only_another_rank_has_made_and_was_frozen_since_counts(context: RankContext, is_cut: bool) -> None:
    """Unless it is dropped. Each rank has a shard of it, also a rank that has not used the layer."""

    def grads(*, drops: bool, **settings: Any) -> dict[str, Any]:
        model = sharded("no_sync", FP32, **settings)
        call = context.call(0)
        with model.no_sync():
            model.route = range(5) if context.rank == 0 else (0, 1, 3, 4)
            stack_step(model, call)
            model.layers[2].requires_grad_(False)
            model.route = (0, 1, 3, 4)
            stack_step(model, call)
        model.layers[2].requires_grad_(True)
        if drops:
            model.zero_grad()
        model.route = range(5)
        stack_step(model, call)
        return full_grads(model)

    mesh = {"mesh": mesh_2d(2, 2), "shard_over_replicas": is_cut}
    for drops in (False, True):
        with case(drops):
            assert_same(grads(drops=drops, **mesh), grads(drops=drops), "gradients", NEAR)


@on_ranks(4)
def test_a_mesh_may_arrange_ranks_in_any_way(context: RankContext) -> None:
    """Shard groups of ranks 1 and 3, 0 and 2, and two axes of a larger mesh, as beside tensor parallelism."""
    mesh = DeviceMesh("cpu", [[1, 3], [0, 2]])
    torch.manual_seed(context.rank)
    model = StreamShard(Stack(), precision=FP32, mesh=mesh)
    torch.manual_seed(0)
    assert_same(full_weights(model), dict(Stack().state_dict()), "weights", EXACT)
    assert_trains_like_plain(context, Stack, stack_step, mesh=mesh)
    place = RankContext(context.rank // 2, 2, context.device)
    for shape in ((2, 1), (1, 2)):
        larger = init_device_mesh("cpu", (*shape, 2), mesh_dim_names=("replicate", "shard", "other"))
        assert_trains_like_plain(place, Stack, stack_step, mesh=larger["replicate", "shard"])


@on_ranks(4)
def test_meshes_that_cannot_work_are_refused(context: RankContext) -> None:
    """Without this rank, with descending ranks (groups sort theirs), of three axes; a group without this rank.

    The model is still whole, and the ranks inside are not held up.
    """
    model = Stack()
    shapes = [param.shape for param in model.parameters()]
    with pytest.raises(ConfigError, match="ascend along the second axis"):
        StreamShard(model, mesh=DeviceMesh("cpu", [[1, 3], [2, 0]]))
    with pytest.raises(ConfigError, match="mesh has 3 axes: wanted one.*or two .replicate x shard"):
        StreamShard(model, mesh=init_device_mesh("cpu", (2, 2, 1)))
    mesh, group = DeviceMesh("cpu", [[0], [2]]), dist.new_group([0, 2])
    if context.rank in (1, 3):
        with pytest.raises(ConfigError, match=f"rank {context.rank} is not in it"):
            StreamShard(model, mesh=mesh)
        with pytest.raises(ConfigError, match=f"a ProcessGroup with rank {context.rank}"):
            StreamShard(model, mesh=group)
        assert [param.shape for param in model.parameters()] == shapes
    else:
        stack_step(StreamShard(model, mesh=group, precision=FP32), Call(0, context.rank // 2, 2, 1.0))


@on_ranks(4)
def test_memory_and_norms_are_those_of_one_replica(context: RankContext) -> None:
    """But for the memory of flags, which are of all ranks."""
    model, pair = (sharded("plain", FP32, mesh=mesh) for mesh in (mesh_2d(2, 2), mesh_2d(2, 2)["shard"]))
    lm_step(model, context.call(0))
    grads = [grad for grad in full_grads(model).values() if grad is not None]
    wanted = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in grads]))
    found = {"ours": model.clip_grad_norm_(1e9), "torch's": torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)}
    assert_same(found, dict.fromkeys(found, wanted), "norm")
    held, of_pair = (dict(each.memory_report().held_bytes) for each in (model, pair))
    assert held.pop(Category.FLAGS.value) > of_pair.pop(Category.FLAGS.value)
    assert held == of_pair


# -- state that is cut over all ranks of the mesh: fewer bytes between replicas ---------------------------------------


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
    """From the second step on, and only where state is cut over replicas."""

    def step(model: Any, call: Call) -> None:
        parts = [vector_batch(3 * call.step + part, call.rank) for part in range(3)]
        if call.step and engine_inside(model).outer is not None:
            model.accumulate(parts, lambda model, part: model(part).square().mean())
        else:
            for part in parts:
                model(part).square().mean().backward()

    train_stack(model, adamw(model), context, step=step)


def _stepped_whole(model: Any, context: RankContext) -> None:
    """By one of all ranks."""
    optimizer = WholeParameterOptimizer(model.parameters(), torch.optim.Adafactor, lr=0.01)
    train_stack(model, optimizer, context, steps=2)


def _fails_inside_no_sync(model: Any, context: RankContext) -> None:
    """The next step has no gradient of it; gradients from before ``no_sync()`` count."""
    with model.no_sync():
        stack_step(model, context.call(0))
        with pytest.raises(Trouble), failing(model.layers[0]):
            stack_step(model, context.call(0))
    for step in range(2):
        stack_step(model, context.call(step))
        with model.no_sync():
            stack_step(model, context.call(step + 1))
    stack_step(model, context.call(0))
    torch.optim.SGD(model.parameters(), lr=0.1).step()


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
def test_all_gather_what_only_ranks_with_elements_have_written(context: RankContext, way: str, tmp_path: Path) -> None:
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
        stack_step(model, context.call(0))
    places = [call.args[0].slot.untyped_storage().data_ptr() for call in start.call_args_list]
    assert len(places) > 6 and len({*places}) == 2
    assert all(before != after for before, after in itertools.pairwise(places))


@on_ranks(4)
def test_memory_is_what_the_formula_says(context: RankContext) -> None:
    """4 bytes of main weights, and moments, over all ranks; 2 over the ranks of a replica; 4 for sums of no_sync()."""
    model = sharded_model(stack_of(Layer, 6), precision=BF16, **outer(2, 2))
    engine = engine_inside(model)
    optimizer = adamw(model)
    stack_step(model, context.call(0))
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
            stack_step(model, context.call(0))
        stack_step(model, context.call(0))
        assert held(Category.STAGING) - before == 4 * numel // 2
        assert model.memory_report().held_bytes["staging"] == held(Category.STAGING)


@on_ranks(4)
def test_checkpoints_and_exports_are_those_of_any_mesh(context: RankContext, tmp_path: Path) -> None:
    """Saved on 2 x 2 and loaded on 1-D, and back. Four ranks write one file; rank 0 alone gets the full state."""
    wanted: dict[str, Tensor] = {}
    for number, settings in enumerate((outer(2, 2), {}, outer(4, 1), {"mesh": mesh_2d(2, 2)})):
        model = sharded("plain", FP32, **settings)
        optimizer = adamw(model)
        if number:
            load_checkpoint(tmp_path, model, optimizer)
            assert_same(full_weights(model), wanted, "weights", EXACT)
        train_stack(model, optimizer, context, steps=2, step=lm_step)
        save_checkpoint(tmp_path, model, optimizer, step=number)
        assert bool(full_optimizer_state_dict(model, optimizer)) == (context.rank == 0)
        wanted = full_weights(model)
        assert export_safetensors(model, tmp_path / f"export{number}") == ["model.safetensors"]
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
