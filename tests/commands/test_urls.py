"""show, stats, locate, list and verify of caches at URLs: as of local ones, with few bytes fetched and nothing left."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from support import small_builds
from support.buckets import MARK_NAME, before, bucket
from support.commands import niels_gpt
from support.disk import META_NAME
from support.errors import refused
from support.small_caches import change_meta

from niels_gpt.cache import write_meta
from niels_gpt.cache.formats import BLOCK_BYTES
from niels_gpt.exchange.transfer.push import push
from niels_gpt.kinds import look, urls
from niels_gpt.sampling import bits_per_byte, iter_eval
from niels_gpt.storage.errors import REBUILD, CacheError, UsageError
from niels_gpt.storage.mounted import MOUNTED

NAMES = ("tokenizer", "pretrain/roam", "sft/oasst1")
MIB = 1 << 20


@pytest.fixture(scope="module")
def here(built):
    """The folder of the caches that were pushed."""
    return built / "sample"


@pytest.fixture(scope="module")
def sent(here, tmp_path_factory):
    """A folder that stands for a bucket with a tokenizer and two caches."""
    folder = tmp_path_factory.mktemp("bucket")
    for name in NAMES:
        push(here / name, f"file://{folder}/{name}")
    return folder


@pytest.fixture
def there(sent, tmp_path):
    """A copy of it, to be damaged."""
    return shutil.copytree(sent, tmp_path / "bucket")


@pytest.fixture(autouse=True)
def leaves_nothing(tmp_path, monkeypatch):
    """Let folders of commands be made below tmp_path; a test leaves none there, and no mount."""
    folder = tmp_path / "temp"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    before = {*MOUNTED}
    yield folder
    assert {*MOUNTED} == before and not os.listdir(folder)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A pretrain cache with 24 MiB of tokens of train in three files."""
    path = tmp_path_factory.mktemp("large") / "large"
    chance = np.random.default_rng(0)
    text = "".join(map(chr, chance.integers(97, 123, 1 << 20)))
    items = [(None, text, f"{number}") for number in range(13)]
    arguments = {"max_train_tokens": 12 * MIB, "max_val_tokens": 1000, "shard_bytes": 8 * MIB, "shuffle_buffer": None}
    small_builds.pretrain(path, items=items, checkpoint_seconds=30, **arguments)
    return path


