"""Trainer with StreamShard on two ranks: the numbers of DistributedDataParallel, and its files."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from streamshard import CheckpointError, ConfigError, ShardingError, StreamShard, load_safetensors
from streamshard.comm.communicator import Communicator
from streamshard.optim import WholeParameterOptimizer
from tests.compare import assert_same, full_weights
from tests.counts import engine_inside
from tests.faults import case
from tests.integrations.accelerating import on_ranks
from tests.integrations.models import make_model, make_rows
from tests.integrations.trainers import and_sharded, arguments_of, assert_equal, launched, run_example, train
from tests.ranks import RankContext, RankPool

_SAVING: dict[str, Any] = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}


def _trainers() -> tuple[Any, Any]:
    """Trainer, and ours."""
    from transformers import Trainer

    from streamshard.integrations.transformers import StreamShardTrainer

    return Trainer, StreamShardTrainer


# Of a Llama, by what they try: an optimizer that steps whole parameters; accumulation with much that changes gradients.
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "optim": {"optim": "adafactor", "max_grad_norm": 0.3},
    "bf16": {"bf16": True},
    "max_grad_norm": {
        **{"gradient_accumulation_steps": 2, "max_grad_norm": 0.5},
        **{"label_smoothing_factor": 0.1, "neftune_noise_alpha": 5.0},
    },
}


@on_ranks(2)
@pytest.mark.parametrize("name", ["llama-tied", "bert", "t5", "mixtral", "llava", *_ARGUMENTS])
def test_training_equals_ddp(context: RankContext, name: str, tmp_path: Path) -> None:
    """Families of models, and training arguments."""
    family = "llama" if name in _ARGUMENTS else name
    with launched(context):
        theirs, ours = (
            train(each, make_model(family), tmp_path / each.__name__, make_rows(family), **_ARGUMENTS.get(name, {}))
            for each in _trainers()
        )
    assert isinstance(ours.trainer.optimizer.optimizer, WholeParameterOptimizer) == (name == "optim")
    if name == "bf16":  # DistributedDataParallel keeps weights in fp32 beside those of autocast
        assert_equal(ours, theirs, digits=2, weights=False)
    else:
        assert_equal(ours, theirs)


def _files(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


@on_ranks(2)
@pytest.mark.parametrize("optim", ["adamw_torch", "adafactor"])
def test_ddp_and_streamshard_continue_each_others_runs(context: RankContext, optim: str, tmp_path: Path) -> None:
    """With the random numbers of each rank, for dropout."""
    steps, data, classes = {"optim": optim, "max_steps": 3}, make_rows("llama"), _trainers()

    def run(each: Any, out: Path, **arguments: Any) -> Any:
        return train(each, make_model("llama", attention_dropout=0.2), out, data, **steps, **arguments)

    with launched(context):
        whole = [run(each, tmp_path / each.__name__, save_strategy="steps", save_steps=2) for each in classes]
        directories = [tmp_path / each.__name__ / "checkpoint-2" for each in classes]
        assert _files(directories[1]) == _files(directories[0])
        for each, directory in zip(classes, reversed(directories), strict=True):
            assert_equal(run(each, tmp_path / "resumed", resume=directory), whole[0], resumed=True)


def _global_batches(
    context: RankContext, out: Path, resume: Path | None = None, accumulate: bool = False, of: int = 4, **arguments: Any
) -> Any:
    """`of` micro-batches of two examples in each step: what was logged, and the weights."""
    accumulated = of // context.world_size
    with launched(context):
        run = train(
            _trainers()[1], make_model("llama"), out, make_rows("llama", 64), resume=resume, max_steps=4,
            gradient_accumulation_steps=accumulated, max_grad_norm=_MAX_NORM,
            given={"streamshard": {"accumulate": accumulate}}, **arguments,
        )  # fmt: skip
        assert callable(run.trainer.accelerator.backward)
    return run.history, run.weights


_MAX_NORM = 0.05


def test_the_same_global_batches_give_the_same_bits_on_any_number_of_processes(ranks: RankPool, tmp_path: Path) -> None:
    """From the start, and from a checkpoint of another number of processes."""
    saving = {"save_strategy": "steps", "save_steps": 2}
    history, weights = ranks(1).run(_global_batches, tmp_path / "1", of=6, **saving)[0]
    norms = [entry.get("grad_norm") for entry in history]
    assert norms[0] > _MAX_NORM
    for count, resume in ((3, None), (3, "1"), (1, "3")):
        checkpoint = None if resume is None else tmp_path / resume / "checkpoint-2"
        out = tmp_path / (str(count) if resume is None else "resumed")
        history, found = ranks(count).run(_global_batches, out, checkpoint, of=6, **saving)[0]
        assert [entry.get("grad_norm") for entry in history] == norms
        assert [name for name, weight in weights.items() if not torch.equal(weight, found[name])] == []


@on_ranks(2)
def test_a_divisor_of_ones_own_stays(context: RankContext, tmp_path: Path) -> None:
    """Half of the ranks' number doubles gradients."""
    norms = []
    with launched(context):
        for factor in (2.0, 1.0):
            model: Any = StreamShard(make_model("llama"))
            model.set_gradient_divide_factor(factor)
            run = train(_trainers()[1], model, tmp_path / str(factor), make_rows("llama"), max_steps=1)
            norms.append(run.history[0]["grad_norm"])
            assert engine_inside(model).ranks.grad_divisor == factor
    assert norms[1] == pytest.approx(2 * norms[0], rel=1e-6)


