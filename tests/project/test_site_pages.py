"""The built site in Chromium, as a person sees it on a wide and on a narrow screen.

It wants Debian's chromium and the extras `browser` and `docs`. Run: pytest -m browser tests/project/test_site_pages.py
"""

import functools
import html
import http.server
import re
import shutil
import subprocess
import sys
import threading

import pytest
from support import ROOT

from tools import check_site

pytestmark = pytest.mark.browser
PAGES = (
    "index",
    "tutorials/small_gpt",
    "formats",
    "concepts/folding",
    "api/prefix_tree",
    "api/settings",
    "decisions/0009-the-read-side",
)


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A strict build of the site, in a copy of what it is made from."""
    root = tmp_path_factory.mktemp("site")
    shutil.copyfile(ROOT / "zensical.toml", root / "zensical.toml")
    for name in ("docs", "niels_gpt", "tools"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "sample"))
    subprocess.run([sys.executable, "-m", "zensical", "build", "--strict"], cwd=root, check=True)
    return root / "site"


@pytest.fixture(scope="module")
def address(site):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_every_link_and_file_of_the_built_site_is_there(site):
    assert list(check_site.faults(site)) == []


def prose(page):
    """Return what a page says, on one line, without its signatures."""
    article = page.read_text(encoding="utf-8").partition("<article")[2].partition("</article>")[0]
    article = re.sub(r"<pre>.*?</pre>", "", article, flags=re.DOTALL)
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<(?!li>)[^>]*>", "", article)).replace("<li> ", "<li>"))


def test_docstrings_are_lists_and_fields_have_their_comments(site):
    assert "<li>shuffle_buffer: documents in the shuffle buffer; None: the order" in prose(site / "api" / "cache.html")
    folding = prose(site / "api" / "prefix_tree.html")
    assert "int64 [T], tokens above this one in every sample through it" in folding
    assert "where k <= q < subtree_end[k]" in folding
    settings = (site / "api" / "settings.html").read_text(encoding="utf-8")
    assert "_setting(" not in re.sub(r"<[^>]*>", "", settings)
    assert "seed of every split and shuffle" in prose(site / "api" / "settings.html")
    assert [page.name for page in (site / "api").glob("*.html") if "\\" in prose(page)] == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 390])
def test_no_page_overflows_its_screen_and_no_request_fails(address, width, scheme):
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    assert chromium, "no chromium: apt-get install chromium"
    asked = []
    failed = []
    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-component-update"]
        browser = playwright.chromium.launch(executable_path=chromium, args=flags)
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.on("request", lambda request: asked.append(request.url))
        page.on("requestfailed", lambda request: failed.append((request.failure, request.url)))
        page.on("response", lambda answer: failed.extend([(answer.status, answer.url)] * (answer.status >= 400)))
        for name in PAGES:
            page.goto(f"{address}/{name}.html", wait_until="networkidle")
            assert page.locator("h1").first.is_visible(), name
            assert page.evaluate("document.documentElement.scrollWidth") <= width, name
            assert page.evaluate("[...document.images].every(image => image.naturalWidth > 0)"), name
        browser.close()
    assert asked and [url for url in asked if not url.startswith((address, "data:"))] == []
    assert [fault for fault in failed if fault[0] != "net::ERR_ABORTED"] == []  # that is what a left page still loaded
