"""Expert parallelism: experts as DTensors on a mesh inside the shard group; context parallelism: parts of sequences."""

from __future__ import annotations

import contextlib
import functools
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.functional import cross_entropy

from streamshard import ConfigError, RankMismatchError, ShardingError, StreamShard
from tests.adversary import make_adversarial
from tests.compare import Tolerance, assert_same, difference, full_weights
from tests.counts import engine_inside
from tests.races import detect_races
from tests.ranks import RankContext, everywhere, on_ranks
from tests.scenarios import over_sockets
from tests.simulated import late, simulated_device
from tests.training.test_tensor_parallel import _mesh, _train, assert_loads, example, made, save, with_adam

WAYS: dict[str, Any] = {"shared memory": contextlib.nullcontext, "sockets": over_sockets, "a device": simulated_device}
KINDS = {"shared memory": {"SharedMemoryTransport"}, "sockets": {"PairwiseTransport"}}


_example = functools.partial(example, "expert")
_made = functools.partial(made, "expert")


def _sharded(model: Any, ep: int, **settings: Any) -> Any:
    """Shard over all ranks; with `ep` > 1 each has 8 / ep of the experts."""
    if ep > 1:
        shape, names = (dist.get_world_size() // ep, ep), (f"beside {ep}", f"experts over {ep}")
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)[names[1]]
        for layer in model.layers:
            layer.experts.place_on(mesh)
    return StreamShard(model, mesh=dist.group.WORLD, **{"precision": "fp32", **settings})


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
    with simulated_device(), mock.patch.object(dist, "new_group", wraps=dist.new_group) as make:
        model = _sharded(_made(), 2)
    made = [call.args[0] for call in make.call_args_list if "gloo" not in call.args]
    # A second group would be a communicator of NCCL, of hundreds of MB.
    assert made == [[rank for rank in range(4) if rank % 2 == context.rank % 2]]
    sizes = {name: param.detach().as_subclass(Tensor).numel() for name, param in model.named_parameters()}
    assert model.layers[0].experts.up.shape == (8, 32, 64)
    told = everywhere(sizes)
    for name, param in model.named_parameters():
        assert sum(each[name] for each in told) == param.numel(), name


def _saved(context: RankContext, path: Path) -> Any:
    model, optimizer = with_adam(_sharded(_made(), 2))
    _train(model, _mesh(4, 1), optimizer=optimizer, steps=1)
    return save(path, model, optimizer)


def _loaded(context: RankContext, path: Path, *saved: Any, ep: int) -> None:
    assert_loads(path, *saved, lambda seed: _sharded(_made(seed), ep))


def test_checkpoints_and_exports_load_with_other_meshes_of_experts(ranks: Any, tmp_path: Path) -> None:
    """From 4 ranks in pairs to 4 ranks without a mesh, and to fewer ranks, to the bit."""
    saved = ranks(4).run(_saved, tmp_path)[0]
    for size, ep in ((4, 1), (2, 2)):
        ranks(size).run(_loaded, tmp_path, *saved, ep=ep)


@on_ranks(2)
def test_experts_that_cannot_be_sharded_are_refused(context: RankContext) -> None:
    """Without a mesh (they would be tensor parallelism), uneven, beside a copy, and with `offload`."""
    mesh, world = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)), dist.group.WORLD
    copy = nn.Parameter(distribute_tensor(torch.ones(8, 32), mesh, [Replicate()]))  # as torch replicates a router
    for experts, router, given, error, told in (
        (8, None, None, ConfigError, "is a DTensor and may be of experts: give mesh="),
        (7, None, world, ShardingError, "has 7 experts over 2 ranks: wanted the same number on each"),
        (8, copy, world, ShardingError, r"'layers.1.router.weight' is a copy \(Replicate\) on the mesh of the experts"),
    ):
        model = _made()
        for layer in model.layers:
            for name in ("up", "down"):
                whole = getattr(layer.experts, name).detach()[:experts]
                setattr(layer.experts, name, nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)])))
        if router is not None:
            model.layers[1].router.weight = router
        with pytest.raises(error, match=told):
            StreamShard(model, mesh=given)
    with simulated_device(), pytest.raises(ConfigError, match="the model has DTensors of experts"):
        _sharded(_made(), 2, offload="state")


