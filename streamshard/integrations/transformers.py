"""`StreamShardTrainer`: transformers' Trainer whose model is sharded where Trainer prepares it.

`StreamShardTrainerMixin` is what it is made of, for `Seq2SeqTrainer`, the trainers of TRL and sentence-transformers,
and others that derive from Trainer. Sharding itself, clipping and precision are `StreamShardAccelerator`'s. What is
here is what Trainer does with models and optimizers beside its accelerator: files, and counts of parameters.

A checkpoint has the files that Trainer writes under DistributedDataParallel, so that each goes on from the other's. It
is written into a directory of another name, which gets its own when everything is in it: see `_Checkpoint`.
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

from streamshard.adapters import (
    called_on_all_ranks,
    find_piece,
    forget_sums,
    has_adapters,
    plain_classes,
    refuse_pieces,
    save_whole,
)
from streamshard.api import (
    export_safetensors,
    full_optimizer_state_dict,
    load_optimizer_state_dict,
    load_safetensors,
)
from streamshard.comm.objects import RankGroup, gather_from_all_ranks, run_on_all_ranks
from streamshard.engine.engine import Engine
from streamshard.engine.handle import engine_of, handle_of
from streamshard.engine.hooks import call_shell
from streamshard.errors import ConfigError, ShardingError
from streamshard.integrations.accelerate import StreamShardAccelerator
from streamshard.optim.whole import WholeParameterOptimizer
from streamshard.unit.elementwise import is_elementwise_class

__all__ = ["StreamShardTrainer", "StreamShardTrainerMixin"]

# Names that Trainer gives to files.
_OPTIMIZER = "optimizer.pt"
_SCHEDULER = "scheduler.pt"
_STATE = "trainer_state.json"
_ARGUMENTS = "training_args.bin"
_MAX_SHARD_SIZE = "50GB"  # what save_pretrained splits at when it is not told
_FULL_EVAL = {"bf16_full_eval": torch.bfloat16, "fp16_full_eval": torch.float16}
_NO_FULL_EVAL = (
    "bf16_full_eval and fp16_full_eval cast the whole model, and main weights that train are fp32: train with bf16 or "
    "fp16=True, with which evaluation computes in that dtype as well, or evaluate in a run that does not train"
)
_PARTIAL = "partial-"  # Trainer takes whatever begins with "checkpoint-" for one
_REPLACED = "replaced"

_Trainer: Any = object  # what the mixin stands in front of


class StreamShardTrainerMixin(_Trainer):  # type: ignore[misc]  # any trainer
    """In front of a Trainer it trains with StreamShard: ``class SFT(StreamShardTrainerMixin, SFTTrainer): pass``.

    The model is sharded when training or evaluation begins, so whatever a trainer's constructor does to it (adapters,
    a copy as reference) comes before. It may be sharded already.

    Args:
        *args: Trainer's.
        streamshard: what `StreamShardAccelerator` can be told beside Accelerator's own arguments, such as
            ``{"weight_slots": 4}``. Comes before ``STREAMSHARD_*`` variables.
        **kwargs: Trainer's.

    Raises:
        ConfigError: a training argument asks for another way of sharding, or for what sharded models cannot do.
    """

    is_fsdp_enabled: bool  # Trainer's
    optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None

    def __init__(self, *args: Any, streamshard: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._sharding_options = dict(streamshard or {})
        self._checkpoint: _Checkpoint | None = None
        self._resumed_from: str | None = None
        self._saved_to: Path | None = None  # where the model is, while `save_model` runs
        super().__init__(*args, **kwargs)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if Trainer in order and order.index(Trainer) < order.index(StreamShardTrainerMixin):
            raise ConfigError(
                f"{cls.__name__}: StreamShardTrainerMixin has to come before the trainer: "
                f"class {cls.__name__}(StreamShardTrainerMixin, {cls.__bases__[0].__name__})"
            )

    # -- preparing ----------------------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """As Trainer does, which names the class of its accelerator in the middle of this; then that shards."""
        _refuse(self.args)
        super().create_accelerator_and_postprocess()
        accelerator = StreamShardAccelerator.take_over(self.accelerator, **self._sharding_options)
        if getattr(self.args, "sync_ref_model", False) and not accelerator.shard_references:
            raise ConfigError(
                "sync_ref_model=True averages the reference model's parameters with those of the model, which are "
                "pieces: leave shard_references=False away, so that both are sharded"
            )

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Not before it is sharded: a model that fits no device moves there piece by piece."""

    def _wrap_model(self, model: nn.Module, training: bool = True, *args: Any, **kwargs: Any) -> Any:
        """As Trainer does; it evaluates a model that has not been trained as it is if a reference was prepared."""
        wrapped = super()._wrap_model(model, training, *args, **kwargs)
        if not training and wrapped is self.model and _engine(wrapped) is None:
            never_trains = self.train_dataset is None
            self.model_wrapped = self.accelerator.prepare_sharded(wrapped, evaluation_mode=never_trains)
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
            _refuse_optimizer(name)
            kind, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
        else:
            name, (kind, options) = "optimizer_cls_and_kwargs", given
        if _steps_whole_parameters(kind):
            if options.get("optim_bits") == 8:
                raise ConfigError(
                    f"{name} has 8-bit moments, but those of embeddings in 32 bits, which it knows by their modules, "
                    "and WholeParameterOptimizer steps other tensors: take the 32-bit one, or adamw_8bit"
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
        """As Trainer does, which casts a model for `bf16_full_eval` when it is sharded already."""
        dtype, engine, settings = _full_eval_dtype(self.args), _engine(self.model), self.args
        if dtype is not None and engine is None:
            self.model.to(dtype)
        elif dtype is not None and engine is not None and engine.precision.param_dtype is not dtype:
            raise ConfigError(_NO_FULL_EVAL)
        given = {name: getattr(settings, name) for name in _FULL_EVAL}
        is_fsdp = self.is_fsdp_enabled
        try:
            for name in _FULL_EVAL:
                setattr(settings, name, False)
            if getattr(self, "evaluator", None) is not None:
                # sentence-transformers lets ranks take different numbers of batches, except of models that are sharded.
                self.is_fsdp_enabled = True
            return super().evaluation_loop(*args, **kwargs)
        finally:
            self.is_fsdp_enabled = is_fsdp
            for name, value in given.items():
                setattr(settings, name, value)

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        if _full_eval_dtype(self.args) is not None:
            raise ConfigError(_NO_FULL_EVAL)
        return super()._inner_training_loop(*args, **kwargs)

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
        best = self.state.best_model_checkpoint
        with checkpoint.open():
            self._checkpoint = checkpoint
            try:
                error: Exception | None = None
                try:
                    super()._save_checkpoint(model, trial)
                except Exception as raised:
                    if not checkpoint.is_collected:
                        raise
                    error = raised
                checkpoint.run(lambda: self._write_state(checkpoint, error))
            except BaseException:
                self.state.best_model_checkpoint = best
                raise
            finally:
                self._checkpoint = None
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(checkpoint.path))
        run_on_all_ranks(engine.ranks, f"delete checkpoints beside {checkpoint.path}", lambda: self._rotate(checkpoint))

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """As Trainer does. Those of TRL write one with each checkpoint."""
        write = super().create_model_card
        if self._checkpoint is None:
            write(*args, **kwargs)  # on the first rank alone, by push_to_hub
        else:
            self._checkpoint.run(lambda: write(*args, **kwargs))

    def _write_state(self, checkpoint: _Checkpoint, error: Exception | None) -> None:
        """Again: Trainer's knows the best checkpoint by the name under which it was written.

        Raises:
            Exception: `error`, which Trainer has met where no rank waits for the others any more.
        """
        _raise(error)
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
        if self._checkpoint is None:  # else once it has its name: uploads go on in the background
            super()._push_from_checkpoint(checkpoint_folder)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As Trainer does, whose versions differ in the ranks on which they call `_save`. Call it on every rank."""
        if _engine(self.model) is None:
            super().save_model(output_dir, _internal_call)
            return
        self._save(output_dir)
        before, self._saved_to = self._saved_to, self._directory(output_dir)
        try:
            super().save_model(output_dir, _internal_call)
        finally:
            self._saved_to = before

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """As Trainer does. Call it on every rank; with a whole `state_dict`, on the rank that has it.

        A trainer's own ``_save`` runs on rank 0, where parameters are whole meanwhile, in CPU memory.

        Raises:
            CheckpointError: on every rank; for pieces in `state_dict`, on the calling rank, which waits for no other.
        """
        engine = _engine(self.model)
        if engine is None:
            super()._save(output_dir, state_dict)
            return
        directory = self._directory(output_dir)
        is_saved = directory == self._saved_to
        if state_dict is not None and not (is_saved and find_piece(state_dict)):
            refuse_pieces(state_dict, "Trainer._save(state_dict=..)")
            if self.args.should_save:
                forget_sums(directory)
                super()._save(str(directory), state_dict=state_dict)
            return
        if is_saved:
            return
        with called_on_all_ranks("save_model()"):
            self._save_together(directory, engine)
        if self._checkpoint is not None:
            self._checkpoint.is_collected = self.args.save_only_model

    def _save_together(self, directory: Path, engine: Engine) -> None:
        ranks, doing = engine.ranks, f"save to {directory}"
        was_there = gather_from_all_ranks(ranks, doing, directory.exists)[0]
        try:
            if self._writes_itself:
                save_whole(self.model, engine, directory, super()._save)
            else:
                export_safetensors(self.model, directory, max_shard_size=_MAX_SHARD_SIZE)
                run_on_all_ranks(ranks, doing, lambda: self._save_beside(directory))
        except BaseException:
            if ranks.is_first and not was_there:
                shutil.rmtree(directory, ignore_errors=True)
            raise

    @property
    def _writes_itself(self) -> bool:
        """Whether the trainer's class has a ``_save`` of its own, as that of sentence-transformers."""
        return getattr(super()._save, "__func__", None) is not Trainer._save

    def _directory(self, output_dir: str | None) -> Path:
        return Path(self.args.output_dir if output_dir is None else output_dir)

    def _save_beside(self, directory: Path) -> None:
        """What Trainer saves with the weights."""
        if not self.args.should_save:
            return
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

        def write() -> None:
            if not self.args.should_save:
                return
            torch.save(state, os.path.join(output_dir, _OPTIMIZER))
            with warnings.catch_warnings():  # a scheduler's "save the optimizer as well"
                warnings.simplefilter("ignore", UserWarning)
                torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, _SCHEDULER))

        run_on_all_ranks(engine.ranks, f"save the optimizer to {output_dir}", write)

    def _save_scaler(self, output_dir: str) -> None:
        save = super()._save_scaler
        self._on_all_ranks(f"save the scaler to {output_dir}", lambda: save(output_dir))

    def _save_rng_state(self, output_dir: str) -> None:
        save = super()._save_rng_state
        self._on_all_ranks(f"save random states to {output_dir}", lambda: save(output_dir))
        if self._checkpoint is not None:
            self._checkpoint.is_collected = True

    def _on_all_ranks(self, doing: str, action: Callable[[], None]) -> None:
        engine = _engine(self.model)
        if engine is None:
            action()
        else:
            run_on_all_ranks(engine.ranks, doing, action)

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


