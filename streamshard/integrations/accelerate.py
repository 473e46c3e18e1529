"""accelerate: an `Accelerator` that shards the models it prepares. What differs from accelerate's own is here.

prepare -> backward, clip -> state dict, export -> save and load (`accelerate_state.py`); how processes are started is
checked first (`accelerate_launch.py`)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DynamoBackend, is_compiled_module, recursively_apply
from accelerate.utils.other import is_repeated_blocks
from torch import nn

from streamshard.adapters import called_on_all_ranks
from streamshard.api import StreamShard, export_safetensors
from streamshard.config import Precision, Settings, read_environment
from streamshard.engine.handle import engine_of, handle_of
from streamshard.errors import ConfigError, ShardingError
from streamshard.full import clip_grads
from streamshard.integrations.accelerate_join import StepNotes, join
from streamshard.integrations.accelerate_launch import check_launch, check_plugins, check_processes, group_of_one
from streamshard.integrations.accelerate_state import Run, load_run, remember_epochs, save_run
from streamshard.unit.pieces import holds_pieces
from streamshard.unit.sharded_tensor import ShardedTensor

__all__ = ["StreamShardAccelerator"]

_SETTINGS = tuple(field.name for field in fields(Settings))
_OWN = ("shard_references",)  # what StreamShard is not told
_OPTIONS = ("units", "resident", "mesh", *_SETTINGS, *_OWN)
_PRECISION = tuple(field.name for field in fields(Precision))
_DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class StreamShardAccelerator(Accelerator):  # type: ignore[misc]  # accelerate is not typed
    """`accelerate.Accelerator` whose `prepare` shards models with `StreamShard`, at any number of processes.

    Models are sharded in place, so optimizers may be made before or after. Everything else is used as with accelerate's
    own class.

    Args:
        *args, **kwargs: accelerate's own, and by keyword those of `StreamShard`: ``units``, ``resident``, ``mesh``,
            ``precision``, ``weight_slots``, ``memory_budget``, and so on, for all models that are prepared. Those
            that are not given are read from the environment: ``STREAMSHARD_WEIGHT_SLOTS=4``, and fields of `Precision`
            as in ``STREAMSHARD_GRAD_DTYPE=bfloat16``. `units` and `resident` in the environment are names of classes or
            modules, with commas between them.
        shard_references: (by keyword, True by default, or ``STREAMSHARD_SHARD_REFERENCES``) False leaves models that
            are prepared with ``evaluation_mode=True`` whole on each process, as accelerate does: for small ones.

    ``mixed_precision`` decides the dtype that layers compute in: ``"bf16"`` or ``"fp16"``; with ``"no"`` it is the
    model's own if its parameters are all of one 16-bit dtype, else fp32. A `precision` that is given has that
    ``param_dtype``, or fp32.

    Raises:
        ConfigError: an option that cannot work; `precision` contradicts ``mixed_precision``; a plugin of FSDP,
            DeepSpeed, Megatron-LM or tensor parallelism; processes that do not know of each other. The message says
            what to run.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        check_plugins(kwargs)
        check_launch()
        kwargs = check_processes(kwargs)
        super().__init__(*args, **kwargs)
        self._begin(options)

    @classmethod
    def take_over(cls, accelerator: Accelerator, **options: Any) -> StreamShardAccelerator:
        """Turn an `Accelerator` that somebody else has made, and that has prepared no model yet, into one of these.

        Args:
            accelerator: is of this class afterwards.
            **options: those of `StreamShard`.

        Raises:
            ConfigError: as for the constructor; an unknown option; a model has been prepared.
        """
        if unknown := [name for name in options if name not in _OPTIONS]:
            raise ConfigError(f"no such option: {', '.join(unknown)}; wanted some of {', '.join(_OPTIONS)}")
        if accelerator._models:
            raise ConfigError("this Accelerator has prepared a model: wanted one that has not")
        check_plugins({})
        accelerator.__class__ = cls
        assert isinstance(accelerator, cls)
        accelerator._begin(options)
        return accelerator

    def _begin(self, options: dict[str, Any]) -> None:
        """What follows accelerate's own constructor."""
        check_launch(self)
        self._options = _with_environment(options)
        self.shard_references = self._options.pop("shard_references", True)
        if not isinstance(self.shard_references, bool):
            raise ConfigError(f"shard_references={self.shard_references!r}: wanted True or False")
        self._notes = StepNotes()
        given = {name: value for name, value in self._options.items() if name in _SETTINGS}
        Settings(**{**given, "precision": self._precision_of(torch.float32)})  # raises now what prepare would raise
        if self.mixed_precision == "fp16":
            # accelerate has neither autocast nor a scaler for fp16 on the CPU, where gradients underflow as well.
            self.native_amp = True
            handler = self.scaler_handler
            self.scaler = torch.amp.GradScaler(self.device.type, **({} if handler is None else handler.to_kwargs()))
        group_of_one(self.device)

    # -- prepare ------------------------------------------------------------------------------------------------------

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Shard `model` in place, and let accelerate put autocast around its forward, and compile it.

        Args:
            model: what `StreamShard` accepts, or sharded already. One without parameters is only placed.
            device_placement: ignored for models with parameters: they are placed where their pieces are.
            evaluation_mode: no room for gradients is made, and the model cannot be trained. With
                ``shard_references=False`` the model is not sharded until it is prepared for training.

        Returns:
            The same object; with a dynamo backend what ``torch.compile`` makes of it, with its regional compilation
            the same object again, whose repeated layers are compiled in place.
        """
        stays_whole = evaluation_mode and not self.shard_references
        if sharded_in(model) is None and (stays_whole or next(model.parameters(), None) is None):
            return _module(super().prepare_model(model, device_placement=device_placement, evaluation_mode=True))
        return self.prepare_sharded(model, evaluation_mode)

    def prepare_sharded(self, model: nn.Module, evaluation_mode: bool = False) -> nn.Module:
        """`prepare_model` of a model that is sharded whatever ``shard_references`` says."""
        sharded, was_prepared = sharded_in(model), getattr(model, "_is_accelerate_prepared", False)
        if sharded is None:
            self._shard(_uncompiled(model), evaluation_mode)
        elif not evaluation_mode and (frozen := _names_without_room(sharded)):
            raise ShardingError(
                f"{type(sharded).__name__} was prepared with evaluation_mode=True, or sharded while {frozen[0]!r} was "
                "frozen, so it has no room for gradients: prepare it for training first, and evaluate it then"
            )
        elif not was_prepared:
            self._check_dtype(engine_of(sharded).sizing.precision, f"{type(sharded).__name__} was sharded with")
        plugin = self.state.dynamo_plugin
        if was_prepared or not plugin.use_regional_compilation or plugin.backend == DynamoBackend.NO:
            return _module(super().prepare_model(model, device_placement=False, evaluation_mode=True))
        # accelerate makes another module around the layers, which would be none of ours.
        for layers in [
            each for each in model.modules() if isinstance(each, nn.ModuleList) and is_repeated_blocks(each)
        ]:
            for layer in layers:
                layer.compile(**plugin.to_kwargs())
        backend, plugin.backend = plugin.backend, DynamoBackend.NO
        try:
            return _module(super().prepare_model(model, device_placement=False, evaluation_mode=True))
        finally:
            plugin.backend = backend

    def _shard(self, model: nn.Module, evaluation_mode: bool) -> None:
        options = {**self._options, "precision": self._precision_of(_dtype_of(model))}
        trained = [param for param in model.parameters() if param.requires_grad]
        if not evaluation_mode:
            trained = []
        try:
            for param in trained:
                param.requires_grad_(False)
            StreamShard(model, **{name: value for name, value in options.items() if name not in _PRECISION})
        finally:
            for param in trained:
                param.requires_grad_(True)

    def _precision_of(self, own: torch.dtype) -> Precision:
        """For a model of dtype `own`."""
        given = self._options.get("precision")
        if given is not None:
            if isinstance(given, Precision):
                self._check_dtype(given, "precision has")
            return given  # type: ignore[no-any-return]  # Settings says what is wrong with it
        if self.mixed_precision not in _DTYPES:
            raise ConfigError(f"mixed_precision={self.mixed_precision!r}: wanted 'no', 'bf16' or 'fp16'")
        dtype = own if self.mixed_precision == "no" else _DTYPES[self.mixed_precision]
        precision = Precision(param_dtype=dtype)
        return replace(precision, **{name: self._options[name] for name in _PRECISION if name in self._options})

    def _check_dtype(self, precision: Precision, what: str) -> None:
        wanted = _DTYPES.get(self.mixed_precision)
        if precision.param_dtype not in (wanted, torch.float32):
            right = {dtype: name for name, dtype in _DTYPES.items()}[precision.param_dtype]
            raise ConfigError(
                f"{what} param_dtype={precision.param_dtype}, and mixed_precision is {self.mixed_precision!r}: give "
                f"the Accelerator mixed_precision={right!r}, or leave precision away: its dtype follows from that"
            )

    # -- a step -------------------------------------------------------------------------------------------------------

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """As accelerate's; of one sharded model's parameters the norm over all ranks takes one collective."""
        params: list[Any] = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        self.unscale_gradients()
        self._notes.note("norm", lambda: self.clip_grad_norm_(params, max_norm, norm_type))
        for model in self._sharded:
            engine = engine_of(model)
            if {shard.param for shard in engine.param_shards}.issuperset(params):
                return clip_grads(engine, params, max_norm, norm_type, None)
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)

    def clip_grad_value_(self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
        """As accelerate's."""
        params: list[Any] = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        self._notes.note("value", lambda: self.clip_grad_value_(params, clip_value))
        super().clip_grad_value_(params, clip_value)

    @contextmanager
    def join_uneven_inputs(
        self, joinables: list[Any], even_batches: bool | None = None, *, repeat: Callable[[], object] | None = None
    ) -> Iterator[None]:
        """As accelerate's, and on CPUs as well: ranks that have run out of inputs shadow the steps of the others.

        Args:
            joinables: models that were prepared, and other joinables.
            even_batches: True: loaders repeat samples until all ranks have as many, and nothing else is done.
            repeat: what a rank that has run out does after each backward of the others, as of ``Join``; None: what its
                own last step did through this Accelerator (clipping, steps of prepared optimizers and schedulers). A
                loop that does more after a backward, or trains several models, gives it.
        """
        sharded = [sharded_in(each) if isinstance(each, nn.Module) else None for each in joinables]
        if not self.use_distributed or not any(sharded):
            with super().join_uneven_inputs(joinables, even_batches=even_batches):
                yield
            return
        inner = [own or given for own, given in zip(sharded, joinables, strict=True)]
        again = repeat or partial(self._notes.repeat, self)
        with self._notes.open(self), join(self, inner, even_batches, again):
            yield

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """As accelerate's; not of parameters and gradients of sharded models, of which ranks have different pieces."""
        self._refuse_pieces(tensor, "reduce")
        return super().reduce(tensor, reduction, scale)

    def gather(self, tensor: Any) -> Any:
        """As accelerate's; not of parameters and gradients of sharded models, of which ranks have different pieces."""
        self._refuse_pieces(tensor, "gather")
        return super().gather(tensor)

    def _refuse_pieces(self, data: Any, what: str) -> None:
        def check(tensor: torch.Tensor) -> torch.Tensor:
            if isinstance(tensor, ShardedTensor) or holds_pieces(tensor):
                raise ShardingError(
                    f"{what} of a parameter or gradient of a sharded model, {tuple(tensor.shape)} here: each rank has "
                    "another piece of it. accelerator.get_state_dict(model) and model.summon_full_params() give them "
                    "whole; for accelerate's LocalSGD see streamshard.LocalSGD and docs/guide/replicas.md"
                )
            return tensor

        if self.use_distributed:
            recursively_apply(check, data)

    # -- data ---------------------------------------------------------------------------------------------------------

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """As accelerate's; what `save_state` saves of it lets a run go on within an epoch that is shuffled."""
        prepared = super().prepare_data_loader(data_loader, *args, **kwargs)
        remember_epochs(prepared)
        return prepared

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """As accelerate's, of the epoch that `dataloader` is in; accelerate 1.14 takes the first one's order."""
        rest = super().skip_first_batches(dataloader, num_batches)
        if hasattr(rest, "iteration"):
            rest.iteration = dataloader.iteration
        return rest

    # -- whole weights ------------------------------------------------------------------------------------------------

    def get_state_dict(self, model: nn.Module, unwrap: bool = True, *, rank0_only: bool = False) -> dict[str, Any]:
        """The whole state dict: original names and shapes, weights fp32, in CPU memory. Call it on every rank.

        Args:
            model: one that was prepared.
            unwrap: as accelerate's, for models that are not sharded.
            rank0_only: other ranks get an empty dict, and need no memory for it.
        """
        inner = sharded_in(model)
        if inner is None:
            return super().get_state_dict(model, unwrap)  # type: ignore[no-any-return]
        with called_on_all_ranks("get_state_dict()"):
            return StreamShard.full_state_dict(inner, rank0_only=rank0_only)  # type: ignore[arg-type]  # it is one

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the weights as safetensors, every rank its own bytes: `export_safetensors`. Call it on every rank.

        Raises:
            ConfigError: ``safe_serialization=False``, for a sharded model.
        """
        inner = sharded_in(model)
        if inner is None:
            super().save_model(model, save_directory, max_shard_size, safe_serialization)
            return
        if not safe_serialization:
            raise ConfigError(
                "save_model(safe_serialization=False): sharded models are written as safetensors. For a file of "
                "torch.save: accelerator.save(accelerator.get_state_dict(model), 'pytorch_model.bin')"
            )
        with called_on_all_ranks("save_model()"):
            export_safetensors(inner, save_directory, max_shard_size=max_shard_size)

    # -- the run ------------------------------------------------------------------------------------------------------

    def save_state(
        self, output_dir: str | os.PathLike[str] | None = None, safe_serialization: bool = True, **kwargs: Any
    ) -> Any:
        """Save all that was prepared or registered, as `save_checkpoint` does. Call it on every rank, between steps.

        Hooks of ``register_save_state_pre_hook`` run first and are given whole state dicts (on other ranks than the
        first, empty ones). What they take out of the list is saved here nevertheless. With automatic naming older
        checkpoints go, as ``total_limit`` says, when the new one is complete.

        Returns:
            The directory.

        Raises:
            CheckpointError: on every rank; nothing is left of the new checkpoint then.
        """
        if not self._sharded:
            return super().save_state(output_dir, safe_serialization, **kwargs)
        with called_on_all_ranks("save_state()"):
            return save_run(self._run(), output_dir)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Go on where `save_state` was called, on any number of ranks. Call it on every rank.

        Models that a hook of ``register_load_state_pre_hook`` takes out of the list stay as the hook leaves them.

        Args:
            input_dir: as given to `save_state`; with automatic naming None is the latest.
            load_kwargs: ignored: nothing is unpickled.
            **load_model_func_kwargs: ``strict=False`` loads what fits; others are ignored.

        Raises:
            CheckpointError: on every rank, before anything has changed.
        """
        if not self._sharded:
            super().load_state(input_dir, load_kwargs, **load_model_func_kwargs)
            return
        self.step = load_run(self._run(), input_dir, strict=bool(load_model_func_kwargs.get("strict", True)))

    def _run(self) -> Run:
        return Run(self, [sharded_in(model) or model for model in self._models])

    @property
    def _sharded(self) -> list[nn.Module]:
        return [inner for model in self._models if (inner := sharded_in(model)) is not None]


