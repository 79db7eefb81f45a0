"""Why two undisturbed runs of a script differ, and which call fixes it. Pure.

batches of the first step differ   ─► the data is not seeded
batches are equal                  ─► the model is not seeded, or an operation is not deterministic
batches are unknown                ─► either
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Lines = Sequence[Mapping[str, Any]]

_DATA = (
    "seed the data: a ResumableSampler has a seed of its own, and DataLoader(shuffle=True) takes "
    "generator=torch.Generator().manual_seed(1)"
)
_MODEL = (
    "call torch.manual_seed(1) before the model is made (Lightning: seed_everything(1, workers=True), Transformers: "
    "set_seed(1))"
)
_KERNELS = "torch.use_deterministic_algorithms(True) finds operations that are not deterministic"
_PAGE = "docs/drill.md#a-script-that-is-not-deterministic"


def advice_on_seeding(reference: Lines, drilled: Lines) -> str:
    """Return a sentence that names the calls which would make the two runs equal before any kill."""
    want, got = _first_batches(reference), _first_batches(drilled)
    ranks = want.keys() & got.keys()
    differ = sorted(rank for rank in ranks if want[rank] != got[rank])
    if differ:
        return f"The batches of rank {differ[0]} differ already at its first step: {_DATA} ({_PAGE})"
    if ranks:
        return f"The batches of the first step are equal: {_MODEL}; {_KERNELS} ({_PAGE})"
    return f"In the script, {_MODEL}, and {_DATA}; {_KERNELS} ({_PAGE})"


def _first_batches(diary: Lines) -> dict[int, tuple[int, Sequence[int]]]:
    """Return for each rank its first step and the CRC of each of its batches."""
    found: dict[int, tuple[int, Sequence[int]]] = {}
    for line in diary:
        if "batches" in line:
            found.setdefault(int(line["rank"]), (line["batches"]["step"], line["batches"]["crcs"]))
    return found
