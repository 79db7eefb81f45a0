"""The boto3 client's settings, for AWS and for servers of one's own; no network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import ConfigError
from holdfast.store.s3_client import crc_header, make_client
from tests.support.s3_place import s3_environment


def _s3_settings(monkeypatch: pytest.MonkeyPatch, **environment: str) -> Any:
    for name, value in (s3_environment("", "key", "secret") | environment).items():
        if value:
            monkeypatch.setenv(name, value)
        else:
            monkeypatch.delenv(name, raising=False)
    client = make_client("s3://bucket/run")
    settings: Any = client.meta.config
    client.close()
    return settings


def test_aws_gets_its_own_addressing_and_no_second_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = _s3_settings(monkeypatch)
    assert settings.s3.get("addressing_style") in (None, "auto", "virtual")
    assert settings.s3["payload_signing_enabled"] is False
    assert settings.retries["total_max_attempts"] == 1


def test_a_server_of_ones_own_is_addressed_by_path(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = _s3_settings(monkeypatch, AWS_ENDPOINT_URL="http://store.example:9000")
    assert settings.s3["addressing_style"] == "path"
    assert "payload_signing_enabled" not in settings.s3


def test_the_endpoint_for_s3_alone_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = _s3_settings(monkeypatch, AWS_ENDPOINT_URL_S3="https://store.example")
    assert settings.s3["addressing_style"] == "path"
    assert settings.s3["payload_signing_enabled"] is False


def test_the_users_configuration_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config").write_text("[default]\ns3 =\n  addressing_style = virtual\n")
    settings = _s3_settings(
        monkeypatch, AWS_CONFIG_FILE=str(tmp_path / "config"), AWS_ENDPOINT_URL="http://store.example:9000"
    )
    assert settings.s3["addressing_style"] == "virtual"


def test_a_profile_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"s3://bucket/run.*nobody.*AWS_PROFILE"):
        _s3_settings(monkeypatch, AWS_PROFILE="nobody")


def test_crcs_are_written_as_s3_reads_them() -> None:
    assert crc_header(0x3610A686) == "NhCmhg=="  # of b"hello", as AWS documents it
