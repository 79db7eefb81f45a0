"""Checkpoints as a job writes them, with the names of what has numbers in them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.image.manifest import Manifest
from tests.support.restoring import publish
from tests.unit.trainer_side.assemble import save


def publish_named(root: Path, step: int, state: Mapping[str, Any]) -> Manifest:
    """Write the file of a job of one rank, and its manifest."""
    root.mkdir(exist_ok=True)
    path = root / "image"
    save(state, path)
    image = path.read_bytes()
    path.unlink()
    return publish(root, step, None, image=image)
