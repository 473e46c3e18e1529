"""The tools on models with DTensors: a plan has what the live engine reports and sends, and what a step takes."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from streamshard import ConfigError, ShardingError, StreamShard, plan
from streamshard.tools.fit import Stage
from streamshard.tools.model_source import builder_of
from streamshard.torch_private import fake_ranks
from tests.launched import ROOT
from tests.models import TinyLM
from tests.ranks import RankContext, on_ranks
from tests.scenarios import over_sockets
from tests.simulated import simulated_device
from tests.tools.test_plan import SLOTS, _assert_equal, _config, sent_in_last
from tests.tools.test_planned_activations import BATCH, SEQ, peak_of_step
from tests.training import test_experts_and_context as experts
from tests.training import test_tensor_parallel as tensors

WAYS: dict[str, Callable[[], Any]] = {"shared-memory": nullcontext, "sockets": over_sockets, "nccl": simulated_device}
pytestmark = [
    pytest.mark.filterwarnings("ignore:While redistributing:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*lru_cache:UserWarning"),
]


def build_parts(mesh: DeviceMesh) -> nn.Module:
    """Sequence parallel, with a vocabulary of 33 words: the first of two ranks has 17."""
    model: nn.Module = tensors._made()
    tensors._parallelize(model, mesh, sequence=True)
    return model


def build_experts(mesh: DeviceMesh) -> nn.Module:
    model = experts._made()
    for layer in model.layers:
        layer.experts.place_on(mesh)
    return model  # type: ignore[no-any-return]


def _built(parallel: str, size: int) -> tuple[nn.Module, Any]:
    """On this rank, and the mesh for `StreamShard`."""
    if parallel == "tp":
        world = tensors._mesh(dist.get_world_size() // size, size)
        return build_parts(world.tp), world.dp
    shape, names = (dist.get_world_size() // size, size), (f"beside {size}", f"experts over {size}")
    return build_experts(init_device_mesh("cpu", shape, mesh_dim_names=names)[names[1]]), dist.group.WORLD


def _compare(
    context: RankContext, parallel: str, size: int, transport: str, precision: str, first: list[Stage]
) -> None:
    given: dict[str, Any] = {"transport": transport, "precision": precision, "weight_slots": 3, parallel: size}
    planned = plan(_built(parallel, size)[0], context.world_size, **given)
    with WAYS[transport]():
        for stage, slots in zip(planned.stages, SLOTS, strict=True):
            model, mesh = _built(parallel, size)
            live: Any = StreamShard(model, mesh=mesh, precision=precision, **slots)
            _assert_equal(stage, live)
            assert planned.numel == live.memory_report().numel
    if context.rank == 0:
        assert planned.stages == first
    is_larger = planned.stages[0].memory.held_bytes["weight slots"] < first[0].memory.held_bytes["weight slots"]
    assert is_larger == (parallel == "tp" and context.rank % size == 1)  # 16 of 33 words


@pytest.mark.parametrize(
    ("parallel", "world_size", "size", "precision", "transport"),
    [
        *(("tp", 4, 2, "bf16", "nccl"), ("tp", 2, 2, "fp32", "sockets")),
        *(("ep", 4, 2, "fp32", "shared-memory"), ("ep", 4, 4, "bf16", "nccl")),
    ],
)
def test_a_plan_equals_the_live_memory_report(
    ranks: Any, parallel: str, world_size: int, size: int, precision: str, transport: str
) -> None:
    """In each category, byte for byte, on each rank; a function on no ranks makes the plan of rank 0."""
    build = build_parts if parallel == "tp" else build_experts
    given: dict[str, Any] = {"transport": transport, "precision": precision, "weight_slots": 3, parallel: size}
    first = plan(build, world_size, **given).stages
    ranks(world_size).run(_compare, parallel, size, transport, precision, first)


@on_ranks(2)
def test_a_plan_of_tied_weights_equals_the_live_memory_report(context: RankContext, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    build, world = builder_of(str(_config(tmp_path / str(context.rank), **sizes))), tensors._mesh(1, 2)
    model: Any = build(world.tp)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    planned = plan(build(world.tp), 2, tp=2, transport="shared-memory").stages[0]
    _assert_equal(planned, StreamShard(model, mesh=world.dp, weight_slots=2))


@on_ranks(4)
def test_a_plan_with_offload_equals_the_live_memory_report(context: RankContext) -> None:
    """With tensor parallelism. Experts are refused, as by StreamShard."""
    planned = plan(_built("tp", 2)[0], 4, tp=2, offload="state")
    with simulated_device():
        model, mesh = _built("tp", 2)
        _assert_equal(planned.stages[0], StreamShard(model, mesh=mesh, offload="state"))
    with pytest.raises(ConfigError, match="the model has DTensors of experts, whose state stays on the device"):
        plan(_built("ep", 2)[0], 4, ep=2, offload="state")


@on_ranks(4)
@pytest.mark.parametrize(("parallel", "size"), [("tp", 2), ("ep", 2)])
def test_a_step_sends_what_the_plan_says(context: RankContext, parallel: str, size: int) -> None:
    def step(model: nn.Module) -> None:
        model(torch.arange(2 * 8).view(2, 8)).square().mean().backward()

    planned = plan(_built(parallel, size)[0], 4, precision="fp32", **{parallel: size})  # type: ignore[arg-type]
    for number, slots in enumerate((SLOTS[0], SLOTS[2], SLOTS[3])):
        model, mesh = _built(parallel, size)
        live: Any = StreamShard(model, mesh=mesh, precision="fp32", **slots)
        assert sent_in_last(live, functools.partial(step, live), 1) == planned.stages[number].sent_bytes


def _true_peak(context: RankContext, config: str, *, is_checkpointed: bool) -> int:
    model: Any = builder_of(config)(init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    return peak_of_step(model, "bf16", is_checkpointed=is_checkpointed)


def test_activations_equal_the_true_peak_of_a_step(ranks: Any, tmp_path: Path) -> None:
    """With transformers' own plan, without checkpointing and with it."""
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3, "vocab_size": 1024}
    config = str(_config(tmp_path, **sizes, num_attention_heads=4, num_key_value_heads=2))
    given: dict[str, Any] = {"precision": "bf16", "batch": BATCH, "seq": SEQ, "transport": "sockets"}
    planned = plan(builder_of(config), 2, tp=2, **given).activation_bytes
    assert planned is not None
    for is_checkpointed in (False, True):
        measured = ranks(2).run(functools.partial(_true_peak, is_checkpointed=is_checkpointed), config)[0]
        assert planned[is_checkpointed] == pytest.approx(measured, abs=256), is_checkpointed


