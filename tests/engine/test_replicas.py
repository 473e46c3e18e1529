"""Hybrid sharding: on a replicate x shard mesh training gives what DDP over all ranks gives."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from streamshard import ConfigError, StreamShard, export_safetensors, full_optimizer_state_dict
from streamshard.comm.streams import Rule, StreamName
from streamshard.inspect import engine_inside
from streamshard.inspect.adversary import make_adversarial
from streamshard.inspect.races import detect_races
from streamshard.inspect.trace import Activity, trace_step
from streamshard.plan.memory import Category
from tests.models import Stack, TinyLM
from tests.ranks import RankContext, on_ranks
from tests.reference import (
    EXACT,
    FP32,
    Call,
    Tolerance,
    adamw,
    assert_same,
    assert_trains_like_ddp,
    assert_trains_like_plain,
    full_grads,
    full_weights,
    lm_step,
    stack_step,
)
from tests.scenarios import BF16, SCENARIOS, dropping, reference, sharded, train, trained

SHAPES = [(2, 2), (4, 1), (1, 4)]  # replicate, shard
NEAR = Tolerance(1e-4, 1e-5)  # sums in another order, through Adam


def _mesh(replicate: int, shard: int) -> DeviceMesh:
    return init_device_mesh("cpu", (replicate, shard), mesh_dim_names=("replicate", "shard"))


@on_ranks(4)
@pytest.mark.parametrize("shape", SHAPES)
def test_training_equals_ddp_over_all_ranks(context: RankContext, shape: tuple[int, int]) -> None:
    """Every rank has its own batch; four steps."""
    assert_trains_like_ddp(context, TinyLM, lm_step, mesh=_mesh(*shape))


# Replicas that are sharded over ranks, and whole ones, which have no slots.
MESHES = pytest.mark.parametrize(("world_size", "shape"), [(4, (2, 2)), (2, (2, 1))])


# What is averaged while a backward goes on, or given up in the middle of one; all else is a shard group's own affair.
_AVERAGING = (
    "plain",
    "micro-batches",
    "no_sync",
    "layers unused on some ranks",
    "layers used twice",
    "two backwards",
    "a kept graph",
    "freezing",
    "clipping",
    "a backward that fails",
    "gradients kept when a backward fails",
)
# What a rank that has whole weights does otherwise than one that has shards.
_WHOLE = (
    "tied",
    "evaluation between steps",
    "summoning",
    "weights elsewhere",
    "weights read elsewhere",
    "layers in layers",
)


@on_ranks()
@pytest.mark.parametrize(
    ("world_size", "shape", "scenario"),
    [*((2, (2, 1), name) for name in _AVERAGING + _WHOLE), *((4, (2, 2), name) for name in _AVERAGING)],
)
def test_every_way_of_training_equals_one_shard_group(
    context: RankContext, scenario: str, shape: tuple[int, int]
) -> None:
    """Layers that only some replicas use, gradients in several parts, exceptions and all."""
    found = trained(context, scenario, FP32, mesh=_mesh(*shape))
    assert_same(found, reference(context, scenario, FP32), "weights", NEAR)


@on_ranks(4)
@pytest.mark.parametrize("slots", [{"weight_slots": "all"}, {"weight_slots": "all", "grad_slots": "all"}])
def test_the_dial_works_on_a_mesh(context: RankContext, slots: dict[str, Any]) -> None:
    """Main grads that lie in the slots, gradients left there inside no_sync."""
    for scenario in ("no_sync", "micro-batches", "layers used twice", "layers unused on some ranks"):
        found = trained(context, scenario, FP32, mesh=_mesh(2, 2), **slots)
        assert_same(found, reference(context, scenario, FP32), scenario, NEAR)


@on_ranks(4)
def test_all_replicas_hold_the_same_bits(context: RankContext) -> None:
    """Weights and gradients, after steps in which replicas used other layers."""
    model = sharded("layers unused on some ranks", BF16, mesh=_mesh(2, 2))
    train(model, "layers unused on some ranks", context)
    stack_step(model, Call(9, context.rank, 4, 1.0))
    everyone: list[Any] = [None] * 4
    state = {**full_weights(model), **{f"grad of {name}": g for name, g in full_grads(model).items() if g is not None}}
    dist.all_gather_object(everyone, state)
    for other in everyone:
        assert_same(other, everyone[0], "rank", EXACT)


@on_ranks()
@MESHES
@pytest.mark.parametrize("scenario", ["plain", "layers used twice", "two backwards", "micro-batches"])
def test_averages_are_free_of_races(context: RankContext, scenario: str, shape: tuple[int, int]) -> None:
    """And an adversarial transport changes nothing."""
    model = sharded(scenario, BF16, mesh=_mesh(*shape))
    with detect_races(model), make_adversarial(model):
        train(model, scenario, context)
        found = full_weights(model)
    assert_same(found, trained(context, scenario, BF16, mesh=_mesh(*shape)), "weights", EXACT)


def _races_without(context: RankContext, scenario: str, mesh: DeviceMesh, *waits: str) -> set[tuple[Category, Rule]]:
    model = sharded(scenario, BF16, mesh=mesh)
    with dropping(model, *waits), detect_races(model, raise_at_exit=False) as races:
        train(model, scenario, context)
    return {(race.category, race.rule) for race in races.found}


@on_ranks(4)
def test_the_wait_of_averages_for_gradients_is_needed(context: RankContext) -> None:
    """Rule 4, where one rank has the whole shard: the compute stream itself has written what is averaged."""
    found = _races_without(context, "plain", _mesh(4, 1), "main grads to average")
    assert (Category.MAIN_GRADS, Rule.GRADS_WRITTEN) in found


@on_ranks(4)
def test_the_wait_of_averages_for_reductions_is_needed(context: RankContext) -> None:
    """Rule 7, where a shard group has several ranks: averages read what reductions write."""
    found = _races_without(context, "plain", _mesh(2, 2), "main grads to average")
    assert (Category.MAIN_GRADS, Rule.RESULTS_ARRIVED) in found


@on_ranks()
@MESHES
def test_the_wait_of_the_optimizer_for_averages_is_needed(context: RankContext, shape: tuple[int, int]) -> None:
    """Rule 7: that for reductions says nothing of another stream. Flags come behind averages."""
    found = _races_without(context, "plain", _mesh(*shape), "averaged main grads", "everybody's flags")
    assert found - {(Category.FLAGS, Rule.RESULTS_ARRIVED)} == {(Category.MAIN_GRADS, Rule.RESULTS_ARRIVED)}


@on_ranks(4)
def test_the_wait_of_more_gradients_for_an_average_is_needed(context: RankContext) -> None:
    """Rule 7: gradients that come in several parts are added to what is being averaged."""
    found = _races_without(context, "a kept graph", _mesh(4, 1), "averaged main grads")
    assert (Category.MAIN_GRADS, Rule.RESULTS_ARRIVED) in found


@on_ranks(2)
def test_averages_are_late_as_well(context: RankContext) -> None:
    """Under the adversary nothing is averaged before it is waited for; afterwards ranks have their own transports."""
    model = sharded("plain", FP32, mesh=_mesh(2, 1))
    replicas = engine_inside(model).reductions.replicas
    assert replicas is not None
    own = replicas.ranks.transport
    with make_adversarial(model):
        value = torch.full((3,), float(context.rank))
        work = replicas.ranks.transport.start_average(value, None)
        dist.barrier()
        assert value.tolist() == [context.rank] * 3
        assert work is not None
        work.wait()
        assert value.tolist() == [0.5] * 3
    assert replicas.ranks.transport is own


@on_ranks(4)
def test_averages_are_traced(context: RankContext) -> None:
    """One of each unit, behind its reduction."""
    model = sharded("plain", FP32, mesh=_mesh(2, 2))
    train(model, "plain", context, steps=1)
    with trace_step(model) as trace:
        SCENARIOS["plain"].step(model, Call(1, context.rank, 4, 1.0))
    averages = {span.unit: span for span in trace.spans if span.activity is Activity.AVERAGE}
    reductions = {span.unit: span for span in trace.spans if span.activity is Activity.REDUCE}
    assert sorted(averages) == list(range(len(trace.units)))
    assert all(reductions[unit].stop_us <= span.start_us for unit, span in averages.items())
    assert {span.stream for span in averages.values()} == {StreamName.REPLICA}


@on_ranks(4)
def test_a_mesh_may_lie_across_ranks_in_any_way(context: RankContext) -> None:
    """Shard groups of ranks 1 and 3, 0 and 2; everything starts from rank 0's weights."""
    mesh = DeviceMesh("cpu", [[1, 3], [0, 2]])
    torch.manual_seed(context.rank)
    model = StreamShard(Stack(), precision=FP32, mesh=mesh)
    torch.manual_seed(0)
    assert_same(full_weights(model), dict(Stack().state_dict()), "weights", EXACT)
    assert_trains_like_plain(context, Stack, stack_step, mesh=mesh)


