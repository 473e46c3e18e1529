"""accelerate, Trainer and transformers' own plans with tensor parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.data import DataLoader

from tests.compare import assert_same_state, difference, full_weights
from tests.integrations.trainers import Run, launched, train
from tests.ranks import RankContext, everywhere, on_ranks

transformers: Any = pytest.importorskip("transformers")
pytest.importorskip("transformers.distributed.tensor_parallel")
from accelerate import ParallelismConfig  # noqa: E402
from transformers import DistributedConfig  # noqa: E402
from transformers.distributed.expert_parallel import apply_expert_parallelism  # noqa: E402
from transformers.distributed.tensor_parallel import apply_tensor_parallelism  # noqa: E402

from streamshard import (  # noqa: E402
    ConfigError,
    StreamShard,
    export_safetensors,
    full_optimizer_state_dict,
    load_checkpoint,
    load_safetensors,
    save_checkpoint,
)
from streamshard.integrations.accelerate import StreamShardAccelerator  # noqa: E402
from streamshard.integrations.transformers import StreamShardTrainer  # noqa: E402

WORDS, STEPS, CLIP = 64, 2, 0.5
CONFIGS: dict[str, Any] = {
    "llama": transformers.LlamaConfig,
    "qwen2": transformers.Qwen2Config,
    "mixtral": transformers.MixtralConfig,  # a gate and an up projection in one matrix, each cut
    "qwen3 moe": transformers.Qwen3MoeConfig,
}


def _made(kind: str = "llama") -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    experts = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    given = {**sizes, **heads, **special, **(experts if kind in ("mixtral", "qwen3 moe") else {})}
    config = CONFIGS[kind](**given, max_position_embeddings=64)
    return transformers.AutoModelForCausalLM.from_config(config)


def _parallel(kind: str, mesh: DeviceMesh) -> Any:
    """A model with transformers' own plan."""
    model = _made(kind)
    apply_tensor_parallelism(model, mesh, model._expand_parallel_plan(model.tp_plan))
    return _copy_into_parts(model, kind)


def _copy_into_parts(model: Any, kind: str) -> Any:
    """Give DTensors the values of `_made`: transformers makes them without any. Returns the model."""
    weights = _made(kind).state_dict()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if isinstance(param, DTensor):
                param.to_local().copy_(distribute_tensor(weights[name], param.device_mesh, param.placements).to_local())
    return model


def _rows() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, WORDS, (4, 10), generator=generator) for _ in range(STEPS)]


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.0)


def _train(model: Any, place: int = 0, places: int = 1) -> tuple[list[float], dict[str, Tensor]]:
    optimizer, norms = _adam(model), []
    for rows in _rows():
        own = rows.chunk(places)[place]
        model(input_ids=own, labels=own).loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, full_weights(model)


def _assert_trains_as_one_process(model: Any, kind: str, place: int = 0, places: int = 1) -> dict[str, Tensor]:
    """Train the sharded `model` of this kind on the rows of a place, compare, and return its weights."""
    norms, found = _train(model, place, places)
    wanted_norms, wanted = _train(_made(kind))
    assert norms == pytest.approx(wanted_norms, rel=1e-5)
    assert difference(found, wanted) < 1e-5
    return found


@on_ranks(4)
@pytest.mark.parametrize("kind", ["qwen2", "mixtral"])
def test_transformers_own_plans_train_what_one_process_trains(context: RankContext, kind: str) -> None:
    """2 x 2 ranks; embedding and head are cut too. Llama's plan is used by accelerate and Trainer below."""
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=(f"dp {kind}", f"tp {kind}"))
    model = StreamShard(_parallel(kind, world[f"tp {kind}"]), mesh=world[f"dp {kind}"], precision="fp32")
    _assert_trains_as_one_process(model, kind, world[f"dp {kind}"].get_local_rank(), 2)


