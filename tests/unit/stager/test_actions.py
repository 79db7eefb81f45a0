"""The stager's log, when the ranks that are about to be lost hold what nobody else has."""

from __future__ import annotations

import logging
from unittest.mock import Mock

import pytest

from holdfast.image.entries import SPLIT, Entry
from holdfast.image.layout import Layout
from holdfast.image.regions import Region, unite
from stager.actions import Actions
from stager.session.session_messages import BeginReceiving


def _layout(*shards: int) -> Layout:
    pattern = unite((4, 1000), 1, [Region((shard, 0), (1, 1000)) for shard in shards])
    entry = Entry("archive/data/0", 64, pattern.nbytes, SPLIT, ())
    return Layout(8192, 4096, len(shards), (entry,), patterns=(pattern,))


def _said(layouts: list[Layout], caplog: pytest.LogCaptureFixture) -> list[str]:
    trainers = Mock()
    trainers.name = "rank {} on host b".format
    actions = Actions(Mock(), Mock(), trainers, Mock(), Mock(), Mock())
    with caplog.at_level(logging.WARNING, "holdfast.stager"):
        actions.do([BeginReceiving(step, layout) for step, layout in enumerate(layouts)])
    return [record.getMessage() for record in caplog.records]


def test_the_log_says_once_what_the_loss_of_a_shard_means(caplog: pytest.LogCaptureFixture) -> None:
    layout = _layout(0, 1, 2, 3)
    said = _said([layout, layout.sparing((2,)), layout.sparing((2,)), layout], caplog)
    (line,) = said
    assert line.startswith(
        "step 1: rank 2 on host b holds 1000 bytes of split tensors that no rank which stays has"
    )
    assert line.endswith("if it is lost before that, the job resumes from the checkpoint before")


def test_it_says_nothing_of_a_rank_whose_replica_stays(caplog: pytest.LogCaptureFixture) -> None:
    assert _said([_layout(0, 1, 2, 3, 0, 1, 2, 3).sparing((2,))], caplog) == []
