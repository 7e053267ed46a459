"""Every command and every Python block of README.md and docs/ runs, and prints what the page shows.

    UPDATE_DOCUMENTS=1 python -m pytest -n 0 tests/project/test_documents_run.py -k small_gpt

writes the output of the run into the page, where it differs. support/documents.py has the rules.
"""

import fcntl
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT
from support.commands import parse
from support.documents import RUN, Page, blocks_of, difference

UPDATE = "UPDATE_DOCUMENTS" in os.environ
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
SLOW = {
    "README.md",
    "docs/building.md",
    "docs/chat_templates.md",
    "docs/drafters.md",
    "docs/eagle3.md",
    "docs/eagle3_exchange.md",
    "docs/exchange.md",
    "docs/folded_training.md",
    "docs/index.md",
    "docs/packing.md",
    "docs/prefix_tree.md",
    "docs/tutorials/folded_step.md",
    "docs/reading.md",
    "docs/rollouts.md",
    "docs/scale.md",
    "docs/tokenizers.md",
    "docs/trainers.md",
    "docs/tutorials/dagster.md",
    "docs/tutorials/eagle3.md",
    "docs/tutorials/own_data.md",
    "docs/tutorials/small_gpt.md",
}
"""Pages that take more than some seconds."""
LANGUAGES = {*RUN, "text", "toml", "json", "yaml", "jinja", "markdown", "mermaid"}
SCRIPTS = {"dagster": "dagster_location"}  # examples/dagster.py would hide Dagster


def name(page):
    return page.relative_to(ROOT).as_posix()


@pytest.fixture(scope="session")
def sample_caches(tmp_path_factory):
    """The folder `cache` that the demo makes, made once for all processes of a run."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = shared / "demo"
    with (shared / "demo.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            (shared / "demo.new").mkdir()
            command = [sys.executable, "-c", "from niels_gpt.commands.main import main; main()"]
            subprocess.run([*command, "demo", "cache"], cwd=shared / "demo.new", check=True, capture_output=True)
            (shared / "demo.new").rename(folder)
    return folder / "cache"


def with_blocks_that_run():
    found = [page for page in PAGES if any(each.language in RUN for each in blocks_of(page.read_text("utf-8")))]
    return [pytest.param(page, marks=[pytest.mark.slow] * (name(page) in SLOW), id=name(page)) for page in found]


@pytest.mark.parametrize("page", with_blocks_that_run())
def test_a_page_runs_and_prints_what_it_shows(page, tmp_path, request, one_thread):
    text = page.read_text(encoding="utf-8")
    if "<!-- needs: sample caches -->" in text:
        shutil.copytree(request.getfixturevalue("sample_caches"), tmp_path / "cache", symlinks=True)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    run = Page(text, tmp_path)
    run.run()
    shown = {Path(link).name: page.parent / link for link in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)}
    made = {picture.name: picture for picture in tmp_path.glob("*.png")} if page in TUTORIALS else {}
    assert made.keys() <= shown.keys(), "a tutorial shows the pictures that it makes"
    if UPDATE:
        page.write_text(run.rewritten, encoding="utf-8")
        for picture in made:
            shutil.copyfile(made[picture], shown[picture])
    assert not run.differences, "\n\n".join(run.differences)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_no_block_of_a_page_escapes_the_test(page):
    text = page.read_text(encoding="utf-8")
    blocks = blocks_of(text)
    assert {each.language for each in blocks} <= LANGUAGES
    assert 2 * len(blocks) == len(re.findall(r"^[ >]*```", text, re.MULTILINE)), (
        "a fence is indented, or has no language"
    )


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_commands_of_a_page_that_are_not_run_parse(page):
    blocks = blocks_of(page.read_text(encoding="utf-8"))
    for command in [
        each for block in blocks if block.why_not_run and block.language == "console" for each in block.commands
    ]:
        words = shlex.split(command.text.replace("\\\n", ""), comments=True)
        if words[0] == "niels-gpt":
            parse(*words[1:])


@pytest.mark.parametrize("page", TUTORIALS, ids=name)
def test_the_script_of_a_tutorial_is_its_python(page):
    script = SCRIPTS.get(page.stem, page.stem) + ".py"
    docstring, code = (ROOT / "examples" / script).read_text(encoding="utf-8").split('"""\n', 1)
    assert docstring.startswith('"""') and name(page) in docstring
    blocks = [each for each in blocks_of(page.read_text(encoding="utf-8")) if each.language == "python"]
    saved = [each for each in blocks if each.title == script]
    python = "".join(each.body for each in saved or blocks)
    assert [line for line in code.splitlines() if line] == [line for line in python.splitlines() if line]


@pytest.mark.parametrize("page", [ROOT / "README.md", *TUTORIALS], ids=name)
def test_no_sentence_is_longer_than_30_words(page):
    too_long = [each for each in sentences(page.read_text(encoding="utf-8")) if words(each) > 30]
    assert not too_long, "\n\n".join(too_long)


def sentences(text):
    """Return the sentences of a page's prose, without its blocks, tables and comments."""
    prose = re.sub(r"^```.*?^```$|<!--.*?-->", "", text, flags=re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^    .*$|^\|.*$", "", prose, flags=re.MULTILINE)
    prose = re.sub(r"\]\([^)]*\)", "]", prose)
    return re.split(r"(?<=[.!?])[`*)]*\s+|\n\s*\n|\n(?:[-*]|\d+\.) ", prose)


def words(sentence):
    return len(re.findall(r"\w[\w'/.-]*", sentence))


def test_the_longest_sentence_of_a_page_is_found():
    page = "# A title\n\nOne two. `code` [three](four.md),\nfive.\n\n- six\n\n```text\na b c d\n```\n\n    a b c d\n"
    assert [words(each) for each in sentences(page) if words(each)] == [2, 2, 3, 1]


@pytest.mark.parametrize(
    ("shown", "real", "equal"),
    [
        ("built 3 caches\n...\nend", "built 3 caches\na\nb\nend", True),
        ("...\nend", "end", True),
        ("built 3 caches", "built 4 caches", False),
        ("loss 4.125", "loss 4.160", True),
        ("loss 4.125", "loss 4.300", False),
        ("largest difference 0.0", "largest difference 0.1", False),
        ("took 1.5 s, 12,000 tokens/s", "took 31.25 s, 900 tokens/s", True),
        ("state 0a1b2c3d4e5f of ...", "state 99bb2c3d4e5f of seed 3", False),
        ("a   b", "a b", True),
        ("a b", "a\nb", False),
        ("version 1.2.3", "version 1.2.4", False),
        ("", "more", False),
    ],
)
def test_what_may_differ_between_a_page_and_a_run(shown, real, equal):
    assert (difference(shown.splitlines(), real.splitlines()) == "") is equal


def test_a_page_that_is_wrong_fails_and_is_rewritten(tmp_path):
    text = (
        '```markdown title="notes/a.md"\nhello\n```\n\n```console\n$ cat notes/a.md\nhi\n$ false\n$ echo $?\n0\n```\n\n'
        "```python\nx = 2\nprint(x)\n```\n\n```text\n3\n```\n\n<!-- not run: no hub -->\n```console\n$ false\n```\n"
    )
    page = Page(text, tmp_path)
    page.run()
    assert len(page.differences) == 3
    assert page.rewritten == text.replace("\nhi\n", "\nhello\n").replace("\n0\n", "\n1\n").replace("\n3\n", "\n2\n")
    with pytest.raises(AssertionError, match="exit code 3"):
        Page("```console\n$ (exit 3)\n```\n", tmp_path).run()
