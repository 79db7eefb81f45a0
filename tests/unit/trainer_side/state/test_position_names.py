"""The names of an optimizer's parameters follow the pickle, track each change, and disturb no other reader."""

from __future__ import annotations

import io
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.errors import DamageError
from tests.unit.trainer_side.assemble import assembled, make_plan, named, save, sent, taken
from trainer_side.state.position_names import Position, SavedNames, from_record, pad_pickle, to_trailer
from trainer_side.state.skeleton import Outgrown, capture
from trainer_side.state.tree import collect


def job() -> dict[str, Any]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = torch.optim.AdamW(
        [{"params": [*model[0].parameters()]}, {"params": [*model[1].parameters()]}]
    )
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def said(trailer: bytes) -> list[list[tuple[str, ...]]]:
    found = from_record(pad_pickle(b"pickle.", trailer, 4096), source="file")
    return [[position.names for position in group] for group in found["optimizer"]]


EXPECTED = [[("model/0.weight",), ("model/0.bias",)], [("model/1.weight",), ("model/1.bias",)]]


def test_plain_torch_reads_the_tree_that_the_objects_gave(tmp_path: Path) -> None:
    state = job()
    save(state, tmp_path / "named.pt")
    loaded = torch.load(tmp_path / "named.pt", weights_only=True)
    assert loaded.keys() == state.keys()
    assert loaded["optimizer"]["param_groups"] == state["optimizer"].state_dict()["param_groups"]
    fresh = job()
    fresh["optimizer"].load_state_dict(loaded["optimizer"])
    reader = torch._C.PyTorchFileReader(str(tmp_path / "named.pt"))
    record = reader.get_record("data.pkl")
    assert [
        [one.names for one in group] for group in from_record(record, source="file")["optimizer"]
    ] == EXPECTED


@pytest.mark.parametrize("defer", [False, True])
def test_names_are_in_each_capture_made_at_once_or_later(defer: bool) -> None:
    state = job()
    trailer = named(state)
    skeleton = make_plan(state, trailer=trailer)
    for lr in (0.5, 0.25):
        state["optimizer"].param_groups[0]["lr"] = lr
        found = capture(collect(state), skeleton, defer=defer, trailer=trailer)
        assert found is not None
        assert (found.deferred is not None) == defer
        contents = {**found.contents, **(found.deferred.contents() if found.deferred else {})}
        record = contents[skeleton.zip_parts.pickle_entry]
        assert len(record) == skeleton.pickle_reserve_bytes
        assert record.endswith(trailer)
        loaded = torch.load(
            io.BytesIO(assembled(skeleton.layout, [sent(skeleton, found._replace(contents=contents))])),
            weights_only=True,
        )
        assert loaded["optimizer"]["param_groups"][0]["lr"] == lr


def test_names_without_room_beside_the_pickle_ask_for_more() -> None:
    state = job()
    skeleton = make_plan(state)
    trailer = bytes(skeleton.pickle_reserve_bytes)
    for defer in (False, True):
        with pytest.raises(Outgrown) as raised:
            capture(collect(state), skeleton, defer=defer, trailer=trailer)
        assert raised.value.needed_bytes > len(trailer)
    assert taken(state, skeleton) is not None


def test_names_follow_the_optimizer_and_are_kept_meanwhile() -> None:
    state = job()
    names = SavedNames(state, is_writer=True)

    def look() -> bytes:
        with names.record_param_groups() as given:
            tree = collect(state)
        names.refresh(tree, given)
        return names.trailer

    first = look()
    assert said(first) == EXPECTED
    assert look() is first
    state["optimizer"].param_groups.reverse()
    assert said(look()) == EXPECTED[::-1]
    extra = nn.Parameter(torch.zeros(2, 5))
    state["optimizer"].add_param_group({"params": [extra]})
    found = from_record(look(), source="file")["optimizer"]
    assert found[2] == [Position((), (2, 5))]
    other = SavedNames(state, is_writer=False)
    with other.record_param_groups() as given:
        tree = collect(state)
    other.refresh(tree, given)
    other.rebuild(tree, given)
    assert other.trailer == b""


def test_a_state_without_optimizers_has_nothing_to_say() -> None:
    assert named({"model": nn.Linear(2, 2)}) == b""
    assert from_record(b"\x80\x02}." + bytes(100), source="file") == {}
    assert from_record(b"", source="file") == {}


def test_all_kinds_of_names_come_back() -> None:
    groups = [
        [Position(("a/ü.weight",)), Position(("a/b", "a/\ud800"))],
        [Position((), ()), Position((), (1, 2))],
    ]
    assert from_record(pad_pickle(b".", to_trailer({"x/y": groups}), 500), source="file") == {"x/y": groups}


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b"[]",
        b'{"names": 7}',
        b'{"names": {"a": [[7]]}}',
        b'{"names": {"a": [[[]]]}}',
        b'{"names": {"a": [[{"shape": ["x"]}]]}}',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
def test_names_that_cannot_be_read_are_damage(text: bytes) -> None:
    record = text + struct.pack("<I8s", len(text), b"HFNAMES1")
    with pytest.raises(DamageError, match="the names behind the pickle"):
        from_record(record, source="file")
    with pytest.raises(DamageError, match="the names behind the pickle"):
        from_record(struct.pack("<I8s", 2**32 - 1, b"HFNAMES1"), source="file")
