"""Expert parallelism: experts as DTensors on a mesh inside the shard group train what one process trains."""

from __future__ import annotations

import contextlib
import functools
import runpy
import time
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from streamshard import (
    ConfigError,
    RankMismatchError,
    ShardingError,
    StreamShard,
    export_safetensors,
    full_optimizer_state_dict,
    load_checkpoint,
    load_safetensors,
    save_checkpoint,
)
from tests.adversary import make_adversarial
from tests.launched import ROOT
from tests.races import detect_races
from tests.ranks import RankContext, everywhere, on_ranks
from tests.reference import assert_script_trained_like_plain, difference, engine_inside, full_weights
from tests.scenarios import over_sockets
from tests.simulated import late, simulated_device

STEPS, CLIP = 2, 0.5
WAYS: dict[str, Any] = {"shared memory": contextlib.nullcontext, "sockets": over_sockets}
SHARED = {2: ["SharedMemoryTransport", "ExpertsTransport"], 4: ["SharedMemoryTransport", "AloneTransport"]}
SOCKETS = {2: ["PairwiseTransport"] * 2, 4: ["PairwiseTransport", "AloneTransport"]}


@functools.cache
def _example() -> Any:
    """The names of the script."""
    return runpy.run_path(str(ROOT / "docs/examples/expert_parallel.py"))


def _made(seed: int = 0) -> Any:
    model = _example()["make_model"]()
    if seed:
        torch.manual_seed(seed)
        with torch.no_grad():
            for param in model.parameters():
                param.normal_()
    return model


def _slots(count: Any) -> dict[str, Any]:
    return {"weight_slots": count, "grad_slots": "all" if count == "all" else None}


def _sharded(model: Any, ep: int, **settings: Any) -> Any:
    """Shard over all ranks; with `ep` > 1 each has 8 / ep of the experts."""
    if ep > 1:
        shape, names = (dist.get_world_size() // ep, ep), (f"beside {ep}", f"experts over {ep}")
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)[names[1]]
        for layer in model.layers:
            layer.experts.place_on(mesh)
    return StreamShard(model, mesh=dist.group.WORLD, **{"precision": "fp32", **settings})


class _Course(NamedTuple):
    norms: list[float]
    weights: dict[str, Tensor]


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def _train(model: Any, place: int = 0, places: int = 1, *, own_clip: bool = False, steps: int = STEPS) -> _Course:
    optimizer = _adam(model)
    norms = _steps(model, optimizer, place, places, own_clip=own_clip, steps=steps)
    return _Course(norms, full_weights(model))


def _steps(
    model: Any, optimizer: torch.optim.Optimizer, place: int, places: int, *, own_clip: bool = False, steps: int
) -> list[float]:
    norms = []
    for step in range(steps):
        rows = _example()["whole_batch"](step).chunk(places)[place]
        F.cross_entropy(model(rows)[:, :-1].flatten(0, 1), rows[:, 1:].flatten()).backward()
        norm = model.clip_grad_norm_(CLIP) if own_clip else nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        norms.append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def _assert_equal(found: _Course, wanted: _Course) -> None:
    assert found.norms == pytest.approx(wanted.norms, rel=1e-6)
    assert difference(found.weights, wanted.weights) < 2e-6


@on_ranks(4)
@pytest.mark.parametrize("ep", [2, 4])
def test_the_ranks_of_experts_have_one_group_more(context: RankContext, ep: int) -> None:
    """A second one would be a communicator of NCCL, of hundreds of MB. There is one replica."""
    with simulated_device(), mock.patch.object(dist, "new_group", wraps=dist.new_group) as make:
        _sharded(_made(), ep)
    made = [call.args[0] for call in make.call_args_list if "gloo" not in call.args]
    assert made == [[rank for rank in range(4) if rank % ep == context.rank % ep]]


@on_ranks(4)
@pytest.mark.parametrize("tp", [1, 2])
def test_the_example_trains_what_one_process_trains(context: RankContext, tp: int) -> None:
    """As a user starts it, on two by two ranks; also with tensor parallelism."""
    model, norms = _example()["main"](STEPS, 2, tp)
    assert_script_trained_like_plain(_example(), model, norms)