@on_ranks(4)
def test_transformers_plans_of_experts_train_what_one_process_trains(context: RankContext) -> None:
    """All ranks shard the model, and exchange tokens: two have the same experts."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("beside mixtral", "ep mixtral"))["ep mixtral"]
    alone = init_device_mesh("cpu", (4, 1), mesh_dim_names=("all of mixtral", "one of mixtral"))["one of mixtral"]
    model = _made("mixtral")
    apply_expert_parallelism(model, mesh, alone, model._expand_parallel_plan(model.ep_plan), "all_to_all")
    model = StreamShard(_copy_into_parts(model, "mixtral"), mesh=dist.group.WORLD, precision="fp32")
    _assert_trains_as_one_process(model, "mixtral", context.rank, 4)


def _with_experts() -> tuple[Any, int]:
    """A model with both of transformers' plans, its experts over all ranks, and this rank's number along dp."""
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp beside experts", "tp beside experts"))
    dp_mesh, tp_mesh = world["dp beside experts"], world["tp beside experts"]
    experts = init_device_mesh("cpu", (1, 4), mesh_dim_names=("same", "experts"))["experts"]
    return _with_both_plans(tp_mesh, experts, tp_mesh, dp_mesh), dp_mesh.get_local_rank()


def _with_both_plans(tp: DeviceMesh, experts: DeviceMesh, within: DeviceMesh, dp: DeviceMesh) -> Any:
    model = _made("qwen3 moe")
    tp_plan = {key: style for key, style in model.tp_plan.items() if "experts" not in key}
    apply_tensor_parallelism(model, tp, model._expand_parallel_plan(tp_plan))
    apply_expert_parallelism(model, experts, within, model._expand_parallel_plan(model.ep_plan), "all_to_all")
    return StreamShard(_copy_into_parts(model, "qwen3 moe"), mesh=dp, precision="fp32")


def _norms_with_penalties(model: Any, whole: Any, place: int) -> list[float]:
    """Norms of the gradients of a loss with a penalty on all weights: sharded, of one of two places; and whole."""
    norms = []
    for trained, rows in ((model, _rows()[0].chunk(2)[place]), (whole, _rows()[0])):
        loss = trained(input_ids=rows, labels=rows).loss
        (loss + sum(param.square().sum() for param in trained.parameters())).backward()
        norms.append(float(nn.utils.clip_grad_norm_(trained.parameters(), CLIP)))
    return norms


@on_ranks(4)
def test_tensor_parallelism_with_experts_trains_what_one_process_trains(context: RankContext, tmp_path: Path) -> None:
    """transformers' plans for both. A checkpoint loads where all ranks shard the model, and back. Penalties too."""
    model, place = _with_experts()
    found = _assert_trains_as_one_process(model, "qwen3 moe", place, 2)
    save_checkpoint(tmp_path / "parallel", model)
    whole = StreamShard(_made("qwen3 moe"), precision="fp32")
    load_checkpoint(tmp_path / "parallel", whole)
    save_checkpoint(tmp_path / "whole", whole)
    again, _ = _with_experts()
    load_checkpoint(tmp_path / "whole", again)
    assert difference(full_weights(whole), found) == difference(full_weights(again), found) == 0.0
    again.set_gradient_divide_factor(1.0)  # gradients are summed, not averaged, over two data-parallel ranks
    plain = _made("qwen3 moe")
    plain.load_state_dict(found)
    norms, wanted = _norms_with_penalties(again, plain, place)
    assert norms == pytest.approx(2 * wanted, rel=1e-5)


@on_ranks(4)
def test_experts_over_data_ranks_are_copies_along_tensor_parallelism(context: RankContext) -> None:
    """Ranks along "tp" exchange the same tokens, each with the data ranks of its own number. Penalties too."""
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))
    alone = init_device_mesh("cpu", (4, 1), mesh_dim_names=("all of copies", "one of copies"))["one of copies"]
    model, place = _with_both_plans(world["tp"], world["data"], alone, world["data"]), world["data"].get_local_rank()
    whole = _made("qwen3 moe")
    whole.load_state_dict(_assert_trains_as_one_process(model, "qwen3 moe", place, 2))
    found, wanted = _norms_with_penalties(model, whole, place)
    assert found == pytest.approx(wanted, rel=1e-5)


def _mixtral_on(dp: int, tp: int) -> tuple[Any, torch.optim.Optimizer]:
    """A model with experts that tensor parallelism cuts, and its optimizer."""
    world = init_device_mesh("cpu", (dp, tp), mesh_dim_names=(f"dp {dp} of experts", f"tp {tp} of experts"))
    dp_mesh, tp_mesh = (world[name] for name in world.mesh_dim_names or ())
    model = _parallel("mixtral", tp_mesh)
    assert "_StridedShard" in str(model.model.layers[0].mlp.experts.gate_up_proj.placements)
    model = StreamShard(model, mesh=dp_mesh, precision="fp32")
    return model, _adam(model)


@on_ranks(4)
def test_packed_experts_load_on_meshes_of_other_shapes(context: RankContext, tmp_path: Path) -> None:
    """Checkpoints, exports and full state, of a gate and an up projection in one matrix, each cut."""
    model, optimizer = _mixtral_on(2, 2)
    rows = _rows()[0]
    model(input_ids=rows, labels=rows).loss.backward()
    optimizer.step()
    weights, state = full_weights(model), full_optimizer_state_dict(model, optimizer, rank0_only=False)
    save_checkpoint(tmp_path / "run", model, optimizer)
    export_safetensors(model, tmp_path / "export")
    other, own = _mixtral_on(1, 4)
    load_checkpoint(tmp_path / "run", other, own)
    loaded, _ = _mixtral_on(1, 4)
    load_safetensors(loaded, tmp_path / "export")
    for found in (other, loaded):
        assert difference(full_weights(found), weights) == 0.0
    assert_same_state(full_optimizer_state_dict(other, own, rank0_only=False), state)
    plain = transformers.MixtralForCausalLM.from_pretrained(tmp_path / "export")
    assert difference(plain.state_dict(), weights) == 0.0


