"""Loaders over a network that fails: every document once and in order, or an error.
The hub, its faults and the libraries are real; only the waiting times are small.
"""

import itertools
import json
import math
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from support import hub_datasets as hub
from support import numbered_datasets
from support.errors import refused
from support.numbered_datasets import number_of

from niels_gpt.data.dolly import iter_dolly_sft
from niels_gpt.data.fineweb_edu import iter_fineweb_edu
from niels_gpt.data.oasst1 import iter_oasst1_sft
from niels_gpt.data.wikitext import iter_wikitext

FINEWEB = "HuggingFaceFW/fineweb-edu"
Files = dict[str, bytes]


@dataclass(frozen=True)
class Case:
    """A loader of the project with the files that it reads."""

    dataset_id: str
    files: Callable[[int], Files]
    """Numbered from an offset: the libraries keep what they have seen, so each test needs content of its own."""
    read: Callable[[], list[str]]
    """The documents' texts, in order."""
    shard: str
    """Part of the path of the file that the faults are about."""

    def numbers(self, start):
        return [number_of(text) - start for text in self.read()]


def fineweb(form, *, shuffle):
    return Case(
        FINEWEB,
        lambda start: numbered_datasets.fineweb_edu(documents=36, form=form, start=start),
        lambda: [one.text for one in iter_fineweb_edu(shuffle=shuffle, shuffle_buffer_size=10, seed=7)],
        "CC-MAIN-2024-10/train-00001",
    )


CASES = {
    "fineweb_edu-shuffled": fineweb("parquet", shuffle=True),
    "fineweb_edu-in-order": fineweb("parquet", shuffle=False),
    "fineweb_edu-jsonl": fineweb("jsonl", shuffle=False),
    "fineweb_edu-jsonl.gz": fineweb("jsonl.gz", shuffle=False),
    "fineweb_edu-jsonl.gz-shuffled": fineweb("jsonl.gz", shuffle=True),
    "wikitext": Case(
        "Salesforce/wikitext",
        lambda start: numbered_datasets.wikitext(lines=160, start=start),
        lambda: [one.text for one in iter_wikitext(split="train")],
        "train-00001",
    ),
    "dolly": Case(
        "databricks/databricks-dolly-15k",
        lambda start: numbered_datasets.dolly(rows=60, start=start),
        lambda: [one.messages[1].content for one in iter_dolly_sft()],
        "00001-of",
    ),
    "oasst1": Case(
        "OpenAssistant/oasst1",
        lambda start: numbered_datasets.oasst1(trees=50, start=start),
        lambda: [message.content for one in iter_oasst1_sft(split="all") for message in one.messages[:2]],
        "train-00001",
    ),
}
FAULTS = {
    "429 with Retry-After": lambda hub, shard: hub.fail(shard, status=429, retry_after=60, times=2),
    "429 with RateLimit": lambda hub, shard: hub.fail(shard, status=429, rate_limit='"resolvers";r=0;t=60', times=2),
    "503": lambda hub, shard: hub.fail(shard, status=503, times=3),
    "cut once": lambda hub, shard: hub.cut(shard, after=5_000),
    "cut many times": lambda hub, shard: hub.cut(shard, after=2_000, times=8),
    "reset": lambda hub, shard: hub.cut(shard, after=5_000, reset=True),
    "stalled": lambda hub, shard: hub.stall(shard, after=5_000, seconds=30),
    "ended early without a length": lambda hub, shard: hub.end_early(shard, after=5_000),
    "an empty answer": lambda hub, shard: hub.end_early(shard, after=0, chunked=True),
    "a page of somebody else": lambda hub, shard: hub.foreign(shard),
    "a page of somebody else, of two lines of JSON": lambda hub, shard: hub.fail(shard, status=200),
}
STARTS = iter(range(1_000, 10**6, 1_000))
IN_PEACE = {}
"""What each case reads where nothing fails; filled on first use."""


@pytest.fixture(autouse=True)
def small_times(loopback_hub, monkeypatch):
    """Let the libraries wait hardly at all between their attempts, and 0.3 s for a byte; and read in small blocks."""
    quick = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})
    for module in ("huggingface_hub.utils._http", "huggingface_hub.file_download", "niels_gpt.hub.retries"):
        monkeypatch.setattr(f"{module}.time", quick)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
    for one in ("STREAMING_READ_RETRY_INTERVAL", "STREAMING_OPEN_RETRY_INTERVAL"):
        monkeypatch.setattr(f"datasets.config.{one}", 0)
    monkeypatch.setattr("fsspec.spec.AbstractBufferedFile.DEFAULT_BLOCK_SIZE", 8_192)


