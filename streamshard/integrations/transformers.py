"""`StreamShardTrainer`: transformers' Trainer with a sharded model.

`StreamShardTrainerMixin` does the same for `Seq2SeqTrainer`, the trainers of TRL and sentence-transformers, and others
that derive from Trainer. `StreamShardAccelerator` shards, clips and sets precision. This module does what Trainer does
without its accelerator: files, and counts of parameters.

A checkpoint has the files that Trainer writes under DistributedDataParallel, so each can continue from the other's. It
is written under another name, and renamed when it is complete: see `_Checkpoint`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.optim import Optimizer
from transformers import Trainer, trainer_utils

from streamshard.api import (
    export_safetensors,
    full_optimizer_state_dict,
    load_optimizer_state_dict,
    load_safetensors,
)
from streamshard.comm.objects import RankGroup, raise_if, run_on_all_ranks
from streamshard.engine.engine import Engine
from streamshard.engine.hooks import call_shell
from streamshard.engine.module_state import engine_of, handle_of
from streamshard.errors import CommunicationError, ConfigError, ShardingError
from streamshard.integrations.accelerate import StreamShardAccelerator
from streamshard.integrations.peft import (
    has_adapters,
    plain_classes,
    refuse_pieces,
    save_on_first,
)
from streamshard.optim.whole import WholeParameterOptimizer
from streamshard.unit.optimizer_hooks import is_elementwise_class

__all__ = ["StreamShardTrainer", "StreamShardTrainerMixin"]

# Names that Trainer gives to files.
_OPTIMIZER = "optimizer.pt"
_SCHEDULER = "scheduler.pt"
_STATE = "trainer_state.json"
_ARGUMENTS = "training_args.bin"
_MAX_SHARD_SIZE = "50GB"  # what save_pretrained splits at when it is not told
_PARTIAL = "partial-"  # Trainer takes whatever begins with "checkpoint-" for one
_REPLACED = "replaced"

_Trainer: Any = object  # what the mixin stands in front of


class StreamShardTrainerMixin(_Trainer):  # type: ignore[misc]  # any trainer
    """Makes a trainer train with StreamShard: ``class SFT(StreamShardTrainerMixin, SFTTrainer): pass``.

    The model is sharded when training or evaluation begins, after the trainer's constructor has changed it (adapters, a
    reference copy). A model that is sharded already is accepted.

    Args:
        *args: Trainer's arguments.
        streamshard: options of `StreamShard` for `StreamShardAccelerator`, such as ``{"weight_slots": 4}``. They take
            precedence over ``STREAMSHARD_*`` variables.
        **kwargs: Trainer's keyword arguments.

    Raises:
        ConfigError: a training argument asks for another way of sharding, or for something sharded models cannot do.
    """

    is_fsdp_enabled: bool  # Trainer's
    optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None

    def __init__(self, *args: Any, streamshard: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._sharding_options = dict(streamshard or {})
        self._checkpoint: _Checkpoint | None = None
        self._resumed_from: str | None = None
        super().__init__(*args, **kwargs)

    # -- preparing ----------------------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """As Trainer does, which names the class of its accelerator in the middle of this; then that shards."""
        _refuse(self.args)
        super().create_accelerator_and_postprocess()
        StreamShardAccelerator.take_over(self.accelerator, **self._sharding_options)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Not before it is sharded: a model that fits no device moves there piece by piece."""

    def _wrap_model(self, model: nn.Module, training: bool = True, *args: Any, **kwargs: Any) -> Any:
        """As Trainer does; it evaluates a model that has not been trained as it is if a reference was prepared."""
        wrapped = super()._wrap_model(model, training, *args, **kwargs)
        if not training and wrapped is self.model and _engine(wrapped) is None:
            never_trains = self.train_dataset is None  # then no room for gradients is needed
            self.model_wrapped = self.accelerator.prepare_model(wrapped, evaluation_mode=never_trains)
            return self.model_wrapped
        return wrapped

    def compute_ref_log_probs(self, model: nn.Module, inputs: Any) -> Any:
        """As TRL does, whose constructors compute with a model that is on no device yet: it is sharded for that."""
        if model is self.model:
            model = self._wrap_model(model, training=False)
        return super().compute_ref_log_probs(model, inputs)

    def _compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """As TRL does, whose distillation reads the teacher's head behind the teacher's forward, and in backward.

        So all of it is inside a forward of the teacher: the head is in place, and what the graph keeps is gathered
        again. Inputs are cast where it calls the models.
        """
        compute, teacher = super()._compute_loss, getattr(self, "teacher_model", None)
        handle = None if teacher is None else handle_of(teacher)
        if handle is None:
            return compute(*args, **kwargs)
        return call_shell(handle._replace(cast_dtype=None, output_dtype=None), compute, args, kwargs)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer does. A class that is not elementwise steps whole parameters, in a `WholeParameterOptimizer`.

        Raises:
            ConfigError: the optimizer that the training arguments name does not work with sharded parameters.
        """
        create, given = super().create_optimizer, self.optimizer_cls_and_kwargs
        if self.optimizer is not None:
            return create(*args, **kwargs)
        if given is None:
            name = f'optim="{self.args.optim.value}"'
            if "lomo" in name or "layerwise" in name:
                raise ConfigError(
                    f"{name} steps each parameter within backward, before its gradient is averaged over ranks: take "
                    'one that steps afterwards, such as optim="adafactor" or optim="galore_adamw"'
                )
            kind, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
        else:
            name, (kind, options) = "optimizer_cls_and_kwargs", given
        is_class = isinstance(kind, type) and issubclass(kind, Optimizer)  # else it makes one
        if is_class and not issubclass(kind, WholeParameterOptimizer) and not is_elementwise_class(kind):
            if options.get("optim_bits") == 8:  # its moments of embeddings have 32 bits, by their modules
                raise ConfigError(
                    f"{name} with 8-bit moments steps whole parameters: take the 32-bit one, or adamw_8bit"
                )
            kind, options = WholeParameterOptimizer, {**options, "optimizer_class": kind}
        self.optimizer_cls_and_kwargs = kind, options
        try:
            return create(*args, **kwargs)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error
        finally:
            self.optimizer_cls_and_kwargs = given

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **kwargs)
        self._load_weights()
        return prepared

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer does. sentence-transformers lets all ranks run an evaluator if FSDP shards the model."""
        given = self.is_fsdp_enabled
        try:
            self.is_fsdp_enabled = given or getattr(self, "evaluator", None) is not None
            return super().evaluation_loop(*args, **kwargs)
        finally:
            self.is_fsdp_enabled = given

    # -- saving -------------------------------------------------------------------------------------------------------

    def _get_output_dir(self, trial: Any) -> str:
        directory: str = super()._get_output_dir(trial)
        return directory if self._checkpoint is None else str(self._checkpoint.staging)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        engine = _engine(self.model)
        if engine is None:
            super()._save_checkpoint(model, trial)
            return
        name = f"{trainer_utils.PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        checkpoint = _Checkpoint(Path(self._get_output_dir(trial)), name, engine.ranks)
        with checkpoint.open():
            self._checkpoint = checkpoint
            error: Exception | None = None
            try:
                super()._save_checkpoint(model, trial)
            except CommunicationError:
                raise
            except Exception as raised:  # of this rank perhaps: the others hear of it when they meet
                error = raised
            finally:
                self._checkpoint = None
            checkpoint.run(lambda: self._write_state(checkpoint, error))
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(checkpoint.path))
        run_on_all_ranks(engine.ranks, f"delete checkpoints beside {checkpoint.path}", lambda: self._rotate(checkpoint))

    def _write_state(self, checkpoint: _Checkpoint, error: Exception | None) -> None:
        """Write trainer_state.json again: Trainer's has the best checkpoint under the name of the staging directory."""
        raise_if(error)
        if self.state.best_model_checkpoint == str(checkpoint.partial):
            self.state.best_model_checkpoint = str(checkpoint.path)
        if self.args.should_save:
            self.state.save_to_json(str(checkpoint.partial / _STATE))

    def _rotate(self, checkpoint: _Checkpoint) -> None:
        if self.args.should_save:
            trainer_utils.rotate_checkpoints(
                output_dir=str(checkpoint.path.parent),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._checkpoint is None:  # else later, under the directory's own name: uploads go on in the background
            super()._push_from_checkpoint(checkpoint_folder)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As Trainer does. Call it on every rank. Trainer itself calls `_save` on rank 0 alone in some versions."""
        if _engine(self.model) is None:
            super().save_model(output_dir, _internal_call)
            return
        self._save(output_dir)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save")

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """As Trainer does. Call it on every rank; with a full `state_dict`, on the rank that has it.

        A trainer's own ``_save`` runs on rank 0, where parameters are full meanwhile, in CPU memory.

        Raises:
            CheckpointError: on every rank; for pieces in `state_dict`, on the calling rank, which waits for no other.
        """
        engine, directory = _engine(self.model), Path(self.args.output_dir if output_dir is None else output_dir)
        if engine is None:
            super()._save(output_dir, state_dict)
        elif state_dict is None and self._writes_itself:
            save_on_first(self.model, engine, directory, super()._save)
        elif state_dict is not None:
            refuse_pieces(state_dict, "Trainer._save(state_dict=..)")
            if self.args.should_save:
                super()._save(str(directory), state_dict=state_dict)
        else:
            export_safetensors(self.model, directory, max_shard_size=_MAX_SHARD_SIZE)
            run_on_all_ranks(engine.ranks, f"save to {directory}", lambda: self._save_beside(directory))

    @property
    def _writes_itself(self) -> bool:
        """Whether the trainer's class has a ``_save`` of its own, as that of sentence-transformers."""
        return getattr(super()._save, "__func__", None) is not Trainer._save

    def _save_beside(self, directory: Path) -> None:
        """What Trainer saves with the weights."""
        if self.args.should_save:
            processing = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            if processing is not None:
                processing.save_pretrained(str(directory))
            torch.save(self.args, directory / _ARGUMENTS)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        engine = _engine(self.model)
        if engine is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        try:
            state = full_optimizer_state_dict(self.model, _inner(self.optimizer))
        except ShardingError as error:
            raise ShardingError(f"{error}. save_only_model=True saves without the optimizer's state") from error
        if self.args.should_save:
            torch.save(state, os.path.join(output_dir, _OPTIMIZER))
            with warnings.catch_warnings():  # a scheduler's "save the optimizer as well"
                warnings.simplefilter("ignore", UserWarning)
                torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, _SCHEDULER))

    # -- loading ------------------------------------------------------------------------------------------------------

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        if self._can_read(resume_from_checkpoint):
            self._resumed_from = resume_from_checkpoint  # once it is sharded, each rank what it owns
            return
        # sentence-transformers makes another model of the model's class, and loads that one's state dict.
        with plain_classes(self.model) if self._writes_itself else contextlib.nullcontext():
            super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)

    def _load_weights(self) -> None:
        if self._resumed_from is not None:
            load_safetensors(self.model, self._resumed_from)
            self._resumed_from = None

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if _engine(self.model) is not None and self._can_read(best):
            load_safetensors(self.model, best)
        else:
            super()._load_best_model()

    def _can_read(self, directory: str) -> bool:
        """Whether it holds the whole model in a format that ranks read slices of."""
        names = ("model.safetensors", "model.safetensors.index.json")
        is_ours = not self._writes_itself and not has_adapters(self.model)
        return is_ours and any((Path(directory) / name).is_file() for name in names)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        engine = _engine(self.model)
        if engine is None or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        files = [Path(checkpoint) / name for name in (_OPTIMIZER, _SCHEDULER)]
        if not engine.ranks.of_first(all(file.is_file() for file in files)):
            return  # as Trainer does, for checkpoints of save_only_model

        def read(file: Path) -> Any:
            return torch.load(file, map_location="cpu", weights_only=True, mmap=file == files[0])

        doing = f"load {checkpoint}"
        state = run_on_all_ranks(engine.ranks, doing, lambda: read(files[0]) if engine.ranks.is_first else None)
        load_optimizer_state_dict(self.model, _inner(self.optimizer), state)
        run_on_all_ranks(engine.ranks, doing, lambda: self.lr_scheduler.load_state_dict(read(files[1])))


