"""Local SGD: processes train on their own, and their weights are averaged every few steps.

Not one line but two: a process can only train on its own with a whole model, so each is a replica of one rank (on
several machines, `init_device_mesh(.., (machines, processes of each))`); and `streamshard.LocalSGD` averages.
"""

from __future__ import annotations

import torch
from _toy import Classifier, make_loaders
from accelerate import PartialState
from accelerate.utils import set_seed
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

import streamshard
from streamshard.integrations.accelerate import StreamShardAccelerator


def main(epochs: int = 3) -> list[float]:
    set_seed(0)
    state = PartialState(cpu=not torch.accelerator.is_available())
    accelerator = StreamShardAccelerator(mesh=init_device_mesh(state.device.type, (state.num_processes, 1)))
    train, _ = make_loaders()
    model, train = accelerator.prepare(Classifier(), train)
    optimizer = accelerator.prepare(
        streamshard.LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model, period=4)
    )

    losses = []
    for epoch in range(epochs):
        for tokens, labels in train:
            loss = cross_entropy(model(tokens), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
        accelerator.print(f"epoch {epoch}: loss {losses[-1]:.4f}")
    accelerator.end_training()
    return losses


if __name__ == "__main__":
    main()
