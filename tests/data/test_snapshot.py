"""A snapshot stands for the hub: the same builds, without any network."""

import dataclasses
import json
import math
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support import numbered_datasets, snapshots
from support.commands import niels_gpt
from support.data_files import rows_of
from support.errors import refused
from support.readings import found_source
from support.snapshots import manifest_of

from niels_gpt.cache.meta import read_meta
from niels_gpt.recipes.plan import plan, recipes
from niels_gpt.recipes.snapshot import take_snapshot
from niels_gpt.recipes.tokenizer import ensure_tokenizer
from niels_gpt.settings import Settings

IDS = {
    "fineweb_edu": "HuggingFaceFW/fineweb-edu",
    "wikitext": "Salesforce/wikitext",
    "dolly15k": "databricks/databricks-dolly-15k",
    "oasst1": "OpenAssistant/oasst1",
}
BUDGETS = {"fineweb_edu_train_tokens": 6_000, "fineweb_edu_val_tokens": 600, "shuffle_buffer": 16}
FLAGS = [text for name, value in BUDGETS.items() for text in (f"--{name.replace('_', '-')}", str(value))]


@pytest.fixture
def full_hub(loopback_hub, quick_retries):
    """The four datasets on the hub; returns their commits."""
    made = ("fineweb_edu", "wikitext", "dolly", "oasst1")
    contents = [getattr(numbered_datasets, name)() for name in made]
    return {name: loopback_hub.add(IDS[name], content) for name, content in zip(IDS, contents, strict=True)}


@pytest.fixture
def hub(tmp_path, tiny_model_path):
    """Settings of the hub."""
    return Settings(cache_dir=str(tmp_path / "hub"), tokenizer=str(tiny_model_path), **BUDGETS)


@pytest.fixture
def short():
    """No text beyond what the tokens ask for, so that a small snapshot can be too short."""
    with snapshots.read_ahead(0):
        yield


def build(settings, key):
    return recipes(settings)[key](settings)


def without_network():
    """Return the command that takes the network from what follows it."""
    for command in (["unshare", "-rn"], ["unshare", "-n"]):
        if subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0:
            return command
    pytest.skip("this system lets nobody unshare the network")


@pytest.fixture
def read_ahead():
    """Enough text for the tokens of these tests."""
    with snapshots.read_ahead(1 << 22):
        yield


