"""A run that is saved every few steps, and goes on within an epoch: accelerate's example, with one line changed.

python checkpointing.py                         # writes checkpoints/step_N
python checkpointing.py checkpoints/step_4      # goes on there
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from _toy import Classifier, make_loaders
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.nn.functional import cross_entropy

from streamshard.integrations.accelerate import StreamShardAccelerator as Accelerator  # from accelerate import ..


def main(directory: str = "checkpoints", resume: str | None = None, epochs: int = 2, every: int = 2) -> list[float]:
    set_seed(0)
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    train, _ = make_loaders()
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs * len(train))
    model, optimizer, train, schedule = accelerator.prepare(model, optimizer, train, schedule)

    done = 0  # steps
    if resume is not None:
        accelerator.load_state(resume)
        done = int(Path(resume).name.removeprefix("step_"))
    first, skipped = divmod(done, len(train))

    losses = []
    for epoch in range(first, epochs):
        train.set_epoch(epoch)
        rest = accelerator.skip_first_batches(train, skipped) if epoch == first and skipped else train
        for tokens, labels in rest:
            loss = cross_entropy(model(tokens), labels)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            done += 1
            if done % every == 0:
                accelerator.save_state(str(Path(directory) / f"step_{done}"))
    accelerator.print(f"{len(losses)} steps, loss {losses[-1]:.4f}")
    accelerator.end_training()
    return losses


if __name__ == "__main__":
    main(resume=sys.argv[1] if len(sys.argv) > 1 else None)
