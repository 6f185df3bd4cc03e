"A headless Chromium, driven over its debugging protocol: enough to open a page, ask it something, type and take a picture."
import base64
import contextlib
import functools
import http.server
import json
import shutil
import subprocess
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

import websocket


def program():
    "The Chromium of this machine, or None."
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


@contextlib.contextmanager
def served(folder):
    "The address at which `folder` is served to this machine alone."
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *words):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


class Browser:
    "One page of a headless Chromium with a profile of its own; `with Browser() as browser:` ends it again."

    flags = (
        "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
        "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--remote-debugging-port=0", "--remote-allow-origins=*",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # whatever a page asks of another machine fails at once
    )

    def __enter__(self):
        self.profile = tempfile.mkdtemp(prefix="databloom-chromium-")
        self.process = subprocess.Popen(
            [program(), *self.flags, f"--user-data-dir={self.profile}", "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        try:
            self.connect()
        except BaseException:
            self.__exit__()
            raise
        return self

    def connect(self):
        port = self.wait(lambda: self.port_file(), 60)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json") as answer:
            page = next(target for target in json.load(answer) if target["type"] == "page")
        self.socket = websocket.create_connection(page["webSocketDebuggerUrl"], timeout=60)
        self.number, self.events = 0, []
        for domain in ("Page", "Runtime", "Network"):
            self.ask(f"{domain}.enable")

    def port_file(self):
        file = Path(self.profile, "DevToolsActivePort")
        return file.read_text().split()[0] if file.exists() and file.read_text().strip() else None

    def __exit__(self, *error):
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for _ in range(20):  # its other processes write there for a moment longer
            shutil.rmtree(self.profile, ignore_errors=True)
            if not Path(self.profile).exists():
                break
            time.sleep(0.1)

    def ask(self, method, **parameters):
        "The answer of Chromium to one command of its protocol; what it reports meanwhile is kept in `events`."
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self.socket.recv())
            if message.get("id") == self.number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                return message["result"]
            self.events.append(message)

    def wait(self, question, seconds=20):
        "The first answer to `question` that is true, asked again and again."
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if answer := question():
                return answer
            time.sleep(0.05)
        raise TimeoutError(f"no answer within {seconds} s")

    def run(self, script):
        "The value of a JavaScript expression on the page."
        answer = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"].get("exception", {}).get("description", script))
        return answer["result"].get("value")

    def open(self, url):
        "Open a page and wait until it has loaded."
        self.events.clear()
        self.ask("Page.navigate", url=url)
        self.wait(lambda: self.run(f"location.href.split('#')[0] == {json.dumps(url.split('#')[0])} && document.readyState == 'complete'"))

    def complaints(self):
        "Errors of the page's scripts, and requests that failed, since it was opened."
        self.run("1")
        for event in self.events:
            if event["method"] == "Runtime.exceptionThrown":
                yield event["params"]["exceptionDetails"]["text"]
            elif event["method"] == "Network.loadingFailed" and not event["params"].get("canceled"):
                yield event["params"]["errorText"]
            elif event["method"] == "Network.responseReceived" and event["params"]["response"]["status"] >= 400:
                yield f"{event['params']['response']['status']} {event['params']['response']['url']}"

    def type(self, text):
        "Type into whatever has the focus."
        self.ask("Input.insertText", text=text)

    def size(self, width, height=900):
        "Give the page the size of a phone's or a desk's screen."
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)

    def picture(self, path, whole=True):
        "Take a picture of the page as PNG."
        data = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        Path(path).write_bytes(base64.b64decode(data))
