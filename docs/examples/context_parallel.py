"""Context parallelism: each sequence is divided over ranks, which exchange heads for positions in each attention.

    torchrun --nproc-per-node 4 docs/examples/context_parallel.py --cp 2

The exchange is DeepSpeed-Ulysses': two all-to-alls around an unchanged attention. The model is a tiny Llama made here,
and its sequences have different lengths; put your own in their place.
"""

from __future__ import annotations

import argparse
import functools
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from streamshard import StreamShard

VOCAB, LENGTH, SEQUENCES = 64, 32, 4  # LENGTH: of padded sequences, a multiple of the ranks that share one
IGNORED = -100  # label of a position that does not count


class AllToAll(torch.autograd.Function):
    """Chunk r of dim 0 goes to rank r. Backward sends gradients back."""

    @staticmethod
    def forward(ctx: Any, chunks: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        received = torch.empty_like(chunks, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, chunks.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return AllToAll.apply(grad, ctx.group), None


def to_heads(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[sequences, heads, positions / cp, head_dim] -> [sequences, heads / cp, positions, head_dim]"""
    received = AllToAll.apply(x.unflatten(1, (group.size(), -1)).movedim(1, 0), group)
    return received.movedim(0, 2).flatten(2, 3)


def to_positions(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The way back."""
    received = AllToAll.apply(x.unflatten(2, (group.size(), -1)).movedim(2, 0), group)
    return received.movedim(0, 1).flatten(1, 2)


def ulysses(
    group: dist.ProcessGroup,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers. Padding is at the end, so a causal mask hides it from all that counts."""
    query, key, value = (to_heads(x, group) for x in (query, key, value))
    out = scaled_dot_product_attention(
        query, key, value, dropout_p=dropout, scale=scaling, is_causal=True, enable_gqa=True
    )
    return to_positions(out, group).transpose(1, 2).contiguous(), None


def make_model(attention: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}  # multiples of the ranks that share a sequence
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, attn_implementation=attention, **sizes, **heads))


class Batch(NamedTuple):
    """Each [sequences, positions]. The label of a position is the next token: shift before you divide."""

    tokens: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor


def whole_batch(step: int) -> Batch:
    """All sequences of a step. They count, and have different lengths."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(VOCAB, (SEQUENCES, 1), generator=generator)
    lengths = torch.randint(LENGTH // 4, LENGTH + 1, (SEQUENCES, 1), generator=generator)
    positions = torch.arange(LENGTH).expand(SEQUENCES, -1)
    is_padding = positions >= lengths
    tokens = ((starts + positions) % VOCAB).masked_fill(is_padding, 0)
    labels = ((starts + positions + 1) % VOCAB).masked_fill(is_padding, IGNORED)
    return Batch(tokens, labels, positions)


def part_of(batch: Batch, mesh: DeviceMesh) -> Batch:
    """This rank's positions of its sequences. All ranks along "cp" have parts of the same sequences."""
    dp, cp = mesh.get_local_rank("dp"), mesh.get_local_rank("cp")
    positions = slice(cp * LENGTH // mesh["cp"].size(), (cp + 1) * LENGTH // mesh["cp"].size())
    return Batch(*(each[dp :: mesh["dp"].size(), positions].to(mesh.device_type) for each in batch))


def main(steps: int, cp: int) -> tuple[Any, list[float], list[float]]:
    """Returns the model, and loss and gradient norm of each step."""
    if not dist.is_initialized():
        dist.init_process_group()
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device_type, (dist.get_world_size() // cp, cp), mesh_dim_names=("dp", "cp"))
    AttentionInterface.register("ulysses", functools.partial(ulysses, mesh.get_group("cp")))
    model = StreamShard(make_model("ulysses"), mesh=mesh["dp", "cp"]._flatten("dp_cp"), precision="fp32")
    model.set_gradient_divide_factor(1.0)  # the losses are divided by the tokens of all ranks
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses, norms = [], []
    for step in range(steps):
        tokens, labels, position_ids = part_of(whole_batch(step), mesh)
        count = (labels != IGNORED).sum()
        dist.all_reduce(count)
        logits = model(input_ids=tokens, position_ids=position_ids, use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum") / count
        loss.backward()
        norms.append(model.clip_grad_norm_(1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        losses.append(total.item())
        if dist.get_rank() == 0:
            print(f"step {step}: loss {losses[-1]:.4f}, norm {norms[-1]:.3f}, {int(count)} tokens", flush=True)
    return model, losses, norms


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="how many to take")
    parser.add_argument("--cp", type=int, default=2, help="how many ranks share a sequence")
    args = parser.parse_args()
    main(args.steps, args.cp)
    dist.destroy_process_group()
