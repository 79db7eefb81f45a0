"""Parsers for setting values: sizes, URLs, addresses, checkpoints. Each `ValueError` states the expected form."""

from __future__ import annotations

import re
import sys
from fractions import Fraction
from typing import Any

from holdfast.image.best_rule import is_metric_name
from holdfast.image.checkpoint_id import CheckpointId
from holdfast.image.shares import WRITERS_MAX, ShareNumber
from holdfast.net.address import parse_address

OWN_STAGER = "own"  # value of the trainer setting `stager`: rank 0 starts the stager
OWN_PER_NODE = "own-per-node"  # the first rank of each node starts a stager for a share
_STEP_AT_END = re.compile(r"@(\d{1,18}|latest)/*$")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(|b|[kmgtp]i?b)", re.IGNORECASE)
_UNIT_BYTES = {"": 1, "b": 1} | {
    f"{letter}{infix}b": base**power
    for power, letter in enumerate("kmgtp", start=1)
    for infix, base in (("", 1000), ("i", 1024))
}


def parse_size(value: int | str) -> int:
    """Return the number of bytes in a number or a text such as `512MiB`, `1.5GiB` or `16 MB`. Raises `ValueError`: not
    a size, or not a whole number of bytes.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError('a size in bytes, or with a unit such as "512MiB", "1GiB" or "16 MB"')
    number = Fraction(match[1]) * _UNIT_BYTES[match[2].lower()]
    if number.denominator != 1:
        raise ValueError("a whole number of bytes")
    return int(number)


def utf8_value(value: Any) -> Any:
    # Bytes that the locale cannot decode become lone surrogates. Such text differs between locales, so it cannot
    # identify a run.
    if isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
        raise ValueError(
            f"a path in the encoding of the locale, which is {sys.getfilesystemencoding()}; set LC_ALL=C.UTF-8, or "
            "PYTHONUTF8=1"
        )
    return value


def url_value(value: str) -> str:
    if _STEP_AT_END.search(value):
        raise ValueError(
            "another name: commands read `@latest` or `@` and a number as a step of the run before it"
        )
    return value


def listed_values(value: Any) -> Any:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def checkpoint_values(value: Any) -> Any:
    # One message with the whole value, instead of one for each checkpoint.
    try:
        return tuple(
            one if isinstance(one, CheckpointId) else CheckpointId.from_label(one)
            for one in listed_values(value)
        )
    except (TypeError, ValueError):
        raise ValueError("checkpoints as STEP-aATTEMPT, such as 1200-a3, separated by commas") from None


def steps_value(value: Any) -> Any:
    # One message, where pydantic would give one for each type of the union.
    text = str(value).strip()
    if text != "auto" and not text.isdecimal():
        raise ValueError('0 or more steps, or "auto"')
    return text if text == "auto" else int(text)


def metric_value(value: str) -> str:
    if not is_metric_name(value):
        raise ValueError("the name of a metric: printable text without blanks at its ends")
    return value


def address_value(value: Any) -> str:
    return str(parse_address(str(value)))


def share_value(value: Any) -> ShareNumber:
    return value if isinstance(value, ShareNumber) else ShareNumber.from_text(str(value).strip())


def stager_values(value: Any) -> str:
    if value in (OWN_STAGER, OWN_PER_NODE):
        return str(value)
    listed = value if isinstance(value, list | tuple) else str(value).split(",")
    try:
        addresses = [address_value(one) for one in listed]
    except ValueError as error:
        raise ValueError(f"own, own-per-node, or {error}") from None
    if len(set(addresses)) != len(addresses) or len(addresses) > WRITERS_MAX:
        raise ValueError(f"each address once, and at most {WRITERS_MAX}")
    return ",".join(addresses)
