"""Models that transformers loads quantized by torchao, with adapters of PEFT: trained and saved as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests import families
from tests.models import token_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import EXACT, Call, adamw, assert_same, assert_trains_like_plain, full_weights

torchao: Any = pytest.importorskip("torchao.quantization", reason="needs torchao: pip install streamshard[test]")
peft: Any = pytest.importorskip("peft", reason="needs PEFT: pip install streamshard[hf]")


def _saved(context: RankContext, path: Path) -> Path:
    """A directory with a model that is not quantized."""
    if context.rank == 0:
        torch.manual_seed(0)
        families.llama().save_pretrained(path)
    dist.barrier()
    return path


def _base(path: Path, kind: str) -> Any:
    from transformers import AutoModelForCausalLM, TorchAoConfig

    config = TorchAoConfig(getattr(torchao, kind)())
    return AutoModelForCausalLM.from_pretrained(path, quantization_config=config, dtype=torch.float32)


def _adapted(path: Path, kind: str) -> Any:
    lora = peft.LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    base = peft.prepare_model_for_kbit_training(_base(path, kind), use_gradient_checkpointing=False)
    return peft.get_peft_model(base, lora).train()


def _step(model: nn.Module, call: Call) -> Tensor:
    tokens = token_batch(call.step, call.rank)
    return call.backward(model(input_ids=tokens, labels=tokens).loss)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "IntxWeightOnlyConfig"])
def test_adapters_on_a_loaded_base_train_as_in_one_process(context: RankContext, kind: str, tmp_path: Path) -> None:
    path = _saved(context, tmp_path / "base")
    model = assert_trains_like_plain(
        context, lambda: _adapted(path, kind), _step, optimizer=adamw, steps=2, checked=[1]
    )
    found, wanted = (
        {name: part for name, part in full_weights(each).items() if "base_layer.weight." in name}
        for each in (model, _adapted(path, kind))
    )
    assert sum(name.endswith("qdata") for name in wanted) == 21
    assert_same(found, wanted, "packed weights", EXACT)