def test_accumulation_layer_by_layer_logs_and_trains_as_trainers_own(ranks: RankPool, tmp_path: Path) -> None:
    (history, weights), (wanted, expected) = (
        ranks(2).run(_global_batches, tmp_path / str(each), accumulate=each)[0] for each in (True, False)
    )
    for found, own in zip(history, wanted, strict=True):
        numbers = [key for key in ("loss", "grad_norm", "learning_rate") if key in own]
        assert [found[key] for key in numbers] == pytest.approx([own[key] for key in numbers], rel=1e-5)
    assert "loss" in wanted[0]
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_the_best_model_is_loaded_at_the_end(context: RankContext, tmp_path: Path) -> None:
    """Directories that differ between ranks are those of rank 0: scripts name them by the time."""
    data, classes = make_rows("llama-tied"), _trainers()
    options: dict[str, Any] = {"load_best_model_at_end": True, "greater_is_better": True, "save_total_limit": 1}
    options |= {"given": {"eval_dataset": data[:6]}, "eval_strategy": "steps", "eval_steps": 2, **_SAVING}
    outs = [tmp_path / "theirs", tmp_path / f"of rank {context.rank}"]
    with launched(context):
        theirs, ours = (
            train(each, make_model("llama-tied"), out, data, **options) for each, out in zip(classes, outs, strict=True)
        )
        ours.trainer.save_model(str(outs[1] / "final"))
        dist.barrier()
    assert_equal(ours, theirs)
    first = tmp_path / "of rank 0"
    assert _files(tmp_path) == {"theirs", first.name}
    assert _files(first) == {*_files(outs[0]), "final"}
    best = Path(ours.trainer.state.best_model_checkpoint)
    assert best.parent == first and best.name == Path(theirs.trainer.state.best_model_checkpoint).name
    assert json.loads((best / "trainer_state.json").read_text())["best_model_checkpoint"] == str(best)
    assert {path.name for path in best.glob("rng_state*")} == {"rng_state_0.pth", "rng_state_1.pth"}
    fresh = StreamShard(make_model("llama-tied"), precision="fp32")
    load_safetensors(fresh, first / "final")
    assert_same(full_weights(fresh), ours.weights, "what is saved at the end")


@on_ranks(2)
def test_evaluation_without_training_equals_ddp(context: RankContext, tmp_path: Path) -> None:
    """Loss, predictions and counted samples, of examples that are no multiple of the batches."""
    data = make_rows("gpt2", count=7)
    found = []
    with launched(context):
        for each in _trainers():
            made = each(model=make_model("gpt2"), args=arguments_of(tmp_path))
            predicted = [made.predict(data) for _ in range(2)][-1]
            found.append((made.evaluate(data), predicted.predictions, made.model))
    (theirs, their_logits, _), (ours, our_logits, model) = found
    assert isinstance(model, StreamShard)
    assert abs(ours["eval_loss"] - theirs["eval_loss"]) < 1e-5
    assert our_logits.shape == their_logits.shape == (7, 12, 61)
    assert abs(our_logits - their_logits).max() < 1e-5
    assert model.memory_report().held_bytes["main grads"] == 0


