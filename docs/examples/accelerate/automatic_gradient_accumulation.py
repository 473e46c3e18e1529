"""The batch that fits into memory, and accumulation over as many as the wanted one takes."""

from __future__ import annotations

import torch
from _toy import Classifier, make_loaders
from accelerate.utils import find_executable_batch_size, set_seed
from torch.nn.functional import cross_entropy

from streamshard.integrations.accelerate import StreamShardAccelerator as Accelerator  # from accelerate import ..

WANTED, ROOM = 16, 6  # samples of a step on each process, and how many fit


def main(epochs: int = 2) -> list[float]:
    set_seed(0)
    accelerator = Accelerator()

    @find_executable_batch_size(starting_batch_size=WANTED, reduce_batch_size_fn=halve(WANTED))
    def train_with(batch_size: int) -> list[float]:
        accelerator.free_memory()
        set_seed(1)
        accelerator.gradient_accumulation_steps = WANTED // batch_size
        model = Classifier()
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        train, _ = make_loaders(batch_size)
        model, optimizer, train = accelerator.prepare(model, optimizer, train)
        losses = []
        for _ in range(epochs):
            for tokens, labels in train:
                with accelerator.accumulate(model):
                    loss = cross_entropy(run_out_of_memory(model(tokens)), labels)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(accelerator.reduce(loss.detach(), "mean").item())
        return [float(batch_size), *losses]

    losses = train_with()
    accelerator.print(f"{losses[0]:.0f} samples at a time fit; loss {losses[-1]:.4f}")
    accelerator.end_training()
    return losses


def halve(size: int):
    """16, 8, 4, .."""

    def smaller() -> int:
        nonlocal size
        size //= 2
        return size

    return smaller


def run_out_of_memory(logits: torch.Tensor) -> torch.Tensor:
    """As a small device would."""
    if len(logits) > ROOM:
        raise torch.OutOfMemoryError(f"tried to allocate for {len(logits)} samples: device out of memory.")
    return logits


if __name__ == "__main__":
    main()
