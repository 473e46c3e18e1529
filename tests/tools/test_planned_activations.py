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
from streamshard.tools.activations import Activations, LiveBytes, estimate_activations
from streamshard.tools.command import main
from tests.families import _make
from tests.models import Stack, TinyLM
from tests.ranks import RankContext, on_ranks
from tests.reference import adamw

BATCH, SEQ = 4, 128
_TEXT: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 192}
_TEXT["vocab_size"] = 1024
_ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_GROUPED = {**_TEXT, **_ENDS, "num_key_value_heads": 2}
_T5 = {"d_model": 64, "d_kv": 16, "d_ff": 192, "num_layers": 4, "num_heads": 4, "vocab_size": 1024}


class ConvLM(nn.Module):
    """Convolutions along the sequence, batch norm and dropout; returns logits and no loss."""

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
        """[batch, seq] tokens -> [batch, seq, 1024]"""
        x: torch.Tensor = self.embedding(tokens).transpose(1, 2)
        for block in self.blocks:
            x = x + block(x)
        logits: torch.Tensor = self.head(x.transpose(1, 2))
        return logits


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "Llama": (lambda: _make("LlamaForCausalLM", _GROUPED), "bf16"),
    "GPT-2 with dropout": (
        lambda: _make("GPT2LMHeadModel", {**_ENDS, "n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 1024}),
        "bf16",
    ),
    "GPT-2 with a large head": (
        lambda: _make("GPT2LMHeadModel", {**_ENDS, "n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 9000}),
        "bf16",
    ),
    "T5 with dropout": (lambda: _make("T5ForConditionalGeneration", {**_T5, "decoder_start_token_id": 0}), "fp32"),
    "Mixtral": (lambda: _make("MixtralForCausalLM", {**_GROUPED, "num_local_experts": 4}), "fp32"),
    "convolutions": (ConvLM, "bf16"),
}


def _inputs() -> dict[str, torch.Tensor]:
    tokens = torch.randint(3, 1000, (BATCH, SEQ))
    return {"input_ids": tokens, "labels": tokens}


def _loss(name: str, output: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    if name == "convolutions":
        return nn.functional.cross_entropy(output.flatten(0, 1), inputs["labels"].flatten())
    loss: torch.Tensor = output.loss
    return loss


def measure(name: str, micro_batches: int = 1, *, is_checkpointed: bool) -> int:
    """Bytes of tensors that a step of one CPU rank makes, at most: the inputs, forward, backward, AdamW's step.

    Several micro-batches run layer by layer.
    """
    torch.manual_seed(0)
    build, precision = CASES[name]
    model = build().train()
    if isinstance(model, ConvLM):
        for block in model.blocks if is_checkpointed else ():
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # newer versions have another name for it
            if is_checkpointed:
                model.gradient_checkpointing_enable({"use_reentrant": False})
    options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    model = StreamShard(model, precision=precision, weight_slots=2, keep_main_grads=True)
    optimizer = adamw(model)

    def forward(model: Any, inputs: dict[str, torch.Tensor]) -> Any:
        return model(inputs["input_ids"]) if name == "convolutions" else model(**inputs, **options)

    def loss_of(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return _loss(name, forward(model, inputs), inputs)

    def step() -> None:
        inputs = [_inputs() for _ in range(micro_batches)]
        if micro_batches > 1:
            model.accumulate(inputs, loss_of)
        else:
            output = forward(model, inputs[0])  # lives until backward is over
            _loss(name, output, inputs[0]).backward()
        del inputs
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(1 if micro_batches == 1 else 3):  # makes the optimizer's state, and settles the order of layers
        step()
    with LiveBytes() as live:
        step()
    return live.peak


def planned(name: str, accumulate: int | None = None) -> Activations:
    """The plan's activations, of a model on meta."""
    build, precision = CASES[name]
    given: dict[str, Any] = {"precision": precision, "batch": BATCH, "seq": SEQ, "accumulate": accumulate}
    found = plan(build, 1, transport="shared-memory", **given)
    assert found.activation_bytes is not None, found.activations_unknown
    return found.activation_bytes


@on_ranks(1)
@pytest.mark.parametrize("name", CASES)
def test_planned_activations_are_the_peak_of_a_step(context: RankContext, name: str) -> None:
    """Within 3 percent, with layers checkpointed and without."""
    pytest.importorskip("transformers")
    for is_checkpointed, estimate in enumerate(planned(name)):
        true = measure(name, is_checkpointed=bool(is_checkpointed))
        assert 0.97 <= estimate / true <= 1.03, (estimate, true)


@on_ranks(1)
@pytest.mark.parametrize("name", ["Llama", "GPT-2 with a large head", "convolutions"])
def test_planned_activations_of_micro_batches_are_the_peak_of_a_step(context: RankContext, name: str) -> None:
    """What layers keep for all of them, the head and loss of one, and gradients of a small tied head of all."""
    pytest.importorskip("transformers")
    for is_checkpointed, estimate in enumerate(planned(name, 3)):
        true = measure(name, 3, is_checkpointed=bool(is_checkpointed))
        assert 0.99 <= estimate / true <= 1.01, (estimate, true)


# -- the estimate -----------------------------------------------------------------------------------------------------


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
            model = _make("GPT2LMHeadModel", {**_ENDS, "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 1024})
        units = find_units(model, None)
        found[on_gpus, seq] = estimate_activations(model, units, torch.bfloat16, 1, seq, on_gpus=on_gpus).without
    assert found[True, 1024] < 2.1 * found[True, 512]
    assert found[False, 1024] > 2.5 * found[False, 512]


# -- what cannot run --------------------------------------------------------------------------------------------------


class _Branches(TinyLM):
    """Its forward looks at values, which fake tensors do not have."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """See `TinyLM`."""
        logits: torch.Tensor = super().forward(tokens)
        return logits * 2 if logits.sum().item() > 1 else logits


def test_a_model_that_cannot_run_has_a_plan_without_activations(capsys: pytest.CaptureFixture[str]) -> None:
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
    assert main(["plan", "tests.models:Stack", "--ranks", "2", "--batch", "1", "--seq", "4"]) == 0
    assert "activations: unknown, because" in capsys.readouterr().out
