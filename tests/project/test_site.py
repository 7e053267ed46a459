"""The site: what is in its navigation, and that a strict build and its checks find what is wrong."""

import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest
from support import ROOT

from niels_gpt import cache, sampling
from tools import check_site
from tools.pictures.__main__ import PICTURES


def test_every_page_of_docs_has_one_entry_in_the_navigation():
    assert list(check_site.faults_of_navigation(ROOT)) == []


def test_a_page_that_is_not_there_or_has_no_place_is_named(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "lost.md").write_text("# Lost\n")
    (tmp_path / "zensical.toml").write_text('[project]\nnav = [{ "A" = ["gone.md"] }]\n')
    assert list(check_site.faults_of_navigation(tmp_path)) == [
        "zensical.toml: docs/gone.md is not there",
        "zensical.toml: docs/lost.md has 0 entries in `nav`; expected one",
    ]


GOOD = '<h1 id="top">A</h1><a href="#top">up</a><a href="https://example.org">out</a><img src="a.png">'


@pytest.mark.parametrize(
    ("page", "css", "fault"),
    [
        (GOOD, "p { color: red }", None),
        (GOOD + '<a href="b.html">b</a>', "", "index.html: b.html leads to no file of the site"),
        (GOOD + '<a href="index.html#b">b</a>', "", "index.html: index.html#b leads to no anchor"),
        (GOOD + '<img src="b.png">', "", "index.html: b.png leads to no file of the site"),
        (GOOD + '<a href="../out.txt">b</a>', "", "index.html: ../out.txt leads to no file of the site"),
        (GOOD + '<script src="//cdn.org/a.js"></script>', "", "index.html: loads //cdn.org/a.js from the network"),
        (GOOD + '<p style="background: url(http://a.org/b)">', "", "index.html: loads http://a.org/b from the network"),
        (GOOD, "@import 'https://a.org/b.css';", "a.css: loads https://a.org/b.css from the network"),
    ],
)
def test_what_a_page_loads_and_links_to_is_checked(page, css, fault, tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    (tmp_path / "out.txt").touch()
    (site / "index.html").write_text(page)
    (site / "a.css").write_text(css)
    (site / "a.png").touch()
    assert list(check_site.faults(site)) == ([fault] if fault else [])


@pytest.mark.parametrize("folder", ["niels_gpt", "pipelines"])
def test_a_public_name_without_a_docstring_fails_the_checks(folder):
    code = '"""A module."""\n\n\ndef public() -> None:\n    pass\n'
    command = [sys.executable, "-m", "ruff", "check", "--output-format", "concise", "--stdin-filename"]
    done = subprocess.run([*command, f"{folder}/a.py", "-"], input=code, text=True, capture_output=True, cwd=ROOT)
    assert done.returncode == 1 and "D103" in done.stdout


def named_pictures():
    """Return the files of docs/images/ that README and the pages show."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    return {name for page in pages for name in re.findall(r"images/([\w.]+)", page.read_text(encoding="utf-8"))}


def test_every_picture_is_shown_and_every_picture_shown_is_there():
    assert {path.name for path in (ROOT / "docs" / "images").iterdir()} == named_pictures()


# One is made by the browser test, and one reads the imports of the whole code.
@pytest.mark.parametrize(
    "name", [*sorted(set(PICTURES) - {"dagster", "plan"}), pytest.param("plan", marks=pytest.mark.slow)]
)
def test_a_picture_is_what_its_script_draws(name, tmp_path):
    PICTURES[name](tmp_path)
    (drawn,) = tmp_path.iterdir()
    picture = ElementTree.parse(drawn).getroot()
    outside = [box.attrib for box in picture.iter() if float(box.get("x", 0)) + float(box.get("width", 0)) > 801]
    assert outside == []
    if name != "plan":  # which changes with every module
        assert drawn.read_text() == (ROOT / "docs" / "images" / drawn.name).read_text(), (
            f"python -m tools.pictures {name}"
        )


@pytest.mark.parametrize("package", [cache, sampling], ids=lambda package: package.__name__)
def test_every_public_name_of_a_package_is_on_an_api_page(package):
    pages = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "api").glob("*.md"))
    shown = {name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)$", pages, re.MULTILINE)}
    assert set(package.__all__) <= shown
