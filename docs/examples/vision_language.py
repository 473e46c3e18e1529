"""A vision-language model of transformers: a frozen vision tower, and batches without pictures on some ranks.

    torchrun --nproc-per-node 2 docs/examples/vision_language.py

The model is a small Llava made from a configuration. Put yours in its place.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from streamshard import StreamShard

VOCAB, PICTURE, LENGTH, ROWS = 64, 63, 24, 2  # PICTURE is the token in whose place a patch of the picture comes
PATCHES = 4


def make_model() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**sizes, image_size=16, patch_size=8, projection_dim=32),
        text_config=LlamaConfig(**sizes, vocab_size=VOCAB, pad_token_id=0, bos_token_id=1, eos_token_id=2),
        image_token_index=PICTURE,
        image_token_id=PICTURE,
        vision_feature_layer=-1,
    )
    model = LlavaForConditionalGeneration(config)
    model.model.vision_tower.requires_grad_(False)
    return model


def batch(step: int, rank: int) -> dict[str, torch.Tensor]:
    """Rows of tokens. In even steps the first rank's rows begin with a picture, in odd steps the others' do."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    starts = torch.randint(3, PICTURE, (ROWS, 1), generator=generator)
    tokens = 3 + (starts + torch.arange(LENGTH)) % (PICTURE - 3)
    if (step + rank) % 2:
        return {"input_ids": tokens, "labels": tokens}
    pictures = torch.randn(ROWS, 3, 16, 16, generator=generator)
    labels = tokens.clone()
    tokens[:, :PATCHES], labels[:, :PATCHES] = PICTURE, -100
    return {"input_ids": tokens, "labels": labels, "pixel_values": pictures}


def train(model: Any, steps: int, rank: int, device: str = "cpu") -> list[float]:
    """Returns the loss of each step."""
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3)
    losses = []
    for step in range(steps):
        loss = model(**{key: value.to(device) for key, value in batch(step, rank).items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if rank == 0:
            print(f"step {step}: loss {losses[-1]:.4f}", flush=True)
    return losses


def main(steps: int) -> tuple[Any, list[float]]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = StreamShard(make_model())
    return (model,), train(model, steps, dist.get_rank(), device)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="how many to take")
    main(parser.parse_args().steps)
    dist.destroy_process_group()