@on_ranks(4)
def test_summed_gradients_of_experts_wait_for_the_last_micro_batch(context: RankContext) -> None:
    """A divide factor of one, slots for all layers, whole experts on each rank: two backwards add up."""
    model, whole = _sharded(_made(), 4, weight_slots="all", grad_slots="all"), _made()
    model.set_gradient_divide_factor(1.0)
    rows = _example()["whole_batch"](0)
    for _ in range(2):
        model(rows.chunk(4)[context.rank]).square().sum().backward()
        whole(rows).square().sum().backward()
    for (name, param), full in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert full.grad is not None
        assert float(param.grad.norm()) == pytest.approx(float(full.grad.norm()), rel=1e-5), name


@on_ranks(4)
def test_a_rank_has_its_experts_shard_and_a_shard_of_everything_else(context: RankContext) -> None:
    """A layer is one unit with two flat parameters: one over four ranks, one over the two with the same experts."""
    model = _sharded(_made(), 2)
    sizes = {name: param.detach().as_subclass(Tensor).numel() for name, param in model.named_parameters()}
    assert model.layers[0].experts.up.shape == (8, 32, 64)
    told = everywhere(sizes)
    for name, param in model.named_parameters():
        assert sum(each[name] for each in told) == param.numel(), name


# -- saving and loading -----------------------------------------------------------------------------------------------


def _saved(context: RankContext, path: Path) -> tuple[dict[str, Tensor], Any]:
    model = _sharded(_made(), 2)
    optimizer = _adam(model)
    _steps(model, optimizer, context.rank, 4, steps=1)
    save_checkpoint(path / "run", model, optimizer)
    export_safetensors(model, path / "export")
    return full_weights(model), full_optimizer_state_dict(model, optimizer, rank0_only=False)


def _loaded(context: RankContext, path: Path, ep: int, weights: dict[str, Tensor], state: Any) -> None:
    model = _sharded(_made(1), ep)
    optimizer = _adam(model)
    load_checkpoint(path / "run", model, optimizer)
    assert difference(full_weights(model), weights) == 0.0
    for number, values in full_optimizer_state_dict(model, optimizer, rank0_only=False)["state"].items():
        for key, value in values.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(state["state"][number][key])), (number, key)
    other = _sharded(_made(2), ep)
    load_safetensors(other, path / "export")
    assert difference(full_weights(other), weights) == 0.0


def test_checkpoints_and_exports_load_with_other_meshes_of_experts(ranks: Any, tmp_path: Path) -> None:
    """From 4 ranks in pairs to 4 ranks of one expert each, without a mesh, and to fewer ranks, to the bit."""
    weights, state = ranks(4).run(_saved, tmp_path)[0]
    for size, ep in ((4, 4), (4, 1), (2, 2), (1, 1)):
        ranks(size).run(_loaded, tmp_path, ep, weights, state)


@on_ranks(2)
def test_offload_with_experts_is_refused(context: RankContext) -> None:
    """Copies to the host know one group of ranks."""
    with simulated_device(), pytest.raises(ConfigError, match="the model has DTensors of experts"):
        _sharded(_made(), 2, offload="state")


@on_ranks(4)
@pytest.mark.parametrize("factor", [None, 1.0])
def test_penalties_on_experts_have_the_gradients_of_one_process(context: RankContext, factor: float | None) -> None:
    """Means of gradients, and sums by a divide factor."""
    model, whole = _sharded(_made(), 2), _made()
    if factor is not None:
        model.set_gradient_divide_factor(factor)
    rows = _example()["whole_batch"](0)
    share = 1.0 if factor is None else 4.0
    for each, own in ((model, rows.chunk(4)[context.rank]), (whole, rows)):
        penalty = 0.1 * sum(param.square().sum() for param in each.parameters())
        (each(own).square().mean() + penalty).backward()
    for (name, param), full in zip(model.named_parameters(), whole.parameters(), strict=True):
        wanted = share * param.piece.cut(full.grad)
        torch.testing.assert_close(param.grad.as_subclass(Tensor), wanted, rtol=1e-4, atol=1e-6, msg=name)


