"""Tensor parallelism: DTensors on a mesh across the shard group train what one process trains, as FSDP2's do."""

from __future__ import annotations

import contextlib
import functools
import runpy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils.checkpoint import checkpoint
from torch.utils.data.distributed import DistributedSampler

from streamshard import (
    ConfigError,
    RankMismatchError,
    ShardingError,
    StreamShard,
    export_safetensors,
    full_optimizer_state_dict,
    load_checkpoint,
    load_optimizer_state_dict,
    load_safetensors,
    save_checkpoint,
)
from streamshard.checkpoint.dcp import from_dcp, to_dcp
from streamshard.optim import WholeParameterOptimizer
from tests.compare import assert_same_state, difference, full_weights, piece_of
from tests.faults import case, let_dynamo_look
from tests.launched import ROOT
from tests.ranks import RankContext, everywhere, on_ranks
from tests.reference import assert_script_trained_like_plain, no_sync
from tests.simulated import simulated_device

WORDS, TOKENS, STEPS, CLIP = 33, 8, 2, 0.5
Course = tuple[list[float], dict[str, Tensor]]  # norms, weights
pytestmark = [
    pytest.mark.filterwarnings("ignore:While redistributing:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*lru_cache:UserWarning"),
]


@functools.cache
def example(name: str) -> Any:
    """The names of a script, with a vocabulary that no number of ranks divides."""
    names: Any = runpy.run_path(str(ROOT / f"docs/examples/{name}_parallel.py"))
    if name == "tensor":
        names["make_model"].__globals__.update(VOCAB=WORDS)
    return names


def made(name: str, seed: int = 0) -> Any:
    """Its model; with a `seed` all parameters have other values."""
    model = example(name)["make_model"]()
    if seed:
        torch.manual_seed(seed)
        with torch.no_grad():
            for param in model.parameters():
                param.normal_()
    return model


_made = functools.partial(made, "tensor")


def _parallelize(model: nn.Module, mesh: DeviceMesh, *, sequence: bool) -> None:
    """The plan of torch's tutorial, with or without sequence parallelism."""
    layout = Shard(1) if sequence else Replicate()
    for layer in model.layers:  # type: ignore[union-attr]
        columns = dict.fromkeys(("attention.q", "attention.k", "attention.v"), ColwiseParallel())
        columns["up"] = ColwiseParallel(input_layouts=layout)
        rows = {name: RowwiseParallel(output_layouts=layout) for name in ("attention.out", "down")}
        plan: dict[str, Any] = {**columns, **rows}
        if sequence:
            whole = {"input_layouts": (layout,), "desired_input_layouts": (Replicate(),)}
            plan["attention"] = PrepareModuleInput(**whole)  # type: ignore[arg-type]
            plan |= {name: SequenceParallel() for name in ("norm1", "norm2")}
        parallelize_module(layer, mesh, plan)
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=layout),
        "head": ColwiseParallel(input_layouts=layout, output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan | ({"norm": SequenceParallel()} if sequence else {}))


class _Axes(NamedTuple):
    """The axes of a mesh of all ranks: the mesh for `StreamShard`, and that of the DTensors."""

    dp: DeviceMesh
    tp: DeviceMesh


def _mesh(*sizes: int) -> _Axes:
    """Meshes of other shapes have other names: torch caches by names, not by groups."""
    names = (f"dp of {sizes}", f"tp of {sizes}")
    return _Axes(*map(init_device_mesh("cpu", sizes, mesh_dim_names=names).__getitem__, names))


def _sharded(model: nn.Module, world: _Axes, *, sequence: bool = True, **settings: Any) -> Any:
    if world.tp.size() > 1:
        _parallelize(model, world.tp, sequence=sequence)
    return StreamShard(model, mesh=world.dp, **{"precision": "fp32", **settings})


