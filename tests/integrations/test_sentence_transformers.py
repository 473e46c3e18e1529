"""The trainers of sentence-transformers with StreamShard on two ranks: the numbers of DistributedDataParallel."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from streamshard import CheckpointError, StreamShard
from tests.compare import Tolerance, assert_same, full_weights
from tests.families import _LAYERS, _STEADY, _make
from tests.integrations.accelerating import on_ranks
from tests.integrations.models import make_texts, make_tokenizer
from tests.integrations.trainers import and_sharded, assert_equal, launched, train
from tests.ranks import RankContext
from tests.reference import FP32

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # one of its own modules imports another by an old name
    st: Any = pytest.importorskip("sentence_transformers", reason="needs sentence-transformers")

from sentence_transformers.sentence_transformer import losses, modules  # noqa: E402
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator  # noqa: E402


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without progress bars, and without warnings of sentence-transformers about accelerate."""
    with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _saved(directory: Path, name: str = "BertModel") -> str:
    """A tiny BERT, with a head if its name says so, and its tokenizer, in a directory."""
    where = directory / name
    if dist.get_rank() == 0 and not where.exists():
        torch.manual_seed(0)
        _make(name, {**_LAYERS, **_STEADY}, vocab_size=61, num_labels=1).save_pretrained(where)
        tokenizer = make_tokenizer()
        if name != "BertModel":
            tokenizer.add_special_tokens({"cls_token": "<s>", "sep_token": "</s>", "mask_token": "w56"})
        tokenizer.save_pretrained(where)
    dist.barrier()
    return str(where)


def _sentences(directory: Path, *more: Any) -> Any:
    layers = [modules.Transformer(_saved(directory)), modules.Pooling(16, "mean"), *more, modules.Normalize()]
    return st.SentenceTransformer(modules=layers, device="cpu")


def _data(labels: list[float] | list[int] | None = None) -> Any:
    from datasets import Dataset

    columns: dict[str, Any] = {"anchor": make_texts(16, (3, 9), 0), "positive": make_texts(16, (3, 9), 1)}
    return Dataset.from_dict(columns if labels is None else {**columns, "label": labels})


def _with_dense(directory: Path) -> Any:
    torch.manual_seed(0)
    return _sentences(directory, modules.Dense(16, 8))


def _cross_encoder(directory: Path) -> tuple[Any, Any, Any]:
    from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss

    model = st.CrossEncoder(_saved(directory, "BertForSequenceClassification"), num_labels=1, device="cpu")
    return model, BinaryCrossEntropyLoss(model), _data([number / 16 for number in range(16)])


def _sparse_encoder(directory: Path) -> tuple[Any, Any, Any]:
    from sentence_transformers.sparse_encoder import losses as sparse

    model = st.SparseEncoder(_saved(directory, "BertForMaskedLM"), device="cpu")
    ranking = sparse.SparseMultipleNegativesRankingLoss(model)
    return model, sparse.SpladeLoss(model, ranking, 3e-3, 5e-3), _data()


def _cached(directory: Path) -> tuple[Any, Any, Any]:
    """Several forwards for one backward."""
    model = _with_dense(directory)
    return model, losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=1), _data()


def _several_tasks(directory: Path) -> tuple[Any, Any, Any]:
    """Batches of one step are of another task on each rank. So a rank does not use the weights of the other's loss."""
    model = _sentences(directory)
    for name, param in model.named_parameters():  # its gradient is rounding of zero, which Adafactor scales up
        param.requires_grad_("key.bias" not in name)
    torch.manual_seed(3)
    classes, scores = losses.SoftmaxLoss(model, 16, 3), losses.CosineSimilarityLoss(model)
    labels = {"classes": [number % 3 for number in range(16)], "scores": [number / 16 for number in range(16)]}
    return model, {"classes": classes, "scores": scores}, {name: _data(each) for name, each in labels.items()}