@on_ranks(2)
def test_experts_without_a_mesh_and_uneven_experts_are_refused(context: RankContext) -> None:
    """Without one they would be tensor parallelism."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    for experts, given, error, told in (
        (8, None, ConfigError, "is a DTensor and may be of experts: give mesh="),
        (7, dist.group.WORLD, ShardingError, "has 7 experts over 2 ranks: wanted the same number on each"),
    ):
        model = _made()
        for layer in model.layers:
            for name in ("up", "down"):
                whole = getattr(layer.experts, name).detach()[:experts]
                setattr(layer.experts, name, nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)])))
        with pytest.raises(error, match=told):
            StreamShard(model, mesh=given)


_SAME_BATCHES = r"stacked experts on ranks \[0, 1\], .* have to get the same batches"  # the first rank says so


@on_ranks(4)
def test_a_mesh_beside_the_experts_is_warned_of(context: RankContext) -> None:
    """FSDP2 takes this mesh for experts. Here the ranks of the experts would be copies, with the same batches."""
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("beside experts", "of experts"))
    model = _made()
    for layer in model.layers:
        layer.experts.place_on(world["of experts"])
    with contextlib.nullcontext() if context.rank else pytest.warns(UserWarning, match=_SAME_BATCHES):
        sharded = StreamShard(model, mesh=world["beside experts"])
    with pytest.raises(RankMismatchError, match="experts beside the ranks that shard"):
        sharded(torch.full((2, 6), context.rank))


@on_ranks(2)
def test_copies_on_the_mesh_of_experts_are_refused(context: RankContext) -> None:
    """Such as a router that torch has replicated: it is a parameter of all ranks."""
    mesh, model = init_device_mesh("cpu", (2,), mesh_dim_names=("experts of two",)), _made()
    for layer in model.layers:
        layer.experts.place_on(mesh)
    model.layers[1].router.weight = nn.Parameter(distribute_tensor(torch.ones(8, 32), mesh, [Replicate()]))
    with pytest.raises(
        ShardingError, match=r"'layers.1.router.weight' is a copy \(Replicate\) on the mesh of the experts"
    ):
        StreamShard(model, mesh=dist.group.WORLD)


@on_ranks(4)
def test_fences_order_the_collectives_of_both_groups(context: RankContext) -> None:
    """On a simulated device: no races, and late collectives change nothing."""
    wanted = _train(_made())
    with simulated_device():
        model = _sharded(_made(), 2)
        with detect_races(model) as races:
            _assert_equal(_train(model, context.rank, 4), wanted)
        assert races.accesses > 100
        model = _sharded(_made(), 2)
        with late(model):
            _assert_equal(_train(model, context.rank, 4), wanted)


@on_ranks(4)
@pytest.mark.parametrize(
    ("ep", "slots", "way"),
    [(2, 2, "shared memory"), (2, "all", "sockets"), (4, 2, "sockets"), (4, "all", "shared memory")],
)
def test_experts_on_a_mesh_train_what_one_process_trains(context: RankContext, ep: int, slots: Any, way: str) -> None:
    """Two ranks have the same experts, or each has its own. On CPUs waits order the collectives of both groups.

    No races, and late collectives change nothing. Ranks of other experts come late. Both functions that clip.
    """
    wanted = _train(_made())
    with WAYS[way]():
        models = [_sharded(_made(), ep, **_slots(slots)) for _ in range(2)]
    transports = {flat.ranks.transport for unit in engine_inside(models[0]).units for flat in unit.flat_params}
    kinds = [kind.__name__ for kind in map(type, transports)]
    assert sorted(kinds) == sorted({"shared memory": SHARED, "sockets": SOCKETS}[way][ep])
    with detect_races(models[0]) as races:
        _assert_equal(_train(models[0], context.rank, 4, own_clip=slots == 2), wanted)
    assert races.accesses > 100
    models[1].layers[1].register_forward_pre_hook(lambda *_: time.sleep(0.05 * (context.rank % 2)))
    optimizer = _adam(models[1])
    with make_adversarial(models[1]):
        norms = _steps(models[1], optimizer, context.rank, 4, steps=STEPS)
    _assert_equal(_Course(norms, full_weights(models[1])), wanted)
