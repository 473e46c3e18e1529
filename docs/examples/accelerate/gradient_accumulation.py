"""Gradients of several batches for one step: accelerate's example of that name, with one line changed."""

from __future__ import annotations

import torch
from _toy import Classifier, make_loaders
from accelerate.utils import set_seed
from torch.nn.functional import cross_entropy

from streamshard.integrations.accelerate import StreamShardAccelerator as Accelerator  # from accelerate import ..


def main(epochs: int = 2) -> list[float]:
    set_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=3)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    train, evaluate = make_loaders()
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=epochs * len(train))
    model, optimizer, train, evaluate, schedule = accelerator.prepare(model, optimizer, train, evaluate, schedule)

    losses = []
    for epoch in range(epochs):
        model.train()
        for tokens, labels in train:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(tokens), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
        model.eval()
        right = []
        for tokens, labels in evaluate:
            with torch.no_grad():
                found = model(tokens).argmax(-1)
            right.append(accelerator.gather_for_metrics(found == labels))
        losses.append(torch.cat(right).float().mean().item())
        accelerator.print(f"epoch {epoch}: loss {losses[-2]:.4f}, accuracy {losses[-1]:.2f}")
    accelerator.end_training()
    return losses


if __name__ == "__main__":
    main()
