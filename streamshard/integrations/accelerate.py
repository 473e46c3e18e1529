"""accelerate: an `Accelerator` that shards the models it prepares. Saved runs are in `accelerate_state.py`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DynamoBackend, is_compiled_module, recursively_apply
from torch import nn

from streamshard.api import StreamShard, export_safetensors
from streamshard.comm.groups import make_default_group
from streamshard.config import Precision, Settings, read_environment
from streamshard.device import accelerator as accelerator_kind
from streamshard.engine.module_state import engine_of, handle_of
from streamshard.errors import ConfigError, ShardingError
from streamshard.full import clip_grads
from streamshard.integrations.accelerate_state import load_run, save_run
from streamshard.integrations.peft import called_on_all_ranks
from streamshard.unit.sharded_tensor import is_piece

__all__ = ["StreamShardAccelerator"]

_SETTINGS = tuple(field.name for field in fields(Settings))
_OPTIONS = ("units", "resident", "mesh", *_SETTINGS)
_PRECISION = tuple(field.name for field in fields(Precision))
_DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_LAUNCH = "accelerate launch --multi_gpu --num_machines 1 --num_processes N script.py (on CPUs too), or torchrun"
_PLUGINS = {
    "fsdp_plugin": "ACCELERATE_USE_FSDP",
    "deepspeed_plugin": "ACCELERATE_USE_DEEPSPEED",
    "deepspeed_plugins": "ACCELERATE_USE_DEEPSPEED",
    "megatron_lm_plugin": "ACCELERATE_USE_MEGATRON_LM",
    "torch_tp_plugin": "ACCELERATE_USE_TP",
    "parallelism_config": "ACCELERATE_USE_PARALLELISM_CONFIG",
}


class StreamShardAccelerator(Accelerator):  # type: ignore[misc]  # accelerate is not typed
    """`accelerate.Accelerator` whose `prepare` shards models with `StreamShard`, at any number of processes.

    `prepare` shards models in place, so optimizers may be made before or after. Everything else works as with
    accelerate's own class.

    Args:
        *args, **kwargs: accelerate's own, and by keyword those of `StreamShard`: ``units``, ``resident``, ``mesh``,
            ``precision``, ``weight_slots``, and so on, for all models. The environment gives those
            that are left out: ``STREAMSHARD_WEIGHT_SLOTS=4``, and fields of `Precision` as in
            ``STREAMSHARD_GRAD_DTYPE=bfloat16``. See `read_environment`.

    ``mixed_precision`` decides the dtype in which layers compute: ``"bf16"`` or ``"fp16"``. With ``"no"`` layers
    compute in the model's own dtype if its parameters are all of one 16-bit dtype, else in fp32. A given `precision`
    has the same ``param_dtype``, or fp32.

    Raises:
        ConfigError: an option cannot work; `precision` contradicts ``mixed_precision``; FSDP, DeepSpeed, Megatron-LM or
            tensor parallelism is asked for too; processes do not know of each other. The message says what to run.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        _refuse_plugins(kwargs)
        if "LOCAL_RANK" in os.environ and accelerator_kind() in (None, "cpu"):
            kwargs.setdefault("cpu", True)  # else accelerate leaves each process alone
        super().__init__(*args, **kwargs)
        self._begin(options)

    @classmethod
    def take_over(cls, accelerator: Accelerator, **options: Any) -> StreamShardAccelerator:
        """Turn an `Accelerator` that has prepared nothing yet, such as Trainer's, into one of this class.

        Args:
            accelerator: is of this class afterwards.
            **options: those of `StreamShard`.

        Raises:
            ConfigError: as for the constructor; an unknown option.
        """
        if unknown := [name for name in options if name not in _OPTIONS]:
            raise ConfigError(f"no such option: {', '.join(unknown)}; wanted some of {', '.join(_OPTIONS)}")
        _refuse_plugins({})
        accelerator.__class__ = cls
        assert isinstance(accelerator, cls)
        accelerator._begin(options)
        return accelerator

    def _begin(self, options: dict[str, Any]) -> None:
        """What follows accelerate's own constructor."""
        _check_launch(self)
        self._options = _with_environment(options)
        given = {name: value for name, value in self._options.items() if name in _SETTINGS}
        Settings(**{**given, "precision": self._precision_of(torch.float32)})  # raises what prepare would raise
        if self.mixed_precision == "fp16":
            # accelerate has neither autocast nor a scaler for fp16 on the CPU, where gradients underflow as well.
            self.native_amp = True
            handler = self.scaler_handler
            self.scaler = torch.amp.GradScaler(self.device.type, **({} if handler is None else handler.to_kwargs()))
        if not dist.is_initialized():  # one process, which accelerate trains without a process group
            store = dist.HashStore()  # type: ignore[attr-defined]  # not re-exported in stubs
            make_default_group(self.device, store=store, rank=0, world_size=1)

    # -- prepare ------------------------------------------------------------------------------------------------------

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Shard `model` in place. accelerate puts autocast around its forward, and compiles it.

        Args:
            model: what `StreamShard` accepts, or a sharded model. One without parameters is only placed.
            device_placement: ignored for models with parameters: their shards decide the place.
            evaluation_mode: the model gets no room for gradients, and cannot be trained.

        Returns:
            The same object; with a dynamo backend, what ``torch.compile`` makes of it.
        """
        if next(model.parameters(), None) is None:
            return _module(super().prepare_model(model, device_placement=device_placement, evaluation_mode=True))
        plugin = self.state.dynamo_plugin
        if plugin.use_regional_compilation and plugin.backend != DynamoBackend.NO:
            raise ConfigError(
                "use_regional_compilation makes another module around the layers, which would not be sharded: leave it "
                "out, and call layer.compile() for each layer before prepare"
            )
        sharded = sharded_in(model)
        if sharded is None:
            self._shard(_uncompiled(model), evaluation_mode)
        else:
            self._check_dtype(engine_of(sharded).sizing.precision, f"{type(sharded).__name__} was sharded with")
        return _module(super().prepare_model(model, device_placement=False, evaluation_mode=True))

    def _shard(self, model: nn.Module, evaluation_mode: bool) -> None:
        options = {**self._options, "precision": self._precision_of(_dtype_of(model))}
        trained = [param for param in model.parameters() if param.requires_grad and evaluation_mode]
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
        if precision.param_dtype not in (_DTYPES.get(self.mixed_precision), torch.float32):
            right = {dtype: name for name, dtype in _DTYPES.items()}[precision.param_dtype]
            raise ConfigError(
                f"{what} param_dtype={precision.param_dtype}, and mixed_precision is {self.mixed_precision!r}: give "
                f"the Accelerator mixed_precision={right!r}, or leave precision out: mixed_precision decides its dtype"
            )

    # -- a step -------------------------------------------------------------------------------------------------------

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """As accelerate's; of one sharded model's parameters the norm over all ranks takes one collective."""
        params: list[Any] = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        self.unscale_gradients()
        for model in self.sharded_models:
            engine = engine_of(model)
            if {shard.param for shard in engine.param_shards}.issuperset(params):
                return clip_grads(engine, params, max_norm, norm_type, None)
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """As accelerate's. Refuses sharded parameters and gradients."""
        self._refuse_pieces(tensor, "reduce")
        return super().reduce(tensor, reduction, scale)

    def gather(self, tensor: Any) -> Any:
        """As accelerate's. Refuses sharded parameters and gradients."""
        self._refuse_pieces(tensor, "gather")
        return super().gather(tensor)

    def _refuse_pieces(self, data: Any, what: str) -> None:
        def check(tensor: torch.Tensor) -> torch.Tensor:
            if is_piece(tensor):
                raise ShardingError(
                    f"{what} of a parameter or gradient of a sharded model, {tuple(tensor.shape)} here: each rank has "
                    "another piece of it. accelerator.get_state_dict(model) gives full tensors; for accelerate's "
                    "LocalSGD see streamshard.LocalSGD and docs/guide/replicas.md"
                )
            return tensor

        if self.use_distributed:
            recursively_apply(check, data)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """As accelerate's, of the epoch that `dataloader` is in; accelerate 1.14 takes the first epoch's order."""
        rest = super().skip_first_batches(dataloader, num_batches)
        if hasattr(rest, "iteration"):
            rest.iteration = dataloader.iteration
        return rest

    # -- whole weights ------------------------------------------------------------------------------------------------

    def get_state_dict(self, model: nn.Module, unwrap: bool = True, *, rank0_only: bool = False) -> dict[str, Any]:
        """The full state dict: original names and shapes, weights fp32, in CPU memory. Call it on every rank.

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

        Hooks of ``register_save_state_pre_hook`` run first and get full state dicts (empty ones on ranks other than the
        first). A model that a hook takes out of the list is saved nevertheless. With automatic naming, older
        checkpoints go as ``total_limit`` says, when the new one is complete.

        Returns:
            The directory.

        Raises:
            CheckpointError: on every rank; nothing is left of the new checkpoint then.
        """
        if not self.sharded_models:
            return super().save_state(output_dir, safe_serialization, **kwargs)
        with called_on_all_ranks("save_state()"):
            return save_run(self, self._all_models(), output_dir)

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
            **load_model_func_kwargs: ignored: whatever does not fit raises.

        Raises:
            CheckpointError: on every rank, before anything has changed.
        """
        if not self.sharded_models:
            super().load_state(input_dir, load_kwargs, **load_model_func_kwargs)
            return
        self.step = load_run(self, self._all_models(), input_dir)

    def _all_models(self) -> list[nn.Module]:
        return [sharded_in(model) or model for model in self._models]

    @property
    def sharded_models(self) -> list[nn.Module]:
        """Those of the prepared models that are sharded, without what ``torch.compile`` has put around them."""
        return [inner for model in self._models if (inner := sharded_in(model)) is not None]


def sharded_in(model: nn.Module) -> nn.Module | None:
    """The sharded model that is `model`, or that ``torch.compile`` has wrapped; None if there is none."""
    inner = _uncompiled(model)
    return inner if handle_of(inner) is not None else None


def _module(prepared: Any) -> nn.Module:
    assert isinstance(prepared, nn.Module)
    return prepared


def _uncompiled(model: nn.Module) -> nn.Module:
    return _module(model._orig_mod) if is_compiled_module(model) else model


def _dtype_of(model: nn.Module) -> torch.dtype:
    """The 16-bit dtype that all parameters have, else fp32."""
    dtypes = {param.dtype for param in model.parameters()}
    only = dtypes.pop() if len(dtypes) == 1 else torch.float32
    return only if only in _DTYPES.values() else torch.float32


def _with_environment(options: dict[str, Any]) -> dict[str, Any]:
    """`options`, and what they leave out as the environment says it."""
    return {**read_environment(os.environ), **options}


def _refuse_plugins(given: dict[str, Any]) -> None:
    """Refuse what shards or replicates models itself, in the arguments or in the environment of accelerate launch."""
    for argument, variable in _PLUGINS.items():
        if given.get(argument) is not None or os.environ.get(variable, "false").lower() == "true":
            asked = argument if given.get(argument) is not None else f"{variable}=true"
            raise ConfigError(
                f"{asked}: StreamShard shards models itself. Leave it out of the arguments, or of the options and the "
                f"config file of accelerate launch, and start with {_LAUNCH}. docs/guide/accelerate.md says what to "
                "write for its options; mesh= says over which ranks to shard"
            )


def _check_launch(accelerator: Accelerator) -> None:
    """Raise if fewer processes train together than were launched."""
    launched = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    is_one_of_several = not dist.is_initialized() and "RANK" not in os.environ and "MASTER_PORT" in os.environ
    if launched != accelerator.num_processes or (is_one_of_several and "ACCELERATE_MIXED_PRECISION" in os.environ):
        raise ConfigError(
            "several processes were asked for, and accelerate knows of "
            f"{accelerator.num_processes} ({accelerator.distributed_type.value}): start them with {_LAUNCH} (without "
            "--multi_gpu accelerate launch starts one process on CPUs; for one process unset MASTER_PORT), and make "
            "StreamShardAccelerator before anything else of accelerate"
        )
