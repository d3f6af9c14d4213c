"""A web server on the loopback interface that gives byte ranges of a folder, and fails on
request."""

import base64
import contextlib
import functools
import http.server
import re
import threading
import time
import zlib


class Server(http.server.ThreadingHTTPServer):
    """url: of the folder. asked: paths of all requests, in order. login ("user:password"), query:
    needed, if not None.

    faults: path -> what is done with its next requests, one each: a status, "hang", "whole"
    (ignores the range), "endless" (never stops to send), "swelling" (unpacks to 512 MiB) or "slow"
    (100 kB a second). always: path -> what is done with all of them.
    """

    daemon_threads = True

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.faults = {}
        self.always = {}
        self.asked = []
        self.login = self.query = None
        self.released = threading.Event()

    def handle_error(self, request, client_address):
        """Clients that give up are expected."""


@functools.lru_cache
def _swelling():
    packer = zlib.compressobj(1, wbits=31)
    first, second = (
        packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH) for _ in range(2)
    )
    return first + second * 511  # after a full flush nothing depends on the bytes before


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        path, _, query = self.path.lstrip("/").partition("?")
        self.server.asked.append(path)
        fault = self.server.always.get(path) or next(iter(self.server.faults.get(path, [])), None)
        del self.server.faults.get(path, [])[:1]
        if fault == "hang":
            self.server.released.wait(30)
            self.close_connection = True
            return None
        login = base64.b64encode((self.server.login or "").encode()).decode()
        if login and self.headers.get("Authorization") != f"Basic {login}":
            return self._answer(401, b"no")
        if self.server.query and query != self.server.query:
            return self._answer(403, b"no")
        if fault == "endless":
            self._begin(200, 1 << 40)
            while not self.server.released.is_set():
                self.wfile.write(bytes(1 << 16))
        if fault == "swelling":
            return self._answer(200, _swelling(), ("Content-Encoding", "gzip"))
        if isinstance(fault, int):
            return self._answer(fault, b"no")
        try:
            content = (self.server.folder / path).read_bytes()
        except OSError:
            return self._answer(404, b"no")
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if found is None or fault == "whole":
            return self._answer(200, content)
        start, last = map(int, found.groups())
        if start >= len(content):
            return self._answer(416, b"no")
        asked = content[start : last + 1]
        place = ("Content-Range", f"bytes {start}-{last}/{len(content)}")
        if fault != "slow":
            return self._answer(206, asked, place)
        self._begin(206, len(asked), place)
        for first in range(0, len(asked), 2000):
            time.sleep(0.02)
            self.wfile.write(asked[first : first + 2000])

    def _answer(self, status, content, *headers):
        self._begin(status, len(content), *headers)
        self.wfile.write(content)

    def _begin(self, status, length, *headers):
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        for header in headers:
            self.send_header(*header)
        self.end_headers()

    def log_message(self, *arguments):
        """Quiet."""


@contextlib.contextmanager
def serving(folder):
    """The server while it runs."""
    server = Server(folder)
    threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    ).start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        server.server_close()
