"""ms-swift: trainers that shard their models. See docs/guide/trainers.md."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from swift.trainers import TrainerFactory

from streamshard.integrations.transformers import StreamShardTrainerMixin


class SwiftTrainerMixin(StreamShardTrainerMixin):
    """`StreamShardTrainerMixin` for ms-swift's trainers."""

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """As in ms-swift, which copies the run's arguments from the directory above into a checkpoint."""
        super()._save(output_dir, state_dict)
        file = Path(self.args.output_dir, "args.json")
        if self._staging is not None and self.args.should_save and file.is_file():
            shutil.copy(file, Path(output_dir or "", file.name))


def shard_trainers(**options: Any) -> None:
    """Let ms-swift's commands train with StreamShard. Call this in a file for ``--external_plugins``.

    Args:
        **options: options of `StreamShard`.
    """
    find = TrainerFactory.get_trainer_cls

    def get_trainer_cls(args: Any) -> type:
        trainer = find(args)
        return type(trainer.__name__, (SwiftTrainerMixin, trainer), {"streamshard": options})

    TrainerFactory.get_trainer_cls = get_trainer_cls
