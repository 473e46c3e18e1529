"""The documentation: every block of code runs, and every command has the options that pages give it."""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import importlib
import io
import itertools
import operator
import re
import runpy
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate.commands.launch import launch_command_parser
from torch import nn
from torch.distributed.run import get_args_parser

import streamshard
from streamshard.tools.command import _parser
from tests import families
from tests.integrations.accelerating import launched
from tests.integrations.trainers import arguments_of
from tests.launched import ROOT, free_port
from tests.models import token_batch
from tests.ranks import RankContext, on_ranks
from tests.simulated import simulated_device

_FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Sections whose blocks share no variables with the rest of their page.
_APART = (
    "Compute in fp8",
    "Context parallelism",
    "DistributedOptimizer",
    "Lightning",
    "Models larger than the GPU",
    "QLoRA on several GPUs",
    "Ray Train",
    "Replicas: hybrid sharding and local SGD",
    "Restarts and preemption",
    "Uneven inputs",
    "Whole parameters: Muon, SOAP, Shampoo, Adafactor",
    "diffusers' training scripts",
    "nanochat",
)


def _parts() -> Iterator[tuple[str, str]]:
    for file in _FILES:
        name, text = str(file.relative_to(ROOT)), file.read_text()
        first, *sections = re.split(rf"^(?=## (?:{'|'.join(_APART)})$)", text, flags=re.MULTILINE)
        yield name, first
        yield from ((f"{name}: {each.splitlines()[0][3:]}", each) for each in sections)


_TEXTS = dict(_parts())


