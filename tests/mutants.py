"""Mutants of a file of the package: one small change each, which some test should notice. Run by hand:

    python -m tests.mutants core/slots                        # of all functions of a file
    python -m tests.mutants core/unit_grads UnitGrads.give    # of those whose name begins so

A mutant leaves out a statement, a context, a branch or a part of a condition, or turns a flag or a limit round. Each
is applied to a copy of the repository in a temporary directory, never to the tree. A mutant that lived is a question: a
test is missing, the code is superfluous, or both do the same and one is faster. `tests/test_waits.py` leaves out each
line that waits (``# rule 5``) in every run of the tests, and wants the rule's name.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 150.0  # of all tests of one mutant; one that hangs is caught
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",  # which would be taken for that of the next mutant, of the same size and second
    "TEST_GROUP_TIMEOUT_S": "15",
    "TEST_RUN_TIMEOUT_S": "25",
}
# Tests of a package or file besides those with its name, in the order of trying: without prefix and suffix.
TESTS = {
    "": "matrix programs loops",
    "comm": "transport groups shared_memory simulated_device flight_recorder same_bits",
    "core": "invariants programs matrix loops graphs dial pieces simulated_device absent_weights replicas",
    "core/host": "offload offload_events offload_device",
    "core/late_step": "offload offload_events offload_device",
    "core/outer_shards": "replicas",
    "core/reductions": "step_in_backward",
    "core/slots": "shared_memory",
    "core/unit": "shared_memory experts_and_context",
    "core/unit_grads": "lookups tied",
    "checkpoint": "restore directory manifest object_storage kills export state_dicts stop_on_signal",
    "forms": "tensor_parallel parallelism_config frozen bitsandbytes",
    "guards": "absent_weights written_weights pieces modules bad_input tensor_parallel",
    "integrations": "accelerate",
    "layer_major": "accumulate",
    "optim": "whole_parameters whole_with state wrappers",
    "planning": "detection program memory layout",
}
_TURNED = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}


class Mutant(NamedTuple):
    """A change of a file.

    Attributes:
        function: ``name`` or ``Class.name``.
        line: of the change.
        what: the change, in words.
        text: of the changed file.
    """

    function: str
    line: int
    what: str
    text: str

    def __str__(self) -> str:
        return f"{self.line:4} {self.function}: {self.what}"


def mutants_of(source: str) -> Iterator[Mutant]:
    """All mutants of a file with this text, in order of its functions."""
    starts, encoded = [0], source.encode()
    for line in encoded.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def range_of(node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def segment(node: ast.expr | ast.stmt) -> str:
        first, last = range_of(node)
        return encoded[first:last].decode()

    def changes(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, int | None, str, str]]:
        """The node to replace, up to which byte (None: its end), by which text, and the change in words."""
        match node:
            case ast.Expr(value=ast.Constant()):  # a docstring
                return
            case ast.Expr() | ast.AugAssign() | ast.Delete() | ast.Raise():
                yield node, None, "pass", f"without {segment(node)}"
            case ast.Assign() if all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets):
                yield node, None, "pass", f"without {segment(node)}"
            case ast.With(items=items) if not any(item.optional_vars for item in items):
                colon = encoded.index(b":", range_of(items[-1].context_expr)[1])
                yield node, colon, "if True", f"outside of {', '.join(segment(item.context_expr) for item in items)}"
            case ast.If(test=test) | ast.IfExp(test=test):
                yield test, None, "False", f"as if not {segment(test)}"
            case ast.BoolOp(op=op, values=values):
                word = " and " if isinstance(op, ast.And) else " or "
                for value in values:
                    left = word.join(f"({segment(each)})" for each in values if each is not value)
                    yield node, None, f"({left})", f"without{word}{segment(value)}"
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield node, None, f"bool({segment(operand)})", f"without not: {segment(operand)}"
            case ast.Compare(left=left, ops=[operator], comparators=[right]) if type(operator) in _TURNED:
                turned = f"({segment(left)}) {_TURNED[type(operator)]} ({segment(right)})"
                yield node, None, turned, f"the other limit: {turned}"
            case ast.keyword(arg=str(name), value=ast.Constant(value=bool(flag)) as constant):
                yield constant, None, str(not flag), f"{name}={not flag}"

    def visit(node: ast.AST, path: str, *, is_inside: bool) -> Iterator[Mutant]:
        for child in ast.iter_child_nodes(node):
            name, is_function = getattr(child, "name", ""), isinstance(child, ast.FunctionDef)
            inner = f"{path}.{name}".strip(".") if is_function or isinstance(child, ast.ClassDef) else path
            if is_inside and not is_function:
                for changed, end, new, what in changes(child):
                    first, last = range_of(changed)
                    text = encoded[:first] + new.encode() + encoded[last if end is None else end :]
                    yield Mutant(path, changed.lineno, " ".join(what.split()), text.decode())
            yield from visit(child, inner, is_inside=is_inside or is_function)

    yield from visit(ast.parse(source), "", is_inside=False)


def likely_tests(file: str) -> list[str]:
    """The files of tests that are likely to notice a mutant of ``streamshard/<file>.py``, in the order of trying."""
    package, _, name = file.rpartition("/")
    names = f"{name} {TESTS.get(file, '')} {TESTS.get(package or file, TESTS[''])}".split()
    found = [path for each in dict.fromkeys(names) for path in sorted((ROOT / "tests").rglob(f"test_{each}.py"))]
    return [str(path.relative_to(ROOT)) for path in found]


def _run_tests(arguments: Sequence[str], root: Path) -> tuple[str, str]:
    """Whether the mutant in this copy of the repository is "caught", and by which test."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "--no-header", "-p", "no:cacheprovider", *arguments],
        cwd=root,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that ranks which hang can be ended with it
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return "caught", "a test that hangs"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode == 0:
        return "lived", ""
    if found := re.search(r"^(?:FAILED|ERROR) tests/(?:\w+/)?test_(\w+)\.py(?:::(\w+))?", output, re.MULTILINE):
        return "caught", f"{found[1]}: {found[2] or 'cannot be imported'}"
    if process.returncode == 1:
        return "caught", "a test"
    raise RuntimeError(f"pytest ended with {process.returncode}:\n{output[-2000:]}")


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module; 1 if a mutant lived."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="below streamshard/, without .py")
    parser.add_argument("functions", nargs="*", help="only functions whose names begin so")
    given = parser.parse_args(arguments)
    mutants = list(mutants_of((ROOT / "streamshard" / f"{given.file}.py").read_text()))
    mutants = [each for each in mutants if each.function.startswith(tuple(given.functions) or "")]
    tests, lived = likely_tests(given.file), []
    with tempfile.TemporaryDirectory(prefix="mutants_") as directory:
        for name in ("streamshard", "tests"):
            shutil.copytree(ROOT / name, Path(directory, name), ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(ROOT / "docs" / "examples", Path(directory, "docs", "examples"))  # which tests run
        shutil.copy(ROOT / "pyproject.toml", directory)
        path = Path(directory, "streamshard", f"{given.file}.py")
        for number, mutant in enumerate(mutants, 1):
            began = time.monotonic()
            path.write_text(mutant.text)
            result, why = _run_tests(tests, Path(directory))
            lived += [mutant] if result == "lived" else []
            print(f"{number}/{len(mutants)} {time.monotonic() - began:5.1f} s  {result:6}  {mutant}  {why}", flush=True)
    print("\n".join([f"\n{len(lived)} of {len(mutants)} lived", *map(str, lived)]))
    return int(bool(lived))


if __name__ == "__main__":
    sys.exit(main())
