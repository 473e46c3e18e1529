"""Losses to a tracker, here one of our own: accelerate's example of that name, with one line changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from _toy import Classifier, make_loaders
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import set_seed
from torch.nn.functional import cross_entropy

from streamshard.integrations.accelerate import StreamShardAccelerator as Accelerator  # from accelerate import ..


class Lines(GeneralTracker):
    """A line of JSON for each thing that is logged, in a file that only the main process writes."""

    name = "lines"
    requires_logging_directory = True

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    @property
    def tracker(self) -> Path:
        return self.path

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.log(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        with open(self.path, "a") as file:
            file.write(json.dumps({**values, "step": step}) + "\n")


def main(directory: str = ".", epochs: int = 2) -> list[float]:
    set_seed(0)
    accelerator = Accelerator(log_with=Lines(Path(directory) / "log.jsonl"), project_dir=directory)
    accelerator.init_trackers("toy", config={"epochs": epochs, "learning_rate": 5e-3})
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    train, _ = make_loaders()
    model, optimizer, train = accelerator.prepare(model, optimizer, train)

    losses = []
    for _ in range(epochs):
        for tokens, labels in train:
            loss = cross_entropy(model(tokens), labels)
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses += [accelerator.reduce(loss.detach(), "mean").item(), float(norm)]
            accelerator.log({"loss": losses[-2], "norm": losses[-1]}, step=len(losses) // 2)
    accelerator.end_training()
    return losses


if __name__ == "__main__":
    main()
