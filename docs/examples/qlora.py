"""QLoRA on several ranks: adapters on a base in 4 bits, of which each rank holds 1/N.

    torchrun --nproc-per-node 2 docs/examples/qlora.py runs/qlora

The base is a tiny Llama made here; give ``load`` the name of your model instead. It needs bitsandbytes and PEFT.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from streamshard import Precision, StreamShard


def make_base(directory: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).to(torch.bfloat16).save_pretrained(directory)


def load(directory: Path) -> Any:
    """The base in 4 bits, on this rank's device: each rank loads all of it, and keeps its part when it is sharded."""
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    device = int(os.environ["LOCAL_RANK"]) if torch.cuda.is_available() else "cpu"
    return AutoModelForCausalLM.from_pretrained(
        directory, quantization_config=quantization, dtype=torch.bfloat16, device_map={"": device}
    )


def batch(step: int, rank: int, device: torch.device) -> torch.Tensor:
    """Sequences that count."""
    starts = torch.randint(64, (4, 1), generator=torch.Generator().manual_seed(1000 * step + rank))
    return ((starts + torch.arange(16)) % 64).to(device)


def main(directory: Path) -> None:
    dist.init_process_group()
    is_first = dist.get_rank() == 0
    if is_first:
        make_base(directory / "base")
    dist.barrier()
    base = prepare_model_for_kbit_training(
        load(directory / "base"), gradient_checkpointing_kwargs={"use_reentrant": False}
    )
    model = get_peft_model(base, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    model = StreamShard(model, precision=Precision(param_dtype=None))  # each parameter computes in its own dtype
    model.train()  # from_pretrained returns a model in eval mode, where it checkpoints nothing
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    first = last = 0.0
    for step in range(20):
        tokens = batch(step, dist.get_rank(), base.device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        last = loss.item()
        first = first or last
    model.save_pretrained(directory / "adapter")  # on all ranks: rank 0 writes
    report = model.memory_report()
    model.eval()
    tokens = batch(0, 0, base.device)
    with torch.no_grad():
        trained = model(input_ids=tokens, labels=tokens).loss.item()
    dist.destroy_process_group()
    if is_first:
        loaded = PeftModel.from_pretrained(load(directory / "base"), directory / "adapter").eval()
        with torch.no_grad():
            again = loaded(input_ids=tokens, labels=tokens).loss.item()
        print(report)
        print(f"loss {first:.4f} -> {last:.4f}; {trained:.4f} with the trained model, {again:.4f} with the loaded one")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
