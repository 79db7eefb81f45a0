"""`holdfast report` as a user calls it: a page, sentences, and errors that name the cause."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.command import cli
from tests.support.checkpoints import manifest_of, small_image
from tests.unit.operator_side.page.reading import Page
from tests.unit.operator_side.report.logs import EVENTS, STATUS


@pytest.fixture(name="run")
def _run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["report", *(str(argument) for argument in arguments)])
        out, err = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, out, err

    return run


def test_a_page_and_its_sentences(run: Any, tmp_path: Path) -> None:
    store, file = tmp_path / "run", tmp_path / "night.html"
    store.mkdir()
    image = small_image()
    manifest = manifest_of(image, step=19)
    (store / manifest.file).write_bytes(b"x" * manifest.image_bytes)
    (store / manifest.file.replace(".pt", ".json")).write_bytes(manifest.to_bytes())
    code, out, err = run(
        store, "--events", STATUS, "--events", EVENTS, "--output", file, "--dollars-per-hour", "12.40"
    )
    assert (code, err) == (0, "")
    assert "It was interrupted 3 times" in out
    assert str(file) in out
    found = Page(file.read_text())
    assert "It was interrupted 3 times" in found.text
    assert "1 manifest and" in found.text
    assert "$12.40 an hour" in found.text


def test_report_replaces_no_file_without_force(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "there.html"
    file.write_text("mine")
    code, _, err = run(tmp_path / "run", "--events", STATUS, "--output", file)
    assert code == 2
    assert "--force replaces it" in err
    assert file.read_text() == "mine"
    code, _, _ = run(tmp_path / "run", "--events", STATUS, "--output", file, "--force")
    assert code == 0
    assert file.read_text().startswith("<!DOCTYPE html>")
    assert [path.name for path in tmp_path.iterdir()] == ["there.html"]


def test_json_is_one_document(run: Any, tmp_path: Path) -> None:
    code, out, _ = run(tmp_path / "run", "--events", STATUS, "--output", tmp_path, "--json")
    assert code == 0
    document = json.loads(out)
    assert document["file"] == str(tmp_path / "holdfast-report.html")
    assert document["nbytes"] == (tmp_path / "holdfast-report.html").stat().st_size
    assert document["interruptions"] == 3
    assert 0 < document["goodput"] < 1
    assert document["happened"][0].startswith("The run went from")
    assert any("The store could not be read" in text for text in document["unknown"])


def test_a_run_without_logs_is_not_found(run: Any, tmp_path: Path) -> None:
    code, _, err = run(tmp_path / "run", "--output", tmp_path / "x.html")
    assert code == 5
    assert str(tmp_path / "run") in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--events", "no-such-log"), "no-such-log: cannot be read: No such file"),
        (("--output", "no/such/folder.html"), "does not exist"),
        (("--dollars-per-hour", "nan"), "expected a price"),
    ],
)
def test_wrong_usage(run: Any, tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    code, _, err = run(tmp_path / "run", "--output", tmp_path / "x.html", *arguments)
    assert code == 2
    assert words in err