def _blocks(page: str) -> list[tuple[int, str]]:
    """Line number and code of each block of Python. Of a diff, the new side."""
    text, found = _TEXTS[page], []
    for block in re.finditer(r"^```(python|diff)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        code = block[2] if block[1] == "python" else re.sub(r"^(-.*|[+ ])", "", block[2], flags=re.MULTILINE)
        found.append((text[: block.start()].count("\n") + 1, code))
    return found


_PAGES = [page for page in _TEXTS if _blocks(page)]

# What pages leave out. All have `model`, not sharded yet, its `optimizer` and `scheduler`, `batch`, and `config`.
_SET_UP = {
    "docs/guide/accumulation.md": """
        from torch.nn.functional import cross_entropy
        from streamshard import StreamShard
        model = StreamShard(model)
        micro_batches, tokens_of_a_step = [batch["input_ids"]] * 3, 2 * 3 * batch["input_ids"][:, 1:].numel()
    """,
    "docs/guide/accelerate.md": """
        from torch.nn.functional import cross_entropy
        from torch.utils.data import DataLoader
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
        optimizer = torch.optim.AdamW(model.parameters())
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
        train = DataLoader([(torch.randn(4), 1) for _ in range(32)], batch_size=2)
    """,
    "docs/guide/big_models.md": """
        model.save_pretrained("snapshot" if torch.distributed.get_rank() == 0 else "unused")
        torch.distributed.barrier()
        base, Model = model.config, type(model)
        def load_it_somehow():
            return Model(config)
    """,
    "docs/guide/checkpoints.md": """
        from torchdata.stateful_dataloader import StatefulDataLoader
        from transformers import AutoModelForCausalLM
        from streamshard import StreamShard, export_safetensors, save_checkpoint
        from tests.checkpoint import objects
        model = StreamShard(model)
        scaler, loader = torch.amp.GradScaler("cpu"), StatefulDataLoader([1, 2, 3])
        extra = {"scheduler": scheduler, "scaler": scaler, "loader": loader, "step": 1}
        save_checkpoint("runs/llama", model, optimizer, extra)
    """,
    "docs/guide/commands.md": """
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict
        from torch.distributed.fsdp import fully_shard
        directory = "dcp"
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
    """,
    "docs/guide/parallelism.md: Context parallelism": """
        from torch.nn.functional import cross_entropy
        from streamshard import StreamShard
        ulysses = example("context_parallel")["ulysses"]
        tokens = labels = batch["input_ids"]
        position_ids = torch.arange(tokens.shape[1]).expand_as(tokens)
    """,
    "docs/guide/quick_start.md": """
        llama = type(model)
        def GPT():
            return llama(config)
    """,
    "docs/guide/parallelism.md": """
        from functools import partial
        from streamshard import StreamShard
        from tests import families
        llama, mixtral = type(model), partial(families.mixtral, num_local_experts=4)
        model = example("tensor_parallel")["make_model"]()
    """,
    "docs/guide/dial.md": """
        from streamshard import StreamShard
        from collections import OrderedDict
        def block():
            norm1 = nn.Sequential(OrderedDict(emb=nn.Linear(4, 4)))
            return nn.Sequential(OrderedDict(norm1=norm1, out=nn.Linear(4, 4)))
        model, dit = nn.Module(), nn.Module()
        model.visual, model.layers = (nn.Sequential(block(), block()) for _ in range(2))
        dit.transformer_blocks = nn.ModuleList(block() for _ in range(3))
    """,
    "docs/guide/optimizers.md: DistributedOptimizer": "from streamshard import StreamShard",
    "docs/guide/stability.md: Compute in fp8": """
        importorskip("torchao", reason="needs torchao: pip install streamshard[test]")
    """,
    "docs/guide/optimizers.md": """
        from streamshard import StreamShard, load_checkpoint, save_checkpoint
        from streamshard.optim import WholeParameterOptimizer
        directory, Model, loader = "runs", type(model), [batch]
        online, target, predictor = nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 5)
        model, _ = StreamShard(model), StreamShard(nn.ModuleList([online, target, predictor]))
    """,
    "docs/guide/big_models.md: Models larger than the GPU": """
        from torch.utils.checkpoint import checkpoint
        model.save_pretrained("snapshot" if torch.distributed.get_rank() == 0 else "unused")
        torch.distributed.barrier()
        loader = [batch, batch]
    """,
    "docs/guide/peft.md": """
        PeftModel = importorskip("peft").PeftModel
        base, directory = model, f"adapter-{torch.distributed.get_rank()}"  # the page has one process
        importorskip("peft").get_peft_model(model, importorskip("peft").LoraConfig()).save_pretrained(directory)
        base = type(model)(config)
    """,
    "docs/guide/peft.md: QLoRA on several GPUs": """
        importorskip("bitsandbytes", reason="needs bitsandbytes: pip install streamshard[test]")
        importorskip("torchao", reason="needs torchao: pip install streamshard[test]")
        importorskip("peft", reason="needs PEFT: pip install streamshard[hf]")
        if torch.distributed.get_rank() == 0:
            model.save_pretrained("base")
        torch.distributed.barrier()
    """,
    "docs/guide/parallelism.md: Replicas: hybrid sharding and local SGD": """
        from streamshard import StreamShard
        Model = type(model)
    """,
    "docs/guide/checkpoints.md: Restarts and preemption": """
        model, last = streamshard.StreamShard(model), 2
        def train(step):
            model(**batch).loss.backward()
            optimizer.step()
    """,
    "docs/guide/same_numbers.md": """
        from torch.nn.functional import cross_entropy
        from streamshard import StreamShard
        steps, tokens_of_a_step = 1, 12 * batch["input_ids"][:, 1:].numel()
        def micro_batch(step, index):
            return batch["input_ids"]
    """,
    "docs/guide/slow_step.md": """
        import transformers, types
        from streamshard import StreamShard
        from streamshard.integrations.transformers import StreamShardTrainer
        model, batches, tracker = StreamShard(model), [batch], types.SimpleNamespace(log=print)
        train = [{name: value[0] for name, value in batch.items()}] * 4
        arguments = arguments_of("out", max_steps=2)
    """,
    "docs/guide/transformers.md": """
        from streamshard.integrations.transformers import StreamShardTrainer
        train = test = [{name: value[0] for name, value in batch.items()}] * 4
        arguments = arguments_of("out", max_steps=1, save_strategy="steps", save_steps=1)
        StreamShardTrainer(model=type(model)(config), args=arguments, train_dataset=train).train()
        arguments = arguments_of("out", max_steps=2)
    """,
    "docs/guide/stability.md: Uneven inputs": """
        model = streamshard.StreamShard(model)
        batches = [batch] * (1 + torch.distributed.get_rank())
    """,
}
# What two processes on a CPU cannot do, or not fast, and what they do in its place.
_REPLACED = {
    "docs/guide/big_models.md": {"nn.Linear(4096, 4096)": "nn.Linear(8, 8)", '"base/"': '"snapshot/"'},
    "docs/guide/checkpoints.md": {"s3://bucket": "kept://bucket"},
    "docs/guide/parallelism.md: Context parallelism": {'"cuda", (4, 2)': '"cpu", (1, 2)'},
    "docs/guide/parallelism.md": {
        '"cuda", (4, 2)': '"cpu", (1, 2)',
        '"cuda", (2, 4)': '"cpu", (1, 2)',
        "dp_shard_size=4": "dp_shard_size=1",
        '"cuda", (8, 1)': '"cpu", (2, 1)',
        "apply_tensor_parallelism(model": "model = llama(config)\napply_tensor_parallelism(model",
        "apply_expert_parallelism(model": "model = mixtral()\napply_expert_parallelism(model",
        "import Shard, distribute_tensor": "import Shard, distribute_tensor\n"
        'model = example("expert_parallel")["make_model"]()',
    },
    "docs/guide/dial.md": {'(model, resident=["transformer': '(dit, resident=["transformer'},
    "docs/guide/stability.md: Compute in fp8": {'Config.from_recipe_name("tensorwise")': "Config(emulate=True)"},
    "docs/guide/big_models.md: Models larger than the GPU": {'to("cuda")': 'to("cpu")'},
    "docs/guide/peft.md: QLoRA on several GPUs": {'int(os.environ["LOCAL_RANK"])': '"cpu"'},
    "docs/guide/parallelism.md: Replicas: hybrid sharding and local SGD": {'"cuda", (4, 8)': '"cpu", (2, 1)'},
    "docs/guide/slow_step.md": {"global_step == 10": "global_step == 0", "global_step == 12": "global_step == 2"},
    "docs/guide/surroundings.md": {'log_with="tensorboard", ': ""},  # not among the tests' packages
    "docs/guide/stability.md": {"torch.amp.GradScaler()": 'torch.amp.GradScaler("cpu")'},
    "docs/guide/optimizers.md: Whole parameters: Muon, SOAP, Shampoo, Adafactor": {
        "256, 256": "16, 16",
        "8, 256": "8, 16",
    },
}
# Run on a simulated device, because `StreamShard` refuses the CPU there.
_ON_A_DEVICE = ("docs/guide/big_models.md: Models larger than the GPU",)
# Not run.
_LEFT_OUT = {
    ("docs/guide/quick_start.md", "_model"): "the scripts themselves are run below",
    # Not among the tests' packages; see tests/integrations.
    ("docs/guide/trainers.md: Lightning", "lightning"): "test_lightning.py",
    ("docs/guide/optimizers.md: nanochat", "orig_model"): "test_nanochat.py",
    ("docs/guide/trainers.md: Ray Train", "TorchTrainer"): "test_ray.py",
    ("docs/guide/transformers.md", "trl"): "test_trl.py",
    ("docs/guide/surroundings.md", "notebook_launcher"): "starts processes itself, below",
}


@contextlib.contextmanager
def _inside(directory: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        yield


@on_ranks(2)
@pytest.mark.parametrize("page", _PAGES)
def test_the_blocks_of_a_page_run_in_order(context: RankContext, page: str, tmp_path: Path) -> None:
    model = families.llama()
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = token_batch(0, context.rank)
    names: dict[str, Any] = {
        "torch": torch,
        "nn": nn,
        "streamshard": streamshard,
        "importorskip": pytest.importorskip,
        "config": model.config,
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
        "arguments_of": arguments_of,
        "batch": {"input_ids": tokens, "labels": tokens},
        "example": lambda name: runpy.run_path(str(ROOT / f"docs/examples/{name}.py")),
    }
    with _inside(tmp_path), launched(context), simulated_device() if page in _ON_A_DEVICE else contextlib.nullcontext():
        for line, code in [(0, textwrap.dedent(_SET_UP.get(page, ""))), *_blocks(page)]:
            if not any(page == name and word in code for name, word in _LEFT_OUT):
                for old, new in _REPLACED.get(page, {}).items():
                    code = code.replace(old, new)
                exec(compile("\n" * line + code, str(ROOT / page), "exec"), names)


def test_the_errors_of_the_troubleshooting_page_are_in_the_source() -> None:
    files = [path.read_text() for path in (ROOT / "streamshard").rglob("*.py")]
    source = re.sub(r'"\s*f?"', "", "".join(files))  # texts that continue on the next line
    rows = re.findall(r"^\| (?:a warning: )?`([^`]+)` \|", _TEXTS["docs/guide/troubleshooting.md"], re.MULTILINE)
    parts = [part for row in rows for part in re.split(r"\.\.\.", row)]
    of_torch = ["no attribute 'module'", "for which the process group ("]  # StreamShard's advice comes behind it
    assert len(rows) >= 29
    assert [part for part in parts if part.strip() not in source and part not in of_torch] == []


def test_messages_name_no_file_that_an_installed_package_lacks() -> None:
    """Of the repository. Docstrings may: they are read beside it."""
    named = []
    for path in sorted((ROOT / "streamshard").rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        statements = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            text = node.value if isinstance(node, ast.Constant) and id(node) not in statements else None
            if isinstance(text, str) and re.search(r"\b(docs|tests|benchmarks)/|(?<!README)\.md\b", text):
                named.append((path.name, text))
    assert named == []


_GPT = ROOT / "docs/examples/nanogpt"


@on_ranks(2)
def test_the_first_script_prints_what_the_quick_start_shows(context: RankContext, tmp_path: Path) -> None:
    text = _TEXTS["docs/guide/quick_start.md"]
    script, output = (re.search(rf"```{kind}\n(.*?)```", text, re.DOTALL) for kind in ("python", "text"))
    assert script is not None and output is not None
    with launched(context), _inside(tmp_path), contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(script[1], {})
    assert printed.getvalue() == (output[1] if context.rank == 0 else "")


def test_a_notebook_starts_ranks_as_its_page_says() -> None:
    (_, code), *_ = _blocks("docs/guide/surroundings.md")
    script = f"""
import torch
from tests import families
from tests.models import token_batch
make_model = families.llama
def make_batch():
    return {{"input_ids": token_batch(0, 0), "labels": token_batch(0, 0)}}
{code.replace("num_processes=2", f"num_processes=2, use_port='{free_port()}'")}"""
    # No fork: accelerate refuses to start ranks where bitsandbytes is imported.
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert re.findall(r"step (\d): loss", done.stdout) == ["0", "1", "2"], done.stderr


@pytest.mark.parametrize("before", ["train_ddp.py", "train_fsdp2.py"])
def test_the_quick_start_shows_the_differences_between_its_scripts(before: str) -> None:
    old, new = ((_GPT / name).read_text().splitlines(keepends=True) for name in (before, "train.py"))
    assert "".join(difflib.unified_diff(old, new, before, "train.py", n=1)) in _TEXTS["docs/guide/quick_start.md"]


@on_ranks(2)
def test_the_scripts_of_the_quick_start_train_to_the_same_losses(context: RankContext, tmp_path: Path) -> None:
    losses = {}
    on_cpu = mock.patch.object(torch.cuda, "is_available", return_value=False)
    with mock.patch.object(sys, "path", [str(_GPT), *sys.path]), launched(context), on_cpu:
        for name in ("train_ddp", "train_fsdp2", "train"):
            main = runpy.run_path(str(_GPT / f"{name}.py"))["main"]
            losses[name] = main(str(tmp_path / name))
            torch.distributed.barrier()  # torch.save of one rank may be under way
            assert main(str(tmp_path / name)) == []
    assert len(losses["train"]) == 20 and losses["train"][-1] < losses["train"][0] - 0.5
    assert losses["train"] == pytest.approx(losses["train_ddp"], rel=1e-4)
    assert losses["train"] == pytest.approx(losses["train_fsdp2"], rel=1e-4)


def test_the_reference_has_every_public_name() -> None:
    reference = (ROOT / "docs/reference.rst").read_text()
    assert [name for name in streamshard.__all__ if f":: streamshard.{name}\n" not in reference] == []


def test_tests_that_the_comparison_names_exist() -> None:
    named = re.findall(r"`(tests/[^`]+)`", _TEXTS["docs/guide/comparison.md"])
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).is_file()] == []


def _commands() -> Iterator[tuple[str, list[str]]]:
    """Page and words of each command in a block of sh, in a block without a language, and in a line of text."""
    for page, text in _TEXTS.items():
        shells = re.findall(r"^```(?:sh|text)?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        inline = re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
        lines = "\n".join(shells).replace("\\\n", " ").splitlines() + [" ".join(each.split()) for each in inline]
        for line in lines:
            for command in re.split(r" && |\| ", line):
                if re.search(r"\b(torchrun|accelerate launch|streamshard \w+|python3?) .*--", command):
                    yield page, shlex.split(command, comments=True)


def _parsers() -> dict[str, argparse.ArgumentParser]:
    own = next(each for each in _parser()._actions if isinstance(each, argparse._SubParsersAction))
    named = {f"streamshard {name}": parser for name, parser in own.choices.items()}
    return {"torchrun": get_args_parser(), "accelerate launch": launch_command_parser(), **named}


def test_commands_have_the_options_that_pages_give_them() -> None:
    """Options in front of a script or `-m` are the launcher's. A script of the repository has its options as text."""
    parsers, checked, unknown = _parsers(), 0, []
    for page, words in _commands():
        script = next((n for n, word in enumerate(words) if word.endswith(".py") or word == "-m"), len(words))
        for part, (name, parser) in itertools.product((words[:script], words[script:]), parsers.items()):
            if f" {name} " in f" {' '.join(part)} ":
                known = parser._option_string_actions
                options = [word.split("=")[0] for word in part if word.startswith("--")]
                unknown += [(page, name, option) for option in options if option not in known]
                checked += len(options)
        file = ROOT / words[script] if script < len(words) else ROOT
        if file.is_file():
            options = [word.split("=")[0] for word in words[script:] if word.startswith("--")]
            unknown += [(page, file.name, option) for option in options if f'"{option}"' not in file.read_text()]
            checked += len(options)
    assert unknown == []
    assert checked > 25


def test_how_a_step_works_links_each_function_to_its_file() -> None:
    """Or class or constant. A method is named with its class."""
    page = ROOT / "docs" / "internals" / "how_a_step_works.md"
    found = 0
    for label, path in re.findall(r"\[([^][]+)\]\(([\w./-]+\.py)\)", page.read_text()):
        module = ".".join((page.parent / path).resolve().relative_to(ROOT).with_suffix("").parts)
        for name in re.findall(r"`([^`]+)`", label):
            value = operator.attrgetter(name)(importlib.import_module(module))
            assert getattr(value, "__module__", module) == module, f"{path} imports {name}"
            found += 1
    assert found > 100
