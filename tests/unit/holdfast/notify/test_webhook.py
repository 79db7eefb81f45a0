"""The request for each service, and no secret in our messages."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from holdfast.errors import ConfigError
from holdfast.notify.alert import Alert, Severity
from holdfast.notify.webhook import Webhook

ALERT = Alert("killed", "killed", "rank <0> & @everyone", Severity.WARNING)
ABOUT = {"run": "s3://bucket/run", "time": 7.0}


def body(url: str) -> Any:
    request = Webhook(url).request(ALERT, ABOUT)
    assert request.get_method() == "POST"
    assert request.get_header("Content-type") == "application/json"
    assert isinstance(request.data, bytes)
    return json.loads(request.data)


def test_any_url_gets_a_document() -> None:
    assert body("https://example.org/hook?key=1") == {
        "event": "killed",
        "severity": "warning",
        "title": "killed",
        "text": "rank <0> & @everyone",
        "run": "s3://bucket/run",
        "time": 7.0,
    }


@pytest.mark.parametrize(
    "url",
    [
        "https://hooks.slack.com/services/T/B/secret",
        "https://hooks.slack-gov.com/services/T/B/secret",
        "https://discord.com/api/webhooks/1/secret/slack",
    ],
)
def test_slack_gets_its_text_escaped(url: str) -> None:
    assert body(url) == {"text": "*holdfast: killed*\nrank &lt;0&gt; &amp; @everyone"}


@pytest.mark.parametrize(
    "url",
    [
        "https://discord.com/api/webhooks/1/secret",
        "https://discordapp.com/api/webhooks/1/secret",
        "https://ptb.discord.com/api/webhooks/1/secret",
        "https://canary.discord.com/api/webhooks/1/secret",
        "https://discord.com/api/v10/webhooks/1/secret?wait=true&thread_id=7",
    ],
)
def test_discord_gets_a_content_that_calls_nobody(url: str) -> None:
    said = body(url)
    assert said["content"] == "**holdfast: killed**\nrank <0> & @everyone"
    assert said["allowed_mentions"] == {"parse": []}


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("https://ntfy.sh/topic", "https://ntfy.sh/topic"),
        ("ntfy://example.org/topic", "https://example.org/topic"),
        ("ntfy+http://example.org:8080/topic", "http://example.org:8080/topic"),
    ],
)
def test_ntfy_gets_a_text_with_headers(url: str, place: str) -> None:
    request = Webhook(url).request(ALERT, ABOUT)
    assert request.full_url == place
    assert request.data == b"rank <0> & @everyone"
    headers = {name: request.get_header(name) for name in ("Title", "Priority", "Tags")}
    assert headers == {"Title": "holdfast: killed", "Priority": "high", "Tags": "warning"}


def test_a_password_becomes_a_header() -> None:
    request = Webhook("ntfy://me:pass%40word@example.org/topic").request(ALERT, ABOUT)
    assert request.full_url == "https://example.org/topic"
    said = request.get_header("Authorization")
    assert said is not None
    assert base64.b64decode(said.removeprefix("Basic ")) == b"me:pass@word"


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd?secret",
        "ftp://example.org/secret",
        "https:///secret",
        "https://exa mple/secret",
        "https://example.org:port/secret",
        "https://example.org/secret\r\nX: y",
        "https://[::1/secret",
        "secret",
        "",
    ],
)
def test_another_url_is_refused_without_its_secret(url: str) -> None:
    with pytest.raises(ConfigError, match="expected a URL that begins with https://HOST/") as caught:
        Webhook(url)
    assert "secret" not in str(caught.value)


def test_a_server_of_ntfy_without_a_topic_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected a topic behind the host"):
        Webhook("ntfy://example.org/")


def test_the_name_of_a_webhook_has_no_secret() -> None:
    assert Webhook("https://me:secret@example.org:8443/secret?secret#secret").name == "https://example.org/…"
