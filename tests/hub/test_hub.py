"""The hub: a dataset's card, one commit throughout, errors that no retry mends."""

import datetime
import email.utils
import logging
import math
import socket
import sys

import pytest
from support import hub_datasets as hub
from support import numbered_datasets
from support.commands import niels_gpt
from support.data_files import lines, write
from support.errors import refused
from support.numbered_datasets import number_of

from niels_gpt.data.dolly import iter_dolly_sft

FINEWEB = "HuggingFaceFW/fineweb-edu"
DOLLY = "databricks/databricks-dolly-15k"


def readme(**card):
    return {"README.md": numbered_datasets.readme(card)}


def numbers(dataset_id=FINEWEB, *, config="CC-MAIN-2024-10", **asked):
    stream = hub.rows(dataset_id, config=config, split="train", **{"streaming": True, **asked})
    return [number_of(row["text"]) for row in stream]


@pytest.mark.parametrize(
    ("card", "licence"),
    [
        ({"license": "odc-by", "pretty_name": "Pages"}, "odc-by"),
        ({"license": ["cc-by-sa-3.0", "gfdl"]}, "cc-by-sa-3.0, gfdl"),
        ({"license": "other", "license_name": "llama3"}, "llama3"),
        ({"license": "other"}, "other"),
        ({}, None),
    ],
)
def test_a_card_has_the_commit_the_licence_and_what_a_notice_needs(loopback_hub, card, licence):
    sha, title = loopback_hub.add("a/b", readme(**card)), card.get("pretty_name", "a/b")
    card_of = hub.card_of("a/b")
    assert (card_of.revision, card_of.licence) == (sha, licence)
    assert card_of.attribution == f"{title} by a, https://huggingface.co/datasets/a/b"


def test_a_branch_a_tag_and_a_commit_are_found(loopback_hub):
    old = loopback_hub.add(FINEWEB, numbered_datasets.fineweb_edu(documents=3, start=100), ref="v1.4.0")
    new = loopback_hub.add(FINEWEB, numbered_datasets.fineweb_edu(documents=3, start=200))
    assert [hub.card_of(FINEWEB, revision=name).revision for name in ("main", "v1.4.0", old)] == [new, old, old]
    assert numbers(revision="v1.4.0") == [100, 101, 102]
    assert numbers(revision="main") == numbers() == [200, 201, 202]
    loopback_hub.requests.clear()
    assert numbers(revision=old) == [100, 101, 102]
    assert f"/api/datasets/{FINEWEB}" not in [one.path for one in loopback_hub.requests]  # a commit is not asked for


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("form", ["parquet", "jsonl", "jsonl.gz"])
def test_rows_are_those_of_load_dataset_in_its_order(loopback_hub, form, seed, streaming):
    import datasets

    sha = loopback_hub.add(FINEWEB, numbered_datasets.fineweb_edu(form=form, start=7_000))
    asked = {"split": "train", "streaming": streaming, "revision": sha}
    plain = datasets.load_dataset(FINEWEB, "CC-MAIN-2024-10", **asked)
    if seed is not None:
        plain = plain.shuffle(seed=seed, **({"buffer_size": 16} if streaming else {}))
    ours = hub.rows(FINEWEB, config="CC-MAIN-2024-10", shuffle_seed=seed, shuffle_buffer=16, **asked)
    assert list(ours) == list(plain)


@pytest.mark.parametrize("seed", [None, 7])
def test_a_stream_stays_at_its_commit_while_main_moves(loopback_hub, seed):
    start = 1_000 + 100 * (seed or 0)
    loopback_hub.add(FINEWEB, numbered_datasets.fineweb_edu(documents=30, start=start))
    stream = hub.rows(
        FINEWEB, config="CC-MAIN-2024-10", split="train", streaming=True, shuffle_seed=seed, shuffle_buffer=4
    )
    got = [number_of(next(stream)["text"])]
    loopback_hub.add(FINEWEB, numbered_datasets.fineweb_edu(documents=30, start=10_000 + start))
    got += [number_of(row["text"]) for row in stream]
    assert sorted(got) == list(range(start, start + 30))
    assert min(numbers()) == 10_000 + start