@on_ranks(4)
def test_a_mesh_beside_the_experts_raises_if_they_get_other_batches(context: RankContext) -> None:
    """FSDP2 takes this mesh for experts. Here the ranks of the experts would be copies, with the same batches."""
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("beside experts", "of experts"))
    model = _made()
    for layer in model.layers:
        layer.experts.place_on(world["of experts"])
    sharded = StreamShard(model, mesh=world["beside experts"])
    with pytest.raises(RankMismatchError, match="beside the ranks that shard.* give mesh= with all of these ranks"):
        sharded(torch.full((2, 6), context.rank))


@on_ranks(4)
@pytest.mark.parametrize("way", WAYS)
def test_experts_on_a_mesh_train_what_one_process_trains(context: RankContext, way: str) -> None:
    """Two ranks have the same experts, and the others come late. No races; both functions that clip."""
    norms, weights = _train(_made())
    places, is_device, slots = _mesh(4, 1), way == "a device", "all" if way == "sockets" else 2
    with WAYS[way]():
        model = _sharded(_made(), 2, weight_slots=slots, grad_slots="all" if slots == "all" else None)
        transports = {flat.ranks.transport for unit in engine_inside(model).units for flat in unit.flat_params}
        assert is_device or {type(transport).__name__ for transport in transports} == KINDS[way]
        model.layers[1].register_forward_pre_hook(lambda *_: time.sleep(0.05 * (context.rank % 2)))
        with detect_races(model) as races, late(model) if is_device else make_adversarial(model):
            found = _train(model, places)
            assert found[0] == pytest.approx(norms, rel=1e-6)
            assert difference(found[1], weights) < 2e-6
        assert races.accesses > 100


# -- context parallelism: ranks hold parts of the same sequences ------------------------------------------------------

OTHER_ORDER = Tolerance(relative=2e-5, absolute=2e-6)  # sums in another order, through several steps of AdamW


def _context() -> Any:
    pytest.importorskip("transformers")
    return example("context")


@on_ranks(4)
def test_the_example_of_context_parallelism_trains_what_one_process_trains(context: RankContext) -> None:
    """Losses, gradient norms and weights after five steps of AdamW, with sums of losses."""
    model, losses, norms = _context()["main"](5, 2)
    plain = _context()["make_model"]("sdpa")
    optimizer = torch.optim.AdamW(plain.parameters(), lr=3e-3)
    for step in range(5):  # the loss of a step is its mean over all tokens that count
        batch = _context()["whole_batch"](step)
        logits = plain(input_ids=batch.tokens, position_ids=batch.position_ids, use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")
        loss = loss / (batch.labels != -100).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        assert (losses[step], norms[step]) == pytest.approx((float(loss.detach()), float(norm)), rel=1e-5), step
        optimizer.step()
        optimizer.zero_grad()
    assert_same(full_weights(model), full_weights(plain), "weights", OTHER_ORDER)
    assert losses[-1] < losses[0] - 0.3


@on_ranks(4)
def test_a_mesh_without_the_ranks_that_share_a_sequence_is_warned_of(context: RankContext) -> None:
    """By the first rank. The mesh that the warning names raises no warning: the example above uses it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    warning = pytest.warns(UserWarning, match=r"leaves out ranks along 'cp': ranks \[0, 1\] .*'cp'\]\._flatten\(")
    with warning if context.rank == 0 else contextlib.nullcontext():
        StreamShard(_context()["make_model"]("sdpa"), mesh=mesh["dp"])
