"""`dagster dev` as a person uses it: materialize by a click, read an asset page, see its picture, in a real browser.

It wants Debian's chromium and the extra `browser`. Run: pytest -m browser tests/pipelines/test_ui.py
"""

import json
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import ROOT
from support.dagster_runs import environment

pytestmark = pytest.mark.browser
SECONDS = 120.0
RUNS = "{ runsOrError { ... on Runs { results { status startTime endTime } } } }"


def until(question: Any, what: str) -> Any:
    """Return the first answer that is not empty; a connection refused is none."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        try:
            if answer := question():
                return answer
        except OSError:
            pass
        time.sleep(0.5)
    raise AssertionError(f"{what}: not within {SECONDS:.0f} s")


def ask(address: str, query: str) -> Any:
    """Return what the web server's GraphQL answers."""
    body = json.dumps({"query": query}).encode()
    request = urllib.request.Request(f"{address}/graphql", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)["data"]


def finished(address: str) -> list[dict[str, Any]]:
    """Return all runs, the newest first, once none of them is in progress."""
    runs: list[dict[str, Any]] = ask(address, RUNS)["runsOrError"]["results"]
    return runs if all(run["status"] in ("SUCCESS", "FAILURE", "CANCELED") for run in runs) else []


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """The address of a `dagster dev` on loopback, in a folder as a fresh clone is, with chats of one's own."""
    for name in ("dagster.yaml", "workspace.yaml"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    chats = [{"prompt": f"What is {number} plus 1?", "response": f"{number + 1}."} for number in range(30)]
    (tmp_path / "chats.json").write_text(json.dumps(chats))
    toml = '[sft.support]\nfiles = "chats.json"\nlicence = "CC BY 4.0"\nattribution = "The support team"\n'
    (tmp_path / "sources.toml").write_text(toml)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # A shell in the background ignores SIGINT, and dagster maps SIGTERM to it: without env it could not be stopped.
    command = ["env", "--default-signal=INT,TERM", "dagster", "dev", "-h", "127.0.0.1", "-p", str(port)]
    with open(tmp_path / "dev.log", "wb") as log:
        dev = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=log, stderr=subprocess.STDOUT)
    found = f"http://127.0.0.1:{port}"
    try:
        until(lambda: ask(found, "{ version }"), f"dagster dev, see {tmp_path / 'dev.log'}")
        yield found
    finally:
        dev.terminate()
        assert dev.wait(timeout=60) is not None


@pytest.fixture
def page(address: str) -> Iterator[Any]:
    """A page of a headless Chromium; at the end no request may have left the machine."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    assert chromium, "no chromium: apt-get install chromium"
    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-component-update"]
        browser = playwright.chromium.launch(executable_path=chromium, args=flags)
        page = browser.new_page(viewport={"width": 1500, "height": 1200})
        page.set_default_timeout(SECONDS * 1000)
        requests: list[str] = []
        page.on("request", lambda request: requests.append(request.url))
        yield page
        browser.close()
    assert requests
    assert [url for url in requests if not url.startswith((address, "data:", "blob:"))] == []


def test_a_person_materializes_the_sft_group_and_looks_at_a_cache(address: str, page: Any, tmp_path: Path) -> None:
    page.goto(f"{address}/locations/niels_gpt/asset-groups/sft/lineage")
    page.get_by_role("button", name="Materialize all (3)").click()
    page.get_by_role("button", name="Confirm").click()  # the tokenizer is not there yet: the caches make it
    assert [run["status"] for run in until(lambda: finished(address), "the run")] == ["SUCCESS"]
    page.screenshot(path=tmp_path / "group.png")

    page.goto(f"{address}/assets/sft/oasst1")
    page.get_by_text("Token cache of OpenAssistant chats").first.wait_for()
    for key in ("train_tokens", "run/seconds", "supervised_share", "content_sha256", "tokenizer_sha256"):
        page.get_by_text(key, exact=True).first.wait_for()
    assert page.get_by_text("[[").first.is_visible()  # the part of an example that carries loss
    page.screenshot(path=tmp_path / "asset.png", full_page=True)
    page.get_by_text("[Show Markdown]").first.click()
    picture = page.get_by_role("img", name="lengths")
    picture.wait_for()
    assert picture.evaluate("image => image.naturalWidth") > 300
    page.screenshot(path=tmp_path / "picture.png")

    page.goto(f"{address}/assets/sft/support")
    for words in ("Token cache of your own chats", "CC BY 4.0", "The support team"):
        page.get_by_text(words).first.wait_for()
    page.screenshot(path=tmp_path / "own.png", full_page=True)

    page.goto(f"{address}/assets/sft/oasst1?view=checks")
    for check in ("files_match_meta", "ids_below_vocab_size", "tokenizer_matches", "examples_supervised"):
        page.get_by_text(check).first.wait_for()
    assert page.get_by_text("Succeeded").count() >= 4
    assert (tmp_path / "cache" / "sample" / "sft" / "oasst1" / "meta.json").is_file()
