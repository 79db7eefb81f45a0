"""s3torchconnector's `S3Checkpoint`: `torch.save` by rank 0 in the training thread, straight into the object store."""

from __future__ import annotations

import os
from typing import IO, cast

import torch

from benchmarks.complete import require_same
from benchmarks.workload import Workload

__all__ = ["S3Connector"]


class S3Connector:
    """Saves to the server that AWS_ENDPOINT_URL names."""

    def __init__(self, workload: Workload, store: str, rank: int) -> None:
        from s3torchconnector import S3Checkpoint, S3ClientConfig

        self._workload, self._rank = workload, rank
        self._client = S3Checkpoint(
            region=os.environ["AWS_REGION"],
            endpoint=os.environ["AWS_ENDPOINT_URL"],
            s3client_config=S3ClientConfig(force_path_style=True),
        )
        self._url = f"{store}-peer/state.pt"

    def save(self, step: int) -> None:  # noqa: ARG002
        if self._rank == 0:
            with self._client.writer(self._url) as writer:
                torch.save(self._workload.state_dict(), writer)

    def before_update(self) -> None:
        """Do nothing: `save` has waited."""

    def done(self) -> bool:
        return True

    def marks(self) -> dict[str, float]:
        return {}

    def verify(self) -> int:
        if self._rank:
            return 0
        with self._client.reader(self._url) as reader:
            state = torch.load(cast("IO[bytes]", reader), weights_only=True)
        return require_same(self._workload.state_dict(), state, what="s3torchconnector")

    def clean(self) -> None:
        """Do nothing: the next save overwrites the object."""

    def close(self) -> None:
        """Do nothing."""