def adam(model: Any) -> torch.optim.Optimizer:
    """With a large `eps`, which does not blow up the rounding of small gradients."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def _train(
    model: Any,
    world: _Axes | None = None,
    *,
    micro_batches: int = 1,
    optimizer: torch.optim.Optimizer | None = None,
    steps: int = STEPS,
    clips: bool = True,
) -> Course:
    """Train on this data rank's rows of each batch, without `world` on all; clip by either function in turn."""
    optimizer = optimizer or adam(model)
    generator, norms = torch.Generator().manual_seed(1), []
    for step in range(steps):
        rows = torch.randint(0, WORDS, (4, TOKENS), generator=generator)
        if world is not None:
            rows = rows.chunk(world.dp.size())[world.dp.get_local_rank()]
        parts = rows.chunk(micro_batches)
        for number, part in enumerate(parts):
            with no_sync(model, number + 1 < len(parts)):
                loss = F.cross_entropy(model(part)[:, :-1].flatten(0, 1), part[:, 1:].flatten()) / len(parts)
                loss.backward()
        if clips:
            clip = functools.partial(nn.utils.clip_grad_norm_, model.parameters())
            norms.append(float((clip if step % 2 == 0 else getattr(model, "clip_grad_norm_", clip))(CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, full_weights(model) if clips else {}


@functools.cache
def _alone(steps: int = STEPS) -> Course:
    return _train(_made(), steps=steps)


def _assert_equal(found: Course, wanted: Course) -> None:
    assert found[0] == pytest.approx(wanted[0], rel=1e-6)
    assert difference(found[1], wanted[1]) < 1e-5


@on_ranks(4)
def test_tensor_parallelism_trains_what_one_process_trains(context: RankContext) -> None:
    """An uneven vocabulary, AdamW with clipping by either function, and what changes when DTensors are made and read.

    The output of a compiled first layer waits for a collective: FSDP2 drops its gradient, plain PyTorch raises.
    """
    let_dynamo_look()
    world = _mesh(2, 2)
    with case("tensor parallelism, micro-batches, checkpoints"):
        model = _made()
        for layer in model.layers:
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
        model = _sharded(model, world, sequence=False)
        _assert_equal(_train(model, world, micro_batches=2), _alone())
    with case("sequence parallelism, compiled"):
        model = _sharded(_made(), world)
        model.layers[0].compile(backend="eager")
        _assert_equal(_train(model, world), _alone())
    with case("without a mesh: over ranks with the same parts; all slots, micro-batches"):
        model = _made()
        _parallelize(model, world.tp, sequence=True)
        model = StreamShard(model, precision="fp32", weight_slots="all", grad_slots="all")
        weight = model.layers[0].up.weight
        assert sum(everywhere(piece_of(weight).numel())) == weight.numel() == 128 * 32
        _assert_equal(_train(model, world, micro_batches=2), _alone())
    with case("some frozen before sharding, some after"):
        model, plain = _made(), _made()
        for layer in (*model.layers, *plain.layers):
            layer.attention.requires_grad_(False)
        model = _sharded(model, world)
        for each in (model, plain):
            each.layers[0].up.weight.requires_grad_(False)
        _assert_equal(_train(model, world), _train(plain))
    with case("state in host memory, on a simulated device"), simulated_device():
        _assert_equal(_train(_sharded(_made(), world, offload="state"), world, steps=3), _alone(3))


@on_ranks(4)
def test_different_batches_along_the_axis_raise_before_a_layer_runs(context: RankContext) -> None:
    """As from a DistributedSampler over all ranks. With the same batches along the axis the model trains on."""
    world = _mesh(2, 2)
    model, optimizer = with_adam(_sharded(_made(0), world))
    shuffled = torch.arange(8).view(2, 4).roll(context.rank, 0)
    for own in (torch.full((2 + context.rank, 4), 3), torch.full((2, 4), context.rank), shuffled):
        with pytest.raises(RankMismatchError, match="ranks 0 and 1 of the model .* different inputs: give all ranks"):
            model(own)
    sampler = DistributedSampler(range(8), world.dp.size(), world.dp.get_local_rank(), shuffle=False)
    model(torch.tensor([[*sampler]])).square().mean().backward()
    optimizer.step()


@on_ranks(4)
def test_copies_that_have_drifted_apart_are_named_by_a_save(context: RankContext, tmp_path: Path) -> None:
    """Each rank along "tp" has changed a norm alone. The checkpoint, loaded, makes the copies equal."""
    model, optimizer = with_adam(_sharded(_made(), world := _mesh(2, 2)))
    save_checkpoint(tmp_path, model, optimizer)
    with torch.no_grad():
        model.norm.weight.add_(world.tp.get_local_rank())
    told = r"ranks 0 and 1 of the model, .* other values of 'norm\.weight'.* after load_checkpoint"
    with pytest.warns(UserWarning, match=told) if context.rank == 0 else contextlib.nullcontext():
        save_checkpoint(tmp_path, model, optimizer)
    load_checkpoint(tmp_path, model, optimizer)
    save_checkpoint(tmp_path, model, optimizer)
    assert bool((model.full_state_dict(rank0_only=False)["norm.weight"] == 1.0).all())


@on_ranks()
@pytest.mark.parametrize(("world_size", "name", "replicas"), [(2, "tensor", 1), (4, "tensor", 2), (4, "expert", 2)])
def test_the_example_trains_what_one_process_trains(context: RankContext, name: str, replicas: int) -> None:
    """As a user starts it: two parts, or two parts of experts."""
    model, norms = example(name)["main"](STEPS, 2, replicas)
    assert_script_trained_like_plain(example(name), model, norms)


@on_ranks(4)
def test_norms_sums_and_shapes_are_the_full_tensors(context: RankContext) -> None:
    """Of matrices in parts, and of norms that every rank of the mesh has. Summoned, both can be changed."""
    world, whole = _mesh(2, 2), _made()
    sharded = _sharded(_made(), world)
    count = sum(param.numel() for param in whole.parameters())
    assert f"{count:,} parameters over 2 ranks in each of 2 parts" in repr(sharded)
    for (name, param), full in zip(sharded.named_parameters(), whole.parameters(), strict=True):
        assert param.shape == full.shape and param.numel() == full.numel(), name
        assert type(param).__name__ != "DTensor", name
        for function in (torch.norm, torch.sum, torch.mean):
            assert float(function(param.detach())) == pytest.approx(float(function(full.detach())), rel=1e-5), name
        assert float(param.detach().max()) == float(full.detach().max()), name
    with sharded.summon_full_params():
        for param in sharded.parameters():
            param.data.mul_(2)
    assert difference(full_weights(sharded), {name: 2 * each for name, each in whole.state_dict().items()}) == 0.0


@on_ranks(4)
def test_dtensors_read_elsewhere_or_changed_in_a_forward_raise(context: RankContext) -> None:
    """Also through its local part, as one that is frozen can be written. By another layer, or by its own."""
    world, model, kept = _mesh(2, 2), _made(), list[Any]()
    model.layers[1].down.weight.requires_grad_(False)
    model.layers[0].register_forward_pre_hook(lambda layer, args: kept.append(layer.up.weight))
    sharded = _sharded(model, world)

    def read(layer: Any, args: Any) -> None:
        kept[-1].square().sum()

    def read_part(layer: Any, args: Any) -> None:
        kept[-1].to_local().square().sum()

    def write(layer: Any, args: Any) -> None:
        with torch.no_grad():
            layer.up.weight.mul_(0.5)

    def write_part(layer: Any, args: Any) -> None:
        layer.down.weight.to_local().mul_(0.5)

    elsewhere = r"'layers.0.up.weight'.*resident=\['layers.0.up'\]"
    for hook, said in (
        (read, elsewhere),
        (read_part, elsewhere),
        (write, "'layers.1.up.weight' was changed in place"),
        (write_part, "'layers.1.down.weight' was changed in place"),
    ):
        handle = sharded.layers[1].register_forward_pre_hook(hook)
        with case(hook.__name__), pytest.raises(ShardingError, match=said):
            sharded(torch.zeros(2, TOKENS, dtype=torch.int64))
        handle.remove()


def with_adam(model: Any) -> tuple[Any, torch.optim.Optimizer]:
    return model, adam(model)


def save(path: Path, model: Any, optimizer: Any) -> tuple[dict[str, Tensor], Any]:
    """A checkpoint and an export; full weights and full state."""
    save_checkpoint(path / "run", model, optimizer)
    export_safetensors(model, path / "export")
    return full_weights(model), full_optimizer_state_dict(model, optimizer, rank0_only=False)


def assert_loads(path: Path, weights: dict[str, Tensor], state: Any, make: Callable[[int], Any]) -> None:
    """Load the checkpoint, and into another model full weights, the export, and full state. `make` takes a seed."""
    model, optimizer = with_adam(make(1))
    load_checkpoint(path / "run", model, optimizer)
    other, own = with_adam(make(2))
    load_optimizer_state_dict(other, own, state)
    other.load_state_dict(weights)
    assert difference(full_weights(other), weights) == 0.0
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()
    load_safetensors(other, path / "export")
    for each, its in ((model, optimizer), (other, own)):
        assert difference(full_weights(each), weights) == 0.0
        assert_same_state(full_optimizer_state_dict(each, its, rank0_only=False), state)
    rows = torch.arange(4 * TOKENS).view(4, TOKENS) % WORDS
    assert torch.equal(other(rows), model(rows))


def _saved(context: RankContext, path: Path) -> tuple[dict[str, Tensor], Any]:
    model, optimizer = with_adam(_sharded(_made(), world := _mesh(2, 2)))
    _train(model, world, optimizer=optimizer, steps=1)
    return save(path, model, optimizer)


def _loaded(context: RankContext, path: Path, *saved: Any) -> None:
    """On as many parts as ranks."""
    assert_loads(path, *saved, lambda seed: _sharded(_made(seed), _mesh(1, context.world_size)))


def test_checkpoints_exports_and_full_state_load_on_meshes_of_any_shape(ranks: Any, tmp_path: Path) -> None:
    """More parts, and one rank without DTensors; to the bit."""
    saved = ranks(4).run(_saved, tmp_path)[0]
    for size in (4, 1):
        ranks(size).run(_loaded, tmp_path, *saved)


@on_ranks(4)
def test_weights_and_checkpoints_of_fsdp2_with_the_same_plan_load(context: RankContext, tmp_path: Path) -> None:
    """State dicts of DTensors on one axis or two; checkpoints, weights and moments, in both directions. To the bit."""
    world = _mesh(2, 2)

    def fsdp2(seed: int) -> Any:
        model = _made(seed)
        _parallelize(model, world.tp, sequence=True)
        for part in (*model.layers, model):
            fully_shard(part, mesh=world.dp)
        return model

    sharded, alike = _sharded(_made(), world), _made(1)
    _parallelize(alike, world.tp, sequence=True)
    for seed, other in ((1, alike), (2, fsdp2(2))):
        sharded.load_state_dict(other.state_dict())
        assert difference(full_weights(sharded), _made(seed).state_dict()) == 0.0
    peer = fsdp2(0)
    theirs = adam(peer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP2's, of views; DCP's
        _train(peer, world, optimizer=theirs, steps=1, clips=False)
        weights, moments = get_state_dict(peer, theirs)
        state_dict_saver.save({"model": weights, "optimizer": moments}, checkpoint_id=tmp_path / "dcp")
    if context.rank == 0:
        from_dcp(tmp_path / "dcp", tmp_path / "run")
    dist.barrier()
    model, optimizer = with_adam(_sharded(_made(1), world))
    load_checkpoint(tmp_path / "run", model, optimizer)
    wanted = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in weights.items()}
    assert difference(full_weights(model), wanted) == 0.0
    save_checkpoint(tmp_path / "again", model, optimizer)
    if context.rank == 0:
        to_dcp(tmp_path / "again", tmp_path / "back")
    dist.barrier()
    other = fsdp2(2)
    mine = adam(other)
    state = dict(zip(("model", "optimizer"), get_state_dict(other, mine), strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state_dict_loader.load(state, checkpoint_id=tmp_path / "back")
    for name, each in state["model"].items():
        assert torch.equal(each.full_tensor() if isinstance(each, DTensor) else each, wanted[name]), name
    for name, values in state["optimizer"]["state"].items():
        for key, value in values.items():
            both = value, moments["state"][name][key]
            local = [each.to_local() if isinstance(each, DTensor) else torch.as_tensor(each) for each in both]
            assert torch.equal(*local), (name, key)


@on_ranks(4)
def test_buffers_that_are_dtensors_are_saved_whole(context: RankContext, tmp_path: Path) -> None:
    """As torchtitan's routers have them: in checkpoints and state dicts they are plain tensors."""
    world = _mesh(2, 2)

    def made(value: float, *, cut: bool = True) -> Any:
        model, bias = _made(), torch.full((4,), value)
        if cut:
            _parallelize(model, world.tp, sequence=False)
            bias = distribute_tensor(bias, world.tp, [Replicate()])
        model.register_buffer("bias", bias)
        return StreamShard(model, mesh=world.dp if cut else None, precision="fp32")

    first, second, whole = made(1.0), made(2.0), made(3.0, cut=False)
    save_checkpoint(tmp_path, first)
    state = first.full_state_dict(rank0_only=False)
    assert type(state["bias"]) is Tensor and torch.equal(state["bias"], torch.ones(4))
    for model in (second, whole):
        load_checkpoint(tmp_path, model)
        bias = model.bias.to_local() if isinstance(model.bias, DTensor) else model.bias
        assert torch.equal(bias, torch.ones(4))


@on_ranks(4)
def test_what_steps_other_tensors_than_the_model_has_raises(context: RankContext) -> None:
    """An optimizer and a clip of DTensors from before sharding; optimizers of matrices; a plan after sharding."""
    world, model = _mesh(2, 2), _made()
    _parallelize(model, world.tp, sequence=True)
    before = torch.optim.AdamW(model.parameters())
    sharded: Any = StreamShard(model, mesh=world.dp)
    matrices = [param for param in sharded.parameters() if param.ndim == 2]
    whole = WholeParameterOptimizer(matrices, torch.optim.Muon, lr=1e-2)
    sharded(torch.zeros(2, TOKENS, dtype=torch.int64)).mean().backward()
    old = before.param_groups[0]["params"]
    assert "DTensor" in type(old[0]).__name__ and old[0].shape == (WORDS, 32)
    assert not any(DTensor._local_tensor.__get__(each).numel() for each in old if isinstance(each, DTensor))
    gone = r"of the DTensor '.*': .* after StreamShard\(model\), for optimizers too"
    for use in (before.step, before.zero_grad, lambda: nn.utils.clip_grad_norm_(old, CLIP)):
        with pytest.raises(ShardingError, match=gone):
            use()
    with pytest.raises(ShardingError, match=r"'embedding.weight' is a DTensor, .*: take an elementwise optimizer"):
        whole.step()
    with pytest.raises(ShardingError, match="No rank can step whole DTensors: take another optimizer"):
        torch.optim.Adafactor(sharded.parameters()).step()
    with pytest.raises(ShardingError, match="parallelize the model before StreamShard"):
        _parallelize(StreamShard(_made()), world.tp, sequence=False)


def refused(model: Any, mesh: Any, said: str, kind: type[Exception] = ShardingError) -> None:
    with pytest.raises(kind, match=said):
        StreamShard(model, mesh=mesh)


@on_ranks(4)
def test_parts_that_are_no_dtensors_or_have_no_values_are_refused_by_name(context: RankContext) -> None:
    """As torchtitan's models by default, as PEFT makes adapters without the mesh, and on meta on some ranks only."""
    world, typed, on_meta = _mesh(2, 2), nn.Linear(4, 4), _made()
    typed.weight._local_type = {"tp": "V"}
    refused(typed, None, r"'weight' has a type of spmd_types.*spmd_backend=.partial_dtensor")
    adapted, adapter = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Module()
    parallelize_module(adapted, world.tp, {"1": ColwiseParallel()})
    adapter.base_layer, adapter.lora_A = adapted[1], nn.Linear(8, 2, bias=False)
    adapter.lora_B = nn.Linear(2, 4, bias=False)
    adapted[1] = adapter
    refused(adapted, world.dp, r"adapter '1.lora_B.weight' \[4, 2\] is made for this rank's part of a matrix")
    parallelize_module(on_meta, world.tp, {"head": ColwiseParallel()})
    if world.tp.get_local_rank():
        on_meta.head.weight = nn.Parameter(on_meta.head.weight.detach().to("meta"))
    refused(on_meta, world.dp, "'head.weight', a DTensor, is on the meta device on some ranks", RankMismatchError)


@on_ranks(4)
def test_models_with_dtensors_that_cannot_be_sharded_are_refused_by_name(context: RankContext) -> None:
    """On some ranks only, of another mesh, of several, with uneven strides, of two axes, or as a buffer."""
    world = _mesh(2, 2)

    def with_weights(*placed: tuple[DeviceMesh, Any]) -> nn.Module:
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in placed))
        for layer, (mesh, placements) in zip(model, placed, strict=True):
            layer.weight = nn.Parameter(distribute_tensor(torch.ones(8, 8), mesh, placements))
        return model

    some, fsdp, rows, columns = (_made() for _ in range(4))
    if world.dp.get_local_rank() == 0:
        _parallelize(some, world.tp, sequence=True)
    _parallelize(fsdp, world.tp, sequence=True)
    _parallelize(rows, world.tp, sequence=False)
    parallelize_module(columns, world.tp, {"layers.*.up": ColwiseParallel()})
    for mesh in (world.dp, None):
        refused(some, mesh, r"rank \d has DTensors, and rank \d has none: parallelize the model", RankMismatchError)
    refused(fully_shard(fsdp, mesh=world.dp), world.dp, r"was given to fully_shard, .* leave fully_shard out")
    for each in (rows, columns):  # as if the mesh were one of experts
        said = r"'.*' is cut along dim 0 on .*: wanted experts .* mesh=world..dp"
        refused(each, init_device_mesh("cpu", (4,)), said)
    both, cut = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), [Shard(0)]
    several = with_weights((world.tp, cut), (world.dp, cut))
    refused(several, _mesh(4, 1).tp, r"'0.weight' and '1.weight' are DTensors on different meshes")
    packed: Any = with_weights((world.tp, cut))
    strided = [_StridedShard(0, split_factor=3)]
    uneven = DTensor.from_local(torch.ones(4, 8), world.tp, strided, shape=(8, 8), stride=(8, 1))
    packed[0].weight = nn.Parameter(uneven)
    refused(packed, world.dp, r"'0.weight' is a DTensor with .*: wanted Shard, a strided Shard of equal")
    over_all = with_weights((init_device_mesh("cpu", (4,), mesh_dim_names=("all",)), cut))
    refused(
        over_all, world.dp, r"has DTensors on ranks \[.*, and is sharded over ranks .*: wanted other axes", ConfigError
    )
    of_both = with_weights((both, [Replicate(), Shard(0)]))
    refused(of_both, world.dp, r"'0.weight' is a DTensor on a mesh of axes \('dp', 'tp'\): wanted one")
    model = with_weights((world.tp, cut))
    model.register_buffer("table", distribute_tensor(torch.ones(4), world.tp, cut), persistent=False)
    refused(model, world.dp, r"buffer 'table' is not dense \(DTensor")


@on_ranks(2)
def test_hooks_of_dtensors_stay_or_are_refused(context: RankContext) -> None:
    """One that gets the sharded gradient is called; one on the whole gradient raises at the first pass."""
    world, calls = _mesh(1, 2), list[torch.Size]()
    for register in ("register_post_accumulate_grad_hook", "register_hook"):
        model = _made()
        _parallelize(model, world.tp, sequence=False)
        getattr(model.layers[0].up.weight, register)(lambda param: calls.append(param.grad.shape))
        sharded = StreamShard(model, mesh=world.dp, precision="fp32")
        refused = pytest.raises(ShardingError, match=r"a hook on parameter 'layers.0.up.weight' would never run")
        with refused if register == "register_hook" else contextlib.nullcontext():
            sharded(torch.zeros(1, TOKENS, dtype=torch.long)).sum().backward()
    assert calls == [sharded.layers[0].up.weight.shape]