@dataclass
class _Checkpoint:
    """A directory that Trainer fills: ``partial-checkpoint-8/checkpoint-8``, and ``checkpoint-8`` once it is whole.

    Attributes:
        root: where the run's checkpoints are.
        name: its own.
        ranks: that save it.
        is_collected: what is left to do for it needs no other rank.
    """

    root: Path
    name: str
    ranks: RankGroup
    is_collected: bool = False

    @property
    def path(self) -> Path:
        """When it is whole."""
        return self.root / self.name

    @property
    def staging(self) -> Path:
        """What Trainer takes for the run's directory."""
        return self.root / f"{_PARTIAL}{self.name}"

    @property
    def partial(self) -> Path:
        """Until then."""
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
        """Clear what killed runs have left."""
        if not self.ranks.is_first:
            return
        for left in self.root.glob(f"{_PARTIAL}{trainer_utils.PREFIX_CHECKPOINT_DIR}-*"):
            path = self.root / left.name.removeprefix(_PARTIAL)
            if (left / _REPLACED).exists() and not path.exists():
                os.replace(left / _REPLACED, path)
            shutil.rmtree(left)
        self.partial.mkdir(parents=True)

    def _publish(self) -> None:
        if not self.ranks.is_first:
            return
        replaced = self.staging / _REPLACED
        if self.path.exists():
            os.replace(self.path, replaced)
        try:
            os.replace(self.partial, self.path)
        except OSError:
            if replaced.exists():
                os.replace(replaced, self.path)
            raise
        shutil.rmtree(self.staging, ignore_errors=True)


