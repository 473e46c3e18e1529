"""What the examples beside this file train and train on, made here: nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = 60


def make_model() -> LlamaForCausalLM:
    """A Llama of 3 layers, the same on every rank."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS + 4, max_position_embeddings=64, **sizes, **special))


def make_tokenizer() -> PreTrainedTokenizerFast:
    """For texts of the words w0, w1, ..."""
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    words = {word: number for number, word in enumerate([*special, *(f"w{number}" for number in range(WORDS))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def make_texts(count: int, seed: int = 0, length: int = 12) -> list[str]:
    """Each counts up by a step of its own, so that there is something to learn."""
    generator = torch.Generator().manual_seed(seed)
    begins = torch.randint(WORDS, (count, 2), generator=generator).tolist()
    return [" ".join(f"w{(begin + number * step) % WORDS}" for number in range(length)) for begin, step in begins]


def make_examples(count: int, seed: int = 0) -> list[dict[str, list[int]]]:
    """Tokens, and the same as labels."""
    tokens = make_tokenizer()(make_texts(count, seed))["input_ids"]
    return [{"input_ids": row, "labels": row} for row in tokens]


def make_preferences(count: int) -> Any:
    """Prompts that are to be gone on with, and not by other words."""
    from datasets import Dataset  # comes with TRL

    texts = [text.split() for text in make_texts(count)]
    others = [text.split() for text in make_texts(count, seed=1)]
    return Dataset.from_dict(
        {
            "prompt": [" ".join(text[:4]) for text in texts],
            "chosen": [" ".join(text[4:]) for text in texts],
            "rejected": [" ".join(text[4:]) for text in others],
        }
    )
