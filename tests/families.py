"""Tiny models of transformers: two layers of width 16, no dropout, unless a test wants other sizes, as arguments."""

from __future__ import annotations

from functools import partial
from typing import Any

_LAYERS = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
_DECODER = {**_LAYERS, "vocab_size": 61, "num_attention_heads": 4, "num_key_value_heads": 2}
_STEADY = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 61}
_T5 = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": 61}
_DINO = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
_IMAGE = {"image_size": 8, "patch_size": 4}


def _make(model: str, sizes: dict[str, Any], **others: Any) -> Any:
    import transformers  # takes a second of every process that asks for it

    kind: Any = getattr(transformers, model)
    return kind(kind.config_class(**{**sizes, **others}))


_ENDS = {"max_position_embeddings": 32, "pad_token_id": 0}
llama = partial(_make, "LlamaForCausalLM", {**_DECODER, **_ENDS, "num_hidden_layers": 3})
# Tied head, Conv1D weights.
gpt2 = partial(_make, "GPT2LMHeadModel", {**_GPT2, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0})
# With its masked language model head: tied decoder and bias.
bert = partial(_make, "BertForMaskedLM", {**_LAYERS, **_STEADY, "vocab_size": 61})
# One embedding under four names; two layers in the encoder and two in the decoder.
t5 = partial(_make, "T5ForConditionalGeneration", {**_T5, "dropout_rate": 0.0, "decoder_start_token_id": 0})
_EXPERTS = {"num_local_experts": 3, "num_experts_per_tok": 2, "max_position_embeddings": 32}
# Experts are stacked in the model and single tensors on disk.
mixtral = partial(_make, "MixtralForCausalLM", {**_DECODER, **_EXPERTS})
# No generation config.
vit = partial(_make, "ViTForImageClassification", {**_LAYERS, **_STEADY, **_IMAGE})
# With a gated feed-forward network.
dinov2 = partial(_make, "Dinov2Model", {**_DINO, **_IMAGE, "use_swiglu_ffn": True})
_TEXT = {"moe_intermediate_size": 8, "head_dim": 4, "num_experts": 3, "num_experts_per_tok": 2}
_VISION = {"depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "out_hidden_size": 16}
_VISION |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}  # type: ignore[dict-item]
# Experts are transposed on saving, depending on the shape a parameter has in the model.
_PARTS = {"text_config": {**_DECODER, **_TEXT, **_ENDS}, "vision_config": _VISION}
qwen3_vl_moe = partial(_make, "Qwen3VLMoeForConditionalGeneration", _PARTS)
