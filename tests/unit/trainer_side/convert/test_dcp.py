"""Folders of torch.distributed.checkpoint: DCP reads our exports, and we import DCP's saves."""

from __future__ import annotations

import dataclasses
import io
import itertools
import os
import pickle
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_saver import save

from holdfast.command import cli
from holdfast.errors import DamageError
from holdfast.store import open_store
from tests.support.blocked import environment_without
from tests.support.restoring import publish
from tests.unit.trainer_side.convert.test_safetensors_out import training_state
from tests.unit.trainer_side.restore.test_restore import Run, assert_same, bring_back
from tests.unit.trainer_side.state.test_skeleton import DTYPES, _bits, _filled, _same
from trainer_side.convert.dcp_in import _RecordsUnpickler, read_dcp
from trainer_side.convert.dcp_out import write_dcp
from trainer_side.state.tree import tensor_paths

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(name="run")
def _run(capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main([*map(str, arguments)])
        assert isinstance(ended.value.code, int)
        return ended.value.code, *capsys.readouterr()

    return run


_LOAD = """
import sys
import torch
from torch.distributed import checkpoint as dcp

original = torch.load(sys.argv[2], weights_only=True)


def emptied(value):
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.shape, dtype=value.dtype)
    if isinstance(value, dict):
        return {key: emptied(one) for key, one in value.items()}
    return [emptied(one) for one in value] if isinstance(value, list) else None


state = emptied(original)
dcp.load(state, checkpoint_id=sys.argv[1], no_dist=True)
torch.save(state, sys.argv[3])
"""


def saved_by_dcp(folder: Path, state: Any) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        save(state, checkpoint_id=folder, no_dist=True)


def check_dcp_itself_loads_what_was_exported(tmp_path: Path, run: Command) -> None:
    state = training_state()
    state["dtypes"] = {str(dtype): _filled(dtype, [3, 5], 7) for dtype in DTYPES}
    base = torch.arange(60.0).reshape(6, 10)
    state["views"] = {
        "across": base.t(),
        "every second": base[::2, 1:4],
        "conj": _filled(torch.complex64, [4], 1).conj(),
    }
    publish(tmp_path / "run", 3, state)
    original = tmp_path / "run" / "step-000000003.pt"
    code, out, err = run("export", tmp_path / "run", tmp_path / "folder", "--to", "dcp")
    assert code == 0, err
    assert "model.1.weight is tied to model.0.weight" in out
    env = environment_without(tmp_path / "blocked", ("holdfast", "trainer_side"))
    command = [sys.executable, "-W", "ignore", "-c", _LOAD]
    command += [str(tmp_path / "folder"), str(original), str(tmp_path / "loaded.pt")]
    subprocess.run(command, env=env, check=True)
    loaded = torch.load(tmp_path / "loaded.pt", weights_only=True)
    expected = torch.load(original, weights_only=True)
    found = dict(tensor_paths(loaded))
    for path, tensor in tensor_paths(expected):
        assert (found[path].dtype, found[path].shape) == (tensor.dtype, tensor.shape), path
        dense = [one.resolve_conj().resolve_neg().contiguous() for one in (found[path], tensor)]
        assert _bits(dense[0]) == _bits(dense[1]), path
    assert loaded["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]
    assert (loaded["epoch"], loaded["best"]) == (3, float("inf"))


def test_a_folder_of_dcp_is_replaced_by_force_alone_and_nothing_else_is(tmp_path: Path, run: Command) -> None:
    publish(tmp_path / "run", 3, training_state())
    assert run("export", tmp_path / "run", tmp_path / "folder", "--to", "dcp")[0] == 0
    code, _, err = run("export", tmp_path / "run", tmp_path / "folder", "--to", "dcp")
    assert code == 2
    assert "--force" in err
    more = ("--to", "dcp", "--force", "--only", "model")
    assert run("export", tmp_path / "run", tmp_path / "folder", *more)[0] == 0
    names = FileSystemReader(tmp_path / "folder").read_metadata().state_dict_metadata
    assert set(names) == {"0.weight", "1.weight"}
    assert run("export", tmp_path / "run", tmp_path / "run", "--to", "dcp", "--force")[0] == 2, (
        "no folder of DCP"
    )


def test_a_flipped_bit_is_found_and_nothing_is_left(tmp_path: Path) -> None:
    manifest = publish(tmp_path / "run", 3, training_state())
    entry = manifest.entries[next(tensor.entry for tensor in manifest.tensors if "exp_avg" in tensor.path)]
    image = tmp_path / "run" / manifest.file
    data = bytearray(image.read_bytes())
    data[entry.offset] ^= 0x80
    image.write_bytes(data)
    store = open_store(str(tmp_path / "run"))
    with pytest.raises(DamageError, match=r"exp_avg.*CRC-32 expected"):
        write_dcp(store, manifest, tmp_path / "folder", only=None, quiet=True)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_state_saved_by_dcp_is_restored_and_goes_on_the_same(tmp_path: Path, run: Command) -> None:
    before = Run(1, steps=3)
    saved_by_dcp(tmp_path / "old", before.tree())
    code, _, err = run("import", tmp_path / "old", tmp_path / "run", "--step", 7)
    assert code == 0, err
    fresh = Run(2)
    assert bring_back(fresh, tmp_path / "run").step == 7
    assert_same(fresh.tree(), before.tree())
    assert fresh.loss() == before.loss()


def test_out_and_in_again(tmp_path: Path, run: Command) -> None:
    publish(tmp_path / "run", 3, training_state())
    assert run("export", tmp_path / "run", tmp_path / "folder", "--to", "dcp")[0] == 0
    assert run("import", tmp_path / "folder", tmp_path / "again", "--step", 3)[0] == 0
    runs = [torch.load(tmp_path / name / "step-000000003.pt", weights_only=True) for name in ("again", "run")]
    for tree in runs:
        tree["model"] = dict(tree["model"])
    _same(*runs)


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Start and size."""


def split_by_dcp(folder: Path, whole: torch.Tensor, boxes: Sequence[Box], *, turned: bool = False) -> None:
    """A folder as the ranks that hold these parts of a tensor `w` would have saved it, some of them transposed."""
    slices = [tuple(slice(a, a + b) for a, b in zip(*box, strict=True)) for box in boxes]
    parts = [whole[place].clone() for place in slices]
    if turned:
        parts[1::2] = [part.mT.contiguous().mT for part in parts[1::2]]
    saved_by_dcp(folder, {f"part{number}": part for number, part in enumerate(parts)} | {"step": 5})
    file = folder / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    records = metadata.state_dict_metadata
    for number in range(len(boxes)):
        del records[f"part{number}"], metadata.planner_data[f"part{number}"]
    chunks = [ChunkStorageMetadata(torch.Size(start), torch.Size(size)) for start, size in boxes]
    records["w"] = TensorStorageMetadata(TensorProperties(whole.dtype), whole.size(), chunks)
    metadata.planner_data["w"] = ("w",)
    for index in [index for index in metadata.storage_data if index.fqn.startswith("part")]:
        start = torch.Size(boxes[int(index.fqn.removeprefix("part"))][0])
        metadata.storage_data[MetadataIndex("w", start)] = metadata.storage_data.pop(index)
    file.write_bytes(pickle.dumps(metadata))


SPLITS: dict[str, list[Box]] = {
    "one": [((0, 0), (6, 5))],
    "rows": [((0, 0), (4, 5)), ((4, 0), (2, 5))],
    "columns": [((0, 3), (6, 2)), ((0, 0), (6, 3))],
    "blocks": [((row, column), (3, size)) for row in (0, 3) for column, size in ((0, 2), (2, 3))],
    "no grid": [((0, 0), (2, 5)), ((2, 0), (4, 1)), ((2, 1), (1, 4)), ((3, 1), (3, 4))],
}


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("split", SPLITS)
def test_any_bytes_of_a_tensor_are_put_together_of_its_parts(
    tmp_path: Path, split: str, turned: bool
) -> None:
    whole = torch.arange(30, dtype=torch.int16).reshape(6, 5)
    split_by_dcp(tmp_path / "old", whole, SPLITS[split], turned=turned)
    _, (stored,) = read_dcp(tmp_path / "old")
    expected = whole.numpy().tobytes()
    for begin, end in itertools.combinations(range(len(expected) + 1), 2):
        out = bytearray(end - begin)
        stored.read(begin, memoryview(out))
        assert bytes(out) == expected[begin:end], (begin, end)


def test_a_part_of_another_dtype_is_taken_as_dcp_takes_it(tmp_path: Path, run: Command) -> None:
    whole = torch.arange(30.0).reshape(6, 5)
    split_by_dcp(tmp_path / "old", whole, SPLITS["rows"])
    file = tmp_path / "old" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    record = metadata.state_dict_metadata["w"]
    record.properties = dataclasses.replace(record.properties, dtype=torch.bfloat16)
    file.write_bytes(pickle.dumps(metadata))
    assert run("import", tmp_path / "old", tmp_path / "run", "--step", 1)[0] == 0
    found = torch.load(tmp_path / "run" / "step-000000001.pt", weights_only=True)
    assert torch.equal(found["w"], whole.bfloat16())
    assert found["step"] == 5


@pytest.mark.parametrize(
    ("boxes", "said"),
    [
        # As many elements as the tensor has, and some of them twice.
        (
            [((0, 0), (4, 5)), ((3, 0), (2, 5))],
            r"\[0:4, 0:5\] and \[3:5, 0:5\] overlap",
        ),
        ([((0, 0), (6, 3)), ((0, 2), (6, 2))], r"\[0:6, 0:3\] and \[0:6, 2:4\] overlap"),
        ([((0, 0), (4, 5)), ((5, 0), (1, 5))], "has 30 elements, its chunks have 25"),
    ],
)
def test_parts_that_do_not_make_up_the_tensor_are_refused_by_name(
    tmp_path: Path, run: Command, boxes: list[Box], said: str
) -> None:
    split_by_dcp(tmp_path / "old", torch.arange(30.0).reshape(6, 5), boxes)
    code, _, err = run("import", tmp_path / "old", tmp_path / "run", "--step", 1)
    assert code == 6, err
    assert re.search(said, " ".join(err.split())), err
    assert "'w'" in err
    assert not (tmp_path / "run").exists()


def test_a_part_that_is_another_one_is_refused_before_the_run_is_touched(
    tmp_path: Path, run: Command
) -> None:
    split_by_dcp(tmp_path / "old", torch.arange(30.0).reshape(6, 5), SPLITS["blocks"])
    file = tmp_path / "old" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    one, other = (MetadataIndex("w", torch.Size(SPLITS["blocks"][n][0])) for n in (0, 1))
    places = metadata.storage_data
    places[one], places[other] = places[other], places[one]
    file.write_bytes(pickle.dumps(metadata))
    code, _, err = run("import", tmp_path / "old", tmp_path / "run", "--step", 1)
    assert code == 6, err
    assert "holds [3, 3], and the metadata has a part of [3, 2] there" in " ".join(err.split())
    assert not (tmp_path / "run").exists()


class Malicious:
    """Pickles to a call."""

    def __reduce__(self) -> Any:
        return os.system, ("touch HACKED",)


@pytest.mark.parametrize("where", ["metadata", "value"])
def test_importing_a_folder_runs_no_code(
    tmp_path: Path, run: Command, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    state = {"x": torch.ones(3), "plain": Malicious() if where == "value" else 1}
    saved_by_dcp(tmp_path / "old", state)
    if where == "metadata":
        file = tmp_path / "old" / ".metadata"
        metadata = pickle.loads(file.read_bytes())
        metadata.planner_data = Malicious()
        file.write_bytes(pickle.dumps(metadata))
    code, _, err = run("import", tmp_path / "old", tmp_path / "run", "--step", 1)
    assert code == 3, err
    assert "without running code" in err
    assert not (tmp_path / "HACKED").exists()
    assert not (tmp_path / "run").exists()


class _By:
    """Pickled as a call of `getattr`."""

    def __init__(self, *arguments: object) -> None:
        self._arguments = arguments

    def __reduce__(self) -> tuple[object, ...]:
        return getattr, self._arguments


def test_getattr_gives_members_of_enumerations_as_early_python_3_11_pickles_them_and_nothing_else() -> None:
    member = pickle.dumps(_By(_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT"))
    assert _RecordsUnpickler(io.BytesIO(member)).load() is _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    for of, name in ((_MEM_FORMAT_ENCODING, "__init_subclass__"), (Path, "home"), (torch.Size, "numel")):
        with pytest.raises(pickle.UnpicklingError, match="getattr"):
            _RecordsUnpickler(io.BytesIO(pickle.dumps(_By(of, name)))).load()


def test_a_folder_that_is_none_or_is_damaged(tmp_path: Path, run: Command) -> None:
    (tmp_path / "old").mkdir()
    code, _, err = run("import", tmp_path / "old", tmp_path / "run", "--step", 1)
    assert code == 2
    assert "the folder has no .metadata" in err
    saved_by_dcp(tmp_path / "old", {"x": torch.ones(3000)})
    part = next((tmp_path / "old").glob("*.distcp"))
    part.write_bytes(part.read_bytes()[:100])
    code, _, err = run("import", tmp_path / "old", tmp_path / "run", "--step", 1)
    assert code == 6, err
    (tmp_path / "old" / ".metadata").write_bytes(b"nothing")
    assert run("import", tmp_path / "old", tmp_path / "run", "--step", 1)[0] in (3, 6)
    assert not (tmp_path / "run").exists()
