"""A real browser without a window, by the DevTools protocol over two pipes; and where there is one."""

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_SECONDS = 60  # more than the slowest start on a busy machine
_SWITCHES = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe",
)  # fmt: skip


@contextlib.contextmanager
def browser():
    """A `Browser` that ends with the block."""
    ours_in, theirs_out = os.pipe()
    theirs_in, ours_out = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # The protocol's pipes are the descriptors 3 and 4.
        script = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        command = ["bash", "-c", script, "bash", PROGRAM, *_SWITCHES, f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(
            command, pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            yield Browser(ours_in, ours_out)
        finally:
            os.close(ours_out)
            process.kill()
            process.wait()
            os.close(ours_in)


class Page:
    """A page that was opened. requests: addresses that it asked for; complaints: what the console warned of."""

    def __init__(self, browser, session):
        self._browser, self._session = browser, session
        self.requests, self.complaints = [], []

    def call(self, method, **parameters):
        """The answer of the protocol's `method`."""
        return self._browser.call(method, self._session, **parameters)

    def value(self, expression):
        """Value of a JavaScript expression, or of the promise that it returns."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def note(self, event):
        method, given = event["method"], event["params"]
        if method == "Network.requestWillBeSent":
            self.requests.append(given["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(given["exceptionDetails"].get("exception", {}).get("description", "an exception"))
        elif method == "Runtime.consoleAPICalled" and given["type"] in ("error", "warning", "assert", "log"):
            self.complaints.append(" ".join(str(each.get("value")) for each in given["args"]))
        elif method == "Log.entryAdded" and given["entry"]["level"] in ("error", "warning"):
            self.complaints.append(given["entry"]["text"])


class Browser:
    """One message after the other: what comes in between is noted for the page that it is about."""

    def __init__(self, source, sink):
        self._source, self._sink = source, sink
        self._number, self._rest, self._pages = 0, b"", {}

    def open(self, path, width=1200, height=900, scheme="light", media=""):
        """The page of a file, loaded and drawn. Args: width, height: of the window, in pixels."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )  # fmt: skip
        page.call(
            "Emulation.setEmulatedMedia", media=media, features=[{"name": "prefers-color-scheme", "value": scheme}]
        )
        page.call("Page.navigate", url=path.resolve().as_uri())
        while page.value("document.readyState") != "complete":
            time.sleep(0.1)
        page.value("new Promise(drawn => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
        return page

    def call(self, method, session=None, **parameters):
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._sink, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + _SECONDS
        while time.monotonic() < end:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            if answer.get("sessionId") in self._pages:
                self._pages[answer["sessionId"]].note(answer)
        raise TimeoutError(method)

    def _next(self):
        while b"\0" not in self._rest:
            read = os.read(self._source, 1 << 16)
            assert read, "the browser has ended"
            self._rest += read
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)
