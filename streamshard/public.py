"""The public names. ``streamshard`` imports them when the first one is used."""

from streamshard.api import (
    StreamShard,
    export_safetensors,
    full_optimizer_state_dict,
    init_weights,
    load_optimizer_state_dict,
    load_safetensors,
)
from streamshard.checkpoint.directory import latest
from streamshard.checkpoint.restore import Loaded, load_checkpoint
from streamshard.checkpoint.save import Saving, save_checkpoint
from streamshard.config import Precision
from streamshard.engine.hooks import register_forward_method
from streamshard.errors import (
    CheckpointError,
    CommunicationError,
    ConfigError,
    OptimizerError,
    RankMismatchError,
    ShardingError,
    StreamShardError,
    UnitError,
)
from streamshard.optim.wrappers import DistributedOptimizer, LocalSGD
from streamshard.preview import plan

__all__ = [
    "CommunicationError",
    "ConfigError",
    "DistributedOptimizer",
    "CheckpointError",
    "Loaded",
    "LocalSGD",
    "OptimizerError",
    "Precision",
    "RankMismatchError",
    "Saving",
    "ShardingError",
    "StreamShard",
    "StreamShardError",
    "UnitError",
    "export_safetensors",
    "full_optimizer_state_dict",
    "init_weights",
    "latest",
    "load_checkpoint",
    "load_optimizer_state_dict",
    "load_safetensors",
    "plan",
    "register_forward_method",
    "save_checkpoint",
]
