from __future__ import annotations

import pytest

from holdfast.config import TrainerConfig
from holdfast.errors import ConfigError
from holdfast.net.address import Address, parse_address


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("stager-0:29411", Address("stager-0", 29411)),
        (" 10.0.0.7:1 ", Address("10.0.0.7", 1)),
        ("[fd00::1]:29411", Address("fd00::1", 29411)),
        ("0.0.0.0:0", Address("0.0.0.0", 0)),
    ],
)
def test_an_address_is_read_and_written(text: str, expected: Address) -> None:
    assert parse_address(text) == expected
    assert parse_address(str(expected)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "HOST:PORT"),
        ("29411", "HOST:PORT"),
        (":29411", "HOST:PORT"),
        ("stager", "HOST:PORT"),
        ("fd00::1:29411", "HOST:PORT"),
        ("a b:1", "HOST:PORT"),
        ("stager:", "a port from 0 to 65535"),
        ("stager:port", "a port from 0 to 65535"),
        ("stager:65536", "a port from 0 to 65535"),
    ],
)
def test_an_invalid_address_is_refused_with_what_was_expected(text: str, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        parse_address(text)


@pytest.mark.parametrize("text", ["29411", "stager:65536"])
def test_a_setting_that_is_no_address_is_told_once(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainerConfig.from_sources(stager=text)
    assert str(caught.value).count("got") == 1
    assert str(caught.value).count(repr(text)) == 1


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("10.0.0.7", False),
        ("0.0.0.0", False),
        ("::", False),
        ("localhost.evil.example", False),
    ],
)
def test_loopback_is_only_what_is_surely_this_machine(host: str, is_loopback: bool) -> None:
    assert Address(host, 1).is_loopback is is_loopback
