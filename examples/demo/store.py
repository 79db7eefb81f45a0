"""Watches the demo's store while jobs run: which checkpoints became visible, and was any of them partial?

The store is a local folder here, so polling is cheap: one listing per poll, and each manifest is read once.
"""

from __future__ import annotations

from pathlib import Path

from holdfast.errors import HoldfastError
from holdfast.image.manifest import Manifest, is_manifest_name
from holdfast.image.proof_record import proof_name

__all__ = ["StoreWatch"]

PRIVATE = ".holdfast"  # holdfast's own claims and temporary files; holds no checkpoints


class StoreWatch:
    """Observations of one run's folder.

    Attributes:
        seen: Newest content of every manifest that was ever visible, by name.
        partial: Files that should not have been visible, with the reason.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.seen: dict[str, Manifest] = {}
        self.partial: list[str] = []

    def look(self) -> None:
        """List the store once; every new manifest must belong to a complete file."""
        if not self._folder.is_dir():
            return
        for path in self._folder.iterdir():
            known = self.seen.get(path.name)
            if is_manifest_name(path.name) and (known is None or known.state == "durable"):
                self._read(path)

    def published(self) -> dict[Path, Manifest]:
        """Return each file now in the store with its manifest, oldest first."""
        self.look()
        there = [name for name in self.seen if (self._folder / name).exists()]
        manifests = sorted((self.seen[name] for name in there), key=lambda manifest: manifest.order)
        return {self._folder / manifest.file: manifest for manifest in manifests}

    def strangers(self) -> list[str]:
        """List the names in the store that are neither manifest, file, proof nor holdfast's own folder."""
        published = self.published()
        expected = (
            {file.name for file in published}
            | {file.with_suffix(".json").name for file in published}
            | {proof_name(file.name) for file in published}
            | {PRIVATE}
        )
        return sorted(path.name for path in self._folder.iterdir() if path.name not in expected)

    def unfinished(self) -> list[str]:
        """List the temporary files left behind in holdfast's own folder."""
        private = self._folder / PRIVATE
        return sorted(
            str(path.relative_to(self._folder)) for path in private.rglob("*") if ".pt" in path.name
        )

    def _read(self, path: Path) -> None:
        try:
            manifest = Manifest.from_bytes(path.read_bytes(), source=path.name)
            file_bytes = (self._folder / manifest.file).stat().st_size
        except FileNotFoundError:
            if path.exists():  # otherwise retention has just removed both
                self.partial.append(f"{path.name} is there without its file")
            return
        except HoldfastError as error:
            self.partial.append(str(error))
            return
        if file_bytes != manifest.image_bytes:
            self.partial.append(
                f"{manifest.file} has {file_bytes} bytes, its manifest says {manifest.image_bytes}"
            )
        self.seen[path.name] = manifest
