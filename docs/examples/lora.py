"""LoRA with StreamShard and PEFT: train, save the adapter, load it without sharding.

    torchrun --nproc-per-node 2 docs/examples/lora.py adapter

The model is a tiny one made here; put ``AutoModelForCausalLM.from_pretrained(..)`` in its place.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from streamshard import StreamShard


def make_base() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))


def batch(step: int, rank: int) -> torch.Tensor:
    """Sequences that count."""
    starts = torch.randint(64, (4, 1), generator=torch.Generator().manual_seed(1000 * step + rank))
    return (starts + torch.arange(16)) % 64


def main(directory: Path) -> None:
    dist.init_process_group()
    model = get_peft_model(make_base(), LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    model = StreamShard(model, precision="fp32")  # instead of DistributedDataParallel
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    first = last = 0.0
    for step in range(20):
        tokens = batch(step, dist.get_rank())
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        last = loss.item()
        first = first or last
    model.save_pretrained(directory)  # on all ranks: rank 0 writes
    is_first = dist.get_rank() == 0
    tokens = batch(0, 0)
    with torch.no_grad():
        trained = model(input_ids=tokens, labels=tokens).loss.item()
    dist.destroy_process_group()
    if is_first:
        loaded = PeftModel.from_pretrained(make_base(), directory).merge_and_unload()
        with torch.no_grad():
            merged = loaded(input_ids=tokens, labels=tokens).loss.item()
        print(f"loss {first:.4f} -> {last:.4f}; {trained:.4f} with the trained model, {merged:.4f} with the merged one")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
