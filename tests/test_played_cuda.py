"""The compiled device of `tests.played_cuda`: where its builds lie, and what a killed build leaves behind."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.played_cuda import build, library

# A Python module of one number: it compiles in a second, the device in half a minute.
MODULE = """
#include <Python.h>
#define NAME_OF(name) PyInit_##name
#define INIT(name) NAME_OF(name)
static PyModuleDef module = {{PyModuleDef_HEAD_INIT, "number"}};
PyMODINIT_FUNC INIT(TORCH_EXTENSION_NAME)() {{
    PyObject *made = PyModule_Create(&module);
    PyModule_AddIntConstant(made, "number", {number});
    return made;
}}
"""


@pytest.mark.skipif(not (shutil.which("c++") and shutil.which("ninja")), reason="no compiler, or no ninja")
def test_a_left_over_lock_stops_no_build_and_each_source_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch waits for a file named lock for ever. A second build of a source takes the library that is there."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    sources = [tmp_path / f"{number}.cpp" for number in (1, 2)]
    for number, source in enumerate(sources, start=1):
        source.write_text(MODULE.format(number=number))
        for name in ("played_cuda", library(source).stem):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "lock").touch()
    assert [build(source).number for source in sources] == [1, 2]
    build.cache_clear()
    monkeypatch.setenv("PATH", "")
    assert [build(source).number for source in sources] == [1, 2]
