"""The assembled file equals that of torch.save: values, ties, structure, on any number of ranks."""

from __future__ import annotations

import collections
import io
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.crc import crc32
from holdfast.errors import StateError
from holdfast.image.entries import REPLICATED, Extent
from holdfast.image.layout import Layout
from holdfast.wire.state_messages import Agreement
from tests.unit.trainer_side.assemble import CHUNK_BYTES, assembled, make_plan, save, sent, taken
from trainer_side.state.per_rank import PerRank
from trainer_side.state.per_rank_blob import decode
from trainer_side.state.skeleton import Outgrown, capture, plan
from trainer_side.state.tensor_table import table
from trainer_side.state.tree import classify, collect, tensor_paths

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]


# -- random states -----------------------------------------------------------------------------------------------


def _filled(dtype: torch.dtype, shape: list[int], seed: int) -> torch.Tensor:
    """Return a tensor of random bits."""
    count = int(np.prod(shape, dtype=np.int64))
    raw = torch.randint(0, 256, (count * dtype.itemsize,), generator=torch.Generator().manual_seed(seed))
    raw = raw % 2 if dtype == torch.bool else raw
    flat = torch.empty(0, dtype=dtype).set_(raw.to(torch.uint8).untyped_storage(), 0, (count,), (1,))
    return flat.reshape(shape)


@st.composite
def _tensors(draw: Any, pool: list[torch.Tensor]) -> torch.Tensor:
    if pool and draw(st.booleans()):
        base: torch.Tensor = draw(st.sampled_from(pool))
    else:
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        base = _filled(draw(st.sampled_from(DTYPES)), shape, draw(st.integers(0, 1 << 30)))
        pool.append(base)
    how = draw(st.sampled_from(["same", "flip", "slice", "expand", "scalar", "parameter", "detach", "conj"]))
    if how == "flip" and base.dim() > 1:
        return base.transpose(0, 1)
    if how == "slice" and base.dim():
        start = draw(st.integers(0, base.shape[0]))
        return base[start : draw(st.integers(start, base.shape[0])) : draw(st.integers(1, 2))]
    if how == "expand":
        return base.unsqueeze(0).expand(3, *base.shape)
    if how == "scalar" and base.numel():
        return base[(0,) * base.dim()]
    if how == "parameter":
        wanted = base.is_floating_point() and base.dtype.itemsize > 1
        return torch.nn.Parameter(base, requires_grad=wanted)
    if how == "conj" and base.is_complex():
        return base.conj()
    return base.detach() if how == "detach" else base


@st.composite
def _states(draw: st.DrawFn) -> dict[str, Any]:
    pool: list[torch.Tensor] = []
    plain = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=5),
        st.binary(min_size=1, max_size=5),
    )
    names = st.text(min_size=1, max_size=5)
    tree = st.recursive(
        st.one_of(plain, _tensors(pool), _tensors(pool)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=4),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(st.one_of(names, st.integers()), inner, max_size=4),
            st.dictionaries(names, inner, max_size=4).map(collections.OrderedDict),
        ),
        max_leaves=12,
    )
    return draw(st.dictionaries(names, tree, min_size=1, max_size=5))


def _same(ours: Any, theirs: Any, path: str = "") -> None:
    assert type(ours) is type(theirs), path
    if isinstance(theirs, torch.Tensor):
        for trait in (_geometry, _flags, _bits):
            assert trait(ours) == trait(theirs), path
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs), path
        for key in theirs:
            _same(ours[key], theirs[key], f"{path}/{key}")
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs), path
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            _same(one, other, f"{path}/{index}")
    else:
        assert repr(ours) == repr(theirs), path


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride()


def _flags(tensor: torch.Tensor) -> tuple[bool, ...]:
    return tensor.is_conj(), tensor.is_neg(), tensor.requires_grad


def _bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().contiguous().clone()
    return bytes(plain.untyped_storage())