@contextlib.contextmanager
def _without_other_ranks() -> Iterator[None]:
    """Inside, whatever waits for other ranks raises."""
    with mock.patch.object(Communicator, "gather_results", side_effect=AssertionError("waits for other ranks")):
        yield


@on_ranks(2)
def test_a_whole_state_dict_is_saved_without_the_other_ranks(context: RankContext, tmp_path: Path) -> None:
    """As FSDP's scripts save it, from rank 0 alone: by Trainer, by the model, and as accelerate's documentation says.

    Each over an earlier export, whose checksums are gone then.
    """
    _, ours_class = _trainers()
    with launched(context):
        run = train(ours_class, make_model("llama-tied"), tmp_path, make_rows("llama-tied"))
        trainer = run.trainer
        accelerator, model = trainer.accelerator, trainer.model
        ways: dict[str, Callable[[str, Any], None]] = {
            "trainer": lambda out, state: trainer._save(out, state_dict=state),
            "model": lambda out, state: model.save_pretrained(out, state_dict=state),
            "accelerate": lambda out, state: accelerator.unwrap_model(model).save_pretrained(
                *(out, context.rank == 0), save_function=accelerator.save, state_dict=state
            ),
        }
        for name, save in ways.items():
            trainer.save_model(str(tmp_path / name))
            state = {key: value + 1 for key, value in accelerator.get_state_dict(model).items()}
            with _without_other_ranks():
                if context.rank == 0 or name == "accelerate":
                    save(str(tmp_path / name), dict(state))
            dist.barrier()
            load_safetensors(model, tmp_path / name)
            assert_same(full_weights(model), state, name)
        pieces = {key: value.cpu() for key, value in model.state_dict().items()}
        if context.rank == 0:  # the rank that would save them raises, and the earlier save stays
            for refusing in (trainer._save, model.save_pretrained):
                with _without_other_ranks(), pytest.raises(ShardingError, match="is one rank's piece"):
                    refusing(str(tmp_path / "model"), state_dict=pieces)
        dist.barrier()
        load_safetensors(model, tmp_path / "model")


