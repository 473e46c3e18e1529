"""Accumulation in which each token counts alike: accelerate's example of that name, with one line changed."""

from __future__ import annotations

import contextlib

import torch
from _toy import VOCAB
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from streamshard.integrations.accelerate import StreamShardAccelerator as Accelerator  # from accelerate import ..

NO_LABEL = -100


class NextToken(nn.Module):
    """From tokens [batch, length] int64 to logits [batch, length, VOCAB]; layers see means of what was before."""

    def __init__(self, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(depth)
        )
        self.head = nn.Linear(width, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        counts = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)[:, None]
        for block in self.blocks:
            x = x + block(x.cumsum(1) / counts)
        return self.head(x)


def make_sequences(count: int = 44) -> list[Tensor]:
    """Each counts up, and is 3 to 12 tokens long."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(VOCAB, (count, 2), generator=generator).tolist()
    return [(begin + torch.arange(3 + length % 10)) % VOCAB for begin, length in numbers]


def pad(sequences: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Tokens and, for each, the next one: [batch, longest - 1] int64."""
    padded = nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=NO_LABEL)
    return padded[:, :-1].clamp(min=0), padded[:, 1:]


def main(epochs: int = 2, accumulated: int = 3) -> list[float]:
    set_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=accumulated)
    model = NextToken()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    train = DataLoader(make_sequences(), batch_size=4, collate_fn=pad)
    model, optimizer, train = accelerator.prepare(model, optimizer, train)

    losses = []
    for epoch in range(epochs):
        batches = list(train)
        for first in range(0, len(batches), accumulated):
            step = batches[first : first + accumulated]
            tokens_here = sum((labels != NO_LABEL).sum() for _, labels in step)
            tokens_in_all = accelerator.gather(tokens_here).sum()
            total = torch.zeros((), device=accelerator.device)
            for number, (tokens, labels) in enumerate(step, 1):
                is_last = number == len(step) or accelerator.num_processes == 1
                with contextlib.nullcontext() if is_last else model.no_sync():
                    logits = model(tokens).flatten(0, 1)
                    loss = cross_entropy(logits, labels.flatten(), ignore_index=NO_LABEL, reduction="sum")
                    total += loss.detach() / tokens_in_all
                    # Gradients are averaged over processes, and accelerate divides by what it takes for accumulated.
                    accelerator.backward(loss / tokens_in_all * accelerator.num_processes * accumulated)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather(total).sum().item())
        accelerator.print(f"epoch {epoch}: loss {losses[-1]:.4f}")
    accelerator.end_training()
    return losses


if __name__ == "__main__":
    main()
