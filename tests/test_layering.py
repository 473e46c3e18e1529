"""One module names torch's private functions."""

from __future__ import annotations

import re
from pathlib import Path

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
