"""States of a file system after the machine lost power: every state that the calls of the real code allow.

    PosixStore ─► os.open, pwrite, ftruncate, fsync, rename, link, unlink, mkdir   (recorded, and really done)
                                      │
                    power fails after the n-th call: fsynced bytes of a file survive, of the rest any part;
                    fsynced entries of a directory survive, of later changes any part; a rename is all or none

The calls are recorded in Python's `os`, so the order is the product's real one.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Call", "Disk", "PowerCut"]


class PowerCut(BaseException):
    """The process dies here."""


@dataclass
class Call:
    """One call. `place`: the directory or inode that a later fsync makes durable."""

    what: str
    place: Any
    name: str = ""
    inode: int = -1
    offset: int = 0
    data: bytes = b""
    note: Any = None


@dataclass
class Disk:
    """Records under `root`. `die_at`: raise `PowerCut` instead of the call with this number."""

    root: Path
    calls: list[Call] = field(default_factory=list)
    die_at: int = -1
    skip: Callable[[Call], bool] = lambda call: False  # a deliberate bug: not recorded, so never durable
    _paths: dict[int, tuple[str, int]] = field(default_factory=dict)
    _files: dict[int, int] = field(default_factory=dict)  # inode → which of the files that had this number

    def returned(self, note: Any) -> None:
        """Record that the product reports something as durable."""
        self.calls.append(Call("returned", None, note=note))

    def _file(self, status: os.stat_result, *, new: bool = False) -> int:
        """A number for the file behind an inode; an inode that is reused gets a new number."""
        if new:
            self._files[status.st_ino] = -2 - len(self.calls)
        return self._files.get(status.st_ino, status.st_ino)

    def _add(self, call: Call) -> None:
        if len(self.calls) == self.die_at:
            self.die_at = -1
            raise PowerCut
        self.calls.append(call)

    # -- recording -----------------------------------------------------------------------------------------------

    @contextmanager
    def recording(self) -> Iterator[None]:  # noqa: C901 - one fake for each call
        """Record all calls of this process below the root."""
        real = {
            name: getattr(os, name)
            for name in ("open", "close", "pwrite", "ftruncate", "fsync", "rename", "link", "unlink", "mkdir")
        }
        root = str(self.root)

        def inside(path: Any, directory: int | None = None) -> str | None:
            text = whole(path, directory)
            return os.path.relpath(text, root) if text.startswith(root) else None

        def whole(path: Any, directory: int | None) -> str:
            if isinstance(path, int):
                return ""
            text = str(os.fspath(path))
            if directory is not None:
                text = os.path.join(root, self._paths[directory][0], text)  # noqa: PTH118
            return os.path.abspath(text)  # noqa: PTH100

        def where(path: str) -> tuple[str, str]:
            head, tail = os.path.split(path)
            return head or ".", tail

        def sim_open(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            name = inside(path, kwargs.get("dir_fd"))
            new = name is not None and flags & os.O_CREAT and not os.path.lexists(path)
            fd: int = real["open"](path, flags, *args, **kwargs)
            if name is not None:
                inode = self._file(os.fstat(fd), new=bool(new))
                if new:
                    directory, last = where(name)
                    self._add(Call("link", directory, last, inode))
                self._paths[fd] = (name, inode)
            return fd

        def sim_close(fd: int) -> None:
            self._paths.pop(fd, None)
            real["close"](fd)

        def sim_pwrite(fd: int, data: Any, offset: int) -> int:
            if fd in self._paths:
                inode = self._paths[fd][1]
                self._add(Call("data", inode, inode=inode, offset=offset, data=bytes(data)))
            return int(real["pwrite"](fd, data, offset))

        def sim_ftruncate(fd: int, nbytes: int) -> None:
            if fd in self._paths:
                inode = self._paths[fd][1]
                self._add(Call("size", inode, inode=inode, offset=nbytes))
            real["ftruncate"](fd, nbytes)

        def sim_fsync(fd: int) -> None:
            if fd in self._paths:
                name, inode = self._paths[fd]
                is_directory = (self.root / name).is_dir()
                self._add(Call("sync", name if is_directory else inode))
            real["fsync"](fd)

        def sim_rename(source: Any, target: Any, *args: Any, **kwargs: Any) -> None:
            source_at = whole(source, kwargs.get("src_dir_fd"))
            old, new = inside(source_at), inside(target, kwargs.get("dst_dir_fd"))
            if old is not None and new is not None:
                inode = self._file(os.lstat(source_at)) if os.path.lexists(source_at) else -1
                if inode != -1:
                    directory, last = where(new)
                    self._add(Call("rename", directory, last, inode, note=old))
            real["rename"](source, target, *args, **kwargs)

        def sim_link(source: Any, target: Any, *args: Any, **kwargs: Any) -> None:
            source_at, target_at = (
                whole(source, kwargs.get("src_dir_fd")),
                whole(target, kwargs.get("dst_dir_fd")),
            )
            new = inside(target_at)
            if new is not None and not os.path.lexists(target_at):
                directory, last = where(new)
                self._add(Call("link", directory, last, self._file(os.lstat(source_at))))
            real["link"](source, target, *args, **kwargs)

        def sim_unlink(path: Any, *args: Any, **kwargs: Any) -> None:
            at = whole(path, kwargs.get("dir_fd"))
            name = inside(at)
            if name is not None and os.path.lexists(at):
                directory, last = where(name)
                self._add(Call("unlink", directory, last))
            real["unlink"](path, *args, **kwargs)

        def sim_mkdir(path: Any, *args: Any, **kwargs: Any) -> None:
            name = inside(path)
            if name is not None and not os.path.lexists(path):
                directory, last = where(name)
                self._add(Call("mkdir", directory, last))
            real["mkdir"](path, *args, **kwargs)

        fakes = {
            "open": sim_open,
            "close": sim_close,
            "pwrite": sim_pwrite,
            "ftruncate": sim_ftruncate,
            "fsync": sim_fsync,
            "rename": sim_rename,
            "link": sim_link,
            "unlink": sim_unlink,
            "mkdir": sim_mkdir,
        }
        try:
            for name, fake in fakes.items():
                setattr(os, name, fake)
            yield
        finally:
            for name, function in real.items():
                setattr(os, name, function)

    # -- what may be left ----------------------------------------------------------------------------------------

    def after_power_cut(self, count: int, chance: random.Random) -> tuple[dict[str, bytes], list[Any]]:  # noqa: C901
        """Return one possible state after `count` calls and a power cut, and the promises made until then."""
        calls = self.calls[:count]
        synced: dict[Any, int] = {}
        for number, call in enumerate(calls):
            if call.what == "sync" and not self.skip(call):
                synced[call.place] = number
        kept_share = chance.choice([0.0, 0.3, 0.7, 1.0])
        files: dict[int, bytearray] = {}
        names: dict[str, int] = {}  # path → inode; -1: a directory
        notes = []
        for number, call in enumerate(calls):
            if call.what == "returned":
                notes.append(call.note)
                continue
            if call.what == "sync":
                continue
            durable = number < synced.get(call.place, -1)
            if not durable and chance.random() >= kept_share:
                continue
            path = call.name if call.place == "." else f"{call.place}/{call.name}"
            match call.what:
                case "data":
                    body = files.setdefault(call.inode, bytearray())
                    body.extend(bytes(max(0, call.offset + len(call.data) - len(body))))
                    body[call.offset : call.offset + len(call.data)] = call.data
                case "size":
                    body = files.setdefault(call.inode, bytearray())
                    body.extend(bytes(max(0, call.offset - len(body))))
                    del body[call.offset :]
                case "link":
                    names[path] = call.inode
                case "mkdir":
                    names[path] = -1
                case "rename":
                    names.pop(call.note, None)
                    names[path] = call.inode
                case "unlink":
                    names.pop(path, None)
        found = {}
        for path, inode in names.items():
            parents = [str(parent) for parent in Path(path).parents if str(parent) != "."]
            if inode != -1 and all(names.get(parent) == -1 for parent in parents):
                found[path] = bytes(files.get(inode, b""))
        return found, notes
