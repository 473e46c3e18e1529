"""One module names torch's private functions. `StreamShard` loads the core alone. Scripts find the package."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import streamshard

PACKAGE = Path(streamshard.__file__).parent
# torch._C, torch.utils._pytree, torch.distributed.distributed_c10d, group._get_backend; not torch._foreach_add_
PRIVATE = re.compile(
    r"\btorch(\.\w+)*\._(?!foreach_|_version__)\w+|\bdistributed_c10d import|\bdist\._\w+|\._get_backend\b"
)


def test_only_one_module_uses_private_functions_of_torch() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.name != "torch_private.py"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if PRIVATE.search(line)
    ]
    assert found == []


def test_the_class_loads_the_core_alone_and_training_no_code_for_hugging_face(tmp_path: Path) -> None:
    """No instrument, checkpoint, optimizer, integration or transport, and none of the libraries that these need.

    Then a model of torch.nn is trained, saved and loaded; an export splits files by huggingface_hub. At last each
    public name is found: by itself, by a star, and in ``dir``.
    """
    code = f"""
import sys
from streamshard import StreamShard
print(*sys.modules)
import torch
import torch.distributed as dist
from streamshard import export_safetensors, init_weights, load_safetensors

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
with torch.device("meta"):
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
model = StreamShard(model)
init_weights(model)
model(torch.ones(2, 4)).sum().backward()
torch.optim.SGD(model.parameters(), 0.1).step()
export_safetensors(model, {str(tmp_path)!r})
load_safetensors(model, {str(tmp_path)!r})
names = ("streamshard.integrations.", "transformers", "peft", "diffusers", "accelerate")
dist.destroy_process_group()
print(sorted(name for name in sys.modules if name.startswith(names)))
import streamshard
assert streamshard.optim.WholeParameterOptimizer and not hasattr(streamshard, "nothing")
names = {{}}
exec("from streamshard import *", names)
for name in streamshard.__all__:
    print(name, getattr(streamshard, name) is names[name], name in dir(streamshard))
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    first, in_training, *lines = done.stdout.splitlines()
    modules = first.split()
    loaded = {name for name in modules if name.partition(".")[0] == "streamshard"}
    assert len(loaded) <= 49
    others = "tools", "checkpoint", "optim", "integrations", "build", "functions", "initialise", "full", "comm.gloo"
    assert [name for name in sorted(loaded) if name.removeprefix("streamshard.").startswith(others)] == []
    libraries = "transformers", "peft", "accelerate", "safetensors", "huggingface_hub", "matplotlib"
    assert [name for name in libraries if name in modules] == []
    assert in_training == "[]"
    assert lines == [f"{name} True True" for name in streamshard.__all__]


def test_a_script_beside_an_editable_clone_finds_the_package(tmp_path: Path) -> None:
    """Python takes the clone's folder, which has the package's name, for a package if it finds no other one.

    A wheel has the list of public names.
    """
    pytest.importorskip("setuptools", "77")
    clone, site = tmp_path / "streamshard", tmp_path / "site"
    clone.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(PACKAGE.parent / name, clone)
    shutil.copytree(PACKAGE, clone / "streamshard", ignore=shutil.ignore_patterns("__pycache__"))
    for kind in ("editable", "wheel"):
        build = f"from setuptools.build_meta import build_{kind}; build_{kind}({str(tmp_path / kind)!r})"
        subprocess.run([sys.executable, "-c", build], cwd=clone, check=True, capture_output=True, timeout=60)
    editable, wheel = (zipfile.ZipFile(next((tmp_path / kind).glob("*.whl"))) for kind in ("editable", "wheel"))
    assert "streamshard/__init__.pyi" in wheel.namelist()
    editable.extractall(site)
    script = tmp_path / "script.py"
    script.write_text(f"import site; site.addsitedir({str(site)!r})\nfrom streamshard import __file__\nprint(__file__)")
    run = [sys.executable, "-S", str(script)]  # without what is installed here
    found = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert found.stdout.strip() == str(clone / "streamshard" / "__init__.py"), found.stderr


def test_the_page_lists_modules_in_the_order_of_the_import_contract() -> None:
    """docs/internals/design.md, "Where to look". Integrations have places of their own."""
    root = PACKAGE.parent
    found = re.search(r"^layers = \[(.*?)^\]", (root / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    layers = [re.findall(r"[\w.]+", line) for line in found[1].strip().splitlines()]
    places = {name: place for place, layer in enumerate(layers) for name in layer if "integrations" not in name}
    table = (root / "docs/internals/design.md").read_text().partition("Imports point downward in this list")[2]
    cells = re.findall(r"^\| (`[^|]+) \|", table, re.MULTILINE)
    rows = [[name for name in re.findall(r"`(\w+)(?:/|\.py)`", cell) if name in places] for cell in cells]
    assert {name for row in rows for name in row} == places.keys() - {"__main__"}
    order = [(min(row_places), max(row_places)) for row in rows if (row_places := [places[name] for name in row])]
    assert all(before[1] <= after[0] for before, after in zip(order, order[1:], strict=False)), rows


def test_no_two_functions_or_classes_have_one_name() -> None:
    places: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(path.name)
    assert {name: files for name, files in places.items() if len(files) > 1} == {}
