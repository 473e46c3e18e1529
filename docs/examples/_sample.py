"""Load an exported model in a plain process (no StreamShard, no process group), judge it and let it write.

python docs/examples/_sample.py runs/train_llama-001/model --prompt "def "
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from _text import BOS, EOS, decode, even_windows, read_text
from transformers import AutoModelForCausalLM
from transformers.utils import logging


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="directory written by streamshard.export_safetensors")
    parser.add_argument("--prompt", default="def ", help="text to go on from")
    parser.add_argument("--tokens", type=int, default=200, help="tokens to write")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--held-out", type=int, default=0, help="held-out windows to judge the model on; 0: none")
    parser.add_argument("--seq-len", type=int, default=256, help="tokens in a held-out window")
    parser.add_argument("--data", type=Path, help="the text it was trained on; the standard library's by default")
    args = parser.parse_args()

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(args.model).eval()
    print(f"loaded {args.model}: {type(model).__name__}, {model.num_parameters():,} parameters, {model.dtype}")
    if args.held_out:
        held_out = even_windows(read_text(args.data, args.seq_len).held_out, args.seq_len, args.held_out)
        with torch.no_grad():
            losses = [model(input_ids=rows, labels=rows).loss for rows in held_out.split(16)]
        weights = torch.tensor([len(rows) for rows in held_out.split(16)])
        print(f"held-out loss of the loaded model: {(torch.stack(losses) * weights).sum() / len(held_out):.4f}")

    torch.manual_seed(args.seed)
    prompt = torch.tensor([[BOS, *args.prompt.encode()]])
    written = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=args.tokens,
        do_sample=True,
        temperature=args.temperature,
        pad_token_id=EOS,
    )
    print(f"--- sampled text, temperature {args.temperature}, prompt {args.prompt!r}:")
    print(decode(written[0].tolist()))
    print("---")


if __name__ == "__main__":
    main()