def test_a_second_reading_asks_for_the_commit_and_the_files_alone(loopback_hub):
    sha = loopback_hub.add(DOLLY, numbered_datasets.dolly(rows=30, start=500))
    first = list(iter_dolly_sft())
    loopback_hub.requests.clear()
    assert list(iter_dolly_sft()) == first
    # datasets looks for these each time, and in dolly's repository there is none of them.
    absent = {"databricks-dolly-15k.py", ".huggingface.yaml", "dataset_infos.json", "data"}
    assert {one.path.rpartition("/")[2] for one in loopback_hub.asked(sha)} <= absent
    assert [one.path for one in loopback_hub.asked("/api/") if sha not in one.path] == [f"/api/datasets/{DOLLY}"]


@pytest.mark.parametrize("streaming", [True, False])
def test_a_folder_that_is_named_like_the_dataset_is_not_read_in_its_place(loopback_hub, tmp_path, streaming):
    start = 20_000 + 100 * streaming
    loopback_hub.add(DOLLY, numbered_datasets.dolly(rows=4, start=start))
    for name in ("train.jsonl", "databricks-dolly-15k.py"):
        write(tmp_path / DOLLY / name, lines({"text": "Page number 1"}))
    rows = hub.rows(DOLLY, split="train", streaming=streaming)
    assert [number_of(row["instruction"]) for row in rows] == list(range(start, start + 4))


def test_a_snapshot_can_be_taken_into_the_current_directory(loopback_hub, tmp_path, monkeypatch):
    loopback_hub.add(DOLLY, numbered_datasets.dolly(rows=30, start=21_000))
    assert niels_gpt("snapshot", "dolly15k", ".").status == 0
    monkeypatch.chdir("/")
    assert list(iter_dolly_sft(split="all", source_root=tmp_path)) == list(iter_dolly_sft(split="all"))


@pytest.mark.parametrize("name", ["./mine", "~/mine", "{tmp_path}/mine"])
def test_a_local_folder_begins_with_a_dot_a_tilde_or_a_slash_and_needs_no_hub(
    loopback_hub, tmp_path, monkeypatch, name
):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "mine" / "train.jsonl", lines({"text": "Page number 1"}, {"text": "Page number 2"}))
    assert numbers(name.format(tmp_path=tmp_path), config=None) == [1, 2]
    hub.rows("no/such", split="train", streaming=True)  # asks with its first row
    assert not loopback_hub.requests


@pytest.mark.parametrize("name", ["data/mine", "my/data/mine"])
def test_a_folder_without_a_dot_is_told_of_the_dot(loopback_hub, tmp_path, name):
    (tmp_path / name).mkdir(parents=True)
    with refused("E602", f"./{name}"):
        numbers(name, config=None)


UNKNOWN = ["Repository not found", "check the name", "`hf auth login`"]
REFUSED = [  # which dataset, what is asked for, what the error says
    ("no/such", {}, ["of no/such", *UNKNOWN]),
    ("me/private", {}, UNKNOWN),
    ("me/private", {"revision": "its own"}, ["private", "`hf auth login`"]),
    (DOLLY, {"revision": "v9"}, [f"{DOLLY} at v9", "Invalid rev id: v9", f"datasets/{DOLLY}/commits"]),
    (DOLLY, {"revision": "0" * 40}, [DOLLY]),
    (DOLLY, {"split": "validation"}, [f"the validation split of {DOLLY}", "['train']"]),
    (FINEWEB, {"config": "CC-MAIN-1999-01"}, ["config CC-MAIN-1999-01", "CC-MAIN-2024-10", "CC-MAIN-2024-18"]),
    ("me/gated", {}, ["gated", "`hf auth login`"]),
    (  # and the library has an older commit
        "me/gated-since",
        {},
        ["restricted", "terms at https://huggingface.co/datasets/me/gated-since-", "`hf auth login`"],
    ),
    ("me/empty", {}, ["the train split of me/empty"]),
]


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize(("name", "asked", "said"), REFUSED, ids=str)
def test_what_the_hub_does_not_have_or_give_is_an_error_with_a_remedy(loopback_hub, name, asked, said, streaming):
    files = {"no/such": None, "me/empty": readme(), FINEWEB: numbered_datasets.fineweb_edu(documents=3, start=700)}
    content = files.get(name, numbered_datasets.dolly(rows=3, start=800 + streaming))
    name += f"-{streaming}" if name.startswith("me/") else ""
    if "since" in name:
        loopback_hub.add(name, numbered_datasets.dolly(rows=3, start=900))
        assert len(list(hub.rows(name, split="train", streaming=False))) == 3
        loopback_hub.requests.clear()
    if content is not None:
        sha = loopback_hub.add(name, content, private="private" in name, gated="gated" in name)
        asked = {**asked, "revision": sha} if asked == {"revision": "its own"} else asked
    with refused("E602", *said, kind=ValueError) as caught:
        list(hub.rows(name, **{"split": "train", "streaming": streaming, **asked}))
    assert name != "no/such" or len(loopback_hub.requests) == 1
    assert "since" not in name or len(loopback_hub.asked("README.md")) == 1  # not asked again
    assert "config" not in asked or "auth" not in str(caught.value)


