"""On PYTHONPATH of a job: gives all its processes an fsspec driver that holdfast does not know.

`elsewhere://` keeps its files on this machine, but holdfast treats it as any object store behind fsspec.
"""

from fsspec import register_implementation
from fsspec.implementations.local import LocalFileSystem


class ElsewhereFileSystem(LocalFileSystem):
    protocol = ("elsewhere", "elsewhere")

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("elsewhere://")))  # type: ignore[no-untyped-call]


register_implementation("elsewhere", ElsewhereFileSystem, clobber=True)  # type: ignore[no-untyped-call]
