"""A headless Chromium that opens files, driven by the DevTools protocol over pipes."""

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--disable-extensions", "--remote-debugging-pipe"),
)
# Chromium reads requests from descriptor 3, and writes answers to 4.
_START = """
import os, sys
read, write = (os.dup(int(fd)) for fd in sys.argv[1:3])
read, write = os.dup(read), os.dup(write)
os.dup2(read, 3)
os.dup2(write, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find():
    """The path of a browser, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """A browser with one page.

    Attributes:
        events: the events of the page since it was opened, as pairs of a method and its facts.
    """

    def __init__(self, path):
        self._home = tempfile.mkdtemp(prefix="browser-")
        ours, theirs = os.pipe(), os.pipe()
        command = [sys.executable, "-c", _START, str(ours[0]), str(theirs[1]), path, *_FLAGS]
        self._process = subprocess.Popen(
            [*command, f"--user-data-dir={self._home}", "about:blank"],
            pass_fds=(ours[0], theirs[1]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": self._home},
            start_new_session=True,
        )
        os.close(ours[0])
        os.close(theirs[1])
        self._requests, self._answers = os.fdopen(ours[1], "wb"), os.fdopen(theirs[0], "rb")
        self._waiting, self._number, self._session, self.events = b"", 0, None, []
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
            self._session = attached["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network", "Accessibility", "DOM"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    def call(self, method, **params):
        """Calls a method of the protocol."""
        self._number += 1
        request = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            request["sessionId"] = self._session
        self._requests.write(json.dumps(request).encode() + b"\0")
        self._requests.flush()
        while True:
            message = self._message()
            if message.get("id") == self._number:
                assert "error" not in message, (method, message["error"])
                return message["result"]

    def _message(self):
        while b"\0" not in self._waiting:
            more = os.read(self._answers.fileno(), 1 << 16)
            assert more, "the browser has died"
            self._waiting += more
        first, self._waiting = self._waiting.split(b"\0", 1)
        message = json.loads(first)
        if "method" in message:
            self.events.append((message["method"], message["params"]))
        return message

    def open(self, path, width=1280, height=900, dark=False):
        """Opens a file, and waits until it is loaded."""
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while "Page.loadEventFired" not in dict(self.events):
            self._message()

    def run(self, expression):
        """The value of a JavaScript expression."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, key):
        """Presses a key."""
        text = {"text": key} if len(key) == 1 else {}
        codes = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowRight": 39}
        code = {"windowsVirtualKeyCode": codes[key]} if key in codes else {}
        for kind in ("keyDown", "keyUp"):
            more = text if kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, **code, **more)

    def screenshot(self, path):
        """Writes a picture of the whole page."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def close(self):
        """Ends the browser and all of its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._requests.close()
        self._answers.close()
        shutil.rmtree(self._home, ignore_errors=True)
