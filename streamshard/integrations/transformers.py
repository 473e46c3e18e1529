"""`StreamShardTrainer`: transformers' Trainer with a sharded model.

`StreamShardTrainerMixin` does the same for `Seq2SeqTrainer`, the trainers of TRL and sentence-transformers, and other
subclasses of Trainer. `StreamShardAccelerator` shards, clips and sets precision. This module handles Trainer's files,
optimizers and evaluation.

A checkpoint has the files that Trainer writes under DistributedDataParallel, so each can continue from the other's.
Trainer fills ``checkpoint-8`` in a partial directory (see `streamshard.checkpoint.directory`). The complete checkpoint
is moved beside the others.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import transformers.trainer
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.optim import Optimizer
from transformers import Trainer, TrainerCallback, trainer_utils
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME, TRAINING_ARGS_NAME

from streamshard.api import StreamShard
from streamshard.checkpoint.directory import write_together
from streamshard.checkpoint.export import export_safetensors, load_safetensors
from streamshard.checkpoint.optimizer_state import full_optimizer_state_dict, load_optimizer_state_dict
from streamshard.checkpoint.stop_on_signal import StopOnSignal
from streamshard.comm.ranks import run_on_all_ranks, run_on_first
from streamshard.config import refuse_unknown
from streamshard.core.module_state import engine_of, handle_of
from streamshard.core.optimizer_kinds import is_elementwise_class
from streamshard.errors import ConfigError
from streamshard.integrations.accelerate import OPTIONS, StreamShardAccelerator
from streamshard.integrations.peft import has_adapters, plain_classes, save_on_first
from streamshard.integrations.run_log import RunLog
from streamshard.optim.whole import WholeParameterOptimizer
from streamshard.planning.structure import replacing

_REPLACED = "replaced-"  # Trainer takes every directory called "checkpoint-.." for a checkpoint

_Trainer: Any = object  # the next class of the trainer, which derives from Trainer


class StreamShardTrainerMixin(_Trainer):  # type: ignore[misc]  # any trainer
    """Makes a trainer train with StreamShard: ``class SFT(StreamShardTrainerMixin, SFTTrainer): pass``.

    The model is sharded when training or evaluation begins, after the trainer's constructor has changed it (adapters, a
    reference copy). A model that is already sharded works too.

    Args:
        *args: Trainer's arguments.
        streamshard: options of `StreamShard` for `StreamShardAccelerator`, such as ``{"weight_slots": 4}``. One more,
            ``{"accumulate": True}``, runs the micro-batches of ``gradient_accumulation_steps`` by
            `StreamShard.accumulate`. And ``flops_per_s`` and ``flops_per_token``, for `RunLog`.
        **kwargs: Trainer's keyword arguments.

    Raises:
        ConfigError: a training argument selects another way of sharding, or a feature that sharded models do not
            support.
    """

    # Trainer would leave models with DTensors of ``DistributedConfig(tp_size=...)`` unsharded, and not save their run.
    is_distributed_loading_by_transformers = property(lambda self: False, lambda self, value: None)
    accelerator: Any
    is_fsdp_enabled: bool  # Trainer's
    optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None
    streamshard: Mapping[str, Any] | None = None  # options of classes that are made for them

    def __init__(self, *args: Any, streamshard: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        options = self._sharding_options = dict(streamshard or self.streamshard or {})
        names = "flops_per_s", "flops_per_token"
        refuse_unknown(options, (*OPTIONS, "accumulate", *names), "option of streamshard=")
        self._accumulates = options.pop("accumulate", False)
        if not isinstance(self._accumulates, bool):  # else a number that counts for nothing
            raise ConfigError(
                f"streamshard={{'accumulate': {self._accumulates!r}}}: wanted True or False. How many micro-batches a "
                "step has, gradient_accumulation_steps= says"
            )
        self._waiting: list[Any] = []  # inputs of the step's earlier micro-batches
        self._rates = {name: options.pop(name) for name in names if name in options}
        self._run_log: RunLog | None = None  # made in the first step
        self._tokens = self._steps = 0  # of the step under way; steps that `_run_log` has counted
        self._speeds: dict[str, float] = {}  # what Trainer logs next to the loss
        self._staging: Path | None = None  # while Trainer saves a checkpoint: the directory in the place of the run's
        super().__init__(*args, **kwargs)
        if self.optimizer_cls_and_kwargs is not None:  # Trainer then asks no `get_optimizer_cls_and_kwargs`
            self.optimizer_cls_and_kwargs = _for_pieces(*self.optimizer_cls_and_kwargs)
        self._saving_at_signal = contextlib.ExitStack()
        if getattr(self.args, "enable_jit_checkpoint", False):
            from transformers.trainer_jit_checkpoint import JITCheckpointCallback

            replaced = self.pop_callback(JITCheckpointCallback)
            replaced.on_train_end(self.args, self.state, self.control)  # gives SIGTERM its earlier handler
            self.add_callback(_SaveAtSignal(self._saving_at_signal))

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As in Trainer. With ``enable_jit_checkpoint`` all ranks save and exit at a signal: see `StopOnSignal`.

        Raises:
            SystemExit: the checkpoint is complete; the code is 128 + the signal's number.
        """
        self._waiting.clear()  # of a step that an exception has ended
        self._run_log = None
        with self._saving_at_signal:
            return super().train(*args, **kwargs)

    # -- steps --------------------------------------------------------------------------------------------------------

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As in Trainer. With ``accumulate`` the last micro-batch of a step runs all, and returns the sum of losses."""
        self._count_tokens(inputs)
        if not self._accumulates:
            with self._dividing_once(*args, **kwargs):
                return cast(torch.Tensor, super().training_step(model, inputs, *args, **kwargs))
        self._waiting.append(inputs)
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)  # Trainer adds up losses, on one device
        waiting, self._waiting = self._waiting, []
        scaled: list[torch.Tensor] = []
        losses: list[torch.Tensor] = []
        run_one, scaler = super().training_step, self.accelerator.scaler
        steps = self.accelerator.gradient_accumulation_steps

        def loss_of(model: nn.Module, inputs: Any) -> torch.Tensor:
            losses.append(run_one(model, inputs, *args, **kwargs))
            loss = scaled.pop() / steps  # as accelerate's ``backward``
            return loss if scaler is None else cast(torch.Tensor, scaler.scale(loss))

        # Trainer's step ends with it.
        with replacing((vars(self.accelerator), "backward", lambda loss, **_: scaled.append(loss))):
            StreamShard.accumulate(cast(StreamShard, model), waiting, loss_of)  # the model may have an `accumulate`
        return torch.stack(losses).sum()

    @contextlib.contextmanager
    def _dividing_once(self, num_items_in_batch: Any = None, *_: Any, **__: Any) -> Iterator[None]:
        """Trainer divides a loss by the tokens of all N ranks, and multiplies it by N, for a mean over ranks.

        Multiplied by 3 and divided by 3 a gradient may have another last bit. So the loss is divided by N for the
        backward, and gradients are summed. Nothing is rounded: autograd computes 1 / N * N, which is 1 for N up to 40.
        """
        engine, n_ranks, backward = engine_of(self.model), self.accelerator.num_processes, self.accelerator.backward
        is_multiplied = num_items_in_batch is not None and self.args.average_tokens_across_devices
        if not is_multiplied or engine.ranks.grad_divisor != n_ranks:  # another: the user's, or with cut matrices
            yield
            return

        def divided(loss: torch.Tensor, **kwargs: Any) -> None:
            with engine.divisor.summing():
                backward(loss / n_ranks, **kwargs)

        with replacing((vars(self.accelerator), "backward", divided)):
            yield

    # -- logs ---------------------------------------------------------------------------------------------------------

    def _count_tokens(self, inputs: Any) -> None:
        """Of a micro-batch, padding too. Trainers with other inputs than ``input_ids`` log no rate of tokens."""
        if self._run_log is None:  # the constructor has no sharded model yet
            self._tokens, self._steps = 0, self.state.global_step
            self._run_log = RunLog(self.model, self.accelerator, every=None, step=self._steps, **self._rates)
        tokens = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
        self._tokens += tokens.numel() if isinstance(tokens, torch.Tensor) else 0

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """As in Trainer, on all ranks after each step and epoch. Its loss is the log's, so `RunLog` has none."""
        log, control, state = self._run_log, self.control, self.state
        is_idle: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if log is not None:
            if state.global_step > self._steps:
                log.step(self._tokens)
                self._tokens, self._steps = 0, state.global_step
            self._speeds = log.write() if control.should_log else {}  # all ranks are here; in a user's `log` maybe one
            is_idle = log.paused() if control.should_evaluate or control.should_save else is_idle
        with is_idle:
            super()._maybe_log_save_evaluate(*args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As in Trainer. Beside a step's loss there are the values of `RunLog`."""
        if "loss" in logs:
            logs, self._speeds = {**logs, **self._speeds}, {}
        super().log(logs, *args, **kwargs)

    # -- preparing ----------------------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """As in Trainer, which gets a `StreamShardAccelerator`."""
        _refuse(self.args)
        make = functools.partial(StreamShardAccelerator, **self._sharding_options)
        with replacing((vars(transformers.trainer), "Accelerator", make)):  # Trainer has no argument
            super().create_accelerator_and_postprocess()

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do nothing: sharding moves the model unit by unit, so it need not fit on a device."""

    def _wrap_model(self, model: nn.Module, training: bool = True, *args: Any, **kwargs: Any) -> Any:
        """As in Trainer. Also shards a model that is only evaluated: Trainer skips it if a reference was prepared."""
        wrapped = super()._wrap_model(model, training, *args, **kwargs)
        if not training and wrapped is self.model and handle_of(wrapped) is None:
            never_trains = self.train_dataset is None  # then it needs no memory for gradients
            self.model_wrapped = self.accelerator.prepare_model(wrapped, evaluation_mode=never_trains)
            return self.model_wrapped
        return wrapped

    def compute_ref_log_probs(self, *args: Any) -> Any:
        """As in TRL. TRL's constructors call this with the model before training, so the model is sharded here.

        TRL before 1.0 passes the inputs alone, during training.
        """
        if args[0] is self.model:
            args = (self._wrap_model(args[0], training=False), *args[1:])
        return super().compute_ref_log_probs(*args)

    def get_optimizer_cls_and_kwargs(self, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """As in Trainer. A class that is not elementwise runs in a `WholeParameterOptimizer`.

        Raises:
            ConfigError: the optimizer that the training arguments name does not work with sharded parameters.
        """
        return _for_pieces(*super().get_optimizer_cls_and_kwargs(*args, **kwargs))

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As in Trainer. sentence-transformers lets all ranks run an evaluator if FSDP shards the model."""
        on_all = self.is_fsdp_enabled or getattr(self, "evaluator", None) is not None
        with replacing((self.__dict__, "is_fsdp_enabled", on_all)):
            return super().evaluation_loop(*args, **kwargs)

    # -- saving -------------------------------------------------------------------------------------------------------

    def _get_output_dir(self, trial: Any) -> str:
        return super()._get_output_dir(trial) if self._staging is None else str(self._staging)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """As in Trainer, but into a partial directory. The complete ``checkpoint-8`` is moved from there."""
        ranks = engine_of(self.model).ranks
        # Scripts name it by the second in which they start.
        root = Path(ranks.of_first("choose a directory", self._get_output_dir(trial)))
        path = root / f"{trainer_utils.PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        save = super()._save_checkpoint

        def write(staging: Path) -> None:
            with replacing((self.__dict__, "_staging", staging)):
                save(model, trial)
            if self.state.best_model_checkpoint == str(staging / path.name):  # where Trainer has seen it
                self.state.best_model_checkpoint = str(path)

        def publish(partial: Path, _: object) -> None:
            # Trainer has written its state with a best checkpoint inside the partial directory.
            self.state.save_to_json(str(partial / path.name / TRAINER_STATE_NAME))
            _replace(path, partial / path.name)
            # Trainer's own rotation has seen the new checkpoint alone.
            limit, best = self.args.save_total_limit, self.state.best_model_checkpoint
            trainer_utils.rotate_checkpoints(str(root), limit, best, use_mtime=True)

        doing = f"save {path}"
        run_on_first(ranks, doing, lambda: _recover(root))  # first: else the rotation misses such a checkpoint
        write_together(ranks, doing, root, "model", write=write, publish=publish)
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(path))

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._staging is None:  # _save_checkpoint calls it again with the final path, which the upload reads later
            super()._push_from_checkpoint(checkpoint_folder)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As in Trainer. Call it on every rank. (Some versions of Trainer call `_save` on rank 0 alone.)"""
        self._save(output_dir)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save")

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """As in Trainer. Call it on every rank; with a full `state_dict`, on the rank that has it.

        If the trainer's class has its own ``_save``, it runs on rank 0, while parameters hold full tensors there.

        Raises:
            CheckpointError: on every rank.
            ShardingError: `state_dict` has pieces; on the calling rank, which waits for no other.
        """
        directory = Path(self.args.output_dir if output_dir is None else output_dir)
        if state_dict is not None or handle_of(self.model) is None:
            if self.args.should_save:
                super()._save(str(directory), state_dict=state_dict)
            return
        ranks = engine_of(self.model).ranks
        directory = ranks.of_first("choose a directory", directory)  # scripts name it by the second in which they start
        if self._writes_itself:
            save_on_first(self.model, directory, super()._save)
        else:
            if hasattr(self.model, "save_pretrained"):
                self.model.save_pretrained(directory)
            else:
                export_safetensors(self.model, directory, max_shard_size="50GB")  # as `save_pretrained` of transformers
            run_on_first(ranks, "save a tokenizer", lambda: self._save_beside(directory), at=f"to {directory}")

    @property
    def _writes_itself(self) -> bool:
        """Whether the trainer's class has its own ``_save``, as sentence-transformers' trainer has."""
        return getattr(super()._save, "__func__", None) is not Trainer._save

    def _save_beside(self, directory: Path) -> None:
        """Save Trainer's other files beside the weights: tokenizer and training arguments."""
        processing = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if processing is not None:
            processing.save_pretrained(str(directory))
        torch.save(self.args, directory / TRAINING_ARGS_NAME)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        state = full_optimizer_state_dict(self.model, _inner(self.optimizer))
        with replacing((self.__dict__, "optimizer", SimpleNamespace(state_dict=lambda: state))):
            super()._save_optimizer_and_scheduler(output_dir)

    # -- loading ------------------------------------------------------------------------------------------------------

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        if not self._load_slices(resume_from_checkpoint):
            # sentence-transformers makes a second model of the model's class, and loads its state dict.
            with plain_classes(self.model) if self._writes_itself else contextlib.nullcontext():
                super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)

    def _load_best_model(self) -> None:
        if not self._load_slices(self.state.best_model_checkpoint):
            super()._load_best_model()

    def _load_slices(self, directory: str) -> bool:
        """Let each rank load its pieces, if the directory has the full model in safetensors files. Returns whether."""
        names = ("model.safetensors", "model.safetensors.index.json")
        is_there = any((Path(directory) / name).is_file() for name in names)
        if self._writes_itself or has_adapters(self.model) or not is_there:
            return False
        if handle_of(self.model) is None:
            self.accelerator.shard(self.model)
        load_safetensors(self.model, directory)
        return True

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        ranks = engine_of(self.model).ranks
        files = [Path(checkpoint or "") / each for each in (OPTIMIZER_NAME, SCHEDULER_NAME)]
        # One rank decides for all: loading is collective.
        if checkpoint is None or not ranks.of_first("find a checkpoint", all(file.is_file() for file in files)):
            return  # a checkpoint of save_only_model

        def read(file: Path) -> Any:
            return torch.load(file, map_location="cpu", weights_only=True, mmap=file == files[0])  # the large one

        state = run_on_all_ranks(ranks, "load", lambda: read(files[0]) if ranks.is_first else None, at=files[0])
        load_optimizer_state_dict(self.model, _inner(self.optimizer), state)
        run_on_all_ranks(ranks, "load", lambda: self.lr_scheduler.load_state_dict(read(files[1])), at=files[1])


