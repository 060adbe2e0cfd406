"""A headless Chromium, asked over a pipe in its own protocol (Chrome DevTools)."""

import json
import os
import shutil
import subprocess
import time
from base64 import b64decode
from contextlib import contextmanager

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
QUIET = ("--no-first-run", "--disable-gpu", "--disable-background-networking")


def browser():
    """Return the command that starts a browser, or skip the test."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"no browser is installed (looked for {', '.join(NAMES)})")
    return [found, "--headless", "--no-sandbox", *QUIET]


class Tab:
    """One tab of the browser."""

    def __init__(self, to, of):
        self.to = to
        self.of = of
        self.session = None
        self.asked = 0
        self.events = []  # as the browser reports them
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        """Return the result of a command."""
        self.asked += 1
        message = {"id": self.asked, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        self.to.write(json.dumps(message).encode() + b"\0")
        self.to.flush()
        while True:
            answer = json.loads(self._read())
            if answer.get("id") == self.asked:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _read(self):
        data = bytearray()
        while (byte := self.of.read(1)) != b"\0":
            assert byte, "the browser has ended"
            data += byte
        return bytes(data)

    def value(self, script):
        """Return the value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, script):
        """Wait until an expression is true, and return it."""
        for _ in range(1200):
            if found := self.value(script):
                return found
            time.sleep(0.05)
        raise AssertionError((script, self.value("document.body.innerText"), self.errors()))

    def open(self, address):
        self.call("Page.navigate", url=address)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def type(self, place, text):
        """Type a text into a field as a user does."""
        self.value(f"document.getElementById({place!r}).focus()")
        self.call("Input.insertText", text=text)

    def press_enter(self):
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key="Enter",
                code="Enter",
                windowsVirtualKeyCode=13,
                text="\r" if kind == "keyDown" else "",
            )

    def text(self, place):
        return self.value(f"document.getElementById({place!r}).innerText")

    def resize(self, width, height, *, dark=False):
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, path):
        path.write_bytes(b64decode(self.call("Page.captureScreenshot")["data"]))

    def errors(self):
        """Return the page's console messages, and the browser's complaints."""
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [event["params"] for event in self.events if event["method"] in kinds]

    def requests(self):
        """Return the addresses that the page asked for."""
        sent = [e for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]


def _pipe():
    """Return two ends of a pipe, neither of them descriptor 3 or 4."""
    import fcntl

    ends = os.pipe()
    moved = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return moved


@contextmanager
def opened_tab(folder):
    """Start a browser whose profile is in a folder; it ends with the block."""
    if os.name != "posix":
        pytest.skip("the browser's descriptors are set by a shell")
    command = [*browser(), f"--user-data-dir={folder / 'profile'}", "--remote-debugging-pipe"]
    to_read, to = _pipe()
    of, of_write = _pipe()
    # Chromium reads its commands from descriptor 3 and answers on 4.
    script = f'exec "$@" 3<&{to_read} 4>&{of_write}'
    started = subprocess.Popen(
        ["bash", "-c", script, "browser", *command], pass_fds=(to_read, of_write), stderr=-3
    )
    os.close(to_read)
    os.close(of_write)
    try:
        with os.fdopen(to, "wb") as commands, os.fdopen(of, "rb") as answers:
            yield Tab(commands, answers)
    finally:
        started.kill()
        started.wait()
