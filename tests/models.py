"""Small models: each has one property that a test is about, and trains in milliseconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIM = 16
VOCABULARY = 48


def _seeded(*key: int) -> torch.Generator:
    """A random generator seeded by the key, so that data does not depend on the order of calls."""
    seed = 17
    for number in key:
        seed = seed * 1009 + number + 1
    return torch.Generator().manual_seed(seed)


def token_batch(step: int, rank: int, *, rows: int = 2, length: int = 6, vocabulary: int = VOCABULARY) -> Tensor:
    """[rows, length] int64 tokens of one rank in one step."""
    return torch.randint(vocabulary, (rows, length), generator=_seeded(step, rank))


def vector_batch(step: int, rank: int, *, rows: int = 4, dim: int = DIM) -> Tensor:
    """[rows, dim] fp32 input of one rank in one step."""
    return torch.randn(rows, dim, generator=_seeded(step, rank))


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean cross entropy of each next token."""
    return F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]).float(), tokens[:, 1:].reshape(-1))


class Layer(nn.Module):
    """A residual linear layer: the smallest thing that can be a unit."""

    def __init__(self, dim_in: int = DIM, dim_out: int | None = None, *, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(dim_in, dim_in if dim_out is None else dim_out, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """tanh(W x + b), added to x where shapes allow."""
        y = torch.tanh(self.linear(x))
        return x + y if x.shape == y.shape else y


class Stack(nn.Module):
    """Layers of given widths one after another, in a `ModuleList`, with a linear head.

    Args:
        widths: width before the first layer, after the first, after the second...
    """

    def __init__(self, widths: Sequence[int] = (DIM,) * 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(a, b) for a, b in zip(widths[:-1], widths[1:], strict=True))
        self.head = nn.Linear(widths[-1], 1)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, width] -> [rows, 1]"""
        for layer in self.order():
            x = layer(x)
        out: Tensor = self.head(x)
        return out

    def order(self) -> Iterable[nn.Module]:
        """The layers in the order in which they run; tests override it."""
        return self.layers


def stack_of(layer: Callable[[], nn.Module], depth: int = 4) -> Callable[[], Any]:
    """A function that builds a `Stack` of such layers."""

    def build() -> Stack:
        stack = Stack()
        stack.layers = nn.ModuleList(layer() for _ in range(depth))
        return stack

    return build


class Calling(nn.Module):
    """Layers of a given class, called by a given function, and a head."""

    def __init__(
        self, layer: Callable[[], nn.Module], call: Callable[[Any, Tensor], Tensor] = lambda layer, x: layer(x)
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(4))
        self.head = nn.Linear(16, 1)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.call(layer, x)
        out: Tensor = self.head(x)
        return out


class NormStack(Stack):
    """Layers with batch norm: buffers that training changes."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__((DIM,) * (depth + 1))
        self.norms = nn.ModuleList(nn.BatchNorm1d(DIM) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(layer(x))
        out: Tensor = self.head(x)
        return out


class Attention(nn.Module):
    """Causal self-attention with an additive mask and rotary-like buffers."""

    def __init__(self, dim: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """[rows, length, dim], mask [length, length] -> [rows, length, dim]"""
        rows, length, dim = x.shape
        query, key, value = self.qkv(x).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(rows, length, dim))
        return out


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, dim: int = DIM, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = Attention(dim)
        self.mlp_norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """[rows, length, dim] -> the same"""
        x = x + self.attention(self.attention_norm(x), mask=mask)
        out: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.mlp_norm(x)))))
        return out


@dataclass(frozen=True)
class TinyConfig:
    """Sizes of a `TinyLM`."""

    vocabulary: int = VOCABULARY
    dim: int = DIM
    depth: int = 4
    length: int = 8
    tied: bool = False
    dropout: float = 0.0


class TinyLM(nn.Module):
    """A language model: embedding, positions used directly by the root's forward, blocks, norm, head."""

    def __init__(self, config: TinyConfig | None = None) -> None:
        super().__init__()
        self.config = config if config is not None else TinyConfig()
        self.embedding = nn.Embedding(self.config.vocabulary, self.config.dim)
        self.positions = nn.Parameter(torch.randn(self.config.length, self.config.dim) * 0.1)
        self.blocks = nn.ModuleList(
            Block(self.config.dim, dropout=self.config.dropout) for _ in range(self.config.depth)
        )
        self.norm = nn.LayerNorm(self.config.dim)
        self.head = nn.Linear(self.config.dim, self.config.vocabulary, bias=False)
        if self.config.tied:
            self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(1.5), persistent=False)
        self.scale: Tensor

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """[rows, length] tokens -> [rows, length, vocabulary] logits"""
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        x = self.run_blocks(x, mask)
        out: Tensor = self.head(self.norm(x)) * self.scale
        return out

    def run_blocks(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """The blocks one after another; tests override it."""
        for block in self.blocks:
            x = block(x, mask=mask)
        return x


class UsingLM(TinyLM):
    """A `TinyLM` that uses its embedding and its head as `uses` says.

    Args:
        config: sizes.
        embedding: makes the embedding.
        **uses: by place, functions of the model and a tensor. "embed" and "head" replace theirs; what "first" (of the
            model alone), "between" (behind the first block) and "last" (of the tokens) return is added.
    """

    def __init__(
        self,
        config: TinyConfig | None = None,
        embedding: Callable[[int, int], nn.Module] = nn.Embedding,
        **uses: Callable[..., Any],
    ) -> None:
        super().__init__(config)
        self.embedding: Any = embedding(self.config.vocabulary, self.config.dim)
        if self.config.tied:
            self.head.weight = self.embedding.weight
        self.uses = uses

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        penalty = self._use("first", lambda m: 0.0)
        x = self._use("embed", lambda m, tokens: m.embedding(tokens), tokens)
        x = self.run_blocks(x + self.positions[: tokens.shape[1]], mask)
        out: Tensor = self._use("head", lambda m, x: m.head(x), self.norm(x)) * self.scale
        return out + penalty + self._use("last", lambda m, tokens: 0.0, tokens)

    def run_blocks(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = self.blocks[0](x, mask=mask)
        x = x + self._use("between", lambda m, x: 0.0, x)
        for block in self.blocks[1:]:
            x = block(x, mask=mask)
        return x

    def _use(self, place: str, otherwise: Callable[..., Any], *values: Tensor) -> Any:
        return self.uses.get(place, otherwise)(self, *values)


class Adapter(nn.Module):
    """A frozen linear layer with a trainable low-rank update, as LoRA has it."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * 0.3)
        self.up = nn.Parameter(torch.randn(base.out_features, rank) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + F.linear(F.linear(x, self.down), self.up)
        return out