@on_ranks(4)
@pytest.mark.parametrize("sizes", [(2, 2), (1, 4)], ids=str)
def test_an_accelerator_trains_what_one_process_trains(context: RankContext, sizes: tuple[int, int]) -> None:
    """The optimizer is made before `prepare`; ranks of one tensor parallel group get the same batches."""
    with launched(context):
        dp, tp = sizes
        config = ParallelismConfig(dp_shard_size=dp, tp_size=tp)
        accelerator = StreamShardAccelerator(parallelism_config=config, precision="fp32")
        model = _parallel("llama", accelerator.torch_device_mesh["tp"])
        optimizer = _adam(model)
        loader = DataLoader(torch.cat(_rows()), batch_size=4 // dp)  # type: ignore[arg-type]  # rows
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for own in loader:
            accelerator.backward(model(input_ids=own, labels=own).loss)
            accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
        if dp == 1:  # with more, accelerate gives each rank rows of its own
            assert difference(full_weights(model), _train(_made())[1]) < 1e-5
        told = everywhere({name: float(each.sum()) for name, each in full_weights(model).items()})
        assert all(each == told[0] for each in told)
        assert len(loader) == STEPS
        loader = accelerator.prepare(DataLoader(range(7), batch_size=2))  # type: ignore[arg-type]
        texts = [text for own in loader for text in accelerator.gather_for_metrics([f"row {row}" for row in own])]
        assert texts == [f"row {row}" for row in range(7)]  # each once
        reference = _parallel("llama", accelerator.torch_device_mesh["tp"])
        assert accelerator.prepare_model(reference, evaluation_mode=True) is reference
        assert all(param.requires_grad for param in reference.parameters())  # as before
        with torch.no_grad():
            assert reference(input_ids=_rows()[0]).logits.shape == (4, 10, WORDS)


@on_ranks(2)
def test_a_parallelism_config_of_other_sizes_is_refused(context: RankContext) -> None:
    """The number of processes, and DeepSpeed's sequence parallelism."""
    for config, told in (
        (ParallelismConfig(tp_size=4), "is of 4 processes, and 2 were launched"),
        (ParallelismConfig(sp_size=2), r"ParallelismConfig\(sp_size=...\) is DeepSpeed's"),
    ):
        with launched(context), pytest.raises(ConfigError, match=told):
            StreamShardAccelerator(parallelism_config=config)


def _assert_trainer_trains_as_one_process(model: Any, path: Path, dp: int = 1, parallelism: Any = None) -> Run:
    """Train a Llama with Trainer on `dp` data ranks, and compare the norms that it logs, and the weights."""
    data = [{"input_ids": row, "labels": row} for row in torch.cat(_rows())]

    def in_order(trainer: Any) -> None:
        trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(data)

    options: dict[str, Any] = {"per_device_train_batch_size": 4 // dp, "max_steps": STEPS, "max_grad_norm": CLIP}
    options |= {"lr_scheduler_type": "constant", "weight_decay": 0.0, "parallelism_config": parallelism}
    options["per_device_eval_batch_size"] = 1  # each row counts as much as the others
    given = {"streamshard": {"precision": "fp32"}}
    run = train(StreamShardTrainer, model, path, data, given=given, before=in_order, **options)
    logs = [entry["grad_norm"] for entry in run.history if "grad_norm" in entry]
    wanted_norms, wanted = _train(_made())
    assert logs == pytest.approx(wanted_norms, rel=1e-4)
    assert difference(run.weights, wanted) < 1e-5
    return run


@on_ranks(4)
def test_trainer_trains_what_one_process_trains_and_predicts_each_row_once(
    context: RankContext, tmp_path: Path
) -> None:
    """On 2 x 2 ranks: Trainer's log of norms equals plain PyTorch's norms. Of seven rows; the loss is their mean."""
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp of rows", "tp of rows"))
    rows = torch.cat(_rows())[:7]
    with launched(context):
        config = ParallelismConfig(dp_shard_size=2, tp_size=2)
        run = _assert_trainer_trains_as_one_process(_parallel("llama", world["tp of rows"]), tmp_path, 2, config)
        found = run.trainer.predict([{"input_ids": row, "labels": row} for row in rows])
    assert torch.equal(torch.as_tensor(found.label_ids), rows)
    plain = _made()
    plain.load_state_dict(run.weights)
    with torch.no_grad():
        wanted = plain(input_ids=rows, labels=rows)
    assert torch.allclose(torch.as_tensor(found.predictions), wanted.logits, atol=1e-5)
    assert found.metrics["test_loss"] == pytest.approx(float(wanted.loss), rel=1e-5)


@on_ranks(2)
def test_a_model_of_distributed_config_trains_what_one_process_trains(context: RankContext, tmp_path: Path) -> None:
    """transformers has made DTensors while loading, over all ranks: StreamShard takes the mesh from them."""
    if context.rank == 0:
        _made().save_pretrained(tmp_path / "llama")
    dist.barrier()
    with launched(context):
        config = DistributedConfig(tp_size=2)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "llama", distributed_config=config)
        _assert_trains_as_one_process(StreamShard(loaded, precision="fp32"), "llama")
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "llama", distributed_config=config)
        _assert_trainer_trains_as_one_process(again, tmp_path / "out")