def _sharing(tree: Any) -> list[int]:
    """Return, for each tensor with bytes, the earlier tensor with the same storage."""
    first: dict[int, int] = {}
    return [
        first.setdefault(tensor.untyped_storage()._cdata, index)
        for index, (_, tensor) in enumerate(tensor_paths(tree))
        if tensor.numel()
    ]


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(state=_states())
def test_our_file_reads_as_the_one_of_torch_save(state: dict[str, Any]) -> None:
    expected_bytes = io.BytesIO()
    torch.save(state, expected_bytes)
    expected = torch.load(io.BytesIO(expected_bytes.getvalue()), weights_only=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ours.pt"
        save(state, path)
        assert zipfile.ZipFile(path).testzip() is None
        for mmap in (False, True):
            ours = torch.load(path, weights_only=True, mmap=mmap)
            _same(ours, expected)
            assert _sharing(ours) == _sharing(expected)
            del ours


# -- ranks -------------------------------------------------------------------------------------------------------


def _job(rank: int) -> dict[str, Any]:
    """Return a rank's state: the same model on each rank; buffers, plain values and RNG differ."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.BatchNorm1d(40), torch.nn.Linear(40, 40))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 40)).sum().backward()
    optimizer.step()
    model.get_buffer("1.running_mean").add_(rank)
    return {
        "model": model,
        "optimizer": optimizer,
        "note": "x" * (50 * rank),
        "count": 10 ** (8 * rank),
        "rng": PerRank({"state": torch.full((7,), rank), "rank": rank}),
    }


def test_ranks_with_different_values_come_to_the_same_layout_and_literals() -> None:
    jobs = [_job(rank) for rank in range(3)]
    trees = [collect(job) for job in jobs]
    tables = [
        table(job, tree, rank=rank, ranks=3) for rank, (job, tree) in enumerate(zip(jobs, trees, strict=True))
    ]
    assert len({proposed.digest for proposed in tables}) == 1
    skeletons = [
        plan(
            tree,
            classify(job, tree),
            rank=rank,
            ranks=3,
            chunk_bytes=CHUNK_BYTES,
            agreed=Agreement(
                tables[0].pickle_bytes + 10, tables[0].per_rank_bytes
            ),  # the other ranks' pickles are larger
        )
        for rank, (job, tree) in enumerate(zip(jobs, trees, strict=True))
    ]
    assert len({skeleton.layout.digest for skeleton in skeletons}) == 1
    assert skeletons[0].literals.runs == skeletons[1].literals.runs == skeletons[2].literals.runs
    frames = [sent(skeleton, taken(job, skeleton)) for job, skeleton in zip(jobs, skeletons, strict=True)]
    file = assembled(skeletons[0].layout, frames)
    assert zipfile.ZipFile(io.BytesIO(file)).testzip() is None
    loaded = torch.load(io.BytesIO(file), weights_only=True)
    assert (loaded["note"], loaded["count"]) == ("", 1)
    _same(loaded["model"], trees[0]["model"].copy())
    _same(loaded["optimizer"], trees[0]["optimizer"])
    for rank, blob in enumerate(loaded["rng"]):
        value = decode(blob)
        assert value["rank"] == rank
        assert value["state"].tolist() == [rank] * 7


def test_ownership_and_gate_are_in_the_layout() -> None:
    skeleton = make_plan(_job(0), ranks=2)
    layout = skeleton.layout
    entries = {tensor.path: tensor.entry for tensor in layout.tensors}
    roles = {path: (layout.entries[entry].owner, skeleton.gated[entry]) for path, entry in entries.items()}
    assert roles["model/0.weight"] == roles["optimizer/state/0/exp_avg"] == (REPLICATED, True)
    assert roles["model/1.running_mean"] == (0, False)
    assert [roles["rng/0"], roles["rng/1"]] == [(0, False), (1, False)]
    assert skeleton.gated[0] is False
    assert layout.entries[0].name == "archive/data.pkl"


def test_a_tensor_of_other_strides_changes_the_digest() -> None:
    def digest(tensor: torch.Tensor) -> str:
        state = {"x": tensor}
        return table(state, collect(state), rank=0, ranks=2).digest

    assert digest(torch.zeros(4, 4)) == digest(torch.ones(4, 4))
    assert digest(torch.zeros(4, 4)) != digest(torch.zeros(4, 4).t())


# -- later saves -------------------------------------------------------------------------------------------------


def test_a_later_save_uses_the_plan_and_carries_the_new_values() -> None:
    state: dict[str, Any] = {"w": torch.zeros(100), "step": 1, "sizes": [1]}
    skeleton = make_plan(state)
    state["w"] = torch.arange(100.0)
    state["step"] = 12345678901234567890
    state["sizes"] = list(range(300))
    file = assembled(skeleton.layout, [sent(skeleton, taken(state, skeleton))])
    loaded = torch.load(io.BytesIO(file), weights_only=True)
    assert loaded["step"] == 12345678901234567890
    assert loaded["sizes"] == list(range(300))
    assert torch.equal(loaded["w"], torch.arange(100.0))


@pytest.mark.parametrize(
    "other",
    [
        {"w": torch.zeros(101)},
        {"w": torch.zeros(100, dtype=torch.float64)},
        {"w": torch.zeros(100), "more": torch.zeros(1)},
        {"v": torch.zeros(100)},
        {"w": torch.zeros(200)[::2]},
        {"w": torch.zeros(10, 10)},
        {"w": 1},
        {"w": torch.zeros(100), "rng": PerRank(1)},
    ],
)
def test_other_tensors_do_not_fit_the_plan(other: dict[str, Any]) -> None:
    skeleton = make_plan({"w": torch.zeros(100)})
    assert capture(collect(other), skeleton) is None


def test_plain_values_that_outgrow_their_reserve_tell_how_much_they_need() -> None:
    state: dict[str, Any] = {"w": torch.zeros(10), "text": ""}
    skeleton = make_plan(state, reserve=1000)
    state["text"] = "x" * 2000
    with pytest.raises(Outgrown) as caught:
        taken(state, skeleton)
    assert 2000 < caught.value.needed_bytes < 3000
    with pytest.raises(Outgrown):
        make_plan(state, reserve=1000)
    assert taken(state, make_plan(state, reserve=caught.value.needed_bytes)).contents


def test_a_per_rank_value_that_outgrows_its_reserve_is_named() -> None:
    value = PerRank([1])
    skeleton = make_plan({"history": value})
    value.value = list(range(10_000))
    with pytest.raises(Outgrown, match="history") as caught:
        taken({"history": value}, skeleton)
    assert caught.value.name == "history"


def test_a_value_of_a_new_kind_is_refused_at_a_later_save_too() -> None:
    state: dict[str, Any] = {"w": torch.zeros(10), "best": 1.0}
    skeleton = make_plan(state, reserve=65536)
    state["best"] = np.zeros(2)
    with pytest.raises(StateError, match=r"best is numpy\.ndarray"):
        taken(state, skeleton)
    state["best"] = frozenset()
    with pytest.raises(StateError, match="best is frozenset"):
        taken(state, skeleton)
    state["best"] = collections.OrderedDict(a=torch.float32)
    assert taken(state, skeleton)


def test_only_the_used_part_of_a_storage_is_saved() -> None:
    big = torch.arange(100_000.0)
    layout = make_plan({"window": big[50_000:50_010], "later": big[50_005:50_020]}).layout
    storages = [entry for entry in layout.entries if "/data/" in entry.name and ".data" not in entry.name]
    assert [entry.nbytes for entry in storages] == [20 * 4]
    assert [tensor.entry for tensor in layout.tensors] == [1, 1]


def test_literals_of_any_window_are_those_of_the_whole() -> None:
    skeleton = make_plan({f"t{index}": torch.zeros(index * 7) for index in range(20)})
    whole = bytearray(b"\xee" * skeleton.layout.image_bytes)
    skeleton.write_literals(Extent(0, len(whole)), memoryview(whole))
    for start in range(0, len(whole), 617):
        part = bytearray(b"\xee" * min(1000, len(whole) - start))
        skeleton.write_literals(Extent(start, len(part)), memoryview(part))
        assert part == whole[start : start + len(part)]
    for entry in skeleton.layout.entries:
        assert set(whole[entry.offset : entry.end]) <= {0xEE}, "entries are left as they are"


# -- sizes -------------------------------------------------------------------------------------------------------


def test_thousands_of_tensors(tmp_path: Path) -> None:
    state = {"model": {f"layer.{index}.weight": torch.full((3,), float(index)) for index in range(4000)}}
    layout = save(state, tmp_path / "many.pt", chunk_bytes=65536)
    assert len(layout.tensors) == 4000
    assert Layout.from_bytes(layout.to_bytes()) == layout
    loaded = torch.load(tmp_path / "many.pt", weights_only=True, mmap=True)
    assert all(tensor[0] == index for index, tensor in enumerate(loaded["model"].values()))


def test_an_image_above_four_gibibytes(tmp_path: Path) -> None:
    # Zip64: one entry above 4 GiB, then headers and descriptors beyond 4 GiB. The tensor's memory is never touched,
    # and the file is sparse.
    huge = torch.empty((4 << 30) + 64, dtype=torch.uint8)
    state = {"first": torch.arange(5.0), "huge": huge, "last": torch.arange(7.0), "note": "n"}
    skeleton = make_plan(state, chunk_bytes=1 << 24)
    layout, captured = skeleton.layout, taken(state, skeleton)
    assert layout.image_bytes > 4 << 30
    path = tmp_path / "huge.pt"
    with path.open("wb") as file:
        file.truncate(layout.image_bytes)
        for offset, data in skeleton.literals.runs:
            file.seek(offset)
            file.write(data)
        for index, entry in enumerate(layout.entries):
            source = captured.sources[index]
            if entry.nbytes == huge.nbytes:
                continue
            content = captured.contents[index] if source is None else bytes(source.bytes().tolist())
            file.seek(entry.offset)
            file.write(content)
            for crc_field in entry.crc_fields:
                file.seek(crc_field)
                file.write(crc32(content).to_bytes(4, "little"))
    assert path.stat().st_blocks * 512 < 1 << 20, "all but the literals is a hole"
    with zipfile.ZipFile(path) as archive:
        for name in ("archive/data.pkl", "archive/data/0", "archive/data/2", "archive/version"):
            archive.read(name)  # checks its CRC
        assert archive.getinfo("archive/data/1").file_size == huge.nbytes
        assert archive.getinfo("archive/data/1").CRC == 0
    loaded = torch.load(path, weights_only=True, mmap=True)
    assert loaded["huge"].shape == huge.shape
    assert loaded["huge"][-1] == 0
    assert torch.equal(loaded["last"], torch.arange(7.0))
    with path.open("rb") as file:
        for entry in layout.entries:
            for signature, crc_field, at in zip(
                (b"PK\x07\x08", b"PK\x01\x02"), entry.crc_fields, (4, 16), strict=True
            ):
                file.seek(crc_field - at)
                assert file.read(4) == signature


# -- what is refused ---------------------------------------------------------------------------------------------


class _Custom:
    pass


class _Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.zeros(3), r"^outer/inner/1 is numpy\.ndarray.*torch\.as_tensor"),
        (np.longdouble(1), r"^outer/inner/1 is numpy\.longdouble"),
        (np.timedelta64(1, "ns"), r"^outer/inner/1 is numpy\.timedelta64"),
        (_Custom(), r"^outer/inner/1 is .*_Custom"),
        (lambda: None, "^outer/inner/1 is function"),
        ({np.datetime64("2026-01-01"): 1}, r"key of outer/inner/1, .*numpy\.datetime64"),
        (torch.eye(3).to_sparse(), "^outer/inner/1 is a sparse tensor"),
        (torch.zeros(3, device="meta"), "^outer/inner/1 is a tensor on device 'meta'"),
        (torch.zeros(3).as_subclass(_Subclass), "^outer/inner/1 is a tensor subclass .*_Subclass"),
        (torch.zeros(3).untyped_storage(), "^outer/inner/1 is a bare storage"),
        (torch.nn.parameter.UninitializedParameter(), "^outer/inner/1 is a parameter without a shape"),
        ({torch.zeros(2)}, "another object than a dict, list or tuple"),
        (PerRank(1), "^outer/inner/1 is a PerRank below the top level"),
    ],
)
def test_a_value_that_cannot_be_saved_is_refused_with_its_path(value: Any, message: str) -> None:
    state = {"fine": torch.zeros(2), "outer": {"inner": [1, value]}}
    with pytest.raises(StateError, match=message):
        make_plan(state)


def test_quantised_tensors_are_refused_with_their_path() -> None:
    state = {"model": {"w": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)}}
    with pytest.raises(StateError, match=r"^model/w is a quantised tensor"):
        make_plan(state)


def test_two_dtypes_over_one_memory_are_refused_with_both_paths() -> None:
    tensor = torch.arange(4.0)
    with pytest.raises(StateError, match=r"^a and b view the same memory"):
        make_plan({"a": tensor, "b": tensor.view(torch.int32)})


def test_memory_that_was_given_back_is_refused() -> None:
    tensor = torch.arange(100.0)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(StateError, match=r"^w reaches to byte 400"):
        make_plan({"w": tensor})


def test_ranks_that_disagree_on_per_rank_names_are_refused() -> None:
    tree = {"rng": PerRank(1)}
    with pytest.raises(StateError, match="rng"):
        plan(
            tree,
            {},
            rank=0,
            ranks=1,
            chunk_bytes=CHUNK_BYTES,
            agreed=Agreement(4096, {"other": 4096}),
        )