def test_without_a_network_and_offline_the_error_says_what_works_instead(monkeypatch):
    with refused("E601", "a/b at main: 4 attempts", "ConnectError", "--source-root sample", kind=ConnectionError):
        hub.card_of("a/b")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with refused("E601", "unset HF_HUB_OFFLINE", kind=ConnectionError):
        hub.card_of("a/b")


def test_each_retry_is_logged(loopback_hub, caplog):
    loopback_hub.add("a/b", readme(license="mit"))
    loopback_hub.fail("a/b", status=502, times=2)
    with caplog.at_level(logging.WARNING, logger="niels_gpt"):
        assert hub.card_of("a/b").licence == "mit"
    said = [one.getMessage() for one in caplog.records if one.name == hub.LOGGER]
    assert [one.split(" failed")[0] for one in said] == [
        f"the commit of a/b at main: attempt {number} of 4" for number in (1, 2)
    ]
    assert all("502 Bad Gateway" in one and "again in" in one for one in said)


@pytest.fixture
def waited():
    """The seconds of each wait, which takes none."""
    with hub.waits() as seconds:
        yield seconds


def test_waits_grow_up_to_a_bound(loopback_hub):
    loopback_hub.fail("a/b", times=math.inf)
    with hub.waits(attempts=hub.STREAM_ATTEMPTS) as waited, refused("E601", "9 attempts", kind=ConnectionError):
        hub.card_of("a/b")
    assert waited == [1, 2, 4, 8, 16, 32, 60, 60]


@pytest.mark.parametrize(
    ("fault", "seconds"),
    [
        ({"status": 429, "retry_after": 300}, 300),
        ({"status": 503, "retry_after": 300}, 300),
        ({"status": 429, "until": (300, "GMT")}, 300),
        ({"status": 503, "until": (300, "-0000")}, 300),
        ({"status": 429, "rate_limit": '"api";r=0;t=55'}, 56),  # one second more, as the library does
        ({"status": 429, "rate_limit": '"api";r=0;t=55', "retry_after": 300}, 56),
        ({"status": 429, "rate_limit": '"api";r=7;t=55', "retry_after": 300}, 300),  # another limit than this
        ({"status": 503, "rate_limit": '"api";r=0;t=55'}, 1),  # our own wait
        ({"status": 429, "until": (-300, "GMT")}, 1),
        ({"status": 429, "retry_after": 0}, 1),
        ({"status": 429, "retry_after": "soon"}, 1),
        ({"status": 429}, 1),
    ],
    ids=str,
)
def test_the_hub_is_left_alone_for_as_long_as_it_asks(loopback_hub, waited, fault, seconds):
    loopback_hub.add("a/b", readme(license="mit"))
    given = {key: value for key, value in fault.items() if key != "until"}
    if "until" in fault:  # from now: the tests before this one may take minutes
        when = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=fault["until"][0])
        given["retry_after"] = email.utils.format_datetime(when).replace("+0000", fault["until"][1])
    loopback_hub.fail("a/b", **given)
    hub.card_of("a/b")
    assert waited == [pytest.approx(seconds, abs=60 if "until" in fault else 0)]


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize(("page", "times"), [("README.md", 7), ("00001-of", 1)])  # the library asks 7 times by itself
def test_the_wish_is_seen_under_the_errors_of_the_libraries(loopback_hub, waited, page, times, streaming):
    dataset_id = f"a/wish-{streaming}-{times}"  # of which the library has no older commit to offer
    loopback_hub.add(dataset_id, numbered_datasets.dolly(rows=40))
    ordered = loopback_hub.fail(page, status=429, retry_after=77, times=times)
    assert len(list(hub.rows(dataset_id, split="train", streaming=streaming))) == 40
    assert ordered.times == 0
    assert waited[-1] == 77


def test_a_retry_after_beyond_reason_is_an_error_with_the_time(loopback_hub, waited):
    loopback_hub.fail("a/b", status=429, retry_after=7_200)
    with refused("E601", "1 attempts", "7200 s", kind=ConnectionError):
        hub.card_of("a/b")
    assert waited == []


