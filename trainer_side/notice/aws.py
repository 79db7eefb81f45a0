"""AWS: the instance metadata service, version 2.

    PUT /latest/api/token ─► token (kept; renewed before it ends, and once on a 401)
    GET spot/instance-action, events/recommendations/rebalance, with it ─► 404 nothing · 200 a notice

`AWS_EC2_METADATA_SERVICE_ENDPOINT` moves the server, as for AWS's own SDKs.
AWS gives two minutes, best effort; a hibernation is announced when it begins.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from holdfast.notices.notice import Notice, NoticeKind
from trainer_side.notice.http import HttpResponse, MetadataServer, json_object, unix_time
from trainer_side.notice.watch import SourceError

_ENDPOINT = "http://169.254.169.254"
_ENDPOINT_VARIABLE = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
_TOKEN_PATH = "/latest/api/token"  # noqa: S105 - the path is no secret
_ROOT_PATH = "/latest/meta-data/"
_ACTION_PATH = "/latest/meta-data/spot/instance-action"
_REBALANCE_PATH = "/latest/meta-data/events/recommendations/rebalance"
_ACTIONS = ("terminate", "stop", "hibernate")


class Aws:
    """A `NoticeSource`. A request takes at most `seconds_max`. `token_seconds`: Lifetime of a token, 1 to 21600."""

    name = "aws"

    def __init__(
        self,
        environ: Mapping[str, str],
        *,
        seconds_max: float = 2.0,
        token_seconds: int = 3600,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server = MetadataServer(environ.get(_ENDPOINT_VARIABLE) or _ENDPOINT, seconds_max=seconds_max)
        self._token_seconds, self._clock = token_seconds, clock
        self._token, self._token_expires_at = "", 0.0

    def poll(self) -> list[Notice]:
        notices = []
        action = self._get(_ACTION_PATH)
        if action is not None:
            document = json_object(action, _ACTION_PATH)
            kind = document.get("action")
            if kind not in _ACTIONS:
                raise SourceError(
                    f"{_ACTION_PATH}: action is {kind!r:.80}, expected one of {', '.join(_ACTIONS)}"
                )
            deadline_unix = unix_time(document.get("time"), _ACTION_PATH)
            notices.append(Notice(NoticeKind.TERMINATE, deadline_unix, self.name, f"instance-action {kind}"))
        try:
            rebalance = self._get(_REBALANCE_PATH)
            if rebalance is not None:
                noticed = json_object(rebalance, _REBALANCE_PATH).get("noticeTime")
                unix_time(noticed, _REBALANCE_PATH)
                notices.append(
                    Notice(NoticeKind.REBALANCE, None, self.name, f"rebalance recommendation of {noticed}")
                )
        except SourceError:
            if not notices:  # a failed poll for the milder notice does not hold back the graver one
                raise
        return notices

    def is_present(self) -> bool:
        try:
            self._renew_token()
        except SourceError:
            return False
        return True

    def answers_without_token(self) -> bool:
        """Whether the server is there although it gave no token: its hop limit may stop answers to PUT."""
        try:
            return self._server.request(_ROOT_PATH).status in {200, 401}
        except SourceError:
            return False

    def _get(self, path: str) -> str | None:
        if self._clock() >= self._token_expires_at:
            self._renew_token()
        answer = self._request(path)
        if answer.status == 401:
            self._renew_token()  # once: the token was withdrawn, or has expired while this machine slept
            answer = self._request(path)
        if answer.status == 404:
            return None
        if answer.status != 200:
            raise SourceError(f"{self._server.url}{path}: answered {answer.status}, expected 200 or 404")
        return answer.body

    def _request(self, path: str) -> HttpResponse:
        return self._server.request(path, headers={"X-aws-ec2-metadata-token": self._token})

    def _renew_token(self) -> None:
        requested_at = self._clock()
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(self._token_seconds), "Content-Length": "0"}
        answer = self._server.request(_TOKEN_PATH, method="PUT", headers=headers)
        token = answer.body.strip()
        if answer.status != 200 or not token or len(token) > 1024 or not token.isprintable():
            raise SourceError(
                f"{self._server.url}{_TOKEN_PATH}: answered {answer.status}, expected 200 and a token; in a container "
                "the hop limit of the metadata service must be 2"
            )
        early = min(15.0, self._token_seconds / 2)
        self._token, self._token_expires_at = token, requested_at + self._token_seconds - early