class StreamShardTrainer(StreamShardTrainerMixin, Trainer):
    """transformers' Trainer, training with StreamShard. See `StreamShardTrainerMixin` for what it can be told."""


@dataclass(frozen=True)
class _Checkpoint:
    """A directory that Trainer fills: ``partial-checkpoint-8/checkpoint-8``, and ``checkpoint-8`` once it is complete.

    Attributes:
        root: where the run's checkpoints are.
        name: its own.
        ranks: that save it.
    """

    root: Path
    name: str
    ranks: RankGroup

    @property
    def path(self) -> Path:
        """When it is complete."""
        return self.root / self.name

    @property
    def staging(self) -> Path:
        """What Trainer takes for the run's directory."""
        return self.root / f"{_PARTIAL}{self.name}"

    @property
    def partial(self) -> Path:
        """Until it is complete."""
        return self.staging / self.name

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Inside it is written; at the end it gets its name or, after an exception, is gone."""
        self.run(self._begin)
        try:
            yield
            self.run(self._publish)
        except BaseException:
            if self.ranks.is_first:
                shutil.rmtree(self.staging, ignore_errors=True)
            raise

    def run(self, action: Callable[[], None]) -> None:
        """On all ranks, or failing on all."""
        run_on_all_ranks(self.ranks, f"save {self.path}", action)

    def _begin(self) -> None:
        """Clear what killed runs have left. One may have been killed in the middle of `_publish`."""
        if self.ranks.is_first:
            for left in self.root.glob(f"{_PARTIAL}{trainer_utils.PREFIX_CHECKPOINT_DIR}-*"):
                path = self.root / left.name.removeprefix(_PARTIAL)
                if (left / _REPLACED).exists() and not path.exists():
                    os.replace(left / _REPLACED, path)
                shutil.rmtree(left)
            self.partial.mkdir(parents=True)

    def _publish(self) -> None:
        if self.ranks.is_first:
            if self.path.exists():
                os.replace(self.path, self.staging / _REPLACED)
            os.replace(self.partial, self.path)
            shutil.rmtree(self.staging, ignore_errors=True)


_SHARDED = "leave it out: the model is sharded by StreamShard"
_EVALUATES = "leave it out: with bf16=True or fp16=True layers compute in that dtype when they evaluate, too"
_REFUSED = {
    "fsdp": _SHARDED,
    "deepspeed": _SHARDED,
    "bf16_full_eval": _EVALUATES,
    "fp16_full_eval": _EVALUATES,
    "save_on_each_node": "all ranks write into one directory, which has to be on storage that they share",
    "use_vllm": "vLLM would be sent this rank's pieces of the weights; generate with transformers (use_vllm=False)",
    "use_transformers_continuous_batching": "each rank runs forwards for as long as its own completions take, and all "
    "ranks have to run as many; leave it out: generate() sees to that",
}


def _refuse(args: Any) -> None:
    """Training arguments that contradict sharding, before anything is made."""
    for name, reason in _REFUSED.items():
        if value := getattr(args, name, None):
            given = name if name == "fsdp" else f"{name}={value!r}"  # Trainer makes True of fsdp="full_shard"
            raise ConfigError(f"the training argument {given} does not go with StreamShard: {reason}")
    if args.n_gpu > 1:
        raise ConfigError(
            f"one process sees {args.n_gpu} GPUs: wanted one process for each, as `torchrun --nproc-per-node "
            f"{args.n_gpu}` starts them"
        )


def _engine(model: nn.Module) -> Engine | None:
    return None if handle_of(model) is None else engine_of(model)


def _inner(optimizer: Optimizer) -> Optimizer:
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
