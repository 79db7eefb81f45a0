"""The destinations of messages: a command of the user, and a POST in the format of the service behind a URL.

    https://hooks.slack.com/…            {"text": …}; also for Discord's URLs that end in /slack
    https://discord.com/api/webhooks/…   {"content": …}; also of its test clients (ptb.discord.com), and /api/v10/
    https://ntfy.sh/TOPIC, ntfy://HOST/TOPIC, ntfy+http://HOST/TOPIC    the text, with a title and a priority
    any other http or https URL          {"event", "severity", "title", "text", "run", "host", "time"}

A webhook URL is a secret that allows writing. Log lines show only its host.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

from holdfast.errors import ConfigError
from holdfast.notify.alert import Alert, Severity

TIMEOUT_SECONDS, COMMAND_SECONDS_MAX = 10.0, 30.0
_PRIORITY = {Severity.INFO: ("default", "information_source"), Severity.WARNING: ("high", "warning")}
_URGENT = ("urgent", "rotating_light")
_TRANSIENT = {408, 425, 429}
_SLACK = re.compile(r"hooks\.slack(-gov)?\.com/|[^/]+/api/(v\d+/)?webhooks/.+/slack/*$")
_DISCORD = re.compile(r"((ptb|canary)\.)?discord(app)?\.com/api/(v\d+/)?webhooks/")


class Undelivered(NamedTuple):
    """Why a message was not delivered, without the URL; `may_retry`: whether another try may help."""

    reason: str
    may_retry: bool = True


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Turns a redirect into an error: urllib would follow it by a GET, without the message."""

    def redirect_request(self, *_: Any) -> None:
        return None


class Webhook:
    """A URL that accepts messages. Any thread. `timeout_seconds`: of silence. `name`: the URL without its secret part.
    Raises `ConfigError`: not such a URL; the message shows only the scheme.
    """

    def __init__(self, url: str, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self._url, self._timeout_seconds = _parse_url(url), timeout_seconds
        self._opener = urllib.request.build_opener(_NoRedirect)
        self._is_ntfy = self._url.scheme.startswith("ntfy") or self._url.hostname == "ntfy.sh"
        self.name = f"{self._url.scheme}://{self._url.hostname}/…"

    def send(self, alert: Alert, context: Mapping[str, Any]) -> Undelivered | None:
        """Try once to deliver a message. `context`: more fields, for programs."""
        try:
            with self._opener.open(self.request(alert, context), timeout=self._timeout_seconds):
                return None
        except urllib.error.HTTPError as error:
            error.close()
            may_retry = error.code in _TRANSIENT or error.code >= http.HTTPStatus.INTERNAL_SERVER_ERROR
            return Undelivered(f"HTTP status {error.code}", may_retry)
        except (OSError, http.client.HTTPException) as error:
            cause = getattr(error, "reason", error)
            return Undelivered((isinstance(cause, OSError) and cause.strerror) or type(cause).__name__)

    def request(self, alert: Alert, context: Mapping[str, Any]) -> urllib.request.Request:
        url = self._url
        scheme = {"ntfy": "https", "ntfy+http": "http"}.get(url.scheme, url.scheme)
        place = url._replace(scheme=scheme, netloc=url.netloc.rpartition("@")[2], fragment="").geturl()
        request = urllib.request.Request(place, method="POST")  # noqa: S310 - `_parse_url` has seen the scheme
        if url.username is not None:
            pair = f"{unquote(url.username)}:{unquote(url.password or '')}"
            request.add_header("Authorization", f"Basic {base64.b64encode(pair.encode()).decode()}")
        request.add_header("User-Agent", "holdfast")
        if self._is_ntfy:
            priority, tag = _PRIORITY.get(alert.severity, _URGENT)
            for name, value in (("Title", f"holdfast: {alert.title}"), ("Priority", priority), ("Tags", tag)):
                request.add_header(name, value)
            request.data = alert.text.encode()
            return request
        request.add_header("Content-Type", "application/json")
        request.data = json.dumps(self._json_body(alert, context)).encode()
        return request

    def _json_body(self, alert: Alert, context: Mapping[str, Any]) -> Mapping[str, Any]:
        title = f"holdfast: {alert.title}"
        place = f"{self._url.hostname}{self._url.path}"
        if _SLACK.match(place):
            text = alert.text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
            return {"text": f"*{title}*\n{text}"}
        if _DISCORD.match(place):
            # The text may quote an error of a script, which must not mention users or @everyone.
            return {"content": f"**{title}**\n{alert.text}", "allowed_mentions": {"parse": []}}
        return alert_document(alert, context)


class AlertCommand:
    """A command for `/bin/sh`; gets the message as JSON on stdin, and HOLDFAST_EVENT and HOLDFAST_TEXT. Any thread.
    `timeout_seconds`: kill the process group after this time. `name`: for people, without the command, which may
    contain a secret.
    """

    def __init__(self, command: str, *, timeout_seconds: float = COMMAND_SECONDS_MAX) -> None:
        self._command, self._timeout_seconds = command, timeout_seconds
        self.name = "--notify-command"

    def send(self, alert: Alert, context: Mapping[str, Any]) -> Undelivered | None:
        """Run the command to its end. No retry after a failure: the command may have done half of its work."""
        payload = json.dumps(alert_document(alert, context)).encode()
        try:
            process = subprocess.Popen(
                ["/bin/sh", "-c", self._command],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={
                    **os.environ,
                    "HOLDFAST_EVENT": alert.kind,
                    "HOLDFAST_TEXT": f"{alert.title}: {alert.text}",
                },
                start_new_session=True,
            )
        except OSError as error:
            return Undelivered(error.strerror or type(error).__name__, may_retry=False)
        try:
            process.communicate(payload, timeout=self._timeout_seconds)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return Undelivered(f"killed after {self._timeout_seconds:g} s", may_retry=False)
        status = process.returncode
        return Undelivered(f"exit code {status}", may_retry=False) if status else None


def alert_document(alert: Alert, context: Mapping[str, Any]) -> dict[str, Any]:
    """Build the JSON document of a message, for programs."""
    return {
        "event": alert.kind,
        "severity": alert.severity.value,
        "title": alert.title,
        "text": alert.text,
        **context,
    }


def _parse_url(url: str) -> SplitResult:
    try:
        found = urlsplit(url)
        # Reading `port` checks it.
        good = found.hostname and found.port != 0 and url.isascii() and url.isprintable() and " " not in url
    except ValueError:
        good = None
    if not good or found.scheme not in {"http", "https", "ntfy", "ntfy+http"}:
        raise ConfigError(
            f"--notify: expected a URL that begins with https://HOST/, http://HOST/ or ntfy://HOST/, got one that "
            f"begins with {url[: url.find(':') + 1][:10]!r}; for other services use --notify-command"
        )
    if found.scheme.startswith("ntfy") and not found.path.strip("/"):
        raise ConfigError(
            f"--notify {found.scheme}://{found.hostname}: expected a topic behind the host, as in ntfy://ntfy.sh/TOPIC"
        )
    return found
