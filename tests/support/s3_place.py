"""A fresh bucket on a test's S3 server, configured by environment variables as a user would."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import boto3
from botocore.config import Config

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

__all__ = ["S3Place", "plain_client", "s3_environment"]


class S3Place(NamedTuple):
    """A bucket that the test may write.

    Attributes:
        server: `swift` or `moto`.
        endpoint: URL of the server.
        bucket: A bucket of this test's own.
        environment: Variables that a process needs to reach the bucket; set in this process already.
    """

    server: str
    endpoint: str
    bucket: str
    environment: Mapping[str, str]

    def url(self, run: str = "run") -> str:
        """Store URL of a run in the bucket."""
        return f"s3://{self.bucket}/{run}"


def s3_environment(endpoint: str, access_key: str, secret_key: str) -> dict[str, str]:
    """The environment of a process that uses the server, without this machine's own AWS settings."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": access_key,
        "AWS_SECRET_ACCESS_KEY": secret_key,
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/nonexistent",
        "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
    }


def plain_client() -> S3Client:
    """A separate client, to check on the store's objects; the caller closes it."""
    session: Any = boto3.session.Session()
    return cast("S3Client", session.client("s3", config=Config(s3={"addressing_style": "path"})))


def fresh_bucket() -> str:
    """Make a bucket that no other test has."""
    bucket = f"test-{secrets.token_hex(6)}"
    client = plain_client()
    client.create_bucket(Bucket=bucket)
    client.close()
    return bucket
