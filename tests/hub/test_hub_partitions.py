"""One partition of a dataset of the hub: whole files where there are enough, else every P-th row; retried and named."""

from collections import Counter

import pytest
from support import hub_datasets as hub
from support import numbered_datasets
from support.data_files import lines
from support.numbered_datasets import number_of
from support.readings import Reading

from niels_gpt.documents import Partition
from niels_gpt.recipes import sources
from niels_gpt.recipes.resolve import resolve_source
from niels_gpt.settings import Settings

FINEWEB, CONFIG = "HuggingFaceFW/fineweb-edu", "CC-MAIN-2024-10"
STEM = f"data/{CONFIG}/train-0000"


def named(number, total, **asked):
    asked = {"config": CONFIG, "split": "train", "shuffle_buffer": 8, **asked}
    return list(hub.rows_of_partition(FINEWEB, number, total, **asked))


@pytest.mark.parametrize(
    ("form", "shards", "total", "seed"), [("parquet", 5, 2, 7), ("jsonl.gz", 3, 3, None), ("parquet", 1, 3, 7)]
)
def test_all_partitions_together_have_the_rows_of_the_split(loopback_hub, form, shards, total, seed):
    sha = loopback_hub.add(FINEWEB, numbered_datasets.fineweb_edu(form=form, shards=shards, chars=100, start=30_000))
    asked = {"revision": sha, "shuffle_seed": seed}
    parts = [named(number, total, **asked) for number in range(total)]
    rows = hub.rows(FINEWEB, config=CONFIG, split="train", streaming=True, revision=sha)
    assert sorted((row for part in parts for _, row in part), key=lambda row: number_of(row["text"])) == list(rows)
    for number, part in enumerate(parts):
        assert named(number, total, **asked) == part
        for name, row in part:
            file, _, in_file = name.rpartition("#")
            at = number_of(row["text"]) - 30_000
            size = -(-60 // shards)
            assert (int(file.partition("train-")[2][:5]), int(in_file)) == (at // size, at % size + 1)
            assert (at // size if shards >= total else at) % total == number
        in_order = [number_of(row["text"]) for _, row in part]
        assert (in_order == sorted(in_order)) == (seed is None)


def test_a_partition_has_its_own_order(loopback_hub):
    loopback_hub.add(FINEWEB, numbered_datasets.fineweb_edu(shards=1, chars=100, start=31_000))
    orders = [[name.rpartition("#")[2] for name, _ in named(number, 2, shuffle_seed=7)] for number in range(2)]
    assert [int(name) + 1 for name in orders[0]] != [int(name) for name in orders[1]]


def test_types_are_those_of_the_whole_split(loopback_hub):
    """The library takes them from the first file, which is here another partition's."""
    files = numbered_datasets.fineweb_edu(shards=2, form="jsonl", chars=50)
    files[f"{STEM}0-of-00002.jsonl"] = lines({"text": "one", "id": "a", "more": 1})
    files[f"{STEM}1-of-00002.jsonl"] = lines({"text": "two", "id": 7})
    loopback_hub.add(FINEWEB, files)
    assert named(1, 2) == [(f"{STEM}1-of-00002.jsonl#1", {"text": "two", "id": "7", "more": None})]


def test_files_of_other_partitions_are_not_fetched(loopback_hub):
    loopback_hub.add(FINEWEB, numbered_datasets.fineweb_edu(shards=4, start=32_000))
    assert len(named(1, 4)) == 15
    fetched = {number for number in range(4) if loopback_hub.asked(f"train-0000{number}")}
    assert fetched == {0, 1}  # the first for the types of its columns


def test_a_broken_stream_goes_on_where_it_was(loopback_hub, quick_retries):
    loopback_hub.add(FINEWEB, numbered_datasets.fineweb_edu(shards=3, start=33_000))
    loopback_hub.cut("train-00001", after=10_000)
    numbers = [number_of(row["text"]) for _, row in named(1, 3)]
    assert numbers == list(range(33_020, 33_040)) and loopback_hub.faults[0].times == 0


def test_documents_of_a_source_that_is_not_streamed(loopback_hub, quick_retries):
    sha = loopback_hub.add("Salesforce/wikitext", numbered_datasets.wikitext(start=34_000))

    def documents(partition):
        read = Reading(Settings(), "wikitext", partition=partition, revision=sha)
        assert not read.error
        return [(each.split, each.text, each.id) for each in read.seen]

    parts = [each for number in range(3) for each in documents((number, 3))]
    whole = documents(None)  # after the partitions, whose files must not be kept as those of the whole
    assert sorted(each[:2] for each in parts) == sorted(each[:2] for each in whole)
    names = [name for _, _, name in parts]
    assert len(set(names)) == len(names) and "wikitext-103-raw-v1/train-00001-of-00002.parquet#1" in names


@pytest.mark.parametrize(
    ("name", "dataset"), [("dolly15k", "databricks/databricks-dolly-15k"), ("oasst1", "OpenAssistant/oasst1")]
)
def test_chats_of_the_hub(loopback_hub, quick_retries, name, dataset):
    made = {"dolly15k": numbered_datasets.dolly, "oasst1": numbered_datasets.oasst1}[name]
    sha = loopback_hub.add(dataset, made(start=35_000))

    def chats(partition):
        counters = Counter[str]()
        read = sources.chats(Settings(), resolve_source(Settings(), name), sha, counters, None, partition)
        return [repr(messages) for _, messages in read], counters

    whole, counted = chats(None)
    parts = [chats(Partition(number, 3)) for number in range(3)]
    assert sorted(chat for some, _ in parts for chat in some) == sorted(whole) and len(whole) > 10
    assert all(some for some, _ in parts) and sum((found for _, found in parts), Counter()) == counted
