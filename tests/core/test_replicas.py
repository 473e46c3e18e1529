"""Hybrid sharding: on a replicate x shard mesh training gives what DDP over all ranks gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from streamshard import ConfigError, ShardingError, StreamShard, export_safetensors, full_optimizer_state_dict
from streamshard.planning.memory import Category
from tests.adversary import make_adversarial
from tests.models import Stack, vector_batch
from tests.races import detect_races
from tests.ranks import Call, RankContext, everywhere, on_ranks
from tests.reference import (
    ALL_SLOTS,
    EXACT,
    FP32,
    NEAR,
    adamw,
    assert_same,
    assert_trains_like_plain,
    case,
    engine_inside,
    full_grads,
    full_weights,
    mesh_2d,
    stack_step,
)
from tests.scenarios import SCENARIOS, reference, sharded, train

# Replicas that are sharded over ranks, and whole ones, which have no slots.
MESHES = pytest.mark.parametrize(("world_size", "shape"), [(4, (2, 2)), (2, (2, 1))])


# What is averaged while a backward goes on, or given up in the middle of one; all else is a shard group's own affair.
SHARDED = ("layers unused on some ranks", "a kept graph", "freezing", "clipping", "a backward that fails")
# The rest of it, and what a rank that has whole weights does otherwise than one that has shards.
WHOLE = ("plain", "layers unused on some ranks", "tied", "two backwards", "evaluation between steps", "summoning")


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
@pytest.mark.parametrize("is_cut", [False, True])
def test_micro_batches_inside_no_sync_cross_between_replicas_once(
    context: RankContext, shape: tuple[int, int], is_cut: bool
) -> None:
    """One collective for each flat parameter and step, and the numbers of one shard group over all ranks."""
    crossed: list[int] = []

    def step(model: nn.Module, call: Call, *, is_whole: bool) -> None:
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
        if is_whole:
            stack_step(model, call._replace(step=4 * call.step + 3))
        else:
            model.layers[2](vector_batch(call.step, call.rank)).sum().backward()

    def train(mesh: DeviceMesh | None) -> dict[str, Tensor]:
        model = sharded("no_sync", FP32, mesh=mesh, shard_over_replicas=is_cut and mesh is not None)
        engine = engine_inside(model)
        if (replicas := engine.reductions.over_replicas) is not None:
            name = "start_reduce" if is_cut else "start_average"
            start = getattr(replicas.ranks.transport, name)
            setattr(replicas.ranks.transport, name, lambda *args: crossed.append(1) or start(*args))
        optimizer = adamw(model)
        for number, is_whole in enumerate((True, False, True)):
            step(model, Call(number, context.rank, context.world_size, 1.0), is_whole=is_whole)
            assert len(crossed) == (0 if mesh is None else sum(len(unit.flat_params) for unit in engine.units))
            optimizer.step()
            optimizer.zero_grad()
        return full_weights(model)

    assert_same(train(mesh_2d(*shape)), train(None), "weights", NEAR)


@on_ranks(4)
@pytest.mark.parametrize("is_cut", [False, True])
def test_what_only_another_rank_has_made_and_was_frozen_since_is_kept_or_dropped(
    context: RankContext, is_cut: bool
) -> None:
    """Each rank has a shard of it, also a rank that has not used the layer."""

    def grads(*, drops: bool, **settings: Any) -> dict[str, Any]:
        model = sharded("no_sync", FP32, **settings)
        call = Call(0, context.rank, context.world_size, 1.0)
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
def test_memory_norms_and_exports_are_those_of_one_replica(context: RankContext, tmp_path: Path) -> None:
    """As of two ranks; four ranks write one file, and rank 0 alone gets the full state."""
    model = sharded("plain", FP32, mesh=mesh_2d(2, 2))
    optimizer = adamw(model)
    SCENARIOS["plain"].step(model, Call(0, context.rank, 4, 1.0))
    pair = sharded("plain", FP32, mesh=mesh_2d(2, 2)["shard"])
    held, other = (dict(each.memory_report().held_bytes) for each in (model, pair))
    assert held.pop(Category.FLAGS.value) > other.pop(Category.FLAGS.value)
    assert held == other
    grads = [grad for grad in full_grads(model).values() if grad is not None]
    wanted = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in grads]))
    found = {"ours": model.clip_grad_norm_(1e9), "torch's": torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)}
    assert_same(found, dict.fromkeys(found, wanted), "norm")
    optimizer.step()
    assert export_safetensors(model, tmp_path) == ["model.safetensors"]
    weights, exported = full_weights(model), load_file(tmp_path / "model.safetensors")
    assert_same({name: exported[name] for name in weights}, weights, "weights", EXACT)
    assert bool(full_optimizer_state_dict(model, optimizer)) == (context.rank == 0)