@on_ranks(2)
@pytest.mark.parametrize("build", [_cached, _cross_encoder, _sparse_encoder, _several_tasks])
def test_what_its_scripts_do_equals_ddp(context: RankContext, build: Any, tmp_path: Path) -> None:
    kind = {_cross_encoder: "CrossEncoder", _sparse_encoder: "SparseEncoder"}.get(build, "SentenceTransformer")
    options: dict[str, Any] = {"arguments_class": getattr(st, f"{kind}TrainingArguments"), "save_strategy": "steps"}
    options["save_steps"] = 2
    if build is _cached:
        options["per_device_train_batch_size"] = 4
    if build is _several_tasks:
        options |= {"multi_dataset_batch_sampler": "round_robin", "optim": "adafactor"}
    if build is _cross_encoder:
        options["ddp_find_unused_parameters"] = False  # DistributedDataParallel raises otherwise
    runs, found = [], []
    with launched(context), _quiet():
        for each in and_sharded(getattr(st, f"{kind}Trainer")):
            model, loss, data = build(tmp_path)
            out = tmp_path / each.__name__
            runs.append(train(each, model, out, data, given={"loss": loss}, **options))
            if isinstance(model, StreamShard) or context.rank == 0:
                model.save_pretrained(str(out / "final"), create_model_card=False)
            dist.barrier()
            found.append(full_weights(type(model)(str(out / "final"), device="cpu")))
    theirs, ours = runs
    assert isinstance(ours.trainer.model, StreamShard)
    assert_equal(ours, theirs)
    assert_same(found[1], found[0], "what is loaded", Tolerance(1e-4, 2e-6))
    for name in ("checkpoint-2", "final"):
        one, other = ({path.name for path in Path(run.trainer.args.output_dir, name).iterdir()} for run in runs)
        assert one == other


@on_ranks(2)
def test_a_run_evaluates_saves_and_goes_on_as_with_ddp(context: RankContext, tmp_path: Path) -> None:
    """Each rank evaluates all sentences. A checkpoint is what SentenceTransformer loads; the best one comes back."""
    scores = torch.linspace(0, 1, 9).tolist()
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    saving |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_pearson_cosine"}
    saving |= {"greater_is_better": False, "max_steps": 4}  # so that the best is not the last
    saving["arguments_class"] = st.SentenceTransformerTrainingArguments

    def given(loss: Any) -> dict[str, Any]:
        texts = (make_texts(9, (3, 9), seed) for seed in (2, 3))
        options = {"batch_size": 2, "write_csv": False, "show_progress_bar": False}
        evaluator = EmbeddingSimilarityEvaluator(*texts, scores, **options)
        return {"loss": loss, "eval_dataset": _data(), "evaluator": evaluator}

    with launched(context), _quiet():
        runs, encoded = [], []
        theirs_class, ours_class = and_sharded(st.SentenceTransformerTrainer)
        for each, resume in ((theirs_class, False), (ours_class, False), (ours_class, True)):
            model, out = _with_dense(tmp_path), tmp_path / each.__name__
            loss = losses.MultipleNegativesRankingLoss(model)
            options = {**saving, "given": given(loss), "resume": out / "checkpoint-2" if resume else None}
            runs.append(train(each, model, out, _data(), **options))
            if not resume:
                runs[-1].trainer.save_model()
                dist.barrier()
                found = st.SentenceTransformer(str(out), device="cpu")
                encoded += [one.encode(make_texts(5, (3, 9), 4)) for one in (runs[-1].trainer.model, found)]
    assert all(run.trainer.state.best_model_checkpoint.endswith("checkpoint-2") for run in runs)
    theirs, ours, resumed = runs
    assert_equal(ours, theirs)
    assert_equal(resumed, ours, resumed=True)
    for one in encoded[1:]:
        torch.testing.assert_close(one, encoded[0], rtol=1e-4, atol=2e-6)
    own, other = (tmp_path / each.__name__ for each in (ours_class, theirs_class))
    for name in ("", "checkpoint-4"):
        assert {path.name for path in (own / name).iterdir()} == {path.name for path in (other / name).iterdir()}


@on_ranks(2)
def test_save_on_all_ranks_writes_what_an_unsharded_model_writes(context: RankContext, tmp_path: Path) -> None:
    """The last line of each of its scripts. Both of its methods; also with adapters, and over an earlier directory."""
    peft = pytest.importorskip("peft", reason="needs PEFT")
    with launched(context), _quiet():
        for adds in (False, True):
            plain, model = _with_dense(tmp_path), _with_dense(tmp_path)
            for each in (plain, model) if adds else ():
                torch.manual_seed(1)
                each.add_adapter(peft.LoraConfig(r=2, target_modules=["query"], init_lora_weights=False))
            StreamShard(model, precision=FP32)
            theirs, ours = tmp_path / f"plain {context.rank} {adds}", tmp_path / f"sharded {adds}"
            plain.save_pretrained(str(theirs), create_model_card=False)
            for save in (model.save, model.save_pretrained):
                save(str(ours), create_model_card=False)
                for path in (path.relative_to(theirs) for path in theirs.rglob("*") if path.is_file()):
                    assert (ours / path).read_bytes() == (theirs / path).read_bytes(), path
            found = st.SentenceTransformer(str(ours), device="cpu")
            torch.testing.assert_close(found.encode("w1 w2"), plain.encode("w1 w2"), rtol=0.0, atol=0.0)
            with pytest.raises(CheckpointError, match=r"save_pretrained\(directory\) on all ranks.*upload_folder"):
                model.push_to_hub("me/it")
