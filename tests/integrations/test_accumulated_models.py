"""Unedited models of transformers and diffusers train by `StreamShard.accumulate` to the gradients of a loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from streamshard import ShardingError
from tests import families
from tests.compare import EXACT, assert_same
from tests.integrations.models import unet
from tests.ranks import RankContext, on_ranks
from tests.test_accumulate import NEAR, _loop, _trained, _Way

pytest.importorskip("transformers", reason="needs transformers")

NEEDS_DIFFUSERS = pytest.mark.skipif(find_spec("diffusers") is None, reason="needs diffusers")


_DECODER = {**families._DECODER, **families._ENDS, "num_hidden_layers": 3}
_MLA = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
# The first layer has another form than the rest.
_EXPERTS = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "moe_intermediate_size": 8,
}  # fmt: skip


def _causal(kind: str, **sizes: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**_DECODER, **sizes}))


def _whisper() -> Any:
    sizes: dict[str, Any] = {"vocab_size": 61, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.1}
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
    sizes |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "num_mel_bins": 4}
    sizes |= {"max_source_positions": 6, "max_target_positions": 16}
    return families._make("WhisperForConditionalGeneration", sizes)


def _checkpointed() -> Any:
    model = families.llama()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    return model


def _dit() -> Any:
    import diffusers

    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 3, "sample_size": 8, "patch_size": 2}
    return diffusers.DiTTransformer2DModel(**sizes, in_channels=3, num_embeds_ada_norm=10)


def _ids(numbers: torch.Generator, length: int) -> Tensor:
    return torch.randint(3, 60, (2, length), generator=numbers)


def _text(model: Any, numbers: torch.Generator, length: int) -> Any:
    ids = _ids(numbers, length)
    return model(input_ids=ids, labels=ids).loss


def _router(model: Any, numbers: torch.Generator, length: int) -> Any:
    """With the auxiliary loss of the experts' router."""
    ids = _ids(numbers, length)
    return model(input_ids=ids, labels=ids, output_router_logits=True).loss


def _hidden(model: Any, numbers: torch.Generator, length: int) -> Any:
    """With a penalty on all hidden states, which transformers takes by hooks inside the layers."""
    output = model(input_ids=_ids(numbers, length), output_hidden_states=True)
    return sum(each.float().square().mean() for each in output.hidden_states) + output.logits.float().mean()


def _speech(model: Any, numbers: torch.Generator, length: int) -> Any:
    return model(input_features=torch.randn(2, 4, 12, generator=numbers), labels=_ids(numbers, length)).loss


def _image(model: Any, numbers: torch.Generator, length: int) -> Any:
    return model(pixel_values=torch.randn(2, 3, 8, 8, generator=numbers), labels=torch.tensor([0, 1])).loss


def _noise(model: Any, numbers: torch.Generator, length: int) -> Any:
    """Diffusion: the model finds the noise."""
    x, noise = torch.randn(2, 2, 3, 8, 8, generator=numbers)
    steps = torch.randint(0, 1000, (2,), generator=numbers)
    labels = {"class_labels": torch.tensor([1, 2])} if hasattr(model, "transformer_blocks") else {}
    return (model(x + noise, steps, **labels).sample[:, :3].float() - noise).square().mean()


class _Model(NamedTuple):
    make: Callable[[], nn.Module]
    loss_of: Callable[[Any, torch.Generator, int], Tensor]
    settings: dict[str, Any] = {}  # noqa: RUF012  # never changed


MODELS = {
    "llama, checkpointed": _Model(_checkpointed, _text),
    "t5": _Model(families.t5, _text),
    "mixtral with its router's loss": _Model(families.mixtral, _router),
    "deepseek v3": _Model(partial(_causal, "deepseek_v3", num_key_value_heads=4, **_MLA, **_EXPERTS), _text),
    "gpt2": _Model(families.gpt2, _text),
    "bert": _Model(families.bert, _text),
    "whisper": _Model(_whisper, _speech),
    "gemma 2": _Model(partial(_causal, "gemma2", head_dim=4), _text),
    "mamba": _Model(partial(_causal, "mamba", state_size=4), _text),
    "vit": _Model(families.vit, _image),
    # Its last step computes with an embedding inside the first layer.
    "a diffusion transformer": _Model(_dit, _noise, {"resident": ["transformer_blocks.0.norm1.emb"]}),
}


def _train(context: RankContext, kind: _Model, *, accumulates: bool) -> Any:
    """See `_trained`; three steps."""

    def loss_of(model: Any, micro_batch: tuple[int, int]) -> Tensor:
        seed = 100 * micro_batch[0] + micro_batch[1]
        torch.manual_seed(seed)
        return kind.loss_of(model, torch.Generator().manual_seed(seed), 6 + seed % 3) / 4

    def run_step(model: Any, micro_batches: list[tuple[int, int]]) -> Any:
        if accumulates:
            return model.accumulate(micro_batches, loss_of)
        return _loop(model, micro_batches, loss_of)

    return _trained(context, _Way(kind.make, kind.settings), run_step, steps=3)


@on_ranks()
@pytest.mark.parametrize(
    ("world_size", "name"),
    [
        pytest.param(size, name, marks=NEEDS_DIFFUSERS if "diffusion" in name else ())
        for size, names in ((1, MODELS), (2, ("llama, checkpointed", "mixtral with its router's loss")))
        for name in names
    ],
)
def test_unedited_models_have_the_gradients_of_a_loop(context: RankContext, name: str) -> None:
    """On one rank to the bit, with half of the all-gathers at most."""
    with warnings.catch_warnings():  # some compute their loss in bf16
        warnings.simplefilter("ignore", UserWarning)
        loop, accumulated = (_train(context, MODELS[name], accumulates=each) for each in (False, True))
    assert_same(accumulated[1], loop[1], "gradients", EXACT if context.world_size == 1 else NEAR)
    assert 2 * accumulated[2] <= loop[2]
    if context.world_size == 1:
        assert accumulated[0] == loop[0]


@on_ranks(1)
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(_Model(families.llama, _hidden), id="hidden states that hooks have taken"),
        pytest.param(_Model(unet, _noise), id="skips of a U-Net", marks=NEEDS_DIFFUSERS),
    ],
)
def test_models_that_need_a_loop_are_refused(context: RankContext, kind: _Model) -> None:
    with pytest.raises(ShardingError, match="of which one was computed from the other.*or loop"):
        _train(context, kind, accumulates=True)
    _train(context, kind, accumulates=False)
