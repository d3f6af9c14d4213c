"""A web server on the loopback interface that gives byte ranges of a folder, and fails on request."""

import contextlib
import http.server
import re
import threading


class Server(http.server.ThreadingHTTPServer):
    """
    Attributes:
        url: of the folder.
        faults: path -> what is done with its next requests, one each: a status, "hang" or "whole" (ignores the range).
        always: path -> what is done with all of its requests, likewise.
        asked: paths of all requests, in order.
    """

    daemon_threads = True

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.faults, self.always, self.asked = {}, {}, []
        self.released = threading.Event()

    def handle_error(self, request, client_address):
        """Clients that give up are expected."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        path = self.path.lstrip("/")
        self.server.asked.append(path)
        fault = self.server.always.get(path) or next(iter(self.server.faults.get(path, [])), None)
        if self.server.faults.get(path):
            self.server.faults[path].pop(0)
        if fault == "hang":
            self.server.released.wait(30)
            self.close_connection = True
            return
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
        self._answer(206, content[start : last + 1], f"bytes {start}-{last}/{len(content)}")

    def _answer(self, status, content, part=None):
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        if part is not None:
            self.send_header("Content-Range", part)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments):
        """Quiet."""


@contextlib.contextmanager
def serving(folder):
    """The server while it runs."""
    server = Server(folder)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        server.server_close()
        thread.join()
