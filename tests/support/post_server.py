"""An HTTP server on loopback that takes messages of `--notify`."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["SECRET", "PostServer"]

SECRET = "s3cr3t"


class PostServer:
    """Takes POSTs; answers with `statuses` one after the other, then 200. Holds answers while `hold` is set."""

    def __init__(self, *statuses: int) -> None:
        self.bodies: list[bytes] = []
        self.go_on = threading.Event()
        self.go_on.set()
        left, server = list(statuses), self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                server.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
                server.go_on.wait(60)
                self.send_response(left.pop(0) if left else 200)
                self.send_header("Location", "/elsewhere")  # which counts in a redirection alone
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._http.server_port}/{SECRET}"

    def said(self) -> list[dict[str, Any]]:
        return [json.loads(body) for body in self.bodies]

    def close(self) -> None:
        self.go_on.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()
