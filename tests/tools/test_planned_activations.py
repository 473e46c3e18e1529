"""The activations of a plan: beside the true peak of a step, and of models whose forward cannot run without memory."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from streamshard import StreamShard, plan
from streamshard.planning.discovery import find_units
from streamshard.tools.activations import LiveBytes, estimate_activations
from tests.families import _make
from tests.models import Stack, TinyLM
from tests.ranks import RankContext, on_ranks
from tests.reference import adamw

BATCH, SEQ = 4, 128
_TEXT: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 192}
_TEXT["vocab_size"] = 1024
_ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_GROUPED = {**_TEXT, **_ENDS, "num_key_value_heads": 2}
_GPT2 = {**_ENDS, "n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 1024}
_T5 = {"d_model": 64, "d_kv": 16, "d_ff": 192, "num_layers": 4, "num_heads": 4, "vocab_size": 1024}


class ConvLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1024, 64)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv1d(64, 192, 3, padding=1),
                nn.BatchNorm1d(192),
                nn.GELU(),
                nn.Dropout(0.1),
                nn.Conv1d(192, 64, 3, padding=1),
            )
            for _ in range(4)
        )
        self.head = nn.Linear(64, 1024)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embedding(tokens).transpose(1, 2)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.transpose(1, 2))


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "Llama": (lambda: _make("LlamaForCausalLM", _GROUPED), "bf16"),
    "GPT-2 with dropout": (lambda: _make("GPT2LMHeadModel", _GPT2), "bf16"),
    "GPT-2 with a large head": (lambda: _make("GPT2LMHeadModel", _GPT2, vocab_size=9000), "bf16"),
    "T5 with dropout": (lambda: _make("T5ForConditionalGeneration", {**_T5, "decoder_start_token_id": 0}), "fp32"),
    "Mixtral": (lambda: _make("MixtralForCausalLM", {**_GROUPED, "num_local_experts": 4}), "fp32"),
    "convolutions": (ConvLM, "bf16"),
}


def peak_of_step(model: Any, precision: str, micro_batches: int = 1, *, is_checkpointed: bool) -> int:
    """Bytes of tensors that a step of this rank makes, at most: the inputs, forward, backward, AdamW's step.

    Several micro-batches run layer by layer.
    """
    if isinstance(model, ConvLM):
        for block in model.blocks if is_checkpointed else ():
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
    elif is_checkpointed:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # newer versions have another name for it
            model.gradient_checkpointing_enable({"use_reentrant": False})
    options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    is_ours = isinstance(model, ConvLM)
    model = StreamShard(model, precision=precision, weight_slots=2, keep_main_grads=True)
    optimizer = adamw(model)

    def loss_of(model: Any, tokens: torch.Tensor, kept: Any = None) -> torch.Tensor:
        output = model(tokens) if is_ours else model(input_ids=tokens, labels=tokens, **options)
        if kept is not None:
            kept.append(output)  # lives until backward is over
        loss: torch.Tensor = (
            nn.functional.cross_entropy(output.flatten(0, 1), tokens.flatten()) if is_ours else output.loss
        )
        return loss

    def step() -> None:
        inputs = [torch.randint(3, 1000, (BATCH, SEQ)) for _ in range(micro_batches)]
        if micro_batches > 1:
            model.accumulate(inputs, loss_of)
        else:
            kept: list[Any] = []
            loss_of(model, inputs[0], kept).backward()  # type: ignore[no-untyped-call]
            del kept
        del inputs
        optimizer.step()
        optimizer.zero_grad()

    # Makes the optimizer's state, and torch's rules for DTensors; settles the order of layers.
    for _ in range(1 if micro_batches == 1 else 3):
        step()
    with LiveBytes() as live:
        step()
    return live.peak


@on_ranks(1)
@pytest.mark.parametrize(
    ("name", "micro_batches"), [*((name, 1) for name in CASES), ("Llama", 3), ("GPT-2 with a large head", 3)]
)
def test_planned_activations_are_the_peak_of_a_step(context: RankContext, name: str, micro_batches: int) -> None:
    """With layers checkpointed and without; of one micro-batch, or of several that run layer by layer."""
    pytest.importorskip("transformers")
    build, precision = CASES[name]
    given: dict[str, Any] = {"accumulate": micro_batches} if micro_batches > 1 else {}
    planned = plan(build, 1, transport="shared-memory", precision=precision, batch=BATCH, seq=SEQ, **given)
    assert planned.activation_bytes is not None, planned.activations_unknown
    for is_checkpointed, estimate in enumerate(planned.activation_bytes):
        torch.manual_seed(0)
        true = peak_of_step(build().train(), precision, micro_batches, is_checkpointed=bool(is_checkpointed))
        assert estimate / true == pytest.approx(1.0, abs=0.03 if micro_batches == 1 else 0.01)


def test_a_model_itself_is_measured_too_and_stays_as_it_is() -> None:
    """As the function that builds it. If it is all frozen it keeps nothing; its forward takes memory all the same."""
    model = TinyLM()
    before = {name: (param, param._version) for name, param in model.named_parameters()}
    made = plan(model, 2, batch=2, seq=8).activation_bytes
    assert made is not None and made == plan(TinyLM, 2, batch=2, seq=8).activation_bytes
    assert {name: (param, param._version) for name, param in model.named_parameters()} == before
    assert not any("forward" in vars(module) or module._forward_hooks for module in model.modules())
    frozen = plan(model.requires_grad_(False), 2, batch=2, seq=8).activation_bytes
    assert frozen is not None and 0 < frozen.without < made.without


def test_attention_with_dropout_keeps_its_weights_on_cpus_only() -> None:
    """GPUs have fused kernels for it: twice the sequence takes twice the memory."""
    pytest.importorskip("transformers")
    found = dict[tuple[bool, int], int]()
    for on_gpus, seq in ((True, 512), (True, 1024), (False, 512), (False, 1024)):
        with torch.device("meta"):
            model = _make("GPT2LMHeadModel", _GPT2, n_layer=2)
        units = find_units(model, None)
        found[on_gpus, seq] = estimate_activations(model, units, torch.bfloat16, 1, seq, on_gpus=on_gpus).without
    assert found[True, 1024] < 2.1 * found[True, 512]
    assert found[False, 1024] > 2.5 * found[False, 512]


class _Branches(TinyLM):
    """Its forward looks at values, which fake tensors do not have."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = super().forward(tokens)
        return logits * 2 if logits.sum().item() > 1 else logits


def test_a_model_that_cannot_run_has_a_plan_without_activations(command: Any) -> None:
    """It says why. The engine's table is the same."""
    for build, why in ((_Branches, "DataDependentOutputException"), (Stack, "RuntimeError: ")):
        made = plan(build, 2, batch=1, seq=4, budget="10GiB")
        assert made.activation_bytes is None
        unknown = f"the model does not run on 1 x 4 tokens without memory: {why}"
        assert made.activations_unknown.startswith(unknown)
        lines = str(made).splitlines()
        assert lines[-5] == f"activations: unknown, because {made.activations_unknown}"
        assert lines[-2:] == ["fits: ZeRO-3, ZeRO-2, ZeRO-1", "take: ZeRO-2"]
        assert made.stages == plan(build, 2).stages
    said = command("plan", "tests.models:Stack", *["--ranks", "2", "--batch", "1", "--seq", "4"])
    assert "activations: unknown, because" in said