@pytest.mark.slow
def test_builds_without_any_network_are_those_from_the_hub_tokenizer_and_meta_included(
    loopback_hub, full_hub, tmp_path, read_ahead
):
    # More than what is read ahead, so that the snapshot of fineweb-edu is a part, with all that the tokenizer sees.
    full_hub["fineweb_edu"] = loopback_hub.add(
        IDS["fineweb_edu"], numbered_datasets.fineweb_edu(documents=260, chars=20_000)
    )
    more = ["--vocab-size", "400", "--tokenizer-max-bytes", "300000", *FLAGS]
    assert niels_gpt("build", *IDS, "--cache-dir", tmp_path / "hub", *more).status == 0
    for source in IDS:
        assert niels_gpt("snapshot", source, tmp_path / "mirror", *FLAGS).status == 0
    assert not manifest_of(tmp_path / "mirror" / IDS["fineweb_edu"] / "CC-MAIN-2024-10")["ended"]
    asked = len(loopback_hub.requests)
    where = ["--cache-dir", str(tmp_path / "offline"), "--source-root", str(tmp_path / "mirror")]
    command = [sys.executable, "-m", "niels_gpt.cache.cli", "build", *IDS, *where, *more]
    done = subprocess.run([*without_network(), *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(loopback_hub.requests) == asked
    compare = ["diff", "-r", "-x", ".runs", str(tmp_path / "hub"), str(tmp_path / "offline")]
    assert subprocess.run(compare, capture_output=True, text=True, check=False).stdout == ""
    source = read_meta(str(tmp_path / "offline" / "pretrain" / "fineweb_edu" / "meta.json"))["source"]
    assert (source["kind"], source["revision"], source["licence"]) == ("hub", full_hub["fineweb_edu"], "odc-by")


def test_the_literal_command_takes_the_tokens_before_the_folder_and_prints_no_requests(full_hub, tmp_path):
    done = niels_gpt("snapshot", "fineweb_edu", "--tokens", "205M", tmp_path / "m")
    assert done.status == 0 and manifest_of(tmp_path / "m" / IDS["fineweb_edu"] / "CC-MAIN-2024-10")["ended"]
    assert "train-00000.jsonl.gz: kept; 60 rows so far" in done.err and "HTTP Request" not in done.err


@pytest.mark.parametrize("text", ["0", "-5", "many", "", "M", "inf"])
def test_a_number_of_tokens_that_is_none_is_a_usage_error(text):
    done = niels_gpt("snapshot", "fineweb_edu", f"--tokens={text}", "DEST")
    assert done.status == 2 and "expected a number of tokens above 0, such as 205M" in done.err


def test_the_command_that_a_snapshot_prints_builds_from_it(full_hub, tiny_model_path):
    for dest in ("my mirror", "hub"):
        done = niels_gpt("snapshot", "fineweb_edu", dest, "--tokens", "4k", "--seed", "7")
        assert done.status == 0
        arguments = shlex.split(done.out.splitlines()[-1].partition("niels-gpt ")[2])
        done = niels_gpt(*arguments, "--cache-dir", dest + " cache", "--tokenizer", tiny_model_path)
        assert done.status == 0
        meta = read_meta(f"{dest} cache/pretrain/fineweb_edu/meta.json")
        assert (meta["train_tokens"] + meta["val_tokens"], meta["seed"], meta["source"]["kind"]) == (4_000, 7, "hub")


def test_a_cache_from_the_hub_is_up_to_date_on_its_snapshot_and_the_other_way_round(full_hub, hub, tmp_path):
    mirror = dataclasses.replace(hub, source_root=str(tmp_path / "m"))
    for source in IDS:
        take_snapshot(hub, source, tmp_path / "m", tokens=None)
    for key in ("pretrain/fineweb_edu", "sft/oasst1"):
        assert not build(hub, key).reused
        assert build(mirror, key).reused
        assert plan(mirror, [key])[1].action == "up to date"
    assert not build(mirror, "sft/dolly15k").reused
    assert build(hub, "sft/dolly15k").reused


def test_another_seed_shuffles_the_snapshot_like_any_mirror(full_hub, hub, tmp_path):
    take_snapshot(hub, "fineweb_edu", tmp_path / "m", tokens=None)
    other = dataclasses.replace(hub, source_root=str(tmp_path / "m"), seed=7)
    origin = found_source(other, "fineweb_edu")
    assert origin.kind == "mirror" and not origin.ordered
    meta = build(other, "pretrain/fineweb_edu").meta
    assert meta["source"]["kind"] == "mirror" and meta["shuffle"]["buffer"] == 16
    known = ("odc-by", full_hub["fineweb_edu"])
    assert (meta["source"]["licence"], meta["source"]["revision"]) == known


def test_a_tokenizer_that_has_seen_less_than_the_hub_has_says_so(full_hub, hub, tmp_path, short, caplog):
    take_snapshot(hub, "fineweb_edu", tmp_path / "m", tokens=5_000)
    trained = {"tokenizer": None, "vocab_size": 400, "source_root": str(tmp_path / "m")}
    meta = ensure_tokenizer(dataclasses.replace(hub, **trained)).meta
    assert meta["trained_on"] == "mirror" and meta["trained_on_sources"] == {}
    assert "trained on less text than from the hub" in caplog.text
    enough = dataclasses.replace(hub, **trained, tokenizer_max_bytes=20_000, cache_dir=str(tmp_path / "enough"))
    assert ensure_tokenizer(enough).meta["trained_on"] == "hub"


def test_a_snapshot_that_is_too_short_says_so_and_can_be_made_longer(full_hub, hub, tmp_path, short):
    mirror = dataclasses.replace(hub, source_root=str(tmp_path / "m"))
    _, manifest = take_snapshot(hub, "fineweb_edu", tmp_path / "m", tokens=1_000)
    assert not manifest["ended"] and 5_000 <= manifest["text_bytes"] < 8_000
    with refused("E307", "bytes of text", "--tokens N"):
        build(mirror, "pretrain/fineweb_edu")
    assert not Path(mirror.cache_dir, "pretrain", "fineweb_edu").exists()
    take_snapshot(hub, "fineweb_edu", tmp_path / "m", tokens=1_000_000)
    assert build(mirror, "pretrain/fineweb_edu").meta == build(hub, "pretrain/fineweb_edu").meta


def test_a_snapshot_broken_off_by_the_hub_goes_on_at_the_same_revision(loopback_hub, full_hub, hub, tmp_path):
    hub = dataclasses.replace(hub, shuffle_buffer=0)  # shuffled, rows come from all files from the beginning
    fault = loopback_hub.fail("train-00002", times=math.inf)
    with snapshots.files_of(10_000), refused("E601", kind=ConnectionError):
        take_snapshot(hub, "fineweb_edu", tmp_path / "m", tokens=None)
    folder = tmp_path / "m" / IDS["fineweb_edu"] / hub.fineweb_edu_config
    started = manifest_of(folder)
    assert started["files"] and not started["finished"]
    with refused("E307", "snapshot.json", " rows"):
        found_source(dataclasses.replace(hub, source_root=str(tmp_path / "m")), "fineweb_edu").provenance(None)
    fault.times = 0
    loopback_hub.add(IDS["fineweb_edu"], numbered_datasets.fineweb_edu(start=1_000))  # upstream moves on
    _, manifest = take_snapshot(hub, "fineweb_edu", tmp_path / "m", tokens=None)
    assert manifest["revision"] == full_hub["fineweb_edu"]
    at_first = dataclasses.replace(hub, revision=f"fineweb_edu={full_hub['fineweb_edu']}")
    whole, _ = take_snapshot(at_first, "fineweb_edu", tmp_path / "whole", tokens=None)
    assert numbers(folder) == numbers(whole) and sorted(numbers(folder)) == list(range(60))


def numbers(folder):
    return [numbered_datasets.number_of(row["text"]) for row in rows_of(*sorted(folder.glob("*.jsonl.gz")))]


def test_a_revision_that_is_not_the_snapshots_is_refused(loopback_hub, full_hub, hub, tmp_path):
    take_snapshot(hub, "dolly15k", tmp_path / "m", tokens=None)
    newer = loopback_hub.add(IDS["dolly15k"], numbered_datasets.dolly(start=500))
    asked = dataclasses.replace(hub, revision=f"dolly15k={newer}")
    with refused("E307", full_hub["dolly15k"], newer):
        take_snapshot(asked, "dolly15k", tmp_path / "m", tokens=None)
    with refused("E307", full_hub["dolly15k"], "--revision"):
        found_source(dataclasses.replace(asked, source_root=str(tmp_path / "m")), "dolly15k")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["roam"], "roam is not on the hub, expected one of fineweb_edu"),
        (["wikitext", "--tokens", "5k"], "wikitext is small and kept whole"),
        (["nothing"], "nothing is not on the hub"),
    ],
)
def test_what_cannot_be_kept_is_said(tmp_path, arguments, message):
    done = niels_gpt("snapshot", *arguments, tmp_path / "m")
    assert done.status == 1 and message in done.err


def test_a_mirror_beside_a_snapshot_stays_a_mirror(full_hub, hub, tmp_path):
    take_snapshot(hub, "oasst1", tmp_path / "m", tokens=None)
    (tmp_path / "m" / IDS["dolly15k"]).mkdir(parents=True)
    row = {"instruction": "a", "context": "", "response": "b"}
    (tmp_path / "m" / IDS["dolly15k"] / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 3)
    mirror = dataclasses.replace(hub, source_root=str(tmp_path / "m"))
    assert build(mirror, "sft/dolly15k").meta["source"]["kind"] == "mirror"
    assert build(mirror, "sft/oasst1").meta["source"]["kind"] == "hub"
    assert build(mirror, "pretrain/gutenberg").meta["built"] is False  # no folder of books: a stub, as on the hub
