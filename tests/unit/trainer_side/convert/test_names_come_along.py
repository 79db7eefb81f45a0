"""Names of parameters survive each format: after an import, too, an optimizer is joined by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from holdfast.command import cli
from tests.unit.trainer_side.convert.test_dcp import saved_by_dcp
from tests.unit.trainer_side.restore.named import publish_named
from tests.unit.trainer_side.restore.test_joining_by_name import Net, assert_own, mark, names_of
from tests.unit.trainer_side.restore.test_restore import bring_back
from trainer_side.state.position_names import from_record

State = dict[str, Any]
Command = Callable[..., tuple[int, str]]
KINDS = ("torch", "safetensors", "dcp")


@pytest.fixture(name="run")
def _run(capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*arguments: object) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main([*map(str, arguments)])
        assert isinstance(ended.value.code, int)
        return ended.value.code, capsys.readouterr().err

    return run


def job(seed: int, *, backwards: bool = False) -> State:
    net = Net(seed)
    parameters = [*net.parameters()]
    return {"model": net, "optimizer": torch.optim.AdamW(parameters[::-1] if backwards else parameters)}


def exported(root: Path, run: Command, kind: str, *options: str) -> Path:
    state = job(0)
    mark(state["optimizer"], names_of(("", state["model"])))
    publish_named(root / "saved", 3, state)
    code, err = run("export", root / "saved", root / "out", "--to", kind, *options)
    assert code == 0, err
    return root / "out"


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_in_another_order_after_export_and_import(
    tmp_path: Path, run: Command, kind: str
) -> None:
    code, err = run("import", exported(tmp_path, run, kind), tmp_path / "run", "--step", 3)
    assert code == 0, err
    fresh = job(1, backwards=True)
    bring_back(fresh, tmp_path / "run")
    assert_own(fresh["optimizer"], names_of(("", fresh["model"])))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [(), ("--rename", "model=net"), ("--under", "all")])
def test_names_say_where_parameters_lie_now(
    tmp_path: Path, run: Command, kind: str, options: tuple[str, ...]
) -> None:
    code, err = run("import", exported(tmp_path, run, kind), tmp_path / "run", "--step", 3, *options)
    assert code == 0, err
    within = "all/" if "--under" in options else ""
    model = "net" if "--rename" in options else f"{within}model"
    names = [f"{model}/{name}" for name, _ in Net().named_parameters()]
    assert names_in(tmp_path / "run") == {f"{within}optimizer": names}


@pytest.mark.parametrize("kind", ["safetensors", "dcp"])
def test_a_part_has_its_own(tmp_path: Path, run: Command, kind: str) -> None:
    out = exported(tmp_path, run, kind, "--only", "optimizer")
    names = [f"model/{name}" for name, _ in Net().named_parameters()]
    for under in ("moments", "optimizer"):
        code, err = run("import", out, tmp_path / under, "--step", 3, "--under", under)
        assert code == 0, err
        assert names_in(tmp_path / under) == {under: names}


def names_in(root: Path) -> dict[str, list[str]]:
    reader = torch._C.PyTorchFileReader(str(root / "step-000000003.pt"))
    found = from_record(reader.get_record("data.pkl"), source="file")
    return {at: [one.names[0] for group in groups for one in group] for at, groups in found.items()}


@pytest.mark.parametrize("text", ["{", "[1]", '{"only": null, "names": {"optimizer": [[7]]}}'])
def test_names_that_cannot_be_read_are_refused(tmp_path: Path, run: Command, text: str) -> None:
    out = exported(tmp_path, run, "dcp")
    (out / "holdfast-names.json").write_text(text)
    code, err = run("import", out, tmp_path / "run", "--step", 3)
    assert code != 0
    assert "the names of parameters cannot be read" in err
    assert not (tmp_path / "run").exists()


class Holder:
    """An object that saves its optimizer's state among other values, as framework loops do."""

    def __init__(self, state: State) -> None:
        self.parts = state

    def state_dict(self) -> State:
        return {name: one.state_dict() for name, one in self.parts.items()}

    def load_state_dict(self, saved: State) -> None:
        for name, one in self.parts.items():
            one.load_state_dict(saved[name])


@pytest.mark.parametrize("is_inside", [False, True])
def test_optimizers_keyed_by_names_in_dcp_are_joined_by_name(
    tmp_path: Path, run: Command, is_inside: bool
) -> None:
    state = job(0)
    mark(state["optimizer"], names_of(("", state["model"])))
    tree: State = {
        "model": state["model"].state_dict(),
        "optimizer": get_optimizer_state_dict(state["model"], state["optimizer"]),
    }
    saved_by_dcp(tmp_path / "old", {"loop": tree} if is_inside else tree)
    code, err = run("import", tmp_path / "old", tmp_path / "run", "--step", 7)
    assert code == 0, err
    fresh = job(1, backwards=True)
    bring_back({"loop": Holder(fresh)} if is_inside else fresh, tmp_path / "run")
    assert_own(fresh["optimizer"], names_of(("", fresh["model"])))
