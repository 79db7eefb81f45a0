"""`holdfast run` at the end of a job: the store says whether the newest step is durable."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import StoreError
from operator_side.commands import run
from operator_side.supervise.verdict import Cause, Verdict

DONE = Verdict(Cause.DONE, "every rank has ended with exit code 0", "done", exit_code=0)


def verdict(step: int, store: Path) -> Verdict:
    return run._check_durable(DONE, step, str(store))


def test_a_run_without_a_step_is_done(tmp_path: Path) -> None:
    assert verdict(-1, tmp_path / "store") is DONE


def test_a_step_that_the_store_does_not_have_is_not_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = verdict(7, tmp_path / "store")
    assert (found.cause, found.exit_code) == (Cause.LOST, 11)
    assert found.message.startswith(
        "the job is done, and step 7, its newest, is staged but not durable; nor is"
    )
    monkeypatch.setenv("HOLDFAST_ON_NOT_DURABLE", "warn")
    assert verdict(7, tmp_path / "store") is DONE


def test_a_store_that_does_not_answer_proves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(store: str) -> int:
        raise StoreError(f"{store}: refused")

    monkeypatch.setattr(run, "_newest_step", refuses)
    found = verdict(7, tmp_path / "store")
    assert found.exit_code == 11
    assert "the store does not say whether step 7, its newest, is durable" in found.message
