"""What a step spends its time on: accelerate's example of that name, with one line changed."""

from __future__ import annotations

import torch
from _toy import Classifier, make_loaders
from accelerate.utils import ProfileKwargs, set_seed
from torch.nn.functional import cross_entropy

from streamshard.integrations.accelerate import StreamShardAccelerator as Accelerator  # from accelerate import ..


def main(traces: str | None = None) -> list[float]:
    set_seed(0)
    accelerator = Accelerator(kwargs_handlers=[ProfileKwargs(activities=["cpu"], output_trace_dir=traces)])
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    train, _ = make_loaders()
    model, optimizer, train = accelerator.prepare(model, optimizer, train)

    losses = []
    with accelerator.profile() as profile:
        for tokens, labels in train:
            loss = cross_entropy(model(tokens), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
    accelerator.print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=5))
    accelerator.end_training()
    return losses


if __name__ == "__main__":
    main()