def add_case(loopback_hub, name):
    """Commit the files of a case and return its first number."""
    start = next(STARTS)
    loopback_hub.add(CASES[name].dataset_id, CASES[name].files(start))
    return start


def in_peace(loopback_hub, name):
    """Return the numbers that a case reads, in order, where nothing fails: those of every document."""
    if name not in IN_PEACE:
        numbers = IN_PEACE[name] = CASES[name].numbers(add_case(loopback_hub, name))
        assert set(numbers) == set(range(max(numbers) + 1))
        assert name == "oasst1" or len(numbers) == len(set(numbers))
    return IN_PEACE[name]


PAIRS = [
    pytest.param(name, fault, marks=[pytest.mark.slow] * ((one + other) % 4 > 0))  # each fault is met by two cases
    for one, name in enumerate(CASES)
    for other, fault in enumerate(FAULTS)
]


@pytest.mark.parametrize(("name", "fault"), PAIRS)
def test_every_document_comes_once_and_in_order(loopback_hub, name, fault):
    expected = in_peace(loopback_hub, name)
    start = add_case(loopback_hub, name)
    ordered = FAULTS[fault](loopback_hub, CASES[name].shard)
    assert CASES[name].numbers(start) == expected
    assert ordered.times == 0, "the fault was not met"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (at % 2)) for at, name in enumerate(CASES)]
)
def test_a_network_that_cuts_every_answer_is_slow_but_loses_nothing(loopback_hub, name):
    expected = in_peace(loopback_hub, name)
    start = add_case(loopback_hub, name)
    loopback_hub.cut(CASES[name].shard, after=1_000, times=math.inf)
    assert CASES[name].numbers(start) == expected
    answers = [one for one in loopback_hub.asked(CASES[name].shard, method="GET") if one.status == 206]
    assert len(answers) > hub.STREAM_ATTEMPTS


ANYWHERE = {
    "503": lambda hub, passing: hub.fail(status=503, passing=passing),
    "a page of somebody else": lambda hub, passing: hub.foreign(passing=passing),
    "ended early without a length": lambda hub, passing: hub.end_early(after=60, passing=passing),
    "JSON of something else": lambda hub, passing: hub.fail(status=200, passing=passing),
}


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        *itertools.product(["wikitext"], ANYWHERE),
        ("dolly", "503"),
        *(
            pytest.param(name, fault, marks=pytest.mark.faults)
            for name in ("fineweb_edu-jsonl", "fineweb_edu-shuffled", "fineweb_edu-jsonl.gz-shuffled", "oasst1")
            for fault in (ANYWHERE if name == "fineweb_edu-jsonl.gz-shuffled" else list(ANYWHERE)[:2])
        ),
        pytest.param("dolly", "a page of somebody else", marks=pytest.mark.faults),
    ],
)
def test_no_request_is_one_that_may_not_fail(loopback_hub, name, fault):
    expected = in_peace(loopback_hub, name)
    for passing in itertools.count():
        start = add_case(loopback_hub, name)
        ordered = ANYWHERE[fault](loopback_hub, passing)
        assert CASES[name].numbers(start) == expected, f"{fault} at request {passing}"
        loopback_hub.faults.clear()
        if ordered.times:
            break
    assert passing > 5, "the fault was hardly met"


@pytest.mark.faults
def test_a_list_of_files_that_stalls_is_asked_for_again(loopback_hub, monkeypatch):
    # Requests are counted: on a busy machine an answer that does not stall may take longer than 0.3 s.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 2.0)
    asked = []
    for passing in itertools.count():
        start = next(STARTS)
        shards = [numbered_datasets.table([{"text": f"Page number {start + number}"}], "jsonl") for number in range(3)]
        # The library lists each folder of a stream when it comes there.
        loopback_hub.add("a/b", {f"part-{number}/train.jsonl": shard for number, shard in enumerate(shards)})
        loopback_hub.requests.clear()
        # Who waits until it goes on asks once.
        ordered = loopback_hub.stall("/tree/", seconds=10, passing=passing)
        texts = [row["text"] for row in hub.rows("a/b", split="train", streaming=True)]
        assert [number_of(text) - start for text in texts] == [0, 1, 2]
        asked.append([one.path.rpartition("/")[2] for one in loopback_hub.asked("/tree/") if one.status == 200])
        if ordered.times:
            break
    *stalled, peaceful = asked
    assert "part-2" in peaceful
    assert [len(one) for one in stalled] == [len(peaceful) + 1] * len(peaceful)


