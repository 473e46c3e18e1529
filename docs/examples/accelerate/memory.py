"""A batch size that fits, found by trying: accelerate's example of that name, with one line changed."""

from __future__ import annotations

import torch
from _toy import Classifier, make_loaders
from accelerate.utils import find_executable_batch_size, set_seed
from torch.nn.functional import cross_entropy

from streamshard.integrations.accelerate import StreamShardAccelerator as Accelerator  # from accelerate import ..

ROOM = 10  # samples that fit


def main(epochs: int = 2) -> list[float]:
    set_seed(0)
    accelerator = Accelerator()
    tried = []

    @find_executable_batch_size(starting_batch_size=12)
    def train_with(batch_size: int) -> list[float]:
        tried.append(float(batch_size))
        accelerator.free_memory()  # models, optimizers and loaders of the last try
        set_seed(1)
        model = Classifier()
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        train, _ = make_loaders(batch_size)
        model, optimizer, train = accelerator.prepare(model, optimizer, train)
        losses = []
        for _ in range(epochs):
            for tokens, labels in train:
                loss = cross_entropy(model(tokens), labels)
                accelerator.backward(loss)
                if batch_size > ROOM:  # in the middle of a step, as a small device would
                    raise torch.OutOfMemoryError("tried to allocate more than there is: device out of memory.")
                optimizer.step()
                optimizer.zero_grad()
                losses.append(accelerator.reduce(loss.detach(), "mean").item())
        return losses

    losses = train_with()
    accelerator.print(f"tried {tried}; loss {losses[-1]:.4f}")
    accelerator.end_training()
    return [*tried, *losses]


if __name__ == "__main__":
    main()
