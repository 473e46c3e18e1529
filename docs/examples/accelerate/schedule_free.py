"""An optimizer that needs no schedule: accelerate's example of that name, with one line changed.

`pip install schedulefree`. The weights that are evaluated are not those that are trained: the optimizer exchanges them.
"""

from __future__ import annotations

import schedulefree
import torch
from _toy import Classifier, make_loaders
from accelerate.utils import set_seed
from torch.nn.functional import cross_entropy

from streamshard.integrations.accelerate import StreamShardAccelerator as Accelerator  # from accelerate import ..


def main(epochs: int = 2) -> list[float]:
    set_seed(0)
    accelerator = Accelerator()
    model = Classifier()
    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=5e-3, warmup_steps=4)
    train, evaluation = make_loaders()
    model, optimizer, train, evaluation = accelerator.prepare(model, optimizer, train, evaluation)

    losses: list[float] = []
    for epoch in range(epochs):
        model.train()
        optimizer.train()
        for tokens, labels in train:
            loss = cross_entropy(model(tokens), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
        model.eval()
        optimizer.eval()
        right = []
        for tokens, labels in evaluation:
            with torch.no_grad():
                predicted = model(tokens).argmax(dim=-1)
            right.append(accelerator.gather_for_metrics((predicted == labels).float()))
        accelerator.print(f"epoch {epoch}: loss {losses[-1]:.4f}, right {torch.cat(right).mean():.2f}")
        losses.append(torch.cat(right).mean().item())
    accelerator.end_training()
    return losses


if __name__ == "__main__":
    main()
