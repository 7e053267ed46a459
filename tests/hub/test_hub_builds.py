"""Builds from the hub: the revision is pinned and recorded, asked for, renewed; the card's licence is kept."""

import dataclasses

import pytest
from support import numbered_datasets
from support.commands import niels_gpt
from support.errors import refused
from support.readings import trained_on

from niels_gpt.cache.meta import read_meta
from niels_gpt.recipes.plan import recipes
from niels_gpt.recipes.tokenizer import ensure_tokenizer
from niels_gpt.settings import Settings

DOLLY = "databricks/databricks-dolly-15k"


@pytest.fixture
def hub(tmp_path, tiny_model_path, quick_retries):
    """Settings of the hub."""
    return Settings(cache_dir=str(tmp_path / "cache"), tokenizer=str(tiny_model_path))


def build(settings, **given):
    return recipes(settings)["sft/dolly15k"](settings, **given)


def source_of(settings, **given):
    source = build(settings, **given).meta["source"]
    return source


def test_the_revision_of_the_first_contact_counts_until_a_refresh(loopback_hub, hub):
    first = loopback_hub.add(DOLLY, numbered_datasets.dolly(rows=20))
    assert source_of(hub)["revision"] == first
    second = loopback_hub.add(DOLLY, numbered_datasets.dolly(rows=20, start=100))
    asked = len(loopback_hub.requests)
    assert build(hub).reused
    assert len(loopback_hub.requests) == asked
    changed = dataclasses.replace(hub, sft_val_frac=0.3)
    assert source_of(changed)["revision"] == first  # built again from the same rows
    assert source_of(changed, refresh=True)["revision"] == second
    assert source_of(changed)["revision"] == second


def test_a_revision_can_be_asked_for_by_commit_branch_or_tag(loopback_hub, hub):
    first = loopback_hub.add(DOLLY, numbered_datasets.dolly(rows=20))
    second = loopback_hub.add(DOLLY, numbered_datasets.dolly(rows=20, start=100))
    third = loopback_hub.add(DOLLY, numbered_datasets.dolly(rows=20, start=200), ref="v2")
    assert source_of(hub)["revision"] == second
    assert source_of(dataclasses.replace(hub, revision=f"dolly15k={first}"))["revision"] == first
    tagged = dataclasses.replace(hub, revision="dolly15k=v2")
    assert source_of(tagged)["revision"] == third
    asked = len(loopback_hub.requests)
    assert build(tagged).reused
    assert len(loopback_hub.requests) == asked
    fourth = loopback_hub.add(DOLLY, numbered_datasets.dolly(rows=20, start=300), ref="v2")
    assert source_of(tagged, refresh=True)["revision"] == fourth


@pytest.mark.parametrize("text", ["abc", "dolly15k", "dolly15k=", "roam=abc", "nobody=abc"])
def test_a_revision_of_nothing_is_refused(hub, text):
    with refused("E102", "--revision", "SOURCE=REVISION", "fineweb_edu"):
        build(dataclasses.replace(hub, revision=text))


def test_a_cache_takes_the_revision_that_the_tokenizer_was_trained_on(loopback_hub, hub):
    first = loopback_hub.add(DOLLY, numbered_datasets.dolly())
    trained = dataclasses.replace(hub, tokenizer=None, vocab_size=400)
    with trained_on("dolly15k"):
        meta = ensure_tokenizer(trained).meta
    assert meta["trained_on_sources"] == {"dolly15k": f"{DOLLY}@{first}"}
    loopback_hub.add(DOLLY, numbered_datasets.dolly(start=100))
    with trained_on("dolly15k"):
        assert source_of(trained)["revision"] == first


def test_licence_and_attribution_come_from_the_dataset_card_if_there_is_one(loopback_hub, hub):
    files = numbered_datasets.dolly(rows=20)
    loopback_hub.add(DOLLY, files)
    source = source_of(hub)
    assert source["licence"] == "cc-by-sa-3.0"
    assert "databricks-dolly-15k" in source["attribution"] and DOLLY in source["attribution"]
    done = niels_gpt("stats", f"{hub.cache_dir}/sft/dolly15k")
    assert done.status == 0 and source["revision"] in done.out
    del files["README.md"]
    loopback_hub.add("me/mine", files)
    source = source_of(dataclasses.replace(hub, dolly_dataset="me/mine"))
    assert source["licence"] == "not stated" and "me/mine" in source["attribution"]


def test_a_hub_that_is_down_leaves_the_committed_cache_and_says_what_to_do(loopback_hub, hub):
    loopback_hub.add(DOLLY, numbered_datasets.dolly(rows=20))
    before = source_of(hub)
    loopback_hub.fail(times=float("inf"))
    assert source_of(hub) == before
    with refused("E601", "--source-root", kind=ConnectionError):
        source_of(hub, refresh=True)
    assert read_meta(f"{hub.cache_dir}/sft/dolly15k/meta.json")["source"] == before
