"""All processes stop when one of them has seen enough: accelerate's example of that name, with one line changed."""

from __future__ import annotations

import torch
from _toy import Classifier, make_loaders
from accelerate.utils import set_seed
from torch.nn.functional import cross_entropy

from streamshard.integrations.accelerate import StreamShardAccelerator as Accelerator  # from accelerate import ..


def main(enough: float = 0.6, epochs: int = 20) -> list[float]:
    set_seed(0)
    accelerator = Accelerator()
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    train, _ = make_loaders()
    model, optimizer, train = accelerator.prepare(model, optimizer, train)

    losses: list[float] = []
    for _ in range(epochs):
        for tokens, labels in train:
            loss = cross_entropy(model(tokens), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            if loss.item() < enough:  # of this process alone
                accelerator.set_trigger()
            if accelerator.check_trigger():
                accelerator.print(f"enough after {len(losses)} steps, loss {losses[-1]:.4f}")
                accelerator.end_training()
                return losses
    accelerator.end_training()
    return losses


if __name__ == "__main__":
    main()