@pytest.mark.parametrize(
    ("fault", "how"),
    [("foreign", {"passing": 1}), ("end_early", {"after": 20}), ("cut", {"after": 20})],  # the first request is of HEAD
    ids=str,
)
def test_a_dataset_card_that_does_not_come_is_asked_for_again(loopback_hub, fault, how):
    card = {"pretty_name": f"A card of {next(STARTS)}, which the library has not kept"}
    rows = numbered_datasets.table([{"text": "Page number 1"}], "jsonl")
    loopback_hub.add("a/b", {"README.md": numbered_datasets.readme(card), "train.jsonl": rows})
    ordered = getattr(loopback_hub, fault)("README.md", **how)
    assert len(list(hub.rows("a/b", split="train", streaming=True))) == 1
    assert ordered.times == 0


def stream(loopback_hub, form="parquet"):
    start = next(STARTS)
    loopback_hub.add(FINEWEB, numbered_datasets.fineweb_edu(documents=36, form=form, start=start))
    return start, hub.rows(FINEWEB, config="CC-MAIN-2024-10", split="train", streaming=True)


def test_a_hub_that_stays_broken_is_an_error_after_the_stated_attempts(loopback_hub):
    _, rows = stream(loopback_hub)
    loopback_hub.fail(times=math.inf)
    with refused("E601", FINEWEB, "4 attempts", "503 Service Unavailable", kind=ConnectionError):
        next(rows)
    assert len(loopback_hub.requests) == hub.ASK_ATTEMPTS


STAYS_BROKEN = {
    "503": (lambda hub, shard: hub.fail(shard, times=math.inf), "503 Service Unavailable"),
    "429": (lambda hub, shard: hub.fail(shard, status=429, times=math.inf), "429 Too Many Requests"),
    "cut": (lambda hub, shard: hub.cut(shard, after=0, times=math.inf), "closed connection"),
    "reset": (lambda hub, shard: hub.cut(shard, after=0, times=math.inf, reset=True), "ReadError|reset|disconnect"),
    "stalled": (lambda hub, shard: hub.stall(shard, seconds=30, times=math.inf), "ReadTimeout"),
    "empty": (lambda hub, shard: hub.end_early(shard, after=0, times=math.inf), "the answer ended after 0"),
}


@pytest.mark.parametrize(
    ("form", "fault", "reason"),
    [
        pytest.param(form, *said, marks=[pytest.mark.slow] * ((one + other) % 3 > 0), id=f"{name}-{form}")
        for one, form in enumerate(["parquet", "jsonl", "jsonl.gz"])
        for other, (name, said) in enumerate(STAYS_BROKEN.items())
    ],
)
def test_a_stream_that_stays_broken_is_an_error_after_the_stated_attempts(
    loopback_hub,
    monkeypatch,
    form,
    fault,
    reason,
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 0.1)
    start, rows = stream(loopback_hub, form)
    got = [number_of(next(rows)["text"])]
    shard = "train-00001-of-00003"
    fault(loopback_hub, shard)
    with refused("E601", "9 attempts", kind=ConnectionError) as caught:
        for row in rows:
            got.append(number_of(row["text"]))
    assert re.search(reason, str(caught))
    assert got == list(range(start, start + 12))  # the first shard, whole
    assert len([one for one in loopback_hub.asked(shard) if one.status != 302]) == hub.STREAM_ATTEMPTS


def test_progress_resets_the_bound(loopback_hub):
    start, rows = stream(loopback_hub)
    number = number_of(next(rows)["text"])
    ordered = loopback_hub.cut("train-00001-of-00003", after=1_500, times=3 * hub.STREAM_ATTEMPTS)
    assert [number - start, *(number_of(row["text"]) - start for row in rows)] == list(range(36))
    assert ordered.times == 0


# What the libraries lose without an error, and `hub.rows` does not: retries.register_checked_files says where.