def _module(prepared: Any) -> nn.Module:
    assert isinstance(prepared, nn.Module)
    return prepared


def sharded_in(model: nn.Module) -> nn.Module | None:
    """The sharded model that is `model`, or that ``torch.compile`` has wrapped; None if there is none."""
    inner = _uncompiled(model)
    return inner if handle_of(inner) is not None else None


def _names_without_room(model: nn.Module) -> list[str]:
    """Parameters that need gradients, and were frozen when `model` was sharded."""
    grads = [grad for unit in engine_of(model).units for grad in unit.grads.params]
    return [grad.shard.name for grad in grads if grad.shard.param.requires_grad and not grad.has_room]


def _uncompiled(model: nn.Module) -> nn.Module:
    return _module(model._orig_mod) if is_compiled_module(model) else model


def _with_environment(options: dict[str, Any]) -> dict[str, Any]:
    """`options`, and what they leave out as the environment says it."""
    found = read_environment(os.environ, switches=_OWN)
    if "memory_budget" in options:
        found = {name: value for name, value in found.items() if name not in ("weight_slots", "grad_slots")}
    elif "weight_slots" in options or "grad_slots" in options:
        found.pop("memory_budget", None)
    return {**found, **options}


def _dtype_of(model: nn.Module) -> torch.dtype:
    """The 16-bit dtype that all parameters have, else fp32."""
    dtypes = {param.dtype for param in model.parameters()}
    only = dtypes.pop() if len(dtypes) == 1 else torch.float32
    return only if only in _DTYPES.values() else torch.float32