def _refuse(args: Any) -> None:
    """Training arguments that contradict sharding, before anything is made."""
    reasons = {
        "fsdp": "leave it out: the model is sharded by StreamShard",
        "deepspeed": "leave it out: the model is sharded by StreamShard",
        "save_on_each_node": "all ranks write into one directory, which has to be on storage that they share",
        "use_vllm": "vLLM would be sent this rank's pieces of the weights; generate with transformers (use_vllm=False)",
        "use_transformers_continuous_batching": "each rank runs forwards for as long as its own completions take, and "
        "all ranks have to run as many; leave it out: generate() sees to that",
    }
    for name, reason in reasons.items():
        if value := getattr(args, name, None):
            given = name if name == "fsdp" else f"{name}={value!r}"  # Trainer makes True of fsdp="full_shard"
            raise ConfigError(f"the training argument {given} does not go with StreamShard: {reason}")
    if args.n_gpu > 1:
        raise ConfigError(
            f"one process sees {args.n_gpu} GPUs: wanted one process for each, as `accelerate launch` or `torchrun "
            f"--nproc-per-node {args.n_gpu}` start them"
        )


def _refuse_optimizer(name: str) -> None:
    """Optimizers that step within backward, before gradients are averaged over ranks."""
    if "lomo" in name or "layerwise" in name:
        raise ConfigError(
            f"{name} steps each parameter within backward, before its gradient is averaged over ranks: take one that "
            'steps afterwards, such as optim="adafactor" or optim="galore_adamw". StreamShard keeps 1/N of all '
            "gradients on each rank"
        )


def _steps_whole_parameters(kind: object) -> bool:
    """Whether `kind` is the class of an optimizer, not a factory of one, that may depend on all of a parameter."""
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        return False
    return not (issubclass(kind, WholeParameterOptimizer) or is_elementwise_class(kind))


def _full_eval_dtype(args: Any) -> torch.dtype | None:
    """What to cast a model to that is evaluated and not trained; None if layers compute in that dtype as it is."""
    for name, dtype in _FULL_EVAL.items():
        if getattr(args, name) and not getattr(args, name.removesuffix("_full_eval")):
            return dtype
    return None


def _engine(model: nn.Module) -> Engine | None:
    return None if handle_of(model) is None else engine_of(model)


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


def _inner(optimizer: Optimizer) -> Optimizer:
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