def altered(path, at=-1):
    """Change a byte of a file, which may be read-only."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.unlink()
    path.write_bytes(content)


# --- show, stats, locate ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "words", [("show",), ("show", "--json"), ("stats",), ("stats", "--json"), ("locate", "--json")], ids=" ".join
)
def test_a_command_says_of_a_url_what_it_says_of_the_folder(here, sent, name, words):
    place = ("train", "30") if words[0] == "locate" else ()
    local, remote = (niels_gpt(*words, f"{at}/{name}", *place) for at in (here, f"file://{sent}"))
    assert remote.status == local.status
    if not local.status:
        expected = local.out.replace(str(here), f"file://{sent}")
        # What the tokenizer was trained on is read beside the cache.
        assert remote.out.splitlines()[:20] == expected.splitlines()[:20]
    assert "temp/niels_gpt-" not in remote.out + remote.err


@pytest.mark.parametrize("build", [small_builds.rollouts, small_builds.templated], ids=["rollouts", "templated"])
def test_other_kinds_too(tmp_path, build):
    build(tmp_path / "here")
    push(tmp_path / "here", f"file://{tmp_path}/there")
    for words in (("stats", "--json"), ("show", "--json")):
        local, remote = (niels_gpt(*words, place) for place in (tmp_path / "here", f"file://{tmp_path}/there"))
        if local.status:  # no tokenizer
            assert remote.status == local.status and f"file://{tmp_path}/tokenizer" in remote.err
        else:
            assert remote.json | {"cache": ""} == local.json | {"cache": ""}
            assert remote.json["cache"] == f"file://{tmp_path}/there"


def test_diff_takes_urls(here, sent):
    assert niels_gpt("diff", f"file://{sent}/sft/oasst1", here / "sft/oasst1").status == 0
    words = "diff", here / "pretrain/wikitext"
    local, remote = (niels_gpt(*words, f"{place}/pretrain/roam") for place in (here, f"file://{sent}"))
    assert remote.status == local.status == 1 and remote.out == local.out


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES[1:])
def test_lengths_are_drawn_as_of_the_folder(here, sent, tmp_path, name):
    pytest.importorskip("matplotlib")
    for place, file in ((here, "a.png"), (f"file://{sent}", "b.png")):
        assert niels_gpt("stats", f"{place}/{name}", "--plot", tmp_path / file).status == 0
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_functions_take_a_url(here, sent):
    assert look.stats_data(f"file://{sent}/sft/oasst1") == look.stats_data(here / "sft/oasst1") | {
        "cache": f"file://{sent}/sft/oasst1"
    }
    with look.opened(f"file://{sent}/pretrain/roam") as cache:
        tokenizer = look.tokenizer_for(cache, is_needed=True)
        found = look.show_data(cache.path, tokenizer, split="val", position=3, num_tokens=5)
    assert found["text"] and found["cache"] == f"file://{sent}/pretrain/roam"


@pytest.mark.slow
def test_a_few_blocks_of_a_large_cache_are_fetched(large, tmp_path, caplog):
    push(large, f"file://{tmp_path}/there")
    caplog.set_level(logging.INFO, "niels_gpt")
    with look.opened(f"file://{tmp_path}/there") as cache:
        mount = MOUNTED[str(cache.folder)]
        tokenizer = small_builds.ByteTokenizer()
        tokenizer.sha256 = None
        cache.kind.show(cache, tokenizer, split="train", at=7 * MIB, tokens=50, color=False)
        assert mount.fetched_bytes < 2 * MIB
        cache.kind.stats(cache)
        cache.kind.locate(cache, None, split="train", position=9 * MIB, tokens=50)
        assert mount.fetched_bytes < 5 * MIB
    assert any("fetched" in record.getMessage() for record in caplog.records)


def test_a_folder_keeps_what_was_fetched(here, sent, tmp_path):
    assert niels_gpt("show", here / "sft/oasst1", "--local", tmp_path / "kept").status == 2
    for _ in range(2):
        assert niels_gpt("show", f"file://{sent}/sft/oasst1", "--local", tmp_path / "kept").status == 0
    assert list((tmp_path / "kept").glob("oasst1-*/meta.json"))


def test_errors_name_the_url(sent, there):
    for name, code in (("pretrain/none", "E105"), ("pretrain/roam/train", "E209")):
        done = niels_gpt("show", f"file://{sent}/{name}", "--json")
        assert done.status and done.json["error"]["code"] == code and f"file://{sent}/pretrain" in done.err
        assert "temp/" not in done.out + done.err
    done = niels_gpt("show", f"file://{sent}/pretrain/roam", "--at", 10**9)
    assert done.status and "10,000" not in done.out and "E106" in done.err
    shutil.rmtree(there / "tokenizer")
    done = niels_gpt("show", f"file://{there}/pretrain/roam")
    assert done.status == 1 and f"file://{there}/tokenizer" in done.err and "--tokenizer" in done.err
    assert "[[" in niels_gpt("locate", f"file://{there}/pretrain/roam", "train", 5).out  # ids need none
    altered(there / "pretrain/roam/train/shard_00000.bin")
    done = niels_gpt("locate", f"file://{there}/pretrain/roam", "train", 5)
    assert done.status == 3 and "E611" in done.err and f"{there}/pretrain/roam/train/shard_00000.bin" in done.err
    assert niels_gpt("show", "s3:/one/slash").status == 2
    assert niels_gpt("show", "s3://key:secret@bucket/x").status == 2


def test_the_remedy_of_a_file_at_a_url_sends_the_cache_again(sent):
    url = f"file://{sent}/pretrain/roam"
    with urls.at_hand(url) as folder:
        of_file = CacheError(folder / "index/train_docs.npy", "wrong offsets", remedy=REBUILD)
        of_ids = CacheError(folder / META_NAME, "other ids", remedy=REBUILD, code="E402")
    assert of_file.path == f"{url}/index/train_docs.npy"
    assert str(of_file).endswith(f" niels-gpt push CACHE {url} --check") and "push" not in str(of_ids)


def started(*words, **environment):
    """Start a command."""
    run = f"import sys; from niels_gpt.commands import start; sys.argv[1:] = {words}; sys.exit(start())"
    return subprocess.Popen([sys.executable, "-c", run], env=os.environ | environment)


@pytest.mark.slow
def test_a_command_that_is_stopped_leaves_nothing(large, tmp_path, leaves_nothing):
    push(large, f"file://{tmp_path}/there")
    process = started("verify", "--deep", *[f"file://{tmp_path}/there"] * 50, TMPDIR=str(leaves_nothing))
    while not os.listdir(leaves_nothing) and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130


@pytest.mark.slow
def test_a_list_that_is_stopped_waits_for_no_silent_server(here, s3_server):
    push(here / "pretrain/roam", "s3://team/silent/roam")
    asked, released = threading.Event(), threading.Event()

    def silent(*_):
        asked.set()
        released.wait(60)

    s3_server.lies = {b"GET /team/silent/roam/meta.json": silent}
    process = started("list", "s3://team/silent")
    try:
        assert asked.wait(60)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
    finally:
        process.kill()
        released.set()


def test_an_interrupt_while_the_folder_is_removed_leaves_nothing(sent, monkeypatch):
    rmdir, raised = os.rmdir, []

    def interrupted(*place, **how):
        if not raised:
            raised.append(place)
            raise KeyboardInterrupt
        rmdir(*place, **how)

    with pytest.raises(KeyboardInterrupt), urls.at_hand(f"file://{sent}/sft/oasst1"):
        monkeypatch.setattr(os, "rmdir", interrupted)
    assert raised


def test_bits_per_byte_reads_meta_json_alone(here, sent, tmp_path):
    url, cache = f"file://{sent}/pretrain/roam", here / "pretrain/roam"
    assert bits_per_byte(1e6, url, split="val") == bits_per_byte(1e6, f"{url}/val") == bits_per_byte(1e6, cache / "val")
    with pytest.raises(ValueError, match="split='val'"):
        bits_per_byte(1e6, f"{url}/train", split="val")
    with refused("E208"):
        bits_per_byte(1e6, f"file://{sent}/sft/oasst1")
    with refused("E204"):
        bits_per_byte(1e6, f"file://{sent}/pretrain")


# --- list -------------------------------------------------------------------------------------------------------------


def test_list_prints_the_same_table_and_marks_what_cannot_be_read(here, there):
    done = niels_gpt("list", f"file://{there}", "--json")
    assert done.status == 0 and done.json["folder"] == f"file://{there}"
    local = {row["key"]: row for row in niels_gpt("list", here, "--json").json["caches"]}
    for row in done.json["caches"]:
        assert [row[key] for key in ("totals", "state", "disk_bytes")] == [
            local[row["key"]][key] for key in ("totals", "state", "disk_bytes")
        ]
    (there / "pretrain/half").mkdir()
    (there / "pretrain/half" / MARK_NAME).write_text("{}")
    (there / "sft/oasst1/train_tokens.bin").unlink()
    change_meta(shutil.copytree(there / "pretrain/roam", there / "pretrain/newer"), format_version=99)
    shutil.copytree(there / "pretrain/roam", there / "pretrain/lost")
    (there / "pretrain/lost" / META_NAME).unlink()
    done = niels_gpt("list", f"file://{there}", "--json")
    refusals = {row["key"]: row["refused"] for row in done.json["caches"]}
    assert done.status == 3
    assert {key for key, reason in refusals.items() if reason} == {
        *("pretrain/half", "pretrain/newer", "pretrain/lost", "sft/oasst1")
    }
    assert "train_tokens.bin" in refusals["sft/oasst1"] and "format_version" in refusals["pretrain/newer"]
    text = niels_gpt("list", f"file://{there}")
    assert text.status == 3 and "roam" in text.out and f"niels-gpt verify file://{there}" in text.out


def test_list_refuses_a_cache_and_a_folder_without_any(sent, tmp_path):
    assert niels_gpt("list", f"file://{sent}/pretrain/roam").status == 2
    assert niels_gpt("list", f"file://{tmp_path}/none").status == 1


# --- verify -----------------------------------------------------------------------------------------------------------


def damages(url, *more):
    """The exit status of verify, and what it finds at a URL."""
    done = niels_gpt("verify", url, "--json", *more)
    return done.status, done.json[url]["damages"]


@pytest.mark.parametrize("deep", [(), ("--deep",)], ids=["quick", "deep"])
def test_verify_finds_nothing_in_good_caches(sent, deep):
    done = niels_gpt("verify", f"file://{sent}", "--json", *deep)
    assert done.status == 0 and {*done.json} == {f"file://{sent}/{name}" for name in NAMES}
    for found in done.json.values():
        assert found["damages"] == [] and found["compared"]["files_whole"] == found["compared"]["files"]


def _newer(cache):
    change_meta(cache, format_version=99)


def _longer(cache):
    path = cache / "train/shard_00000.bin"
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content + b"..")


HARMS = {
    "a missing file": (lambda cache: (cache / "index/val_docs.npy").unlink(), "index/val_docs.npy"),
    "no checksums": (lambda cache: (cache / "index/crc32.bin").unlink(), "index/crc32.bin"),
    "a wrong size": (_longer, "train/shard_00000.bin"),
    "an altered byte": (lambda cache: altered(cache / "train/shard_00000.bin", 40), "train/shard_00000.bin"),
    "an altered index": (lambda cache: altered(cache / "index/train_docs.npy"), "index/train_docs.npy"),
    "an extra file": (lambda cache: (cache / "notes.txt").write_text("x"), "notes.txt"),
    "a newer format": (_newer, META_NAME),
    "a damaged meta.json": (lambda cache: altered(cache / META_NAME, 30), META_NAME),
}


@pytest.mark.parametrize("deep", [(), ("--deep",)], ids=["quick", "deep"])
@pytest.mark.parametrize("harm", HARMS)
def test_verify_names_the_file_and_the_command_that_repairs_it(there, harm, deep):
    act, file = HARMS[harm]
    url = f"file://{there}/pretrain/roam"
    act(there / "pretrain/roam")
    status, found = damages(url, *deep)
    assert status == 3 and file in [each["file"] for each in found]
    done = niels_gpt("verify", url, *deep)
    assert file in done.out
    assert (f"niels-gpt push CACHE {url} --check" in done.out) == (harm != "an extra file")  # push removes none


def test_what_a_push_with_check_repairs_is_good_again(here, there):
    url = f"file://{there}/pretrain/roam"
    altered(there / "pretrain/roam/train/shard_00000.bin")
    assert damages(url)[0] == 3
    push(here / "pretrain/roam", url, check=True)
    assert damages(url, "--deep") == (0, [])


def test_without_a_meta_json_there_is_no_cache(there):
    shutil.rmtree(there / "pretrain/roam/index")
    (there / "pretrain/roam" / META_NAME).unlink()
    done = niels_gpt("verify", url := f"file://{there}/pretrain/roam", there / "none", "--json")
    assert done.status == 1 and url in done.json[url]["damages"][0]["problem"] and done.json[url]["compared"] == {}
    assert len(done.json[str(there / "none")]) == 1
    (there / "sft/oasst1" / META_NAME).unlink()  # here its index shows that it was one
    status, found = damages(f"file://{there}/sft/oasst1")
    assert status == 3 and [each["file"] for each in found] == [META_NAME]
    done = niels_gpt("verify", f"file://{there}", "--json")
    assert done.status == 3 and [name for name, found in done.json.items() if found["damages"]] == [
        f"file://{there}/sft/oasst1"
    ]


@pytest.mark.parametrize("deep", [(), ("--deep",)], ids=["quick", "deep"])
def test_a_cache_that_is_replaced_meanwhile_is_no_damage(there, deep):
    cache = there / "pretrain/roam"

    def replace(name, *_):
        if name.startswith("train/"):
            altered(cache / name)
            change_meta(cache, dataset_name="another")

    with before("part", replace):
        done = niels_gpt("verify", f"file://{cache}", *deep)
    assert done.status == 1 and "E610" in done.err and not done.out


def test_a_cache_without_checksums_is_no_damage(there):
    cache = there / "pretrain/roam"
    meta = json.loads((cache / META_NAME).read_bytes())
    del meta["checksums"]
    write_meta(str(cache / META_NAME), meta)
    done = niels_gpt("verify", f"file://{there}", "--json")
    assert done.status == 1 and "E208" in done.err and f"niels-gpt pull file://{cache} DEST" in done.err
    assert "checksums" in done.json[f"file://{cache}"]["damages"][0]["problem"]
    assert done.json[f"file://{there}/sft/oasst1"]["damages"] == []  # others are verified


def test_a_part_of_a_cache_is_no_damage(sent):
    with refused("E209"):
        urls.find_damage_at(f"file://{sent}/pretrain/roam/train", deep=False)
    assert niels_gpt("verify", f"file://{sent}/pretrain/roam/train").status == 1


@pytest.mark.slow
def test_a_sample_of_blocks_is_compared_and_deep_all_of_them(large, tmp_path):
    url = f"file://{tmp_path}/there"
    push(large, url)
    done = niels_gpt("verify", url, "--json")
    compared = done.json[url]["compared"]
    assert done.status == 0 and compared["blocks"] == 24 * MIB // BLOCK_BYTES
    assert urls.SAMPLED <= compared["blocks_compared"] <= urls.SAMPLED + 6
    last = bucket(url).sizes()["train/shard_00002.bin"] - 1
    shard = tmp_path / "there/train/shard_00002.bin"
    altered(shard)
    status, found = damages(url)
    assert status == 3 and [(each["file"], each["offset"], each["end"]) for each in found] == [
        ("train/shard_00002.bin", last - BLOCK_BYTES + 1, last + 1)
    ]
    altered(shard)
    altered(shard, BLOCK_BYTES + 5)  # no block of the sample
    assert damages(url) == (0, [])
    status, found = damages(url, "--deep")
    first = found[0]  # others tell of the id
    assert status == 3 and {each["file"] for each in found} == {"train/shard_00002.bin"}
    assert (first["offset"], first["end"]) == (BLOCK_BYTES, 2 * BLOCK_BYTES)
    with urls.at_hand(url) as folder, refused("E611", "shard_00002.bin", "block 1,"):  # as readers do
        list(iter_eval(folder, split="train", B=64, T=4096))


def test_deep_looks_at_ids_as_the_stream_does(tmp_path):
    """A cache whose sums are right, and whose ids are not: by another writer."""
    small_builds.pretrain(tmp_path / "here")
    url = f"file://{tmp_path}/there"
    push(tmp_path / "here", url)
    change_meta(tmp_path / "there", vocab_size=70)
    status, found = damages(url, "--deep")
    assert status == 3 and any("vocab_size 70" in each["problem"] for each in found)


# --- over a server ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
class TestServer:
    @pytest.fixture
    def url(self, s3_server, large, request):
        url = f"s3://team/look/{request.node.name}"
        push(large, url)
        s3_server.clear_faults()
        s3_server.sent_bytes = 0
        return url

    def test_few_bytes_are_sent(self, s3_server, url, large):
        done = niels_gpt("stats", url, "--json")
        assert done.json == niels_gpt("stats", large, "--json").json | {"cache": url}
        assert s3_server.sent_bytes < 2 * MIB
        s3_server.sent_bytes = 0
        assert niels_gpt("locate", url, "train", 10 * MIB).status == 0
        assert s3_server.sent_bytes < 5 * MIB
        s3_server.sent_bytes = 0
        assert niels_gpt("verify", url).status == 0
        assert s3_server.sent_bytes < 6 * MIB
        s3_server.sent_bytes = 0
        assert niels_gpt("verify", url, "--deep").status == 0
        assert s3_server.sent_bytes < 1.1 * 24 * MIB
        assert niels_gpt("list", url.rpartition("/")[0], "--json").json["caches"][0]["state"] == "built"

    def test_a_busy_server_is_waited_for_and_a_lying_one_is_damage(self, s3_server, url):
        s3_server.refuse = 2
        assert niels_gpt("verify", url, "--deep").status == 0
        path = url.removeprefix("s3:/")
        lie = b"HTTP/1.1 200 OK\r\nContent-Length: 65536\r\nConnection: close\r\n\r\n" + bytes(65536)
        s3_server.lies[b"GET %s/train/shard_00001.bin" % path.encode()] = lambda: [lie]
        status, found = damages(url)
        assert status == 3 and {each["file"] for each in found} == {"train/shard_00001.bin"}

    def test_a_bucket_that_refuses_is_no_damage(self, s3_server, url):
        path = url.removeprefix("s3:/").encode()
        answer = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        s3_server.lies[b"GET %s/train" % path] = lambda: [answer]
        for more in ((), ("--deep",)):
            done = niels_gpt("verify", url, *more)
            assert done.status == 1 and "E612" in done.err


def test_a_url_of_a_hub_bucket_is_known_and_only_read(here):
    assert bucket("hf://buckets/team/caches/roam").at(META_NAME) == f"hf://buckets/team/caches/roam/{META_NAME}"
    with pytest.raises(ValueError, match="only read"):
        push(here / "pretrain/roam", "hf://buckets/team/caches/roam")
    with pytest.raises(UsageError, match="local=DIR"):
        next(iter_eval("hf://buckets/team/caches/roam/val", B=1, T=8))
    with pytest.raises(ValueError, match="hf://buckets/USER/NAME"):
        push(here / "pretrain/roam", "hf://spaces/team/caches")
