"""A real `dagster dev` in a folder as a fresh clone is, and a real Chromium that looks at it as a person does."""

import json
import re
import shutil
import socket
import subprocess
import urllib.request
from contextlib import contextmanager
from pathlib import Path

from support import ROOT
from support.dagster_dev import until
from support.dagster_runs import environment

SECONDS = 180.0
"""That anything is waited for: a machine may have other work."""
WIDE, HIGH = 1440, 900
"""Pixels of the window."""
ENDED = ("SUCCESS", "FAILURE", "CANCELED")


class DagsterDev:
    """A `dagster dev` on loopback, always at the same address. Its folder has chats of its own, in sources.toml."""

    def __init__(self, folder):
        self.folder = folder
        for name in ("dagster.yaml", "workspace.yaml"):
            shutil.copyfile(ROOT / name, folder / name)
        chats = [{"prompt": f"What is {number} plus 1?", "response": f"{number + 1}."} for number in range(30)]
        (folder / "chats.json").write_text(json.dumps(chats))
        toml = '[sft.support]\nfiles = "chats.json"\nlicence = "CC BY 4.0"\nattribution = "The support team"\n'
        (folder / "sources.toml").write_text(toml)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        self.process = None

    def start(self, **more):
        """Start it with `more` variables in its environment, and wait until its web server answers."""
        # A shell in the background ignores SIGINT, and dagster maps SIGTERM to it: without env it could not be stopped.
        command = ["env", "--default-signal=INT,TERM", "dagster", "dev", "-h", "127.0.0.1", "-p", str(self.port)]
        with open(self.folder / "dev.log", "ab") as log:
            how = {"cwd": self.folder, "env": environment(**more), "stdout": log, "stderr": subprocess.STDOUT}
            self.process = subprocess.Popen(command, **how)
        until(lambda: self.ask("{ version }"), f"dagster dev, see {self.folder / 'dev.log'}")

    def stop(self):
        """Stop it; afterwards no process works in its folder."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait(timeout=SECONDS)
            self.process = None
        until(lambda: not self._processes(), "the end of every process that dagster dev has started")

    def restart(self, **more):
        """Start it again with another environment."""
        self.stop()
        self.start(**more)

    def ask(self, query):
        """Return what the web server's GraphQL answers."""
        body = json.dumps({"query": query}).encode()
        request = urllib.request.Request(f"{self.address}/graphql", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)["data"]

    def run_of(self, click):
        """Do `click`, and return the status in which the run ends that it has started."""
        before = self._runs()
        click()

        def ended():
            return [status for run, status in self._runs().items() if run not in before and status in ENDED]

        (status,) = until(ended, "the run of a click")
        return str(status)

    def stale(self):
        """Return the reasons of all assets that are stale, by key."""
        nodes = self.ask("{ assetNodes { assetKey { path } staleStatus staleCauses { reason } } }")["assetNodes"]
        return {
            "/".join(node["assetKey"]["path"]): [cause["reason"] for cause in node["staleCauses"]]
            for node in nodes
            if node["staleStatus"] == "STALE"
        }

    def _runs(self):
        runs = self.ask("{ runsOrError { ... on Runs { results { runId status } } } }")["runsOrError"]["results"]
        return {run["runId"]: run["status"] for run in runs}

    def _processes(self):
        """Return the ids of the processes that work in the folder."""

        def works_here(process):
            try:
                return (process / "cwd").readlink().is_relative_to(self.folder)
            except OSError:  # it has ended, or is somebody else's
                return False

        return [process.name for process in Path("/proc").glob("[0-9]*") if works_here(process)]


@contextmanager
def chromium(address):
    """Yield a page of a headless Chromium; at the end no request may have left the machine."""
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium")
    assert path, "no chromium: apt-get install chromium"
    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-component-update"]
        browser = playwright.chromium.launch(executable_path=path, args=flags)
        page = browser.new_page(viewport={"width": WIDE, "height": HIGH}, timezone_id="UTC")
        page.set_default_timeout(SECONDS * 1000)
        requests = []
        page.context.on("request", lambda request: requests.append(request.url))
        yield page
        browser.close()
    assert requests
    assert [url for url in requests if not url.startswith((address, "data:", "blob:"))] == []


def seen(page, *texts):
    """Wait until each text is on the page. Dagster's UI has many texts twice, of which one is hidden."""
    for text in texts:
        page.get_by_text(text, exact=True).filter(visible=True).first.wait_for()


def choose(page, button, entry):
    """Choose an entry from the drop-down beside a button."""
    page.get_by_role("button", name=button).first.locator("xpath=following::button[1]").click()
    page.get_by_role("menuitem", name=entry).click()


def confirmed(page, then):
    """Wait for `then`; where the UI first asks whether one is sure, as upstream assets are missing, say so."""
    sure = page.get_by_role("button", name="Confirm")
    sure.or_(then).first.wait_for()
    if sure.is_visible():
        sure.click()
        then.first.wait_for()


def blemishes(page):
    """Return what a page shows for no value, but null, which meta.json has; and the pictures that have not loaded."""
    words = re.findall(r".{0,40}\b(?:undefined|NaN|object Object)\b.{0,40}", page.inner_text("body"))
    broken = "images => images.filter(image => image.complete && !image.naturalWidth).map(image => image.src)"
    return [*words, *page.locator("img").evaluate_all(broken)]
