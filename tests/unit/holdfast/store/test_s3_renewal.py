"""Credentials expire during a run: they are read again from their source, and the same upload continues."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from holdfast.errors import StoreError
from holdfast.store.retrying import RetryBudget, Retrying
from holdfast.store.s3 import S3Store

_PART_BYTES = 5 << 20
_ERROR = "<Error><Code>{}</Code><Message>of the test</Message></Error>"
_INITIATED = "<InitiateMultipartUploadResult><UploadId>one</UploadId></InitiateMultipartUploadResult>"


class _Server:
    """Knows one access key. `let_expire`: refuse the next request, and expect another key from then on."""

    def __init__(self) -> None:
        self.key, self.code = "KEY0", "ExpiredToken"
        self.seen: list[tuple[str, str, int]] = []  # method, path, status
        self.renew: Callable[[str], None] = lambda _: None
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _answer(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", "0")))
                known = f"Credential={server.key}/" in self.headers.get("Authorization", "")
                body = b"" if known else _ERROR.format(server.code).encode()
                if known and self.command == "POST" and self.path.endswith("?uploads"):
                    body = _INITIATED.encode()
                status = 200 if known else 403 if server.code == "403" else 400
                server.seen.append((self.command, self.path, status))
                self.send_response(status)
                self.send_header("ETag", '"e"')
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(b"" if self.command == "HEAD" else body)
                if not known:
                    server.renew(server.key)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _answer  # noqa: N815

            def log_message(self, *_: object) -> None:
                """Nothing."""

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


@pytest.fixture(name="server")
def _server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[_Server]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / name))
    server = _Server()
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    yield server
    server.close()


def _in_a_file(folder: Path, key: str) -> None:
    text = f"[default]\naws_access_key_id={key}\naws_secret_access_key=s\naws_session_token=t-{key}\n"
    (folder / "AWS_SHARED_CREDENTIALS_FILE").write_text(text)


def _of_a_process(folder: Path, key: str) -> None:
    said = {"Version": 1, "AccessKeyId": key, "SecretAccessKey": "s", "SessionToken": f"t-{key}"}
    (folder / "said").write_text(json.dumps(said))
    program = f"import sys; sys.stdout.write(open('{folder}/said').read())"
    (folder / "AWS_CONFIG_FILE").write_text(
        f'[default]\ncredential_process = {sys.executable} -c "{program}"\n'
    )


def _store() -> Retrying:
    return Retrying(S3Store("bucket", "run"), budget=RetryBudget(400, 60.0, 0.01, 0.05))


@pytest.mark.parametrize("code", ["ExpiredToken", "InvalidAccessKeyId", "TokenRefreshRequired", "403"])
@pytest.mark.parametrize("put", [_in_a_file, _of_a_process], ids=["file", "process"])
def test_the_same_upload_goes_on_with_credentials_that_were_renewed(
    server: _Server, tmp_path: Path, put: Callable[[Path, str], None], code: str
) -> None:
    put(tmp_path, "KEY0")
    server.code = code
    upload = _store().begin("x.pt", nbytes=3 * _PART_BYTES, chunk_bytes=_PART_BYTES, write_id="w1")
    part = memoryview(bytes(_PART_BYTES))
    upload.write_part(0, [part], 0)
    server.key = "KEY1"
    put(tmp_path, "KEY1")
    for index in (1, 2):
        upload.write_part(index, [part], 0)
    begun = [one for one in server.seen if one[0] == "POST" and one[1].endswith("?uploads")]
    parts = [
        (path.partition("partNumber=")[2][:1], status)
        for method, path, status in server.seen
        if "partNumber" in path
    ]
    assert len(begun) == 1, "another upload was begun"
    assert [number for number, status in parts if status == 200] == ["1", "2", "3"]
    assert [number for number, status in parts if status != 200] == ["2"], "one request was refused"


def test_late_renewal_of_credentials_is_waited_for(server: _Server, tmp_path: Path) -> None:
    """The store refuses the second part three times, and only then there are others."""
    _in_a_file(tmp_path, "KEY0")
    store, refused = _store(), [0]
    store.write("a", b"1")
    server.key = "KEY1"

    def renew(key: str) -> None:
        refused[0] += 1
        if refused[0] == 3:
            _in_a_file(tmp_path, key)

    server.renew = renew
    store.write("b", b"2")
    assert refused[0] >= 3


def test_credentials_that_are_wrong_and_stay_so_are_an_error_at_once(server: _Server, tmp_path: Path) -> None:
    _in_a_file(tmp_path, "OTHER")
    server.code = "InvalidAccessKeyId"
    with pytest.raises(StoreError, match="the access key is not known there"):
        _store().write("a", b"1")
    assert len(server.seen) == 1
