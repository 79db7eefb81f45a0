"""`holdfast rewind`: what it refuses, what it writes, and what a kill in the middle leaves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from holdfast.checkpoints.catalog import Catalog
from holdfast.checkpoints.lease import Lease, claim_attempt
from holdfast.errors import ConfigError, DamageError, FencedError, StoreError, StoreMissing
from holdfast.image.manifest import State, manifest_name, step_file_name
from holdfast.store.posix import PosixStore
from operator_side.commands.ls import ls
from operator_side.commands.rewind import rewind
from tests.support.checkpoints import manifest_of, small_image


def publish(root: Path, step: int, attempt: int = 1, **more: Any) -> None:
    image = small_image()
    file = step_file_name(step, attempt=attempt if attempt > 1 else 0)
    manifest = manifest_of(image, step=step, attempt=attempt, file=file, **more)
    (root / file).write_bytes(image)
    (root / manifest_name(file)).write_bytes(manifest.to_bytes())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    lease = Lease.acquire(PosixStore(tmp_path))
    for step in (100, 200, 300, 400):
        publish(tmp_path, step)
    lease.release()
    return tmp_path


def typed(run: Path, *arguments: str) -> Result:
    return CliRunner().invoke(rewind, [str(run), *arguments], catch_exceptions=False)


def said(run: Path, *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(typed(run, *arguments, "--json").stdout)
    return found


def newest(run: Path) -> tuple[int, int]:
    manifest = Catalog(PosixStore(run)).get()
    return manifest.step, manifest.attempt


def files(run: Path) -> set[str]:
    return {path.name for path in run.iterdir()}


def test_a_rewind_leaves_all_files_and_begins_a_branch(run: Path) -> None:
    before = files(run)
    text = typed(run, "--to", "200", "--skip-batches", "250..260", "--reason", "a spike").stdout
    assert "the run was rewound from step 400 (attempt 1) to step 200 (attempt 1); branch 2 begins" in text
    assert "step 250 gets that of step 261" in text
    assert files(run) - before == {"rewind-a002.json"}
    assert before <= files(run)
    assert newest(run) == (200, 1)
    listed = said(run, "--list")
    assert listed["rewound"] is None
    assert [
        (row["branch"], row["current"], row["checkpoints"], row["skipped"]) for row in listed["branches"]
    ] == [
        (1, False, 4, []),
        (2, True, 0, [[250, 260]]),
    ]
    assert listed["branches"][0]["files"] == ["step-000000400.json", "step-000000300.json"]
    assert "a spike" in typed(run, "--list").stdout


def test_ls_tells_the_branches_apart(run: Path) -> None:
    typed(run, "--to", "200")
    publish(run, 250, attempt=3)
    rows = json.loads(CliRunner().invoke(ls, [str(run), "--json"]).stdout)["checkpoints"]
    assert [(row["step"], row["branch"], row["current"]) for row in rows] == [
        (250, 2, True),
        (400, 1, False),
        (300, 1, False),
        (200, 1, True),
        (100, 1, True),
    ]
    text = CliRunner().invoke(ls, [str(run)]).stdout
    assert "step-000000400.pt (branch 1)" in text
    assert "branch 2: rewound from step 400 (attempt 1) to step 200 (attempt 1), 20" in text


def test_a_dry_run_changes_nothing(run: Path) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    document = said(run, "--to", "200", "--dry-run")
    assert (document["dry_run"], document["rewound"]["branch"], document["rewound"]["attempt"]) == (
        True,
        2,
        2,
    )
    assert "would be rewound" in typed(run, "--to", "200", "--dry-run").stdout
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_a_second_rewind_goes_back_to_the_older_branch_by_attempt(run: Path) -> None:
    typed(run, "--to", "200", "--skip-batches", "250..260")
    publish(run, 240, attempt=3)
    with pytest.raises(StoreMissing, match="step 400 is on an older branch only; name it 400-a1"):
        typed(run, "--to", "400")
    assert "left out steps 250..260 after this step" in typed(run, "--to", "200", "--dry-run").stdout
    undone = said(run, "--to", "400-a1")["rewound"]
    assert (undone["to_step"], undone["from_step"], undone["branch"]) == (400, 240, 3)
    assert newest(run) == (400, 1)
    typed(run, "--to", "240-a3")
    assert newest(run) == (240, 3)


def test_a_branch_without_a_checkpoint_is_rewound_as_well(run: Path) -> None:
    """A user who types the command twice, or corrects it before the job has begun, gets what was typed last."""
    typed(run, "--to", "200", "--skip-batches", "250..260")
    typed(run, "--to", "200", "--skip-batches", "250..270")
    assert newest(run) == (200, 1)
    branches = Catalog(PosixStore(run)).read_listing().branches
    assert branches is not None
    found = branches.rewind_since(Catalog(PosixStore(run)).get().order)
    assert found is not None
    assert found.skipped == ((250, 270),), "the ranges of a rewind that has led nowhere do not count"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "x"], "expected a step such as 10000"),
        (["--to", "200", "--skip-batches", "250"], "expected two steps N..M"),
        (["--to", "200", "--skip-batches", "260..250"], "N not above M"),
        (["--to", "200", "--skip-batches", "200..250"], "training continues with step 201"),
        (["--to", "200", "--skip-batches", "250..260", "--skip-batches", "260..270"], "overlap"),
        ([], "expected --to"),
        (["--list", "--to", "200"], "--list changes nothing"),
        (["--to", "200", "--reason", "x" * 1001], "at most 1000 characters"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_written(
    run: Path, arguments: list[str], message: str
) -> None:
    before = files(run)
    with pytest.raises(ConfigError, match=message):
        typed(run, *arguments)
    assert files(run) == before
    assert newest(run) == (400, 1)


def test_a_step_that_is_not_there_is_refused_with_those_near_it(run: Path) -> None:
    publish(run, 210, state=State.BAD)
    with pytest.raises(
        StoreMissing, match=r"no checkpoint 211; good ones near it: step 100 .*, step 200 .*, step 300"
    ):
        typed(run, "--to", "211")
    with pytest.raises(
        DamageError, match=r"restore would not continue from step 210 .*found bad.*good ones near it"
    ):
        typed(run, "--to", "210")
    assert newest(run) == (400, 1)


def test_a_writer_that_lives_is_refused(run: Path) -> None:
    code = (
        "import sys; from holdfast.checkpoints.lease import Lease, claim_attempt; "
        "from holdfast.store.posix import PosixStore; store = PosixStore(sys.argv[1]); "
        "Lease.acquire(store) if sys.argv[2] == 'flusher' else claim_attempt(store, 9); "
        "print(flush=True); sys.stdin.read()"
    )
    for kind in ("flusher", "alone"):
        command = [sys.executable, "-c", code, str(run), kind]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
            assert writer.stdin is not None
            assert writer.stdout is not None
            writer.stdout.readline()
            for more in ([], ["--dry-run"]):
                with pytest.raises(FencedError, match="may be writing to this run; end the job first"):
                    typed(run, "--to", "200", *more)
            writer.stdin.close()
        assert newest(run) == (400, 1)
    typed(run, "--to", "200")
    assert newest(run) == (200, 1)


def test_a_kill_between_claim_and_record_changes_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create = PosixStore.create

    def dies(store: PosixStore, name: str, data: bytes) -> bool:
        if name.startswith("rewind-"):
            raise StoreError("killed here")
        return create(store, name, data)

    with monkeypatch.context() as patch:
        patch.setattr(PosixStore, "create", dies)
        with pytest.raises(StoreError, match="killed here"):
            typed(run, "--to", "200")
    assert newest(run) == (400, 1)
    assert said(run, "--to", "200")["rewound"]["attempt"] == 3
    assert newest(run) == (200, 1)


def test_a_writer_that_wakes_up_late_adds_to_its_own_branch(run: Path) -> None:
    typed(run, "--to", "200")
    publish(run, 500)  # no store joins the check of the claim and the write
    assert newest(run) == (200, 1)
    assert claim_attempt(PosixStore(run), 3)
    publish(run, 210, attempt=3)
    assert newest(run) == (210, 3)
