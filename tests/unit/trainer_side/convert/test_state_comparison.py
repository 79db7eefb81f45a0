"""`holdfast diff`: two states compared by tensor, with numbers; equal tensors of verified checkpoints are not read."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.command import cli
from holdfast.command.converters import ComparedFile, StateComparison
from holdfast.errors import ConfigError, DamageError, StateError
from holdfast.image.manifest import State, manifest_name
from tests.support.restoring import CountingStore, publish
from trainer_side.convert import state_comparison
from trainer_side.convert.contents import Contents
from trainer_side.convert.state_comparison import compare, compare_tensors

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", FLOATS)
def test_numbers_of_a_floating_dtype(dtype: torch.dtype) -> None:
    first = torch.tensor([1.0, 2.0, 4.0, -8.0]).to(dtype)
    second = torch.tensor([1.0, 2.0, 2.0, -8.0]).to(dtype)
    found = compare_tensors(first, second)
    assert (found.differing, found.max_abs, found.mean_abs, found.max_relative) == (1, 2.0, 0.5, 0.5)
    assert found.relative == pytest.approx(2.0 / math.sqrt(1 + 4 + 16 + 64))
    assert found.nonfinite == (0, 0)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.complex64,
        torch.complex128,
    ],
)
def test_numbers_of_other_dtypes(dtype: torch.dtype) -> None:
    first, second = torch.tensor([0, 1, 1]).to(dtype), torch.tensor([1, 1, 0]).to(dtype)
    found = compare_tensors(first, second)
    assert (found.differing, found.max_abs, found.relative) == (2, 1.0, 1.0)


def test_nan_and_infinite_elements_are_counted_and_left_out_of_the_numbers() -> None:
    first = torch.tensor([math.nan, math.inf, 1.0, 2.0])
    second = torch.tensor([math.nan, 1.0, math.nan, 2.5])
    found = compare_tensors(first, second)
    assert (found.differing, found.max_abs, found.mean_abs, found.nonfinite) == (3, 0.5, 0.5, (2, 2))


def test_zeros_of_two_signs_differ_in_their_bits_alone() -> None:
    found = compare_tensors(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]))
    assert (found.differing, found.max_abs, found.relative) == (1, 0.0, 0.0)


def test_two_dtypes_are_compared_by_value() -> None:
    first = torch.tensor([1.0, 1.001, math.nan])
    found = compare_tensors(first, first.to(torch.bfloat16))
    assert found.differing == 1
    assert found.max_abs == pytest.approx(0.001, rel=1e-3)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0)])
def test_scalars_and_empty_tensors(shape: tuple[int, ...]) -> None:
    assert compare_tensors(torch.zeros(shape), torch.zeros(shape))[:4] == (0, 0.0, 0.0, 0.0)
    assert compare_tensors(torch.zeros(shape), torch.ones(shape)).differing == math.prod(shape)


@given(st.lists(st.tuples(st.floats(width=32), st.floats(width=32)), max_size=40), st.integers(1, 7))
def test_blocks_of_any_size_give_the_same_numbers(pairs: list[tuple[float, float]], block: int) -> None:
    first, second = (torch.tensor([pair[side] for pair in pairs], dtype=torch.float32) for side in (0, 1))
    whole = compare_tensors(first, second)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_comparison, "_BLOCK_ELEMENTS", block)
        parts = compare_tensors(first, second)
    assert (
        parts.differing == whole.differing == int((first.view(torch.int32) != second.view(torch.int32)).sum())
    )
    assert (parts.max_abs, parts.max_relative, parts.nonfinite) == (
        whole.max_abs,
        whole.max_relative,
        whole.nonfinite,
    )
    assert parts.mean_abs == pytest.approx(whole.mean_abs)
    assert parts.relative == pytest.approx(whole.relative)


def state(**changes: Any) -> dict[str, Any]:
    torch.manual_seed(3)
    weight = torch.randn(60, 50)
    return {
        "model": {"weight": weight, "tied": weight, "bias": torch.zeros(50), "scale": torch.ones(())},
        "optimizer": {"param_groups": [{"lr": 0.1, "betas": (0.9, 0.999)}], "state": {}},
        "rng": tuple(range(600)),
        "step": 7,
        "nan": math.nan,
        **changes,
    }


class Pair:
    """Two checkpoints of a run, and what was read to compare them."""

    def __init__(self, root: Path, a: Any, b: Any, *, kept: State = State.VERIFIED) -> None:
        self.root, self.store = root, CountingStore(root)
        self.manifests = []
        for step, tree in enumerate((a, b)):
            manifest = publish(root, step, tree).model_copy(update={"state": kept})
            (root / manifest_name(manifest.file)).write_bytes(manifest.to_bytes())
            self.manifests.append(manifest)

    def compared(self, only: str | None = None) -> StateComparison:
        sides = [ComparedFile(store=self.store, manifest=manifest) for manifest in self.manifests]
        return compare(*sides, only=only, quiet=True)

    def bytes_of(self, side: int, path: str) -> int:
        manifest = self.manifests[side]
        return next(manifest.entries[one.entry].nbytes for one in manifest.tensors if one.path == path)

    def tensor_bytes_read(self) -> int:
        """Without begin and end of the two files, which are read in any case."""
        before = self.store.bytes_read
        for manifest in self.manifests:
            Contents(self.store, manifest)
        return before - (self.store.bytes_read - before)


def test_equal_tensors_of_verified_checkpoints_are_not_read(tmp_path: Path) -> None:
    changed = state()
    changed["model"]["bias"] = torch.full((50,), 0.5)
    pair = Pair(tmp_path, state(), changed)
    found = pair.compared()
    assert [one.path for one in found.tensors] == ["model/bias"]
    assert (found.equal_tensors, found.unread) == (3, 3)
    assert pair.tensor_bytes_read() == 2 * pair.bytes_of(0, "model/bias")


def test_equal_bytes_of_another_dtype_or_shape_are_no_equal_tensor(tmp_path: Path) -> None:
    first = {"flat": torch.zeros(6), "dtype": torch.zeros(6)}
    second = {"flat": torch.zeros(2, 3), "dtype": torch.zeros(6, dtype=torch.int32)}
    found = Pair(tmp_path, first, second).compared()
    assert (found.equal_tensors, found.unread) == (0, 0)
    assert [(one.path, one.dtypes[1], one.shapes[1]) for one in found.tensors] == [
        ("dtype", "int32", (6,)),
        ("flat", "float32", (2, 3)),
    ]


def test_tensors_of_a_checkpoint_that_was_not_read_back_are_read(tmp_path: Path) -> None:
    found = Pair(tmp_path, state(), state(), kept=State.DURABLE).compared()
    assert found.is_equal
    assert (found.equal_tensors, found.unread) == (4, 0)


def test_values_keys_dtypes_and_shapes_that_differ_are_named(tmp_path: Path) -> None:
    other = state(step=8, rng=tuple(range(1, 601)), more=[1, 2])
    other["model"]["bias"] = torch.zeros(51)
    other["model"]["scale"] = torch.ones((), dtype=torch.float64)
    del other["model"]["tied"]
    other["optimizer"]["param_groups"][0]["lr"] = 0.05
    found = Pair(tmp_path, state(), other).compared()
    assert (found.only_a, found.only_b) == (["model/tied"], ["more/0", "more/1"])
    assert [(one.path, one.dtypes, one.differing) for one in found.tensors] == [
        ("model/bias", ("float32", "float32"), None),
        ("model/scale", ("float32", "float64"), 0),
    ]
    values = {path: (first, second) for path, first, second in found.values}
    assert values.keys() == {"optimizer/param_groups/0/lr", "rng", "step"}
    assert values["step"] == ("7", "8")
    assert values["rng"][0].startswith("tuple of 600, SHA-256 ")
    assert values["rng"][0] != values["rng"][1]


def test_tensors_that_differ_are_sorted_by_the_relative_difference(tmp_path: Path) -> None:
    names = {"large": 1000.0, "small": 0.001, "middle": 1.0}
    first = {name: torch.full((4,), value) for name, value in names.items()}
    second = {name: torch.full((4,), value + 0.001) for name, value in names.items()}
    found = Pair(tmp_path, first, second).compared()
    assert [one.path for one in found.tensors] == ["small", "middle", "large"]


def test_only_compares_a_part(tmp_path: Path) -> None:
    pair = Pair(tmp_path, state(), state(step=8))
    assert pair.compared("model").is_equal
    with pytest.raises(StateError, match="there is no such name"):
        pair.compared("modle")


def test_damage_is_an_error_and_no_difference(tmp_path: Path) -> None:
    changed = state()
    changed["model"]["bias"] = torch.ones(50)
    pair = Pair(tmp_path, state(), changed)
    manifest = pair.manifests[1]
    entry = next(manifest.entries[one.entry] for one in manifest.tensors if one.path == "model/bias")
    file = tmp_path / manifest.file
    data = bytearray(file.read_bytes())
    data[entry.offset] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamageError, match="model/bias"):
        pair.compared()


def run_diff(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(["diff", *arguments])
    code = ended.value.code
    return int(code or 0), capsys.readouterr().out


def test_command_compares_steps_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed = state(step=8)
    changed["model"]["bias"] = torch.full((50,), math.inf)
    Pair(tmp_path / "run", state(), changed)
    run, file = str(tmp_path / "run"), str(tmp_path / "run/step-000000000.pt")
    assert run_diff(capsys, f"{run}@0", f"{run}@0")[0] == 0
    assert run_diff(capsys, f"{run}@0", file)[0] == 0
    code, said = run_diff(capsys, f"{run}@0", run)
    assert code == 1
    assert "model/bias" in said
    assert "50 (100.0%)" in said
    assert "0 / 50" in said
    assert "step: 7 -> 8" in said
    assert "3 tensors (3 by their CRC-32, not read)" in said
    assert "and 1 more (--limit)" in run_diff(capsys, f"{run}@0", run, "--limit", "0")[1]
    code, said = run_diff(capsys, file, f"{run}@1", "--json")
    document = json.loads(said)
    assert (code, document["equal"], document["unread"]) == (1, False, 0)
    assert document["tensors"][0]["nonfinite"] == [0, 50]
    assert document["values"] == [{"path": "step", "a": "7", "b": "8"}]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_sparse_tensors_of_files_are_compared_by_place_and_value(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """NaN included: equal bits are no difference."""
    dense = torch.tensor([[0.0, 1.0], [math.nan, 0.0]])
    files = []
    for number, (coo, csr) in enumerate([(dense, dense), (dense + torch.eye(2), dense.nan_to_num(2.0))]):
        files.append(str(tmp_path / f"{number}.pt"))
        torch.save({"coo": coo.to_sparse(), "csr": csr.to_sparse_csr()}, files[-1])
    assert run_diff(capsys, files[0], files[0])[0] == 0
    code, said = run_diff(capsys, *files, "--json")
    assert code == 1
    found = {one["path"]: (one["elements"], one["differing"]) for one in json.loads(said)["tensors"]}
    assert found == {"coo": (None, None), "csr": (2, 1)}


def test_command_refuses_what_it_cannot_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = Pair(tmp_path / "run", state(), state(), kept=State.BAD)
    assert run_diff(capsys, f"{pair.root}@0", f"{pair.root}@1")[0] == ConfigError.exit_code
    text = tmp_path / "file.pt"
    text.write_text("no checkpoint")
    assert run_diff(capsys, str(text), str(text))[0] == DamageError.exit_code
