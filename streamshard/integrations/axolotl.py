"""axolotl: a plugin that trains with StreamShard. See docs/guide/trainers.md."""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from streamshard.errors import ConfigError
from streamshard.integrations.transformers import StreamShardTrainerMixin


class StreamShardArgs(BaseModel):  # type: ignore[misc]  # see pyproject.toml
    """What the plugin adds to axolotl's YAML: ``streamshard:``, options of `StreamShard`."""

    streamshard: dict[str, Any] | None = None


class StreamShardPlugin(BasePlugin):  # type: ignore[misc]  # axolotl is not typed
    """Lets axolotl's trainer shard the model: ``plugins: [streamshard.integrations.axolotl.StreamShardPlugin]``."""

    def get_input_args(self) -> str:
        """The dotted path of `StreamShardArgs`."""
        return f"{__name__}.{StreamShardArgs.__name__}"

    def load_datasets(self, cfg: Any, preprocess: bool = False) -> None:
        """Load no data. Axolotl calls this before it loads the model, which stays on the CPU until it is sharded."""
        cfg.device_map = {"": "cpu"}
        cfg.experimental_skip_move_to_device = True

    def get_trainer_cls(self, cfg: Any) -> type:
        """Axolotl's trainer for language models, with `StreamShardTrainerMixin`.

        Raises:
            ConfigError: the configuration selects one of axolotl's other trainers.
        """
        for name in ("rl", "reward_model", "process_reward_model"):
            if cfg[name]:
                what = f"{name}: {cfg[name]} does not go with StreamShardPlugin, which shards AxolotlTrainer"
                raise ConfigError(f"{what}: take TRL's trainer with StreamShardTrainerMixin")
        from axolotl.core.trainers import AxolotlTrainer

        bases = (StreamShardTrainerMixin, AxolotlTrainer)
        return type("StreamShardAxolotlTrainer", bases, {"streamshard": cfg.streamshard})

    def post_train(self, cfg: Any, model: Any) -> None:
        """Save the model on all ranks. Axolotl then saves it into the same directory, on rank 0 alone."""
        if "save_pretrained" in vars(model):  # axolotl calls this twice
            return
        save = model.save_pretrained
        save(cfg.output_dir)

        def save_elsewhere(directory: Any, *args: Any, **kwargs: Any) -> None:
            if directory != cfg.output_dir:
                save(directory, *args, **kwargs)

        model.save_pretrained = save_elsewhere