def test_the_command_plans_transformers_own_plan(tmp_path: Path, command: Any) -> None:
    """docs/guide/parallelism.md: Llama 3 8B on 8 ranks, cut over 2."""
    config = str(_config(tmp_path))
    words = ["plan", config, *["--ranks", "8", "--tp", "2"]]
    text = command(*words)
    guide = (ROOT / "docs/guide/parallelism.md").read_text()
    assert text[: text.index("\n") + 1] in guide
    assert text[text.index("GiB per rank") : text.index("\n\narguments of")] in guide
    told = json.loads(command("plan", config, *["--tp", "2", "--budget", "18GiB", "--json"]))
    assert (told["tp"], told["ep"], told["world_size"]) == (2, 1, 10)


def test_the_command_plans_a_function_of_a_mesh(command: Any) -> None:
    """Of experts. Their exchange depends on the tokens, so their activations are not known."""
    text = command("plan", f"{__name__}:build_experts", *["--ranks", "4", "--ep", "2", "--batch", "2", "--seq", "8"])
    assert text.startswith("MixtureLM: 106,616 parameters on 4 ranks (experts over 2), over nccl\n")
    assert "\nactivations: unknown, because the model does not run on 2 x 8 tokens without memory: " in text


def test_bad_input_is_named(tmp_path: Path, command: Any) -> None:
    pytest.importorskip("transformers").GPT2Config(architectures=["GPT2LMHeadModel"]).save_pretrained(tmp_path)
    for model, options, told in (
        ("build_parts", "", "neither tp nor ep: the function takes the mesh of its DTensors"),
        ("without_a_mesh", "--tp 2", "tp=2: the function has to take the mesh of its DTensors, its only argument"),
        ("without_a_plan", "--tp 2", "tp=2, ep=1: the model has no DTensors: wanted neither of the two"),
        ("build_parts", "--tp 3", "tp=3: wanted a number that divides 4 ranks"),
        ("build_parts", "--tp 2 --ep 2", "tp=2, ep=2: a plan is of one of the two"),
        ("build_parts", "--tp 2 --machine pcie5", "and without tp, ep and replicas, whose exchanges"),
        (None, "--tp 2", "transformers has no tensor parallel plan for GPT2LMHeadModel: give a function"),
    ):
        name = str(tmp_path) if model is None else f"{__name__}:{model}"
        assert told in command("plan", name, "--ranks", 4, *options.split(), code=2)
        assert not dist.is_initialized()
    with pytest.raises(ShardingError, match="whose ranks shard the model: wanted experts stacked along dim 0"):
        plan(build_parts, 4, ep=2)
    for build, size in ((build_parts, "tp"), (build_experts, "ep")):
        with pytest.raises(ConfigError, match="shard_over_replicas=True, and the model has DTensors: leave it away"):
            plan(build, 4, replicas=2, shard_over_replicas=True, **{size: 2})  # type: ignore[arg-type]


def without_a_mesh() -> nn.Module:
    return TinyLM()


def without_a_plan(mesh: DeviceMesh) -> nn.Module:
    return TinyLM()


@on_ranks(2)
def test_a_process_with_a_group_plans_models_and_no_functions(context: RankContext) -> None:
    """The model knows over how many ranks it is cut. It cannot be copied, so its activations are not known."""
    model, _ = _built("tp", 2)
    for given, told in (({}, "has DTensors over 2 ranks: wanted tp=2, or ep=2"), ({"tp": 4}, "DTensors over 2 ranks")):
        with pytest.raises(ConfigError, match=told):
            plan(model, 4, **given)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="tp=2: this process has a process group"):
        plan(build_parts, 4, tp=2)
    assert "cannot be copied: give a function" in plan(model, 4, tp=2, batch=2, seq=8).activations_unknown


def test_meshes_after_a_plan_are_not_taken_for_its_mesh() -> None:
    """Else torch would let DTensors of a later run use the ranks of the plan, which do not exist."""
    given: list[DeviceMesh] = []

    def build(mesh: DeviceMesh) -> nn.Module:
        given.append(mesh)
        return build_parts(mesh)

    world: Any = dist.distributed_c10d._world
    world.group_count += 2  # as if earlier groups of the process had taken the names
    assert plan(build, 2, tp=2).stages == plan(build_parts, 2, tp=2).stages
    with fake_ranks(2):
        for names in (None, ("tp",), ("ep",)):
            assert init_device_mesh("cpu", (2,), mesh_dim_names=names) != given[0]
