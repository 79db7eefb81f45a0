"""The boto3 client of a run: its settings, and the reason for each.

Endpoint, region and credentials come from boto3's usual places (AWS_ENDPOINT_URL, AWS_REGION, AWS_PROFILE, instance
role). Values under `s3` in the user's AWS configuration override those set here.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from holdfast.errors import ConfigError

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


_CONNECT_SECONDS_MAX = 10
_READ_SECONDS_MAX = 120
_CONNECTIONS_MAX = 288  # the most requests each way (concurrency.py), and some for small objects
_AWS = (".amazonaws.com", ".amazonaws.com.cn")


def crc_header(value: int) -> str:
    """Encode a CRC-32 as S3 does: big-endian, base64."""
    return base64.b64encode(value.to_bytes(4, "big")).decode()


def make_client(url: str) -> S3Client:
    """Make a client for AWS, or for the environment's endpoint. No network. Raises `ConfigError`: bad AWS settings."""
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError

    settings: dict[str, Any] = {
        # One attempt: `Retrying` retries, with one budget for all stores.
        "retries": {"mode": "standard", "total_max_attempts": 1},
        "connect_timeout": _CONNECT_SECONDS_MAX,
        "read_timeout": _READ_SECONDS_MAX,
        "max_pool_connections": _CONNECTIONS_MAX,
        # boto3's extra checksums fail where a server returns a whole object's CRC for a range; we use our own.
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "user_agent_extra": "holdfast",
    }
    try:
        session: Any = boto3.session.Session()
        # The first client only resolves the endpoint; the second has the settings that suit it.
        first = session.client("s3", config=Config(**settings))
        s3_settings = _settings_for(str(first.meta.endpoint_url)) | (first.meta.config.s3 or {})
        first.close()
        return cast("S3Client", session.client("s3", config=Config(**settings, s3=s3_settings)))
    except (BotoCoreError, ValueError) as error:
        raise ConfigError(
            f"{url}: the AWS settings cannot be used: {error}; see AWS_ENDPOINT_URL, AWS_PROFILE and ~/.aws/config"
        ) from error


def credentials_of(client: S3Client) -> tuple[str, str | None] | None:
    """Return the access key and session token that a client signs with; None where boto3 does not tell."""
    credentials = getattr(getattr(client, "_request_signer", None), "_credentials", None)
    if credentials is None:
        return None
    frozen = credentials.get_frozen_credentials()
    return frozen.access_key, frozen.token


def _settings_for(endpoint_url: str) -> Any:
    endpoint = urlsplit(endpoint_url)
    settings: dict[str, Any] = {}
    if not (endpoint.hostname or "").endswith(_AWS):
        settings["addressing_style"] = "path"  # most other servers have no name `bucket.host` in DNS
    if endpoint.scheme == "https":
        # TLS and our CRC protect the bytes; SHA-256 would cost a core.
        settings["payload_signing_enabled"] = False
    return settings
