"""TRL's trainers with StreamShard on two ranks: the numbers of DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from streamshard import ConfigError, ShardingError, StreamShard
from tests.integrations.accelerating import on_ranks
from tests.integrations.models import make_model, make_texts, make_tokenizer
from tests.integrations.trainers import Run, and_sharded, assert_equal, launched, run_example, train
from tests.models import TinyLM, next_token_loss, token_batch
from tests.ranks import RankContext
from tests.reference import Call, assert_trains_like_plain

trl: Any = pytest.importorskip("trl", reason="needs trl: pip install streamshard[hf]")
pytest.importorskip("peft", reason="needs peft: pip install streamshard[hf]")


def _data(*names: str, count: int = 16) -> Any:
    from datasets import Dataset

    lengths = (6, 12) if names == ("text",) else (4, 8)
    return Dataset.from_dict({name: make_texts(count, lengths, seed) for seed, name in enumerate(names)})


PREFERENCES = ("prompt", "chosen", "rejected")


def _options(config: Any) -> dict[str, Any]:
    """For `train`. Activation checkpointing, which is off, has another name in other versions of transformers."""
    from transformers import TrainingArguments

    known = TrainingArguments.__dataclass_fields__
    name = "activation_checkpointing" if "activation_checkpointing" in known else "gradient_checkpointing"
    return {"arguments_class": config, "bf16": False, name: False}


def _compare(
    out: Path,
    theirs: Any,
    config: Any,
    data: Any,
    model: Callable[[], Any],
    given: Callable[[], dict[str, Any]] = dict,
    resume: Sequence[Path | None] = (None, None),
    **options: Any,
) -> list[Run]:
    """Train with both; `model` and `given` make what they are given, `resume` says where they go on."""
    runs = []
    for each, stored in zip(and_sharded(theirs), resume, strict=True):
        made = {"processing_class": make_tokenizer(), **given()}
        options |= {"given": made, "resume": stored}
        runs.append(train(each, model(), out / each.__name__, data, **_options(config), **options))
    assert_equal(runs[1], runs[0])
    return runs


def _llama(**sizes: Any) -> Any:
    return make_model("llama", **sizes)


@on_ranks(2)
def test_sft_equals_ddp(context: RankContext, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_length": 16, "packing": True, "packing_strategy": "bfd"}
    with launched(context):
        _compare(tmp_path, trl.SFTTrainer, trl.SFTConfig, _data("text", count=32), _llama, **options)


@on_ranks(2)
def test_adapters_are_saved_and_go_on_as_with_ddp(context: RankContext, tmp_path: Path) -> None:
    """Each goes on from the other's checkpoint; what is saved is what PEFT loads."""
    from peft import LoraConfig, PeftModel

    saving = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "max_steps": 4}
    data = _data("text")

    def given() -> dict[str, Any]:
        config = LoraConfig(r=4, target_modules="all-linear", modules_to_save=["lm_head"])
        return {"peft_config": config, "eval_dataset": data}

    arguments: Any = (trl.SFTTrainer, trl.SFTConfig, data, _llama, given)
    with launched(context):
        theirs, ours = _compare(tmp_path, *arguments, load_best_model_at_end=True, **saving)
        stored = [Path(run.trainer.args.output_dir) / "checkpoint-2" for run in (theirs, ours)]
        assert {path.name for path in stored[1].iterdir()} == {path.name for path in stored[0].iterdir()}
        _compare(tmp_path / "resumed", *arguments, resume=stored[::-1], **{**saving, "save_strategy": "no"})
        read = [PeftModel.from_pretrained(_llama(), each).state_dict() for each in stored]
    torch.testing.assert_close(read[1], read[0], rtol=1e-4, atol=2e-6)  # dtypes too


@on_ranks(2)
@pytest.mark.parametrize("reference", ["synced", "precomputed"])
def test_dpo_equals_ddp(context: RankContext, reference: str, tmp_path: Path) -> None:
    """The reference is sharded too. A model that computes in the constructor is sharded for that."""
    from datasets import load_from_disk
    from peft import LoraConfig

    options: dict[str, Any] = {"max_length": 32}
    references, is_sharded, data = list[Any](), list[bool](), _data(*PREFERENCES)
    if reference == "precomputed":  # by the model itself, in the constructor; one file for all ranks
        options["precompute_ref_log_probs"] = True
        if context.rank == 0:
            data.save_to_disk(tmp_path / "data")
        dist.barrier()
        data = load_from_disk(tmp_path / "data")
    else:
        options |= {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}

    def given() -> dict[str, Any]:
        if reference == "precomputed":
            return {"peft_config": LoraConfig(r=4, target_modules="all-linear")}
        references.append(_llama())
        return {"ref_model": references[-1]}

    def before(trainer: Any) -> None:
        is_sharded.append(isinstance(trainer.model, StreamShard))

    with launched(context):
        _compare(tmp_path, trl.DPOTrainer, trl.DPOConfig, data, _llama, given, before=before, **options)
    assert is_sharded == [False, reference == "precomputed"]
    assert all(isinstance(each, StreamShard) for each in references[1:])


def _reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(each.split()))) for each in completions]