class Breaking:
    """Rows 0 to 9; each time it is read, it breaks before the next of the given rows."""

    def __init__(self, errors):
        self.errors = errors

    def __iter__(self):
        for number in range(10):
            if number in self.errors:
                raise self.errors.pop(number)
            yield {"number": number}


@pytest.mark.parametrize(
    "name", ["ReadTimeout", "ConnectError", "RemoteProtocolError", "gaierror", "FileNotFoundError"]
)
def test_a_stream_that_breaks_goes_on_after_the_last_row(name):
    from huggingface_hub.errors import HfHubHTTPError

    client = sys.modules[HfHubHTTPError.__bases__[0].__module__.split(".")[0]]  # httpx or its successor
    kind = {"gaierror": socket.gaierror, "FileNotFoundError": FileNotFoundError}.get(name) or getattr(client, name)
    found = Breaking({number: kind("cut") for number in range(10)})  # more than STREAM_ATTEMPTS of them
    assert [row["number"] for row in hub.rows_until_they_end(found)] == list(range(10))


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (lambda hub: hub.foreign("a/b", times=math.inf), "JSONDecodeError"),
        (lambda hub: hub.end_early("a/b", after=60, times=math.inf), "JSONDecodeError"),
        (lambda hub: hub.end_early("a/b", after=0, times=math.inf), "JSONDecodeError"),
        (lambda hub: hub.fail("a/b", status=200, times=math.inf), "KeyError: 'id'"),
    ],
    ids=["a web page", "half an answer", "nothing", "JSON of something else"],
)
def test_an_answer_of_something_else_is_asked_for_again_and_named(loopback_hub, fault, reason):
    sha = loopback_hub.add("a/b", readme(license="mit"))
    ordered = fault(loopback_hub)
    with refused("E601", "a/b at main: 4 attempts", reason, "proxy", kind=ConnectionError):
        hub.card_of("a/b")
    ordered.times = 2
    assert hub.card_of("a/b").revision == sha


def test_a_hub_that_names_no_commit_is_not_believed(loopback_hub):
    loopback_hub.add("a/b", readme(license="mit"))
    repository = loopback_hub.repositories["a/b"]
    repository.commits[""], repository.refs["main"] = {}, ""
    with refused("E601", "4 attempts", "commit", kind=ConnectionError):
        hub.card_of("a/b")


def test_a_client_that_another_thread_has_closed_is_a_passing_failure():
    from huggingface_hub.utils import close_session, get_session

    client = get_session()
    close_session()
    with pytest.raises(RuntimeError, match="client has been closed") as caught:
        client.get("https://huggingface.co/datasets/")
    assert hub.may_pass(caught.value)


def test_an_error_of_the_data_is_not_retried():
    found = Breaking({3: ArithmeticError("a row that nobody can decode"), 4: ArithmeticError("never reached")})
    with pytest.raises(ArithmeticError, match="nobody can decode"):
        list(hub.rows_until_they_end(found))
    with pytest.raises(KeyError, match="a column"):
        list(hub.rows_until_they_end(Breaking({3: KeyError("a column")})))


def test_another_commit_in_the_librarys_cache_is_not_taken(loopback_hub):
    loopback_hub.add(DOLLY, numbered_datasets.dolly(rows=30, start=5_000))
    assert len(list(iter_dolly_sft())) == 30
    loopback_hub.add(DOLLY, numbered_datasets.dolly(rows=30, start=6_000))
    loopback_hub.fail("/resolve/", status=403, times=math.inf)
    with refused("E601", DOLLY, kind=(ConnectionError, ValueError)):
        list(iter_dolly_sft())


def test_the_same_commit_in_the_librarys_cache_is_no_stream(loopback_hub):
    from huggingface_hub import HfFileSystem

    # Its rows are those of all files in the order of their preparation, not the stream's.
    sha = loopback_hub.add(FINEWEB, numbered_datasets.fineweb_edu(documents=6, start=8_000))
    assert numbers(revision=sha, streaming=False) == list(range(8_000, 8_006))
    HfFileSystem.clear_instance_cache()  # with the lists of files
    loopback_hub.fail("/tree/", status=403, times=math.inf)
    with refused("E601", f"open commit {sha}", f"offers {sha}", kind=ConnectionError):
        numbers(revision=sha)
    loopback_hub.fail(status=403, times=math.inf)
    assert numbers(revision=sha, streaming=False) == list(range(8_000, 8_006))  # which needs no hub
