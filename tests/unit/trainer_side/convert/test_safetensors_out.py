"""Checkpoints as safetensors files: read back by the library itself, bit for bit."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from safetensors import safe_open
from safetensors.torch import load_file

from holdfast.command import cli
from holdfast.errors import DamageError, StateError
from holdfast.store import open_store
from holdfast.store.base import Store
from tests.support.restoring import CountingStore, publish
from tests.unit.trainer_side.state.test_skeleton import DTYPES, _bits, _filled, _same, _states
from trainer_side.convert.plain_values import decode, encode
from trainer_side.convert.safetensors_in import DTYPES as NAMED
from trainer_side.convert.safetensors_out import write_safetensors
from trainer_side.state.tree import tensor_paths

WITHOUT_A_NAME = {torch.complex128}


def written(root: Path, tree: Any, *, only: str | None = None, store: Store | None = None) -> Path:
    """Convert a checkpoint of `tree`; return the file."""
    manifest = publish(root / "run", 3, tree)
    out = root / "out.safetensors"
    write_safetensors(store or open_store(str(root / "run")), manifest, out, only=only, quiet=True)
    return out


def values_of(file: Path) -> Any:
    with safe_open(str(file), framework="pt") as opened:
        metadata = opened.metadata()
    assert metadata["format"] == "pt"
    return json.loads(metadata["holdfast"])


def training_state() -> dict[str, Any]:
    """Return a script's state: a model with tied weights, its optimizer after a step, plain values."""
    torch.manual_seed(4)
    model = torch.nn.Sequential(torch.nn.Embedding(11, 6), torch.nn.Linear(6, 11, bias=False))
    model[1].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.arange(5)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng": [torch.arange(40, dtype=torch.uint8), torch.ones(40, dtype=torch.uint8)],
        "epoch": 3,
        "best": float("inf"),
    }


def test_every_dtype_comes_back_to_the_bit(tmp_path: Path) -> None:
    names = {
        dtype: str(dtype).removeprefix("torch.") for dtype in {*DTYPES, *NAMED.values()} - WITHOUT_A_NAME
    }
    tree = {"all": {name: _filled(dtype, [3, 5], 7) for dtype, name in names.items()}}
    loaded = load_file(written(tmp_path, tree))
    assert loaded.keys() == {f"all.{name}" for name in names.values()}
    for dtype, name in names.items():
        assert loaded[f"all.{name}"].dtype == dtype
        assert loaded[f"all.{name}"].shape == (3, 5)
        assert _bits(loaded[f"all.{name}"]) == _bits(tree["all"][name]), name


def test_a_training_state_with_tied_weights_and_plain_values(tmp_path: Path) -> None:
    state = training_state()
    file = written(tmp_path, state)
    loaded = load_file(file)
    for path, tensor in tensor_paths(state):
        assert torch.equal(loaded[path.replace("/", ".")], tensor), path
    values = values_of(file)
    assert values["tied"] == {"model.1.weight": "model.0.weight"}
    assert (values["step"], values["run"]) == (3, "run")
    assert values["state"]["epoch"] == 3
    assert values["state"]["optimizer"]["param_groups"][0]["lr"] == 1e-3
    back = decode(values["state"], loaded)
    assert back["best"] == float("inf")
    assert list(back["optimizer"]["state"]) == [0], "a number as key stays a number"
    assert back["model"]._metadata == state["model"]._metadata


def test_a_single_part_has_the_names_that_its_model_gave(tmp_path: Path) -> None:
    state = training_state()
    store = CountingStore(tmp_path / "run")
    loaded = load_file(written(tmp_path, state, only="model", store=store))
    model = torch.nn.Sequential(torch.nn.Embedding(11, 6), torch.nn.Linear(6, 11, bias=False))
    model.load_state_dict(loaded)
    assert torch.equal(model.state_dict()["1.weight"], state["model"]["1.weight"])
    whole = state["model"]["0.weight"].nbytes
    moments = [offset for offset, nbytes in store.requests if nbytes == whole]
    assert len(moments) == 1, "what is tied is read once, and the optimizer not at all"
    with pytest.raises(
        StateError, match="--only modell: there is no such name in it; it holds model, optimizer"
    ):
        written(tmp_path, state, only="modell")


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(_states())
def test_any_state_is_written_exactly_or_refused(
    tmp_path_factory: pytest.TempPathFactory, state: Any
) -> None:
    root = tmp_path_factory.mktemp("any")
    paths = tensor_paths(state)
    refused = any(tensor.dtype in WITHOUT_A_NAME for _, tensor in paths)
    if refused or len({path.replace("/", ".") for path, _ in paths}) < len(paths):
        with pytest.raises(StateError, match=r"cannot hold|both be named"):
            written(root, state)
        assert not list(root.glob("*out*"))
        return
    file = written(root, state)
    loaded = load_file(file)
    for path, tensor in paths:
        found = loaded[path.replace("/", ".")]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
        assert _bits(found) == _bits(dense), path


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"deep": {"who": torch.zeros(2, dtype=torch.complex128)}}, "deep/who (torch.complex128)"),
        ({"deep": [{1, 2}]}, "deep/0 is builtins.set"),
        ({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, "a/b and a.b would both be named a.b"),
    ],
)
def test_a_value_without_a_place_in_safetensors_is_refused_by_its_path(
    tmp_path: Path, value: dict[str, Any], words: str
) -> None:
    with pytest.raises(StateError) as refused:
        written(tmp_path, value)
    assert words in str(refused.value)
    assert "--only" in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["run"], "nothing is left"


