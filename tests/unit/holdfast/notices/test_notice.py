"""A notice on its way between processes."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.errors import ProtocolError
from holdfast.notices.notice import Notice, NoticeKind

_NOTICE = Notice(NoticeKind.TERMINATE, 1120.0, "aws", "instance-action terminate", 3)


def test_a_deadline_travels_as_seconds_left_so_clocks_need_not_agree() -> None:
    sent = _NOTICE.to_json(now_unix=1000.0)
    assert sent["seconds_left"] == 120.0
    heard = Notice.from_json(sent, now_unix=5000.0)
    assert heard == Notice(NoticeKind.TERMINATE, 5120.0, "aws", "instance-action terminate", 3)
    assert "terminate in 100.0 s, said by aws (instance-action" in _NOTICE.sentence(1020.0)
    assert "20.0 s ago" in _NOTICE.sentence(1140.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "dance"},
        {"kind": None},
        {"kind": ["terminate"]},
        {"seconds_left": "soon"},
        {"seconds_left": True},
        {"seconds_left": float("nan")},
        {"seconds_left": float("inf")},
        {"source": 7},
        {"said_by": "x" * 301},
        {"rank": "1"},
        {"rank": -2},
    ],
)
def test_an_invalid_notice_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="notice"):
        Notice.from_json({**_NOTICE.to_json(1000.0), **wrong}, now_unix=1000.0)


def test_a_servers_text_cannot_move_the_cursor_of_a_terminal() -> None:
    sent = {**_NOTICE.to_json(1000.0), "said_by": "a\x1b[2Jb\n"}
    assert Notice.from_json(sent, now_unix=1000.0).said_by == "a?[2Jb?"
