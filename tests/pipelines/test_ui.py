"""`dagster dev` as a person uses it, in a real browser: build, look, repair, another setting, the automation.

It wants Debian's chromium and the extra `browser`. Run: pytest -m browser tests/pipelines/test_ui.py
Every test begins and ends with fresh assets and a damaged file of none, so each also runs alone.
"""

import re
from importlib.metadata import entry_points

import pytest
from support import ROOT
from support.browser import HIGH, WIDE, DagsterDev, blemishes, choose, chromium, confirmed, seen
from support.dagster_dev import dagster_dev, until
from support.dagster_runs import shell

pytestmark = pytest.mark.browser
is_registered = any(each.value == "pipelines" for each in entry_points(group="dagster_dg_cli.registry_modules"))
GROUP = "/locations/niels_gpt/asset-groups"
SHARD = "cache/sample/sft/oasst1/train_tokens.bin"


@pytest.fixture(scope="module")
def dagster(tmp_path_factory):
    """A `dagster dev` for all tests of this file."""
    made = DagsterDev(tmp_path_factory.mktemp("clone", numbered=False))
    made.start()
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture
def page(dagster):
    """A page of a headless Chromium."""
    with chromium(dagster.address) as made:
        yield made


@pytest.fixture
def sft(dagster, page):
    """The sft caches, materialized by a click where no other test has done it."""
    if not (dagster.folder / SHARD).exists():
        materialize(dagster, page, "sft")


def materialize(dagster, page, group):
    """Materialize a group by a click."""
    page.goto(f"{dagster.address}{GROUP}/{group}/lineage")

    def click():
        page.get_by_role("button", name="Materialize").first.click()
        confirmed(page, launched(page))  # the tokenizer may not be there yet: the caches make it

    assert dagster.run_of(click) == "SUCCESS"


def launched(page):
    """Return the note that a run was launched."""
    return page.get_by_text("Launched run").filter(visible=True)


def look(page, picture):
    """Take a picture of the window; nothing that is broken may be in it."""
    page.wait_for_load_state("networkidle")
    page.screenshot(path=picture)
    assert blemishes(page) == []


def test_a_person_builds_a_group_watches_its_run_and_looks_at_a_cache(dagster, page, sft, tmp_path):
    page.goto(f"{dagster.address}/runs")
    page.locator("a[href^='/runs/']:not([href*='?'])").last.click()  # the oldest
    seen(page, "Success", "RUN_SUCCESS")
    page.get_by_placeholder("Filter…").fill("oasst1")
    page.get_by_text("examples").filter(visible=True).first.wait_for()
    look(page, tmp_path / "run.png")

    page.goto(f"{dagster.address}/assets/sft/oasst1")
    page.get_by_text("Token cache of OpenAssistant chats").first.wait_for()
    seen(page, "Row count", "NumPy", "family: sft", "licence: MIT", "cache/sample/sft/oasst1")
    assert "SFTExampleDataset.open(" in page.inner_text("body")  # how it is read
    seen(page, "x", "y", "y_masked", "int64 [B, T]")
    look(page, tmp_path / "asset.png")
    keys = page.get_by_placeholder("Filter metadata keys")
    keys.evaluate("element => element.scrollIntoView({block: 'start'})")
    seen(page, "holds", "left out", "look inside", "train_tokens", "run/seconds", "content_sha256")
    picture = page.get_by_role("img", name="examples")  # of the table, without a click
    assert picture.is_visible() and picture.evaluate("image => image.naturalWidth") > 300
    look(page, tmp_path / "figures.png")
    assert page.get_by_text("[[").first.is_visible()  # the part of an example that carries loss
    assert len(re.findall(r"[\d.]+ ?[KMG]i?B\b", page.inner_text("body"))) == 1, "the size, at the top"

    page.goto(f"{dagster.address}/assets/sft/support")
    for words in ("Token cache of your own chats", "licence: CC", "The support team"):
        page.get_by_text(words).first.wait_for()
    look(page, tmp_path / "own.png")


