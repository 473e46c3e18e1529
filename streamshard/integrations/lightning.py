"""Lightning: strategies for Fabric and for Trainer. Their checkpoints are the files that Lightning writes under DDP.

fabric = Fabric(strategy=StreamShardFabricStrategy(), devices=8)
trainer = Trainer(strategy=StreamShardStrategy(), devices=8)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.optim import Optimizer

from streamshard.api import StreamShard
from streamshard.checkpoint.optimizer_state import full_optimizer_state_dict, load_optimizer_state_dict
from streamshard.core.edge import register_forward_method
from streamshard.core.module_state import engine_of, handle_of
from streamshard.core.optimizer_kinds import params_in
from streamshard.errors import ConfigError
from streamshard.planning.structure import replacing

_DTYPES = {"32-true": "fp32", "bf16-mixed": "bf16", "bf16-true": "bf16", "16-mixed": "fp16"}
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def _shard(module: nn.Module, precision: str, options: Mapping[str, Any]) -> nn.Module:
    """Shard `module`, unless it is sharded. Lightning's precision decides the dtype in which layers compute."""
    if handle_of(module) is not None or not any(True for _ in module.parameters()):
        return module
    if precision not in _DTYPES:
        raise ConfigError(f"precision={precision!r}: wanted one of {', '.join(_DTYPES)}")
    return StreamShard(module, **{"precision": _DTYPES[precision], **options})


def _model_of(optimizer: Optimizer, models: Iterable[nn.Module]) -> nn.Module | None:
    """The sharded model whose parameters `optimizer` has; None: it has others."""
    params = set(params_in(optimizer.param_groups))
    sharded = (model for model in models if handle_of(model) is not None)
    return next((each for each in sharded if not params.isdisjoint(each.parameters())), None)


class _Accumulation:
    """How Lightning leaves out the exchange of gradients, as by ``fabric.no_backward_sync(model)``."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
        """A context around forward and backward of a micro-batch that is not the last."""
        model: Any = module
        return model.no_sync() if enabled and handle_of(module) is not None else contextlib.nullcontext()


class StreamShardFabricStrategy(FabricDDPStrategy):  # type: ignore[misc]  # lightning is not checked
    """Fabric's strategy for models that do not fit: ``fabric.setup(model, optimizer)`` shards the model in place.

    Args:
        *args, **kwargs: of Fabric's ``DDPStrategy``.
        streamshard: options of `StreamShard`. Fabric's precision decides its ``precision``, unless it is given.
    """

    def __init__(self, *args: Any, streamshard: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._options = dict(streamshard or {})
        self._models: list[nn.Module] = []
        self._backward_sync_control = _Accumulation()

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shard `module` in place."""
        self._models.append(_shard(module, str(self.precision.precision), self._options))
        return self._models[-1]

    def module_to_device(self, module: nn.Module) -> None:
        """Do nothing: sharding moves the model unit by unit."""

    def get_module_state_dict(self, module: nn.Module) -> Any:
        """The full state dict on rank 0; an empty one on others. Collective."""
        model: Any = module
        return model.full_state_dict() if handle_of(module) is not None else super().get_module_state_dict(module)

    def get_optimizer_state(self, optimizer: Optimizer) -> Any:
        """The full state on rank 0; an empty one on others. Collective."""
        model = _model_of(optimizer, self._models)
        state = super().get_optimizer_state
        return state(optimizer) if model is None else full_optimizer_state_dict(model, optimizer)


class StreamShardStrategy(DDPStrategy):  # type: ignore[misc]  # lightning is not checked
    """Trainer's strategy for models that do not fit: the LightningModule is sharded before ``configure_optimizers``.

    ``model.trainer.strategy`` saves and loads full weights and optimizer state, on any number of ranks.

    Args:
        *args, **kwargs: of Lightning's ``DDPStrategy``.
        streamshard: options of `StreamShard`. Trainer's precision decides its ``precision``, unless it is given.
    """

    model: Any
    _lightning_module: Any

    def __init__(self, *args: Any, streamshard: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._options = dict(streamshard or {})

    def setup(self, trainer: Any) -> None:
        """Shard the model, then make the optimizers."""
        self.accelerator.setup(trainer)
        self.precision_plugin.convert_module(self.model)
        is_new = handle_of(self.model) is None
        self.model = _shard(self.model, str(self.precision_plugin.precision), self._options)
        if is_new and handle_of(self.model) is not None:
            for name in _STEPS:
                register_forward_method(self.model, name)  # Lightning calls these instead of forward
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def block_backward_sync(self) -> AbstractContextManager[Any]:
        """A context around forward and backward of a micro-batch that is not the last."""
        return _Accumulation().no_backward_sync(self.model, enabled=True)

    def lightning_module_state_dict(self) -> Any:
        """The full state dict on rank 0; an empty one on others. Collective."""
        if handle_of(self.model) is None:
            return super().lightning_module_state_dict()
        return self.model.full_state_dict()

    def optimizer_state(self, optimizer: Any) -> Any:
        """The full state on rank 0; an empty one on others. Collective."""
        inner = getattr(optimizer, "optimizer", optimizer)  # of a LightningOptimizer
        model = _model_of(inner, [self.model])
        return super().optimizer_state(inner) if model is None else full_optimizer_state_dict(model, inner)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load full state, made on any number of ranks or under DDP."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            inner = getattr(optimizer, "optimizer", optimizer)
            if (model := _model_of(inner, [self.model])) is None:
                inner.load_state_dict(state)
            else:
                load_optimizer_state_dict(model, inner, state)

    def teardown(self) -> None:
        """As Lightning's, but the model stays where its shards are."""
        model = self._lightning_module
        # Lightning moves both to the CPU.
        with replacing((self.__dict__, "_lightning_module", None), (self.__dict__, "_optimizers", [])):
            super().teardown()
        if model is not None and handle_of(model) is not None:
            engine_of(model).recover()  # an error may have ended a backward