class StreamShardTrainer(StreamShardTrainerMixin, Trainer):
    """transformers' Trainer with StreamShard. See `StreamShardTrainerMixin` for its options."""


# -- checkpoints ------------------------------------------------------------------------------------------------------


class _SaveAtSignal(TrainerCallback):
    """Takes the place of Trainer's callback of ``enable_jit_checkpoint``, with which each rank would save by itself.

    Args:
        until_end: is left when training ends; gives signals their earlier handlers.
    """

    _stop: StopOnSignal

    def __init__(self, until_end: contextlib.ExitStack) -> None:
        self._until_end = until_end

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._stop = self._until_end.enter_context(StopOnSignal(kwargs["model"]))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._stop.requested():
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False  # it would come before the save

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._stop.requested():
            self._stop.exit()


def _replace(path: Path, complete: Path) -> None:
    """Give the checkpoint `complete` the name `path`. An earlier checkpoint of this name stays until this moment."""
    replaced = path.with_name(f"{_REPLACED}{path.name}")
    if path.exists():  # a rename replaces no directory that has files
        os.replace(path, replaced)
    os.replace(complete, path)
    shutil.rmtree(replaced, ignore_errors=True)  # the next save deletes the rest


def _recover(root: Path) -> None:
    """Name checkpoints as before if a run was killed inside `_replace`."""
    for replaced in root.glob(f"{_REPLACED}{trainer_utils.PREFIX_CHECKPOINT_DIR}-*"):
        path = root / replaced.name.removeprefix(_REPLACED)
        shutil.rmtree(replaced) if path.exists() else os.replace(replaced, path)


