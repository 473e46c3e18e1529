"""A small GPT with nanoGPT's names, and the bytes of this file to train it on."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

VOCAB, WIDTH, HEADS, LAYERS, LENGTH = 128, 64, 4, 4, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.c_fc, self.c_out = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        heads = self.c_attn(self.ln_1(x)).view(rows, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.c_proj(attended.transpose(1, 2).reshape(rows, length, width))
        return x + self.c_out(gelu(self.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.lm_head.weight = self.wte.weight  # tied, as in nanoGPT
        nn.init.normal_(self.wte.weight, std=0.02)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def configure_optimizers(model: nn.Module) -> torch.optim.AdamW:
    """Weight decay for matrices only."""
    params = list(model.parameters())
    decay = [p for p in params if p.dim() >= 2]
    no_decay = [p for p in params if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))


def get_batch(generator: torch.Generator, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and next tokens, both [8, LENGTH] int64."""
    data = torch.tensor(list(Path(__file__).read_bytes())).clamp(max=VOCAB - 1)
    starts = torch.randint(len(data) - LENGTH - 1, (8,), generator=generator)
    rows = torch.stack([data[start : start + LENGTH + 1] for start in starts.tolist()]).to(device)
    return rows[:, :-1], rows[:, 1:]