@on_ranks(2)
def test_an_error_of_a_save_is_raised_on_all_ranks_and_leaves_nothing(context: RankContext, tmp_path: Path) -> None:
    """Here of a file that only rank 1 writes. Leftovers of killed saves are removed, and checkpoints replaced."""
    from transformers import Trainer

    saved: list[int] = []
    torch_save = torch.save

    class Counting(Trainer):
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            saved.append(self.state.global_step)
            super()._save_checkpoint(model, trial)

    def save(what: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        if str(path).endswith("rng_state_1.pth") and len(saved) == 2:
            raise OSError("the disk is full")
        torch_save(what, path, *args, **kwargs)

    out, earlier = tmp_path / "out", tmp_path / "out" / "checkpoint-1" / "of an earlier run"
    if context.rank == 0:
        earlier.mkdir(parents=True)
        for name in ("model.0123abcd.partial/checkpoint-7", "replaced-checkpoint-7", "replaced-checkpoint-1"):
            (out / name).mkdir(parents=True)
    dist.barrier()
    failing = mock.patch("torch.save", save)
    with launched(context), failing, pytest.raises(CheckpointError, match="rank 1: OSError: the disk is full"):
        train(and_sharded(Counting)[1], make_model("gpt2"), out, make_rows("gpt2"), save_strategy="steps", save_steps=1)
    dist.barrier()
    assert saved == [1, 2]
    assert _files(out) == {"checkpoint-1", "checkpoint-7"} and not earlier.exists()


@on_ranks(2)
def test_enable_jit_checkpoint_saves_on_all_ranks_at_a_signal_to_one(context: RankContext, tmp_path: Path) -> None:
    """Trainer's own callback would save on this rank alone. The run goes on with the numbers of an undisturbed one."""
    from transformers import TrainerCallback

    class Signal(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1 and context.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    def run(name: str, **options: Any) -> Any:
        options |= {"gradient_accumulation_steps": 2, "enable_jit_checkpoint": name == "run"}
        return train(_trainers()[1], make_model("bert"), tmp_path / name, make_rows("bert"), **options)

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    with launched(context):
        wanted = run("quiet")
        try:
            with pytest.raises(SystemExit) as ended:
                run("run", given={"callbacks": [Signal()]})
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        found = run("run", resume=tmp_path / "run" / "checkpoint-2")
    assert ended.value.code == 128 + signal.SIGTERM
    assert {number: signal.getsignal(number) for number in handlers} == handlers
    assert found.history[-2] == wanted.history[-2]  # the last step
    assert all(torch.equal(tensor, wanted.weights[name]) for name, tensor in found.weights.items())


@on_ranks(2)
def test_generating_evaluation_of_unequal_lengths(context: RankContext, tmp_path: Path) -> None:
    """`predict_with_generate`: ranks finish their sequences at different times, and go on until all have."""
    from transformers import GenerationConfig, Seq2SeqTrainer, Seq2SeqTrainingArguments, StoppingCriteriaList

    data, predictions = make_rows("t5"), []

    def stop(ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        return torch.full((ids.shape[0],), ids.shape[1] >= 3 + 4 * context.rank, device=ids.device)

    with launched(context):
        for each in and_sharded(Seq2SeqTrainer):
            model = make_model("t5")
            model.generate = functools.partial(model.generate, stopping_criteria=StoppingCriteriaList([stop]))
            config = GenerationConfig(max_new_tokens=9, decoder_start_token_id=0, pad_token_id=0)
            options = {"predict_with_generate": True, "generation_config": config}
            run = train(each, model, tmp_path, data, arguments_class=Seq2SeqTrainingArguments, **options)
            predictions.append(run.trainer.predict(data[:6]).predictions)
    assert (predictions[1] == predictions[0]).all()
    assert predictions[0].shape[1] >= 7  # those of rank 1


@on_ranks(2)
def test_training_arguments_that_contradict_sharding_are_refused(context: RankContext, tmp_path: Path) -> None:
    def with_deepspeed(**arguments: Any) -> Any:  # without the package, for which transformers' constructor asks
        made = arguments_of(tmp_path, **arguments)
        made.deepspeed = "zero3.json"
        return made

    adafactor, lbfgs = (torch.optim.Adafactor, {"optim_bits": 8}), (torch.optim.LBFGS, {})
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"bf16_full_eval": True}, "bf16_full_eval=True does not go with .* leave it out"),
        ({"fsdp": "full_shard"}, "argument fsdp=.* does not go with .* leave it out"),
        ({"optim": "lomo"}, 'optim="lomo" steps each parameter within backward.* optim="adafactor"'),
        ({"given": {"optimizer_cls_and_kwargs": adafactor}}, "Adafactor with 8-bit moments steps whole parameters"),
        ({"given": {"optimizer_cls_and_kwargs": lbfgs}}, "torch.optim.lbfgs.LBFGS, tried .*without a closure"),
        ({"arguments_class": with_deepspeed}, "deepspeed='zero3.json' .* leave it out"),
        ({"save_on_each_node": True}, "storage that they share"),
        ({"given": {"streamshard": {"acumulate": True}}}, "no option of streamshard=.* Did you mean 'accumulate'"),
        ({"given": {"streamshard": {"accumulate": 4}}}, "'accumulate': 4}: wanted True.*gradient_accumulation_steps="),
    )
    for arguments, message in refused:
        with case(arguments), launched(context), pytest.raises(ConfigError, match=message):
            train(_trainers()[1], make_model("llama"), tmp_path, make_rows("llama"), **arguments)


@on_ranks(2)
def test_the_example_gives_what_it_gives_with_ddp(context: RankContext, tmp_path: Path) -> None:
    theirs_class, _ = _trainers()
    with launched(context):
        theirs = run_example("trainer", theirs_class, directory=str(tmp_path / "theirs"))
        ours = run_example("trainer", directory=str(tmp_path / "ours"))
        longer = run_example("trainer", directory=str(tmp_path / "ours"), steps=9, resume=True)
    assert len(ours) == 8
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert longer[:8] == ours and len(longer) == 9