@on_ranks(4)
def test_some_ranks_alone_can_make_a_mesh(context: RankContext) -> None:
    """The others are told that they have no part in it."""
    mesh = DeviceMesh("cpu", [[0], [2]])
    if context.rank in (1, 3):
        with pytest.raises(ConfigError, match=f"rank {context.rank} is not in it"):
            StreamShard(Stack(), mesh=mesh)
        return
    place = RankContext(context.rank // 2, 2, context.device)
    assert_trains_like_plain(place, Stack, stack_step, mesh=mesh)


@on_ranks(4)
@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
def test_two_axes_of_a_larger_mesh_can_be_given(context: RankContext, shape: tuple[int, int]) -> None:
    """Two models beside each other, as under tensor parallelism; each has a group of all its ranks made for it."""
    mesh = init_device_mesh("cpu", (*shape, 2), mesh_dim_names=("replicate", "shard", "other"))
    place = RankContext(context.rank // 2, 2, context.device)
    assert_trains_like_plain(place, Stack, stack_step, mesh=mesh["replicate", "shard"])


@on_ranks(4)
def test_memory_is_that_of_the_shard_group(context: RankContext) -> None:
    """Four ranks in two replicas hold what two ranks do, and a few flags; all of it as computed."""
    model = sharded("plain", BF16, mesh=_mesh(2, 2))
    train(model, "plain", context, steps=1)
    report = model.memory_report()
    assert dict(report.held_bytes) == dict(report.formula_bytes)
    pair = sharded("plain", BF16, mesh=_mesh(2, 2)["shard"])
    train(pair, "plain", context, steps=1)
    other = pair.memory_report()
    assert dict(other.held_bytes) == dict(other.formula_bytes)
    flags = Category.FLAGS.value
    assert {k: v for k, v in report.held_bytes.items() if k != flags} == {
        k: v for k, v in other.held_bytes.items() if k != flags
    }


@on_ranks(4)
def test_one_replica_is_exported_and_collected(context: RankContext) -> None:
    """Four ranks write one file; the optimizer's whole state is on one rank alone."""
    place: list[Any] = [tempfile.mkdtemp()]
    dist.broadcast_object_list(place)
    path = Path(place[0])
    model = sharded("plain", FP32, mesh=_mesh(2, 2))
    optimizer = adamw(model)
    SCENARIOS["plain"].step(model, Call(0, context.rank, 4, 1.0))
    optimizer.step()
    names = export_safetensors(model, path)
    assert names == ["model.safetensors"]
    weights = full_weights(model)
    found = load_file(path / names[0])
    assert_same({name: found[name] for name in weights}, weights, "weights", EXACT)
    assert bool(full_optimizer_state_dict(model, optimizer)) == (context.rank == 0)
    assert bool(model.full_state_dict()) == (context.rank == 0)


@on_ranks(4)
def test_norms_are_of_one_replica(context: RankContext) -> None:
    """Both ways of clipping agree with the norm of the averaged gradients."""
    model = sharded("plain", FP32, mesh=_mesh(2, 2))
    SCENARIOS["plain"].step(model, Call(0, context.rank, 4, 1.0))
    whole = [grad for grad in full_grads(model).values() if grad is not None]
    tied = {grad.data_ptr(): grad for grad in whole}
    wanted = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in tied.values()]))
    found = model.clip_grad_norm_(1e9)
    again = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    assert_same({"ours": found, "torch's": again}, {"ours": wanted, "torch's": wanted}, "norm")


@on_ranks(4)
def test_a_mesh_whose_ranks_descend_is_refused(context: RankContext) -> None:
    """Process groups sort their ranks, so replicas would disagree about who holds which shard."""
    with pytest.raises(ConfigError, match="ascend along the second axis"):
        StreamShard(Stack(), mesh=DeviceMesh("cpu", [[1, 3], [2, 0]]))


@on_ranks(4)
def test_a_mesh_of_three_axes_is_refused(context: RankContext) -> None:
    """Says what is wanted; the model is still whole."""
    model = Stack()
    shapes = [param.shape for param in model.parameters()]
    with pytest.raises(ConfigError, match="mesh has 3 axes: wanted one.*or two, replicate x shard"):
        StreamShard(model, mesh=init_device_mesh("cpu", (2, 2, 1)))
    assert [param.shape for param in model.parameters()] == shapes