def test_a_damaged_file_is_seen_and_repaired_by_force_in_the_launchpad(dagster, page, sft, tmp_path):
    good = damage(dagster.folder / SHARD)
    check_all(dagster, page)
    passed = page.get_by_text("Succeeded", exact=True).filter(visible=True)
    until(lambda: passed.count() == 4, "the results of all checks: those that read the file fail")
    seen(page, "Failed")
    look(page, tmp_path / "failed.png")
    remedy = page.locator("code", has_text="force: true").filter(visible=True).first.inner_text()
    page.goto(f"{dagster.address}{GROUP}/sft/list")
    page.get_by_text("Materialized").first.wait_for()
    look(page, tmp_path / "list_failed.png")
    page.goto(f"{dagster.address}{GROUP}/sft/lineage")
    page.get_by_text("4 / 8 Passed").wait_for()
    look(page, tmp_path / "group_failed.png")

    page.goto(f"{dagster.address}/assets/sft/oasst1")

    def click():
        choose(page, "Materialize", "Open launchpad")
        editor = page.locator(".CodeMirror")
        confirmed(page, editor)
        opened = editor.inner_text().split()
        assert "force:" in opened and "wait:" in opened and "null" not in opened and "seed:" not in opened
        editor.click()
        page.keyboard.press("Control+A")
        page.keyboard.insert_text(remedy)  # as the failed check has printed it
        seen(page, "No errors")
        page.screenshot(path=tmp_path / "launchpad.png")
        page.get_by_role("button", name="Materialize").last.click()

    assert dagster.run_of(click) == "SUCCESS"
    assert (dagster.folder / SHARD).read_bytes() == good
    all_pass(dagster, page)


def test_after_a_failed_check_a_click_on_materialize_repairs(dagster, page, sft):
    good = damage(dagster.folder / SHARD)
    check_all(dagster, page)
    page.goto(f"{dagster.address}/assets/sft/oasst1")

    def click():
        page.get_by_role("button", name="Materialize").click()
        confirmed(page, launched(page))

    assert dagster.run_of(click) == "SUCCESS"
    assert (dagster.folder / SHARD).read_bytes() == good
    all_pass(dagster, page)


def damage(file):
    """Cut the last token off a committed file; return what it had."""
    file.chmod(0o644)
    good = file.read_bytes()
    file.write_bytes(good[:-2])
    return good


def check_all(dagster, page):
    """Run all checks of sft/oasst1 by a click; they fail."""
    page.goto(f"{dagster.address}/assets/sft/oasst1?view=checks&checkDetail=files_match_meta")
    page.get_by_text("This is a", exact=False).filter(visible=True).first.wait_for()
    assert dagster.run_of(page.get_by_role("button", name="Execute all").click) == "FAILURE"


def all_pass(dagster, page):
    """See that every check of sft/oasst1 has passed and that nothing is stale."""
    page.goto(f"{dagster.address}/assets/sft/oasst1?view=checks")
    for check in ("files_match_meta", "ids_below_vocab_size", "tokenizer_matches", "examples_supervised"):
        seen(page, check)
    assert page.get_by_text("Succeeded", exact=True).filter(visible=True).count() == 8
    assert dagster.stale() == {}


def test_another_setting_makes_stale_what_reads_it_and_materialize_unsynced_builds_that(dagster, page, sft, tmp_path):
    materialize(dagster, page, "trees")
    assert dagster.stale() == {}
    dagster.restart(NIELS_GPT_OASST1_MAX_MESSAGES="2")
    assert set(dagster.stale()) == {"sft/oasst1", "trees/oasst1"}
    page.goto(f"{dagster.address}{GROUP}/sft/list")
    seen(page, "Code version")
    assert page.get_by_text("Code version", exact=True).filter(visible=True).count() == 1
    look(page, tmp_path / "list_stale.png")

    for group in ("sft", "trees"):
        page.goto(f"{dagster.address}{GROUP}/{group}/lineage")
        stale = page.get_by_text("Unsynced (1)").filter(visible=True)
        stale.wait_for()
        page.mouse.move(WIDE / 2, HIGH / 2)
        page.mouse.wheel(0, -150)  # the graph begins above the window
        stale.hover()
        seen(page, "has a new code version")
        assert stale.count() == 1
        look(page, tmp_path / f"{group}_stale.png")
        page.mouse.move(5, 5)
        choose(page, "Materialize", "Materialize unsynced")
        seen(page, f"{group} / oasst1")
        assert dagster.run_of(page.get_by_role("button", name="Materialize 1 assets").click) == "SUCCESS"
    assert dagster.stale() == {}
    page.goto(f"{dagster.address}{GROUP}/sft/lineage")
    seen(page, "Materialized")
    assert page.get_by_text("Unsynced").count() == 0
    assert page.get_by_text("root", exact=True).count() == 0, "the root of `sft/*` has a group of its own"
    look(page, tmp_path / "group.png")


