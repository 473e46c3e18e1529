"""Tiny models of transformers: two layers of width 16, no dropout, unless a test wants other `sizes`."""

from __future__ import annotations

from typing import Any

_LAYERS = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
_DECODER = {**_LAYERS, "vocab_size": 61, "num_attention_heads": 4, "num_key_value_heads": 2}


def _make(model: str, sizes: dict[str, Any]) -> Any:
    import transformers  # takes a second of every process that asks for it

    kind: Any = getattr(transformers, model)
    return kind(kind.config_class(**sizes))


def llama(**sizes: Any) -> Any:
    """A tiny Llama."""
    ours = {"num_hidden_layers": 3, "max_position_embeddings": 32, "pad_token_id": 0}
    return _make("LlamaForCausalLM", {**_DECODER, **ours, **sizes})


def gpt2(**sizes: Any) -> Any:
    """A tiny GPT-2: tied head, Conv1D weights."""
    ours = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 61}
    return _make("GPT2LMHeadModel", {**ours, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, **sizes})


def bert(**sizes: Any) -> Any:
    """A tiny BERT with its masked language model head: tied decoder and bias."""
    ours = {"vocab_size": 61, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return _make("BertForMaskedLM", {**_LAYERS, **ours, **sizes})


def t5(**sizes: Any) -> Any:
    """A tiny T5: one embedding under four names; two layers in the encoder and two in the decoder."""
    ours = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": 61}
    return _make("T5ForConditionalGeneration", {**ours, "dropout_rate": 0.0, "decoder_start_token_id": 0, **sizes})


def mixtral(**sizes: Any) -> Any:
    """A tiny Mixtral: experts are stacked in the model and single tensors on disk."""
    ours = {"num_local_experts": 3, "num_experts_per_tok": 2, "max_position_embeddings": 32}
    return _make("MixtralForCausalLM", {**_DECODER, **ours, **sizes})


def vit(**sizes: Any) -> Any:
    """A tiny vision transformer for images of 8 x 8: no generation config."""
    ours = {"image_size": 8, "patch_size": 4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return _make("ViTForImageClassification", {**_LAYERS, **ours, **sizes})


def dinov2(**sizes: Any) -> Any:
    """A tiny DINOv2 with a gated feed-forward network."""
    ours = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    return _make("Dinov2Model", {**ours, "use_swiglu_ffn": True, **sizes})


def qwen3_vl_moe() -> Any:
    """A tiny Qwen3-VL with experts: transposed on saving, depending on the shape a parameter has in the model."""
    text = {**_DECODER, "moe_intermediate_size": 8, "head_dim": 4, "num_experts": 3, "num_experts_per_tok": 2}
    text |= {"max_position_embeddings": 32, "pad_token_id": 0}
    vision = {"depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "out_hidden_size": 16}
    vision |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    return _make("Qwen3VLMoeForConditionalGeneration", {"text_config": text, "vision_config": vision})
