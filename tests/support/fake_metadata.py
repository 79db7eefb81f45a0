"""A cloud's metadata server, on an address of the test: AWS, Google Cloud and Azure in one, healthy or faulty.

In a test:          with FakeMetadata() as server: server.interrupt(120); server.environ
On a test's host:   python -m tests.support.fake_metadata HOST PORT
                    lines on stdin: interrupt 120 | rebalance | clear | hang | answer; prints the requests
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

__all__ = [
    "AWS_ACTION",
    "AWS_REBALANCE",
    "AWS_ROOT",
    "AWS_TOKEN",
    "AZURE_EVENTS",
    "GCP_PREEMPTED",
    "FakeMetadata",
]

AWS_TOKEN = "/latest/api/token"
AWS_ROOT = "/latest/meta-data/"
AWS_ACTION = "/latest/meta-data/spot/instance-action"
AWS_REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
GCP_PREEMPTED = "/computeMetadata/v1/instance/preempted"
AZURE_EVENTS = "/metadata/scheduledevents"
AZURE_NAME = "/metadata/instance/compute/name"
_HANG_SECONDS_MAX = 120.0


class FakeMetadata:
    """The server, running in a thread until `close`.

    Attributes:
        action: Body of instance-action; None: 404. `rebalance`: the same for the rebalance recommendation.
        preempted: Google Cloud's answer. `events`: Azure's Scheduled Events.
        forced: Path → (status, body, headers), instead of the usual answer.
        silent: Paths whose requests are accepted and never answered.
        hanging: Accept every request and answer none. `dripping`: send a byte every 50 ms.
        asked: Path → number of requests. `tokens`: number of tokens issued. `headers`: of the last request.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0, *, token_seconds_max: float = 21600) -> None:
        self.action: str | None = None
        self.rebalance: str | None = None
        self.preempted = "FALSE"
        self.events: list[dict[str, Any]] = []
        self.machine = "trainer-0"
        self.forced: dict[str, tuple[int, str, dict[str, str]]] = {}
        self.silent: set[str] = set()
        self.hanging = threading.Event()
        self.dripping = False
        self.asked: Counter[str] = Counter()
        self.tokens = 0
        self.valid: dict[str, float] = {}
        self.headers: dict[str, dict[str, str]] = {}
        self._token_seconds_max = token_seconds_max
        self._closing = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer.serve(self)

            def do_PUT(self) -> None:
                outer.serve(self)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer((host, port), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The server's URL."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    @property
    def environ(self) -> dict[str, str]:
        """The variables that point each watcher to this server."""
        return {
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": self.url,
            "GCE_METADATA_HOST": self.url.removeprefix("http://"),
            "HOLDFAST_AZURE_METADATA_URL": self.url,
        }

    def interrupt(self, seconds: float, action: str = "terminate") -> float:
        """Announce in AWS's words that the machine ends in `seconds` (whole) seconds; return that time."""
        at = int(time.time() + seconds)
        self.action = json.dumps(
            {"action": action, "time": datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")}
        )
        return float(at)

    def recommend(self) -> None:
        """Announce a rebalance recommendation."""
        self.rebalance = json.dumps({"noticeTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")})

    def withdraw_tokens(self) -> None:
        """From now on refuse every token issued so far."""
        self.valid.clear()

    def close(self) -> None:
        """End it."""
        self._closing.set()
        self.hanging.clear()
        self.silent.clear()
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- answers

    def serve(self, request: BaseHTTPRequestHandler) -> None:
        """Answer one request, in a thread of its own."""
        path = request.path.split("?")[0]
        self.headers[path] = {name.lower(): value for name, value in request.headers.items()}
        self.asked[path] += 1
        if self.hanging.is_set() or path in self.silent:
            deadline = time.monotonic() + _HANG_SECONDS_MAX
            while (
                (self.hanging.is_set() or path in self.silent)
                and time.monotonic() < deadline
                and not self._closing.is_set()
            ):
                time.sleep(0.02)
            request.close_connection = True
            return
        status, body, headers = self.forced.get(path) or self._answer(request.command, path)
        data = body.encode()
        try:
            request.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **headers}.items():
                request.send_header(name, value)
            request.end_headers()
            for index in range(len(data)) if self.dripping else ():
                request.wfile.write(data[index : index + 1])
                request.wfile.flush()
                if self._closing.wait(0.05):
                    break
            if not self.dripping:
                request.wfile.write(data)
        except OSError:
            request.close_connection = True  # the client has hung up

    def _answer(self, method: str, path: str) -> tuple[int, str, dict[str, str]]:
        headers = self.headers[path]
        now = time.monotonic()
        if path == AWS_TOKEN:
            seconds = headers.get("x-aws-ec2-metadata-token-ttl-seconds", "")
            if method != "PUT" or not seconds.isdigit() or not 1 <= int(seconds) <= 21600:
                return 400, "", {}
            self.tokens += 1
            token = f"token-{self.tokens}"
            self.valid[token] = now + min(float(seconds), self._token_seconds_max)
            return 200, token, {}
        if path in {AWS_ROOT, AWS_ACTION, AWS_REBALANCE}:
            if self.valid.get(headers.get("x-aws-ec2-metadata-token", ""), 0.0) <= now:
                return 401, "", {}
            said = {AWS_ROOT: "spot/", AWS_ACTION: self.action, AWS_REBALANCE: self.rebalance}[path]
            return (404, "", {}) if said is None else (200, said, {})
        if path == GCP_PREEMPTED:
            return (200, self.preempted, {}) if headers.get("metadata-flavor") == "Google" else (403, "", {})
        if path in {AZURE_EVENTS, AZURE_NAME}:
            if headers.get("metadata") != "true":
                return 400, "", {}
            said = (
                self.machine
                if path == AZURE_NAME
                else json.dumps({"DocumentIncarnation": 1, "Events": self.events})
            )
            return 200, said, {}
        return 404, "", {}


def main() -> None:
    """Serve until stdin ends, executing its lines."""
    with FakeMetadata(sys.argv[1], int(sys.argv[2])) as server:
        print(server.url, flush=True)
        for line in sys.stdin:
            match line.split():
                case ["interrupt", seconds]:
                    server.interrupt(float(seconds))
                case ["rebalance"]:
                    server.recommend()
                case ["clear"]:
                    server.action = server.rebalance = None
                case ["hang"]:
                    server.hanging.set()
                case ["answer"]:
                    server.hanging.clear()
                case _:
                    print(f"not understood: {line!r}", file=sys.stderr)
            print(json.dumps({"asked": dict(server.asked), "tokens": server.tokens}), flush=True)


if __name__ == "__main__":
    main()