def test_the_switches_of_the_automation_observe_the_sources(dagster, page, sft, tmp_path):
    page.goto(f"{dagster.address}/automation")
    page.locator("a[href$='/sensors/files']").filter(visible=True).first.click()
    switch = page.locator("label:has(input[type=checkbox])")
    assert dagster.run_of(switch.click) == "SUCCESS", "two ticks have found the same files"
    assert running(dagster) == ["files"]
    look(page, tmp_path / "sensor.png")
    page.goto(f"{dagster.address}{GROUP}/raw/list")
    seen(page, "Observed")
    assert page.get_by_text("Observed", exact=True).filter(visible=True).count() == 7
    assert page.get_by_text("Never observed").count() == 0
    look(page, tmp_path / "raw.png")
    assert dagster.stale() == {}

    page.goto(f"{dagster.address}/automation")
    seen(page, "observe", "files", "rebuild")
    page.locator("label:has(input[type=checkbox]:checked)").filter(visible=True).first.wait_for()
    look(page, tmp_path / "automation.png")


def test_assets_of_one_name_are_told_apart(dagster, page, sft, tmp_path):
    page.goto(f"{dagster.address}/assets")
    seen(page, "raw / oasst1")
    look(page, tmp_path / "catalog.png")
    page.mouse.move(WIDE / 2, HIGH / 2)
    page.mouse.wheel(0, HIGH)
    seen(page, "sft / oasst1", "trees / oasst1")
    page.goto(f"{dagster.address}/assets/raw/oasst1?view=lineage&lineageScope=downstream")
    seen(page, "raw", "sft", "trees")  # frames of the boxes, which all have the title oasst1
    look(page, tmp_path / "lineage.png")


@pytest.mark.skipif(not is_registered, reason="niels_gpt was installed before it had the component: install it again")
def test_the_component_has_a_page_in_dg_dev(tmp_path):
    quiet = {"HOME": str(tmp_path), "DAGSTER_DG_UPDATE_CHECK_ENABLED": "0", "PYTHONPATH": f"src:{ROOT}"}
    made = shell(tmp_path, "create-dagster project shop --no-uv-sync", **quiet)
    assert made.returncode == 0, made.stderr
    project = tmp_path / "shop"
    (project / "dagster.yaml").write_text("telemetry: {enabled: false}\nnux: {enabled: false}\n")
    with (
        dagster_dev(project, "dg dev --host 127.0.0.1 --port 3000", **quiet) as running,
        chromium(running.address) as page,
    ):
        page.goto(f"{running.address}/locations/shop/components/library")
        for name in ("pipelines", "pipelines.NielsCaches"):
            page.get_by_text(name, exact=True).filter(visible=True).first.click()
        seen(page, "Scaffolding", "Schema", "group_prefix")
        look(page, tmp_path / "component.png")


def running(dagster):
    """Return the sensors that are switched on."""
    where = '{repositoryLocationName: "niels_gpt", repositoryName: "__repository__"}'
    what = "{ ... on Sensors { results { name sensorState { status } } } }"
    results = dagster.ask(f"{{ sensorsOrError(repositorySelector: {where}) {what} }}")["sensorsOrError"]["results"]
    return [sensor["name"] for sensor in results if sensor["sensorState"]["status"] == "RUNNING"]
