"""Object storage for tests: ``kept:///tmp/x`` keeps objects in files of a local directory, for any number of processes.

As in others an object appears when its upload ends, whole, and a kill before leaves nothing. There are no empty
directories and no rename. No object is replaced, unless a test allows it, because no name is ever used again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from tests.checkpoint.changes import Act, acting


def _objects_in(path: str) -> list[str]:
    return sorted(f"{root}/{name}" for root, _, names in os.walk(path) for name in names if not name.startswith("."))


class Kept(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """The file system of ``kept://``.

    Attributes:
        watch: called with the kind of each operation, the path, and a function that carries it out.
        bytes_read: by this process.
        replaces: a put may replace an object.
    """

    protocol = "kept"
    root_marker = "/"
    watch: ClassVar[Any] = staticmethod(lambda kind, path, action: action())
    bytes_read: ClassVar[int] = 0
    replaces: ClassVar[bool] = False

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        def look() -> list[dict[str, Any]]:
            objects = _objects_in(path)
            if not objects:
                raise FileNotFoundError(path)
            names = {each[len(path) + 1 :].partition("/")[0] for each in objects}
            return [self._info(f"{path}/{name}") for name in sorted(names)]

        found: list[dict[str, Any]] = Kept.watch("list", path, look)
        return found if detail else [each["name"] for each in found]

    def _info(self, path: str) -> dict[str, Any]:
        kind = "file" if os.path.isfile(path) else "directory"
        return {"name": path, "size": os.path.getsize(path) if kind == "file" else 0, "type": kind}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        data: bytes = Kept.watch("read", path, lambda: Path(path).read_bytes()[start:end])
        Kept.bytes_read += len(data)
        return data

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        Kept.watch("put", path, lambda: self.put_whole(path, value))

    def put_whole(self, path: str, value: bytes) -> None:
        """The moment at which an object appears."""
        assert Kept.replaces or not os.path.exists(path), f"{path} is there, and readers may have read it"
        os.makedirs(os.path.dirname(path), exist_ok=True)
        hidden = f"{os.path.dirname(path)}/.{os.path.basename(path)}.{os.getpid()}"
        Path(hidden).write_bytes(value)
        os.rename(hidden, path)

    def rm_file(self, path: str) -> None:
        def delete() -> None:
            os.unlink(path)
            with contextlib.suppress(OSError):
                os.rmdir(os.path.dirname(path))

        Kept.watch("delete", path, delete)

    def rm(self, path: str | list[str], recursive: bool = False, maxdepth: int | None = None) -> None:
        for each in [path] if isinstance(path, str) else reversed(path):
            if recursive:  # as s3fs does, also for an object
                Kept.watch("list", each, lambda: None)
            for found in [each] if os.path.isfile(each) else reversed(_objects_in(each) if recursive else []):
                self.rm_file(found)

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **_: Any) -> Any:
        assert mode == "wb"
        return _Upload(self, path, mode, block_size)


class _Upload(AbstractBufferedFile):  # type: ignore[misc]
    def _initiate_upload(self) -> None:
        self.parts: list[bytes] = []

    def _upload_chunk(self, final: bool = False) -> bool:
        Kept.watch("upload", self.path, lambda: self.parts.append(self.buffer.getvalue()))
        if final:
            Kept.watch("put", self.path, lambda: self.fs.put_whole(self.path, b"".join(self.parts)))
        return True


fsspec.register_implementation("kept", Kept, clobber=True)


@contextlib.contextmanager
def at_operation(number: int, act: Act, *, lasting: bool = False) -> Iterator[list[str]]:
    """Inside, ``act(real_call)`` takes the place of the operation with this number, from 0, or of `lasting` ones.

    Yields:
        The operations so far, as "put /tmp/x".
    """
    done: list[str] = []
    carry_out = acting(done, number, act, lasting)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Kept, "watch", staticmethod(lambda kind, path, action: carry_out(f"{kind} {path}", action)))
        yield done