def test_a_flipped_bit_is_found_and_nothing_is_left(tmp_path: Path) -> None:
    state = training_state()
    manifest = publish(tmp_path / "run", 3, state)
    record = next(tensor for tensor in manifest.tensors if tensor.path.endswith("exp_avg"))
    entry = manifest.entries[record.entry]
    image = tmp_path / "run" / manifest.file
    data = bytearray(image.read_bytes())
    data[entry.offset + entry.nbytes - 1] ^= 0x01
    image.write_bytes(data)
    out = tmp_path / "out.safetensors"
    out.write_text("what was there")
    with pytest.raises(DamageError, match=r"optimizer/state/0/exp_avg\): CRC-32 expected"):
        write_safetensors(open_store(str(tmp_path / "run")), manifest, out, only=None, quiet=True)
    assert out.read_text() == "what was there"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.safetensors", "run"]


def test_a_byte_that_changed_on_its_way_is_read_again(tmp_path: Path) -> None:
    class Flipping(CountingStore):
        flips = 1

        def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
            super().read_into(name, offset, buffer)
            if buffer.nbytes == big.nbytes and self.flips:
                self.flips -= 1
                buffer[5] ^= 4

    big = torch.arange(1000.0)
    file = written(tmp_path, {"big": big}, store=Flipping(tmp_path / "run"))
    assert torch.equal(load_file(file)["big"], big)


def test_the_values_are_exact() -> None:
    value = {
        "": [1, -(2**70), 0.1, "a\0\ud800", None, True, b"\xff", (1, (2,)), torch.Size([2])],
        "odd": {1: "a", (2, None): "b", "$x": {}},
        "ordered": OrderedDict([("b", float("-inf")), ("a", torch.float16)]),
        "device": torch.device("cuda:1"),
    }
    document = json.loads(json.dumps(encode(value, {})))
    _same(decode(document, {}), value)
    with pytest.raises(DamageError, match="cannot be read"):
        decode({"$call": ["os.system"]}, {})
    with pytest.raises(DamageError, match="cannot be read"):
        decode({"$dtype": "load"}, {})


def test_the_command_says_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    publish(tmp_path / "run", 3, training_state())

    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["export", *map(str, arguments)])
        assert isinstance(ended.value.code, int)
        return ended.value.code, *capsys.readouterr()

    code, out, _ = run(f"{tmp_path}/run@3", tmp_path, "--to", "safetensors")
    assert code == 0
    assert f"{tmp_path}/step-000000003.safetensors: step 3 as safetensors, 7 tensors" in out
    assert "model.1.weight is tied to model.0.weight" in out
    code, _, err = run(f"{tmp_path}/run", tmp_path, "--to", "safetensors")
    assert code == 2
    assert "--force" in err
    code, out, _ = run(
        f"{tmp_path}/run", tmp_path, "--to", "safetensors", "--force", "--only", "model", "--json"
    )
    said = json.loads(out)
    assert (code, said["step"], said["tensors"]) == (0, 3, 2)
    assert said["nbytes"] == (tmp_path / "step-000000003.safetensors").stat().st_size
    code, _, _ = run(f"{tmp_path}/run", tmp_path / "x.pt", "--to", "torch")
    assert code == 0
    assert (tmp_path / "x.pt").read_bytes() == (tmp_path / "run" / "step-000000003.pt").read_bytes()
    assert run(f"{tmp_path}/run", tmp_path / "y.pt", "--to", "torch", "--only", "model")[0] == 2
