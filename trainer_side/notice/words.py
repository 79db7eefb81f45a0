"""Reading what metadata servers write: times of day and JSON objects, never trusted."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from trainer_side.notice.base import SourceError

__all__ = ["json_object", "unix_time"]


def json_object(text: str, where: str) -> dict[str, Any]:
    """The JSON object in an answer.

    Raises:
        SourceError: It is none.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{where}: expected a JSON object, got {text!r:.80}: {error}") from error
    if not isinstance(document, dict):
        raise SourceError(f"{where}: expected a JSON object, got {text!r:.80}")
    return document


def unix_time(text: object, where: str) -> float:
    """Seconds since 1970 of `2017-09-18T08:22:00Z` or `Mon, 19 Sep 2016 18:29:47 GMT`.

    Raises:
        SourceError: It is neither.
    """
    if isinstance(text, str) and len(text) < 64:
        for read in (datetime.fromisoformat, parsedate_to_datetime):
            try:
                moment = read(text.strip())
                return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
            except (ValueError, TypeError, IndexError, OverflowError):
                continue
    raise SourceError(f"{where}: expected a time such as 2017-09-18T08:22:00Z, got {text!r:.80}")
