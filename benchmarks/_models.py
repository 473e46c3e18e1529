"""The transformer that benchmarks train, plain PyTorch, nothing that favours one system; and transformers' Llama.

Pre-norm blocks with fused query-key-value projection, scaled dot-product attention (causal), a GELU MLP of four times
the width, LayerNorm, learned positions, no biases, head not tied to the embedding: 12 x width^2 parameters per block in
six tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

__all__ = ["LLAMAS", "PRESETS", "Block", "Preset", "Transformer", "flops_per_token", "llama", "next_token_loss"]


@dataclass(frozen=True, kw_only=True)
class Preset:
    """One size of the model and its batch.

    Attributes:
        layers: number of blocks.
        width: hidden size, a multiple of `head_width`.
        vocabulary: rows of the embedding and of the head.
        sequence: tokens per row of the batch.
        rows: rows per rank and step.
        head_width: hidden size of one attention head.
        fp32: compute and send in fp32 instead of bf16.
        target: StreamShard's step time over FSDP2's must not be above this; None where no target was set.
    """

    layers: int
    width: int
    vocabulary: int
    sequence: int
    rows: int
    head_width: int = 64
    fp32: bool = False
    target: float | None = None

    @property
    def tokens(self) -> int:
        """Tokens per rank and step."""
        return self.sequence * self.rows


PRESETS = {
    "8x512-256": Preset(layers=8, width=512, vocabulary=4096, sequence=256, rows=1, target=0.65),
    "8x512-1024": Preset(layers=8, width=512, vocabulary=4096, sequence=256, rows=4, target=0.75),
    "24x256-256": Preset(layers=24, width=256, vocabulary=1024, sequence=256, rows=1, target=0.65),
    "24x64-64": Preset(layers=24, width=64, vocabulary=1024, sequence=64, rows=1),
    "8x512-256-32k": Preset(layers=8, width=512, vocabulary=32768, sequence=256, rows=1),
    "50x16-16": Preset(layers=50, width=16, vocabulary=64, sequence=16, rows=1, head_width=16),
    "8x512-256-fp32": Preset(layers=8, width=512, vocabulary=4096, sequence=256, rows=1, fp32=True),
    "8x512-64-fp32": Preset(layers=8, width=512, vocabulary=4096, sequence=64, rows=1, fp32=True),
    "tiny": Preset(layers=2, width=64, vocabulary=256, sequence=32, rows=1),
    "16x2048-8192": Preset(layers=16, width=2048, vocabulary=32768, sequence=2048, rows=4, head_width=128),
    "48x512-512": Preset(layers=48, width=512, vocabulary=4096, sequence=512, rows=1),
    "3x64-32": Preset(layers=3, width=64, vocabulary=256, sequence=32, rows=1),
    "32x4096-4096": Preset(layers=32, width=4096, vocabulary=32768, sequence=2048, rows=2, head_width=128),
}


class Block(nn.Module):
    """One pre-norm transformer block: the unit that every sharding system gathers and reduces together."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows, sequence, width = hidden.shape
        qkv = self.query_key_value(self.attention_norm(hidden))
        query, key, value = qkv.view(rows, sequence, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.attention_out(attended.transpose(1, 2).reshape(rows, sequence, width))
        mixed: torch.Tensor = self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(hidden))))
        return hidden + mixed


class Transformer(nn.Module):
    """Token and position embeddings, `preset.layers` blocks, final norm, head.

    Args:
        preset: sizes. Parameters are initialised from torch's global generator: seed it for equal models.
    """

    def __init__(self, preset: Preset) -> None:
        super().__init__()
        width = preset.width
        self.tokens = nn.Embedding(preset.vocabulary, width)
        self.positions = nn.Embedding(preset.sequence, width)
        self.blocks = nn.ModuleList(Block(width, width // preset.head_width) for _ in range(preset.layers))
        self.final_norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, preset.vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.head(self.final_norm(hidden))
        return logits


def next_token_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy in fp32 of predicting each token from the ones before it.

    Args:
        logits: [rows, sequence, vocabulary], any floating-point dtype.
        tokens: [rows, sequence] int64.

    Returns:
        [] fp32.
    """
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


LLAMAS: dict[str, dict[str, int]] = {
    "6B": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096,
    },
    "3B": {
        "vocab_size": 32000,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096,
    },
    "1.1B": {  # TinyLlama's sizes
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
    },
    "8M": {
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    },
    "tiny": {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
    },
}


def llama(size: str, device: torch.device) -> Any:
    """A LlamaForCausalLM of that size, fp32, made on `device`; its blocks are ``model.model.layers``.

    Args:
        size: a key of `LLAMAS`.
        device: where. Parameters are initialised from torch's global generator.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    with device:
        return LlamaForCausalLM(LlamaConfig(**LLAMAS[size], use_cache=False, attn_implementation="sdpa"))


def flops_per_token(model: nn.Module, *, layers: int, width: int, sequence: int) -> int:
    """Floating-point operations of forward and backward, per token: what a utilisation counts.

    6 for each weight of a matrix product, the embedding's lookup left out, and 6 x layers x width x sequence for
    causal attention (PaLM, appendix B, halved as half of the scores are never needed). Nothing for recomputation.
    """
    lookups = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    weights = sum(p.numel() for p in model.parameters() if p.dim() == 2 and id(p) not in lookups)
    return 6 * weights + 6 * layers * width * sequence