@on_ranks(2)
def test_grpo_equals_ddp(context: RankContext, tmp_path: Path) -> None:
    """With completions that end at different lengths on the ranks; the reference is loaded from the model's path."""
    from transformers import AutoModelForCausalLM

    if context.rank == 0:
        _llama().save_pretrained(tmp_path / "model")
    dist.barrier()
    with launched(context):
        runs = _compare(
            *(tmp_path, trl.GRPOTrainer, trl.GRPOConfig, _data("prompt")),
            lambda: AutoModelForCausalLM.from_pretrained(tmp_path / "model"),
            lambda: {"reward_funcs": _reward},
            beta=0.1,
            num_generations=2,
            max_completion_length=24,
            generation_kwargs={"sequence_bias": [[[2], 2.0]]},  # the end, now and then
        )
        ours = and_sharded(trl.GRPOTrainer)[1]
        made = {"reward_funcs": _reward, "processing_class": make_tokenizer()}
        asked: Any = {"arguments_class": trl.GRPOConfig, "given": made, "num_generations": 2}
        for name, told in (
            ("use_vllm", "use_vllm=True .* generate with transformers"),
            ("use_transformers_continuous_batching", "continuous_batching=True .* all ranks have to run as many"),
        ):
            with pytest.raises(ConfigError, match=told):
                train(ours, _llama(), tmp_path, _data("prompt", count=4), **asked, **{name: True})
    lengths = [[entry.get(f"completions/{end}_length", 0) for end in ("min", "max")] for entry in runs[1].history]
    assert any(least < most for least, most in lengths)


@on_ranks(2)
def test_a_callback_that_copies_the_model_raises_before_training(context: RankContext, tmp_path: Path) -> None:
    """Its copy would get pieces. The error names the parameters, on all ranks."""
    given = {"processing_class": make_tokenizer(), "callbacks": [trl.BEMACallback()]}
    ours, options = and_sharded(trl.SFTTrainer)[1], {"given": given, "arguments_class": trl.SFTConfig}
    with launched(context), pytest.raises(RuntimeError, match=r"copy\(\) of parameter 'lm_head.weight' outside of its"):
        train(ours, _llama(), tmp_path, _data("text"), **options)


@on_ranks(2)
def test_activations_that_trl_offloads_give_plain_gradients(context: RankContext) -> None:
    """TRL copies saved tensors to the host. It gets no weights of layers."""
    from trl.models.activation_offloading import get_act_offloading_ctx_manager

    has_streams = context.device.type != "cpu"
    offload: dict[bool, Any] = {}

    def step(model: Any, call: Call) -> Tensor:
        is_ours = isinstance(model, StreamShard)
        if is_ours not in offload:
            with mock.patch.object(torch.accelerator, "current_accelerator", lambda: context.device):
                offload[is_ours] = get_act_offloading_ctx_manager(
                    model, use_pin_memory=False, use_streams=has_streams, min_offload_size=1, warn_if_no_head=False
                )
        tokens = token_batch(call.step, call.rank)
        with offload[is_ours]:
            loss = next_token_loss(model(tokens), tokens)
        assert any(is_copied for _, is_copied, *_ in offload[is_ours].tracker.values())
        return call.backward(loss)

    # If bitsandbytes is imported, TRL calls this function, which torch's module for the CPU lacks.
    with mock.patch.object(torch.cpu, "empty_cache", lambda: None, create=True):
        assert_trains_like_plain(context, TinyLM, step)


@on_ranks(2)
def test_distillation_is_refused_because_it_reads_the_teachers_head(context: RankContext, tmp_path: Path) -> None:
    if not hasattr(trl, "DistillationTrainer"):
        pytest.skip("TRL has no distillation but an experimental one")
    given = {"teacher_model": _llama(), "processing_class": make_tokenizer()}
    options: Any = {"given": given, "max_completion_length": 6, **_options(trl.DistillationConfig)}
    ours = and_sharded(trl.DistillationTrainer)[1]
    with launched(context), pytest.raises(ShardingError, match=r"parameter 'lm_head.weight' outside of its model's"):
        train(ours, _llama(), tmp_path, _data("prompt", count=4), **options)


@on_ranks(2)
def test_gkd_distils_as_with_ddp(context: RankContext, tmp_path: Path) -> None:
    """From the teacher's logits, for texts that the student writes."""
    gkd: Any = pytest.importorskip("trl.experimental.gkd", reason="needs TRL's GKDTrainer")
    from datasets import Dataset

    texts = zip(make_texts(16, (4, 8), 0), make_texts(16, (4, 8), 1), strict=True)
    rows = [[{"role": "w1", "content": one}, {"role": "w2", "content": other}] for one, other in texts]
    teachers: list[Any] = []

    def given() -> dict[str, Any]:
        teachers.append(make_model("llama", num_hidden_layers=2))
        return {"teacher_model": teachers[-1]}

    arguments: Any = (gkd.GKDTrainer, gkd.GKDConfig, Dataset.from_dict({"messages": rows}), _llama, given)
    with launched(context):
        _, ours = _compare(tmp_path, *arguments, lmbda=1.0, max_new_tokens=6, max_length=32)
    assert isinstance(teachers[1], StreamShard)
    assert ours.history[0]["loss"] > 0.0


@on_ranks(2)
def test_the_example_gives_what_it_gives_with_ddp(context: RankContext, tmp_path: Path) -> None:
    from trl import DPOTrainer

    with launched(context):
        theirs = run_example("trl_dpo", DPOTrainer, directory=str(tmp_path / "theirs"))
        ours = run_example("trl_dpo", directory=str(tmp_path / "ours"))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
