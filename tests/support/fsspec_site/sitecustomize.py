"""On PYTHONPATH of a job: gives every process of it an fsspec driver that holdfast has never heard of.

`elsewhere://` keeps its files on this machine, but as far as holdfast knows it is any object store behind fsspec.
"""

from fsspec import register_implementation
from fsspec.implementations.local import LocalFileSystem


class ElsewhereFileSystem(LocalFileSystem):
    protocol = ("elsewhere", "elsewhere")

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("elsewhere://")))  # type: ignore[no-untyped-call]


register_implementation("elsewhere", ElsewhereFileSystem, clobber=True)  # type: ignore[no-untyped-call]