def test_an_empty_answer_is_the_end_of_a_file_for_the_library_alone(loopback_hub):
    import datasets

    start, rows = stream(loopback_hub, "jsonl")
    loopback_hub.end_early("train-00001-of-00003", after=0)
    alone = datasets.load_dataset(FINEWEB, "CC-MAIN-2024-10", split="train", streaming=True)
    lost = set(range(start, start + 36)) - {number_of(row["text"]) for row in alone}
    loopback_hub.end_early("train-00001-of-00003", after=0)
    assert [number_of(row["text"]) for row in rows] == list(range(start, start + 36))
    assert lost == set(range(start + 12, start + 24)), "the library has mended this: the check may go"


@pytest.mark.parametrize("form", ["parquet", "jsonl.gz"])
def test_an_answer_that_ignores_the_range_is_not_taken(loopback_hub, form):
    start, shard = next(STARTS), "CC-MAIN-2024-10/train-00001"
    loopback_hub.add(FINEWEB, numbered_datasets.fineweb_edu(documents=36, form=form, chars=8_000, start=start))
    case = fineweb(form, shuffle=False)
    once = loopback_hub.ignore_range(shard, passing=1)
    assert case.numbers(start) == list(range(36))
    assert once.times == 0
    loopback_hub.ignore_range(shard, times=math.inf)
    with refused("E601", "asked for bytes ", "status 200", "proxy", kind=ConnectionError):
        case.numbers(start)


def test_an_answer_that_says_other_bytes_than_asked_is_not_taken():
    from huggingface_hub.errors import HfHubHTTPError

    response = sys.modules[HfHubHTTPError.__bases__[0].__module__.split(".")[0]].Response  # httpx or its successor
    whole, part = {"Content-Length": "500"}, {"Content-Range": "bytes 0-99/500"}
    for status, headers in ((200, whole), (206, part), (206, {"Content-Range": "bytes 0-50/500"})):
        hub.check_range(response(status, headers=headers), 0, 100, 500)
    hub.check_range(response(206, headers={"Content-Range": "bytes 10-99/500"}), 10, 100, 500)
    for first, status, headers in (
        (0, 200, {"Content-Length": "499"}),
        (0, 200, {}),
        (0, 203, whole),
        (10, 200, whole),
        (10, 206, part),
        (0, 206, {}),
        (0, 206, {"Content-Range": "bytes 0-99/*"}),
        (0, 206, {"Content-Range": "bytes 0-99/501"}),
        (0, 206, {"Content-Range": "bytes 0-100/500"}),
        (0, 206, {**part, "Content-Encoding": "gzip"}),
        (0, 200, {**whole, "Content-Encoding": "gzip"}),
    ):
        with refused("E603", f"bytes {first} to 99 of a file of 500", kind=ConnectionError):
            hub.check_range(response(status, headers=headers), first, 100, 500)


def opened(loopback_hub, content):
    """Open a file of the hub the way a stream does."""
    import fsspec

    return fsspec.open(hub.checked_url("a/b", loopback_hub.add("a/b", {"some.bin": content}), "some.bin"))


def test_the_rest_of_an_answer_that_ignores_the_range_is_not_waited_for(loopback_hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 10.0)  # also on a busy machine
    content = bytes(range(256)) * (1 << 16)  # 16 MiB: more than the sockets hold
    loopback_hub.ignore_range("some.bin")
    with opened(loopback_hub, content) as file:
        assert file.read(300) == content[:300]
    assert loopback_hub.left_early("some.bin")


def test_a_file_is_asked_for_as_it_is_where_a_server_would_compress_it(loopback_hub):
    loopback_hub.compressing = True
    content = b"a line of a book\n" * 10_000
    with opened(loopback_hub, content) as file:
        assert file.read() == content
    assert {one.status for one in loopback_hub.asked("/cdn/")} == {206}


def test_a_json_file_of_one_array_comes_whole(loopback_hub):
    rows = [{"text": f"Page number {number} {'of a book ' * 50}"} for number in range(200)]
    loopback_hub.add("a/b", {"train.json": json.dumps(rows).encode()})
    loopback_hub.cut("/cdn/", after=3_000, times=math.inf)
    loopback_hub.end_early("train.json", after=0)
    assert list(hub.rows("a/b", split="train", streaming=True)) == rows


def test_the_librarys_own_way_to_the_hub_stays_as_it_was(loopback_hub):
    import fsspec
    from huggingface_hub import HfFileSystem
    from huggingface_hub.utils import get_session

    assert list(stream(loopback_hub)[1])
    assert fsspec.get_filesystem_class("hf") is HfFileSystem
    assert get_session().timeout.read is None  # as its factory made it
    assert not hub.is_asking()
