"""StreamShard: sharded data-parallel training for PyTorch by layer streaming.

Each public name is imported when it is first used. So ``from streamshard import StreamShard`` loads the core alone, and
``streamshard --help`` does without torch, which takes seconds to import.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"  # the packaging reads it here

if TYPE_CHECKING:
    from streamshard import checkpoint as checkpoint
    from streamshard import errors as errors
    from streamshard import optim as optim
    from streamshard.api import StreamShard as StreamShard
    from streamshard.checkpoint.directory import latest as latest
    from streamshard.checkpoint.export import export_safetensors as export_safetensors
    from streamshard.checkpoint.export import load_safetensors as load_safetensors
    from streamshard.checkpoint.optimizer_state import full_optimizer_state_dict as full_optimizer_state_dict
    from streamshard.checkpoint.optimizer_state import load_optimizer_state_dict as load_optimizer_state_dict
    from streamshard.checkpoint.restore import Loaded as Loaded
    from streamshard.checkpoint.restore import load_checkpoint as load_checkpoint
    from streamshard.checkpoint.save import save_checkpoint as save_checkpoint
    from streamshard.checkpoint.saving import Saving as Saving
    from streamshard.checkpoint.stop_on_signal import StopOnSignal as StopOnSignal
    from streamshard.config import Precision as Precision
    from streamshard.core.edge import register_forward_method as register_forward_method
    from streamshard.errors import CheckpointError as CheckpointError
    from streamshard.errors import CommunicationError as CommunicationError
    from streamshard.errors import ConfigError as ConfigError
    from streamshard.errors import OptimizerError as OptimizerError
    from streamshard.errors import RankMismatchError as RankMismatchError
    from streamshard.errors import ShardingError as ShardingError
    from streamshard.errors import StreamShardError as StreamShardError
    from streamshard.errors import UnitError as UnitError
    from streamshard.initialise import init_weights as init_weights
    from streamshard.integrations.run_log import RunLog as RunLog
    from streamshard.optim.wrappers import DistributedOptimizer as DistributedOptimizer
    from streamshard.optim.wrappers import LocalSGD as LocalSGD
    from streamshard.tools.fingerprints import fingerprints as fingerprints
    from streamshard.tools.plan import plan as plan
    from streamshard.tools.trace import trace as trace
else:
    import importlib

    _NAMES = {
        "api": "StreamShard",
        "checkpoint.directory": "latest",
        "checkpoint.export": "export_safetensors load_safetensors",
        "checkpoint.optimizer_state": "full_optimizer_state_dict load_optimizer_state_dict",
        "checkpoint.restore": "Loaded load_checkpoint",
        "checkpoint.save": "save_checkpoint",
        "checkpoint.saving": "Saving",
        "checkpoint.stop_on_signal": "StopOnSignal",
        "config": "Precision",
        "core.edge": "register_forward_method",
        "errors": "CheckpointError CommunicationError ConfigError OptimizerError RankMismatchError ShardingError"
        " StreamShardError UnitError",
        "initialise": "init_weights",
        "integrations.run_log": "RunLog",
        "optim.wrappers": "DistributedOptimizer LocalSGD",
        "tools.fingerprints": "fingerprints",
        "tools.plan": "plan",
        "tools.trace": "trace",
    }
    _MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}
    __all__ = sorted(_MODULE_OF)

    def __getattr__(name: str) -> Any:
        """Import the module of the public name `name`, or the package of this name, such as ``streamshard.optim``."""
        if name in ("checkpoint", "errors", "optim"):
            return importlib.import_module(f"{__name__}.{name}")
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        return globals().setdefault(name, found)  # found without this function from now on

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
