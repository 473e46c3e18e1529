"""Tiny models of transformers with examples to train them on, by family. Nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch

from tests import families
from tests.families import _DECODER, _LAYERS, _make

_ENDS = {"bos_token_id": 1, "eos_token_id": 2}
_IMAGE_TOKEN = 60


def _llava() -> Any:
    import transformers

    vision = transformers.CLIPVisionConfig(**_LAYERS, image_size=8, patch_size=4)
    text = transformers.LlamaConfig(**_DECODER, **_ENDS, max_position_embeddings=32, pad_token_id=0)
    sizes = {"vision_config": vision, "text_config": text, "image_token_id": _IMAGE_TOKEN}
    return _make("LlavaForConditionalGeneration", {**sizes, "vision_feature_layer": -1, "image_seq_length": 4})


FAMILIES: dict[str, Any] = {
    "llama": lambda **sizes: families.llama(**{**_ENDS, **sizes}),
    "llama-tied": lambda **sizes: families.llama(tie_word_embeddings=True, **sizes),
    "gpt2": lambda: families.gpt2(**_ENDS),
    "bert": lambda: _make("BertForSequenceClassification", {**_LAYERS, "vocab_size": 61, "num_labels": 3}),  # dropout
    "t5": families.t5,
    "mixtral": lambda **sizes: families.mixtral(pad_token_id=0, **sizes),
    "llava": _llava,
}


def unet() -> Any:
    """A U-Net of diffusers, the same each time."""
    import diffusers

    torch.manual_seed(0)
    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    return diffusers.UNet2DModel(8, 3, 3, block_out_channels=(8, 16), norm_num_groups=4, layers_per_block=1, **blocks)


def make_model(family: str, **sizes: Any) -> Any:
    """The same on every rank and each time."""
    torch.manual_seed(0)
    return FAMILIES[family](**sizes)


def make_rows(family: str, count: int = 16, length: int = 12) -> list[dict[str, Any]]:
    """Examples for it, of one length, each a dict of what its forward takes."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for tokens in torch.randint(3, 59, (count, length), generator=generator):
        row = {"input_ids": tokens, "labels": tokens}
        if family == "bert":
            row["labels"] = tokens[0] % 3
        elif family == "t5":
            row["labels"] = tokens[:6]
        elif family == "llava":
            row["input_ids"] = torch.cat([torch.full((4,), _IMAGE_TOKEN), tokens[4:]])
            row["labels"] = torch.cat([torch.full((4,), -100), tokens[4:]])
            row["pixel_values"] = torch.randn(3, 8, 8, generator=generator)
        made.append(row)
    return made


def make_texts(count: int, lengths: tuple[int, int], seed: int) -> list[str]:
    """Of the tokenizer's words; `lengths`: from, and up to but not including."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(*lengths, (count,), generator=generator).tolist()
    return [" ".join(f"w{n}" for n in torch.randint(0, 56, (each,), generator=generator).tolist()) for each in drawn]


def make_tokenizer() -> Any:
    """Of 61 words, with a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>", "<unk>"]
    words = {word: number for number, word in enumerate([*special, *(f"w{number}" for number in range(57))])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), special, strict=True))
    template = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} </s> {% endfor %}"
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=template, **names)
