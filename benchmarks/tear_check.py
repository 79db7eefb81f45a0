"""`python -m benchmarks.tear_check [TENSORS]`: the cost per tensor of checking that a copy is not torn.

A model with AdamW in host memory, in one process, without a stager; medians and minima of several rounds. The save
beside it is the training thread's work for the same tensors: state dicts, capture, and the part copied at once.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks import machine
from holdfast.wire.state_messages import Agreement
from trainer_side.save.copy_plan import Batch, Router, SlicePlan
from trainer_side.save.staging import CopyEngine, Staging
from trainer_side.save.tearing import SavedInstant, TearCheck, compare_bytes
from trainer_side.state.skeleton import capture, plan
from trainer_side.state.tensor_table import table
from trainer_side.state.tree import classify, collect

_LARGE_BYTES = 256 << 20
_NUMEL, _ROUNDS, _TENSORS_OF_A_LAYER = 1024, 15, 4  # a parameter has two moments and a counter


def main() -> None:
    layers = (int(sys.argv[1]) if len(sys.argv) > 1 else 10_000) // _TENSORS_OF_A_LAYER
    torch.set_num_threads(1)
    model = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(_NUMEL)) for _ in range(layers))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    tree = collect(state)
    proposed = table(state, tree, rank=0, ranks=1)
    skeleton = plan(
        tree,
        classify(state, tree),
        rank=0,
        ranks=1,
        chunk_bytes=8 << 20,
        agreed=Agreement(2 * proposed.pickle_bytes, {}),
    )
    pieces = SlicePlan.of(skeleton.layout, 0, skeleton.gated)
    check, router = TearCheck(skeleton.layout, pieces, skeleton.gated, {}), Router(pieces)
    area = Staging(skeleton, pieces, CopyEngine(), pinned=False)

    def save() -> Any:
        taken = capture(collect(state), skeleton, defer=True)
        assert taken is not None
        area.copy_now(taken.sources, taken.contents)
        return taken

    taken = save()
    instant = check.capture_instant(taken, 0)
    assert instant is not None

    def copy(instant: SavedInstant | None) -> None:
        def look(batch: Batch) -> None:
            assert instant is None or not instant.find_changed_in(batch)

        def look_at_copy(batch: Batch) -> None:
            assert instant is None or not instant.find_miscopied(batch, area.memory)

        area.copy_gated(
            taken.sources,
            router.route(taken.sources, dict, order_changed=False),
            after=None,
            cancelled=lambda: False,
            release=lambda _: None,
            on_all_read=lambda: None,
            on_read=look,
            on_copied=look_at_copy,
        )

    tensors = len(check.entry_of_tensor)
    processor, mib = machine.describe(Path.cwd())["processor"], skeleton.layout.image_bytes >> 20
    click.echo(f"{processor}; {tensors} tensors behind the gate, {mib} MiB")
    for name, call in (
        ("save(), without", save),
        ("save(): counters and words are taken", lambda: check.capture_instant(taken, 7)),
        ("the first update, while a copy is under way", instant.find_changed),
        ("the whole comparison, before an update", lambda: instant.find_uncounted_change(area.memory)),
        ("copy thread, without", lambda: copy(None)),
        ("copy thread, with", lambda: copy(instant)),
    ):
        median, least = _seconds(call)
        click.echo(
            f"{name:45} {1e6 * median / tensors:7.2f} us a tensor, at least {1e6 * least / tensors:.2f}"
        )
    live, there = (torch.ones(_LARGE_BYTES, dtype=torch.uint8) for _ in range(2))
    places = there.data_ptr(), live.data_ptr(), _LARGE_BYTES
    for name, call in (
        ("a large tensor: the copy", lambda: ctypes.memmove(*places)),
        ("a large tensor: the whole comparison", lambda: compare_bytes(*places)),
    ):
        median, least = _seconds(call)
        click.echo(
            f"{name:45} {1e12 * median / _LARGE_BYTES:7.1f} ms a GB, at least {1e12 * least / _LARGE_BYTES:.1f}"
        )


def _seconds(call: Callable[[], object]) -> tuple[float, float]:
    found = []
    for _ in range(_ROUNDS):
        begun = time.perf_counter()
        call()
        found.append(time.perf_counter() - begun)
    return statistics.median(found), min(found)


if __name__ == "__main__":
    main()
