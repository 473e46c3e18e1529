"""A model for each fold of the data, one after another: accelerate's example of that name, with one line changed."""

from __future__ import annotations

import torch
from _toy import Classifier, make_data
from accelerate.utils import set_seed
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset

from streamshard.integrations.accelerate import StreamShardAccelerator as Accelerator  # from accelerate import ..


def main(folds: int = 3, epochs: int = 2) -> list[float]:
    set_seed(0)
    accelerator = Accelerator()
    data, test_data = make_data(), make_data(samples=37, seed=1)
    parts = torch.randperm(len(data), generator=torch.Generator().manual_seed(0)).chunk(folds)
    results, scores_of_folds = [], []
    for fold in range(folds):
        chosen = torch.cat([part for number, part in enumerate(parts) if number != fold])
        model = Classifier()
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        train = DataLoader(Subset(data, chosen.tolist()), batch_size=8, shuffle=True)
        held_out = DataLoader(Subset(data, parts[fold].tolist()), batch_size=8)
        test = DataLoader(test_data, batch_size=8)
        model, optimizer, train, held_out, test = accelerator.prepare(model, optimizer, train, held_out, test)
        for _ in range(epochs):
            model.train()
            for tokens, labels in train:
                accelerator.backward(cross_entropy(model(tokens), labels))
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        losses, scores = [], []
        with torch.no_grad():
            for tokens, labels in held_out:
                loss = cross_entropy(model(tokens), labels, reduction="none")
                losses.append(accelerator.gather_for_metrics(loss))
            for tokens, _ in test:
                scores.append(accelerator.gather_for_metrics(model(tokens)))
        results.append(torch.cat(losses).mean().item())
        scores_of_folds.append(torch.cat(scores))
        model, optimizer, train, held_out, test = accelerator.free_memory(model, optimizer, train, held_out, test)
    answers = torch.stack([test_data[number][1] for number in range(len(test_data))])
    mean = torch.stack(scores_of_folds).mean(0).to(answers.device)
    results.append((mean.argmax(-1) == answers).float().mean().item())
    accelerator.print(f"held-out losses {results[:-1]}, accuracy of all folds together {results[-1]:.2f}")
    accelerator.end_training()
    return results


if __name__ == "__main__":
    main()
