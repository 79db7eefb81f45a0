"""An S3 server that keeps only sizes, and limits the bytes a second of each connection and of all together.

    python -m benchmarks.growing.sink CONNECTION_BYTES_PER_SECOND ALL_BYTES_PER_SECOND    prints its port; 0: no limit

One thread serves all connections, to leave the CPU to the measured processes. The server only knows multipart uploads,
and ranged reads of uploaded objects, which return zeros.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from urllib.parse import parse_qs, urlsplit

_PIECE_BYTES = 256 << 10
_PAUSE_SECONDS = 0.05
_ZEROS = bytes(_PIECE_BYTES)
_MAKE = re.compile(r"/make/(\d+)/")  # an object of zeros of this size, without sending them
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


class Speed:
    """Rate limit in bytes a second, without credit for idle time."""

    def __init__(self, bytes_per_second: float) -> None:
        self._rate, self._at = bytes_per_second, 0.0

    def after(self, nbytes: int) -> float:
        """Return the seconds to wait after transferring `nbytes`."""
        now = time.monotonic()
        self._at = max(self._at, now - _PAUSE_SECONDS) + nbytes / self._rate
        return self._at - now


class Sink:
    """The server. `/peak` returns the most concurrent requests and the bytes transferred since the last `/peak`."""

    def __init__(self, each: float, in_all: float) -> None:
        self._each, self._all = each, Speed(in_all)
        self._parts: dict[str, dict[int, int]] = {}
        self._sizes: dict[str, int] = {}
        self._bodies: dict[str, bytes] = {}
        self._busy = self._peak = self._passed = 0
        self._number = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            own = Speed(self._each)
            while await self._request(reader, writer, own):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, own: Speed) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        line, *rows = head.split("\r\n")
        method, target, _ = line.split(" ", 2)
        fields = {name.lower(): value.strip() for name, _, value in (row.partition(":") for row in rows)}
        url = urlsplit(target)
        query = parse_qs(url.query, keep_blank_values=True)
        if fields.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        large = int(fields.get("content-length", "0"))
        self._busy += 1
        self._peak = max(self._peak, self._busy)
        try:
            body = await self._take(reader, large, own, keep="partNumber" not in query)
            await self._answer(method, url.path, query, fields, body, large, writer, own)
        finally:
            self._busy -= 1
        await writer.drain()
        return True

    async def _take(self, reader: asyncio.StreamReader, nbytes: int, own: Speed, *, keep: bool) -> bytes:
        kept = bytearray()
        while nbytes:
            piece = await reader.read(min(nbytes, _PIECE_BYTES))
            if not piece:
                raise ConnectionError("the client has gone")
            nbytes -= len(piece)
            if keep:
                kept += piece
            else:
                await self._pass(len(piece), own)
        return bytes(kept)

    async def _pass(self, nbytes: int, own: Speed) -> None:
        self._passed += nbytes
        seconds = max(own.after(nbytes), self._all.after(nbytes))
        if seconds > 0:
            await asyncio.sleep(seconds)

    async def _answer(
        self,
        method: str,
        path: str,
        query: dict[str, list[str]],
        fields: dict[str, str],
        body: bytes,
        nbytes: int,
        writer: asyncio.StreamWriter,
        own: Speed,
    ) -> None:
        if path == "/peak":
            self._say(writer, f"{self._peak} {self._passed}".encode())
            self._peak = self._passed = 0
        elif method == "POST" and "uploads" in query:
            self._number += 1
            self._parts[path] = {}
            self._say(writer, f"<R><UploadId>upload-{self._number}</UploadId></R>".encode())
        elif method == "PUT" and "partNumber" in query:
            self._parts[path][int(query["partNumber"][0])] = nbytes
            self._say(writer, b"", {"ETag": '"part"'})
        elif method == "POST":
            self._sizes[path] = sum(self._parts.pop(path).values())
            self._say(
                writer, b"<CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>"
            )
        elif method == "PUT" and (asked := _MAKE.search(path)):
            self._sizes[path.replace(asked[0], "/")] = int(asked[1])
            self._say(writer, b"", {"ETag": '"object"'})
        elif method == "PUT":
            self._bodies[path], self._sizes[path] = body, nbytes
            self._say(writer, b"", {"ETag": '"object"'})
        elif method == "DELETE":
            self._bodies.pop(path, None)
            self._sizes.pop(path, None)
            self._say(writer, b"", status="204 No Content")
        elif path not in self._sizes:
            self._say(writer, b"", status="404 Not Found")
        elif method == "HEAD":
            self._say(writer, b"", length=self._sizes[path])
        elif path in self._bodies:
            self._say(writer, self._bodies[path])
        else:
            found = _RANGE.fullmatch(fields.get("range", ""))
            begin, end = (int(found[1]), int(found[2]) + 1) if found else (0, self._sizes[path])
            self._say(writer, b"", length=end - begin, status="206 Partial Content")
            while begin < end:
                piece = _ZEROS[: min(_PIECE_BYTES, end - begin)]
                writer.write(piece)
                await writer.drain()
                begin += len(piece)
                await self._pass(len(piece), own)

    @staticmethod
    def _say(
        writer: asyncio.StreamWriter,
        body: bytes,
        fields: dict[str, str] | None = None,
        *,
        status: str = "200 OK",
        length: int | None = None,
    ) -> None:
        rows = {"Content-Length": str(len(body) if length is None else length), **(fields or {})}
        head = "".join(f"{name}: {value}\r\n" for name, value in rows.items())
        writer.write(f"HTTP/1.1 {status}\r\n{head}\r\n".encode() + body)


async def _run(each: float, in_all: float) -> None:
    sink = Sink(each, in_all)
    server = await asyncio.start_server(sink.serve, "127.0.0.1", 0, limit=1 << 20)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_run(*(float(text) or float("inf") for text in sys.argv[1:3])))
