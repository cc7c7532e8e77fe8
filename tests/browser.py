"""Opens pages in headless Chromium, through chromedriver (W3C WebDriver)."""

import base64
import json
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars"),
)


class Browser:
    """One tab. After `open`, `requests` and `complaints` have the page's requests and console messages."""

    def __init__(self, url: str, profile: str) -> None:
        self._url = url
        options = {"binary": CHROMIUM, "args": [*FLAGS, f"--user-data-dir={profile}"]}
        logs = {"browser": "ALL", "performance": "ALL"}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": logs}
        session = self._post("/session", {"capabilities": {"alwaysMatch": wanted}})
        self._url += f"/session/{session['sessionId']}"

    def _post(self, path: str, values: object) -> object:
        request = urllib.request.Request(self._url + path, json.dumps(values).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())["value"]

    def _devtools(self, command: str, **parameters: object) -> object:
        return self._post("/goog/cdp/execute", {"cmd": command, "params": parameters})

    def open(self, page: Path, width: int) -> None:
        """Shows a page at a width of `width` CSS pixels, and clears the logs of the page before."""
        self._post("/url", {"url": "about:blank"})
        self.complaints()
        self.requests()
        metrics = {"width": width, "height": 800, "deviceScaleFactor": 2 if width < 600 else 1, "mobile": width < 600}
        self._devtools("Emulation.setDeviceMetricsOverride", **metrics)
        self._post("/url", {"url": page.resolve().as_uri()})

    def evaluate(self, expression: str) -> object:
        return self._post("/execute/sync", {"script": f"return {expression}", "args": []})

    def complaints(self) -> list[str]:
        """Console messages since the last call."""
        return [entry["message"] for entry in self._post("/se/log", {"type": "browser"})]

    def requests(self) -> list[str]:
        """URLs requested since the last call."""
        entries = self._post("/se/log", {"type": "performance"})
        events = [json.loads(entry["message"])["message"] for entry in entries]
        return [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]

    def screenshot(self, file: Path, max_height: int = 20_000) -> None:
        """The whole page, from its top, as a PNG."""
        width, height = self.evaluate("[innerWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": width, "height": min(height, max_height), "scale": 1}
        shot = self._devtools("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        urllib.request.urlopen(urllib.request.Request(self._url, method="DELETE"), timeout=60).close()


@contextmanager
def browser() -> Iterator[Browser]:
    """A new browser with its own profile, closed on exit."""
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://localhost:{port}"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        driver = subprocess.Popen([DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL)
        try:
            _wait_for(url)
            opened = Browser(url, profile)
            try:
                yield opened
            finally:
                opened.close()
        finally:
            driver.terminate()
            driver.wait()


def _wait_for(url: str) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            return urllib.request.urlopen(f"{url}/status", timeout=10).close()
        except (URLError, ConnectionError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