# -- refused arguments ------------------------------------------------------------------------------------------------

_SHARDED = "leave it out: StreamShard shards the model"
_EVALUATES = "leave it out: with bf16=True or fp16=True layers compute in that dtype when they evaluate, too"
_REFUSED = {
    "fsdp": _SHARDED,
    "deepspeed": _SHARDED,
    "bf16_full_eval": _EVALUATES,
    "fp16_full_eval": _EVALUATES,
    "save_on_each_node": "all ranks write into one directory, on storage that they share",
    "use_vllm": "vLLM would get this rank's pieces of the weights; generate with transformers (use_vllm=False)",
    "use_transformers_continuous_batching": "all ranks have to run as many forwards; leave it out",
}


def _refuse(args: Any) -> None:
    """Raise for training arguments that contradict sharding."""
    for name, reason in _REFUSED.items():
        if value := getattr(args, name, None):
            raise ConfigError(f"the training argument {name}={value!r} does not go with StreamShard: {reason}")
    if "lomo" in args.optim or "layerwise" in args.optim:
        what = f'optim="{args.optim.value}" steps each parameter within backward, before gradients are averaged'
        raise ConfigError(f'{what}: take optim="adafactor" or optim="galore_adamw"')
    if args.n_gpu > 1:
        raise ConfigError(f"one process has {args.n_gpu} GPUs: start with `torchrun --nproc-per-node {args.n_gpu}`")


# -- optimizers -------------------------------------------------------------------------------------------------------


def _for_pieces(kind: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A class and options for sharded parameters that give the numbers of `kind` with `options` on full parameters."""
    is_class = isinstance(kind, type) and issubclass(kind, Optimizer)  # else a function that makes an optimizer
    if not is_class or issubclass(kind, WholeParameterOptimizer) or is_elementwise_class(kind):
        return kind, options
    if options.get("optim_bits") == 8:  # bitsandbytes finds embeddings, whose moments have 32 bits, by their modules
        raise ConfigError(f"{kind.__name__} with 8-bit moments steps whole parameters: take 32 bits, or adamw_8bit")
    return WholeParameterOptimizer, {**options, "optimizer_class": kind}


def _inner(optimizer: Optimizer) -> Optimizer:
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
