"""push, pull and stage: what a folder at a URL holds afterwards, what is refused, and what a stopped run leaves."""

import fcntl
import hashlib
import json
import logging
import os
import threading
from contextlib import ExitStack
from functools import partial

import pytest
from support import small_builds
from support.buckets import ATTEMPTS, MARK_NAME, before, bucket, place_of, waiting
from support.disk import META_NAME, canonical_json, write_meta
from support.errors import refused
from support.small_builds import whole_version
from support.small_caches import change_meta

from niels_gpt.exchange.exporting import export_cache
from niels_gpt.exchange.transfer import fetch, push
from niels_gpt.storage.errors import CacheError

pytestmark = pytest.mark.usefixtures("quick")
KINDS = ("pretrain", "sft", "templated", "rollouts")
NOTE = {"files": [], "kind": "push", "push_version": 1, "removing": []}
"""Of a push, without its content_sha256."""


@pytest.fixture(scope="module")
def caches(tmp_path_factory):
    """A cache of each kind, and another pretrain cache."""
    root = tmp_path_factory.mktemp("caches")
    for kind in KINDS:
        small_builds.BUILDERS[kind](root / kind / "wiki")
    small_builds.pretrain(root / "pretrain/other", 1)
    return root


def refusal(code, found, act):
    """The error of `act`, which has this code and this in it."""
    with refused(code, found, kind=CacheError) as caught:
        act()
    return str(caught)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_comes_back_as_it_was(kind, caches, tmp_path, url):
    cache = caches / kind / "wiki"
    sent = push.push(cache, url, check=True)
    assert sent.sent_bytes == sent.num_bytes and not sent.skipped_files
    assert set(bucket(url).sizes()) == {p.relative_to(cache).as_posix() for p in cache.rglob("*") if p.is_file()}
    again = push.push(cache, url)
    assert again.sent_bytes == 0 and again.skipped_files == again.files == sent.files
    calls = []
    pulled = fetch.pull(url, tmp_path / "wiki", progress=lambda *seen: calls.append(seen))
    assert whole_version(tmp_path / "wiki") == whole_version(cache)
    assert calls[-1][0] == pulled.files - 1 and calls[-1][1] == calls[-1][2] == pulled.fetched_bytes
    assert (pulled.version / META_NAME).read_bytes() == (cache / META_NAME).read_bytes()
    assert fetch.pull(url, tmp_path / "wiki").fetched_bytes == 0


def test_a_local_folder_is_a_bucket_too_and_a_stage_copies(caches, tmp_path):
    push.push(caches / "pretrain/wiki", str(tmp_path / "mirror"))
    assert not list((tmp_path / "mirror").rglob("*.tmp")) and not (tmp_path / "mirror" / MARK_NAME).exists()
    fetch.pull(f"file://{tmp_path}/mirror", tmp_path / "pulled")
    staged = fetch.stage(str(caches / "pretrain/wiki"), tmp_path / "staged")
    assert whole_version(tmp_path / "pulled") == whole_version(tmp_path / "staged")
    assert all(path.stat().st_nlink == 1 for path in staged.version.rglob("*.bin"))


def test_another_cache_is_refused_without_replace(caches, tmp_path, url):
    cache, other = caches / "pretrain/wiki", caches / "pretrain/other"
    push.push(other, url)
    refusal("E610", "another", lambda: push.push(cache, url))
    fetch.pull(url, tmp_path / "wiki")
    push.push(cache, url, replace=True)
    assert set(bucket(url).sizes()) == {p.relative_to(cache).as_posix() for p in cache.rglob("*") if p.is_file()}
    fetch.pull(url, tmp_path / "wiki")
    assert whole_version(tmp_path / "wiki") == whole_version(cache)


@pytest.mark.parametrize("name", ["notes.txt", "train/shard_00000.bin"])
def test_foreign_files_stay(name, caches, url):
    bucket(url).write(name, b"mine")
    refusal("E610", "not of", lambda: push.push(caches / "pretrain/wiki", url, replace=True))
    assert bucket(url).sizes() == {name: 4}


def cut_after(count):
    """A list of names, and what cuts a run before the step after so many."""
    done = []

    def act(name, *_):
        if len(done) == count:
            raise OSError("cut")
        done.append(name)

    return done, act


def test_half_a_push_is_no_cache_and_is_resumed(caches, tmp_path, url):
    cache, (_, cut) = caches / "pretrain/wiki", cut_after(3)
    with before("send", cut), pytest.raises(OSError, match="cut"):
        push.push(cache, url, jobs=1)
    refusal("E612", "being pushed", lambda: fetch.pull(url, tmp_path / "wiki"))
    refusal("E610", "being pushed", lambda: push.push(caches / "pretrain/other", url))
    assert push.push(cache, url).skipped_files == 3
    assert MARK_NAME not in bucket(url).sizes()
    refusal("E612", "no cache", lambda: fetch.pull("memory://bucket/none", tmp_path / "none"))


def test_a_replacement_that_was_stopped_takes_no_file_of_the_old_cache(caches, tmp_path, url):
    push.push(caches / "pretrain/other", url)
    removed, cut = cut_after(2)
    with before("remove", cut), pytest.raises(OSError, match="cut"):
        push.push(caches / "pretrain/wiki", url, replace=True, jobs=1)
    assert removed[0] == META_NAME
    assert push.push(caches / "pretrain/wiki", url, check=True).skipped_files == 0
    fetch.pull(url, tmp_path / "wiki")


@pytest.mark.parametrize("step", ["create", "send", "remove"])
def test_of_two_pushes_of_different_caches_one_fails(step, caches, tmp_path):
    """One comes before its note, its first file, or the end of the other. On a disk, where files appear whole."""
    url, names, errors = str(tmp_path / "bucket"), ["wiki", "other"], []

    def send(*_):
        if names:
            try:
                push.push(caches / "pretrain" / names.pop(), url, jobs=1)
            except CacheError as error:
                errors.append(error.code)

    with before(step, send):
        send()
    assert errors == ["E610"] and not names and MARK_NAME not in bucket(url).sizes()
    fetch.pull(url, tmp_path / "wiki")


def once(act):
    """What does `act` the first time it is called."""
    left = [act]
    return lambda *_: left and left.pop()()


def test_two_pushes_of_one_cache_end_well(caches, tmp_path):
    cache, url, (_, cut), steps = caches / "pretrain/wiki", str(tmp_path / "bucket"), cut_after(3), ExitStack()

    def half():
        """One is under way when the other comes to its note, and ends before the other looks again."""
        with before("send", cut), pytest.raises(OSError, match="cut"):
            push.push(cache, url, jobs=1)
        steps.enter_context(before("sizes", once(lambda: push.push(cache, url))))

    def whole():
        """One ends while the other sends, and a push of another cache, which gives up next, has left its note."""
        push.push(cache, f"{url}/2")
        bucket(f"{url}/2").write(MARK_NAME, json.dumps({**NOTE, "content_sha256": "0" * 64}).encode())

    with steps:
        steps.enter_context(before("create", once(half)))
        push.push(cache, url)
    with before("send", once(whole)):
        push.push(cache, f"{url}/2", jobs=1)
    for each in (url, f"{url}/2"):
        fetch.pull(each, tmp_path / "wiki")
        assert MARK_NAME not in bucket(each).sizes()


def test_a_push_that_looked_before_another_ended_does_not_take_its_place(caches, tmp_path, url):
    """The other one begins and ends between the look and the note of the first."""
    cache, other = caches / "pretrain/wiki", caches / "pretrain/other"

    def late(between, url):
        waiting = [between]
        return before("create", lambda *_: waiting and push.push(waiting.pop(), url))

    with late(other, url):
        refusal("E610", "another", lambda: push.push(cache, url))
    fetch.pull(url, tmp_path / "kept")
    assert whole_version(tmp_path / "kept") == whole_version(other) and MARK_NAME not in bucket(url).sizes()
    with late(cache, f"{url}/same"):
        assert push.push(cache, f"{url}/same").sent_bytes == 0  # one of the same cache was faster
    assert MARK_NAME not in bucket(f"{url}/same").sizes()


def test_damage_is_not_published(caches, tmp_path, url):
    small_builds.pretrain(tmp_path / "bad")
    shard = tmp_path / "bad/train/shard_00001.bin"
    shard.write_bytes(bytes(len(shard.read_bytes())))
    refusal("E611", "shard_00001", lambda: push.push(tmp_path / "bad", url))
    assert META_NAME not in bucket(url).sizes()


def test_a_file_of_the_right_size_with_other_bytes_is_sent_again_by_a_push_with_check(caches, tmp_path, url):
    sent, there = push.push(caches / "pretrain/wiki", url), bucket(url)
    for name in ("train/shard_00001.bin", "index/crc32.bin"):
        there.write(name, bytes(there.sizes()[name]))
    text = refusal("E611", f"niels-gpt push CACHE {url} --check", lambda: fetch.pull(url, tmp_path / "wiki"))
    assert "twice" in text and push.push(caches / "pretrain/wiki", url).sent_bytes == 0
    calls = []
    checked = push.push(caches / "pretrain/wiki", url, check=True, progress=lambda *seen: calls.append(seen))
    assert 0 < checked.sent_bytes < sent.sent_bytes and checked.skipped_files == sent.files - 2
    assert calls[-1][:2] == (sent.files - 1, calls[-1][2])
    fetch.pull(url, tmp_path / "wiki")


@pytest.mark.parametrize("size", [0, 1])
def test_damage_is_not_pulled(size, caches, tmp_path, url):
    push.push(caches / "pretrain/wiki", url)
    name, there = "train/shard_00001.bin", bucket(url)
    length = there.sizes()[name]
    there.write(name, b"x" * (length - size))
    refusal("E611", "shard_00001", lambda: fetch.pull(url, tmp_path / "wiki"))
    assert not os.path.lexists(tmp_path / "wiki")
    there.remove(name)
    refusal("E611", "no such file", lambda: fetch.pull(url, tmp_path / "wiki"))
    assert push.push(caches / "pretrain/wiki", url).sent_bytes == length
    assert fetch.pull(url, tmp_path / "wiki").kept_bytes > 0


def test_a_replaced_cache_is_refused_in_words(caches, tmp_path, url):
    push.push(caches / "pretrain/wiki", url)
    others = [caches / "pretrain/other"]

    def replace(name, *_):
        if name.startswith("val/") and others:
            push.push(others.pop(), url, replace=True)

    with before("part", replace):
        refusal("E610", "replaced", lambda: fetch.pull(url, tmp_path / "wiki", jobs=1))
    assert not os.path.lexists(tmp_path / "wiki") and not others


def test_a_stopped_pull_is_resumed_within_a_file_and_damage_in_it_is_found(caches, tmp_path, url):
    push.push(caches / "sft/wiki", url)

    def stop(name, begin, end):
        if name == "train_tokens.bin" and begin >= 200:
            raise KeyboardInterrupt

    with waiting(0.001, range_bytes=100), before("part", stop), pytest.raises(KeyboardInterrupt):
        fetch.pull(url, tmp_path / "wiki", jobs=1)
    [work] = [path for path in tmp_path.glob(".versions/wiki/building-*") if path.suffix == ""]
    assert (work / "train_tokens.bin").stat().st_size == 200
    with waiting(0.001, range_bytes=100):
        resumed = fetch.pull(url, tmp_path / "wiki")
    assert resumed.kept_bytes >= 200 and whole_version(tmp_path / "wiki") == whole_version(caches / "sft/wiki")


HOSTILE = [
    {"shards": {"train": [{"name": "../../out.bin", "bytes": 1, "sha256": "0" * 64}], "val": []}},
    {"shards": {"train": [{"name": "/out.bin", "bytes": 1, "sha256": "0" * 64}], "val": []}},
    {"kind": "other"},
    {"kind": "eagle3"},
    {"content_sha256": "0" * 64},
    {"files": [{"name": MARK_NAME, "bytes": 1, "sha256": "0" * 64}]},
]


@pytest.mark.parametrize("keys", HOSTILE)
def test_a_hostile_meta_is_refused(keys, tmp_path):
    small_builds.pretrain(tmp_path / "bad")
    change_meta(tmp_path / "bad", **keys)
    before = {path for path in tmp_path.rglob("*")}
    with pytest.raises(CacheError):
        fetch.pull(str((tmp_path / "bad").resolve()), tmp_path / "wiki")
    assert {path for path in tmp_path.rglob("*")} == before


def test_no_room_is_said_before_anything_is_fetched(caches, tmp_path, url, monkeypatch):
    push.push(caches / "sft/wiki", url)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 5}))
    with refused("E501", kind=OSError):
        fetch.pull(url, tmp_path / "wiki")


@pytest.mark.parametrize(
    "url",
    [
        *("s3://KEYID:geheim@bucket/x", "s3://bucket/x?token=geheim", "https://geheim/x", "a://b"),
        *(
            "hf://geheim@x/y",
            "hf://datasets/me:geheim@o/x",
            "hf://datasets/o/me:geheim@x",
            "hf://datasets/o/x@me:geheim@y",
        ),
        *("file://me:geheim@host/x", "FILE://me:geheim@host"),
    ],
)
def test_credentials_in_a_url_are_refused_and_not_repeated(url, caches, tmp_path):
    acts = (fetch.pull, fetch.stage, lambda url, _: bucket(url), lambda url, _: push.push(caches / "sft/wiki", url))
    for act in (partial(each, url, tmp_path / "wiki") for each in acts):
        with refused("E102") as caught:
            act()
        assert "geheim" not in str(caught.value) + repr(caught.value)


def test_errors_of_a_library_are_repeated_and_shown_without_keys(caches, tmp_path, url, monkeypatch, caplog):
    import fsspec

    push.push(caches / "pretrain/wiki", url)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "geheim-123")
    said = "https://me:geheim@host/x?X-Amz-Signature=geheim Authorization: geheim-123"
    memory, failures = type(fsspec.filesystem("memory")), [ConnectionResetError(said), TimeoutError(said)]
    cat_file = memory.cat_file

    def failing(self, *args, **more):
        if failures:
            raise failures.pop()
        return bytes(cat_file(self, *args, **more))

    monkeypatch.setattr(memory, "cat_file", failing)
    caplog.set_level(logging.INFO)
    fetch.pull(url, tmp_path / "wiki")
    assert [record.code for record in caplog.records if hasattr(record, "code")] == ["W610"] * 2
    failures += [ConnectionResetError(said)] * ATTEMPTS
    text = refusal("E612", "attempts", lambda: fetch.pull(url, tmp_path / "more"))
    failures.append(PermissionError(said))
    text += refusal("E612", "refused", lambda: fetch.pull(url, tmp_path / "more"))
    assert "geheim" not in text + caplog.text


def test_a_server_that_asks_to_wait_is_waited_for_or_given_up(caches, tmp_path, url, monkeypatch, caplog):
    import fsspec

    push.push(caches / "sft/wiki", url)
    memory, asked = type(fsspec.filesystem("memory")), []
    cat_file = memory.cat_file

    def busy(self, *args, **more):
        if asked:
            error = OSError("busy")
            headers = {"retry-after": asked.pop()}
            error.response = {"ResponseMetadata": {"HTTPStatusCode": 503, "HTTPHeaders": headers}}
            raise error
        return bytes(cat_file(self, *args, **more))

    monkeypatch.setattr(memory, "cat_file", busy)
    asked.append("1")
    fetch.pull(url, tmp_path / "wiki")
    assert "again in 1.0 s" in caplog.text
    asked.append("4000")
    refusal("E612", "asks to wait 4000 s", lambda: fetch.pull(url, tmp_path / "more"))


def test_a_note_of_a_push_says_what_docs_say(caches, url):
    content = whole_version(caches / "sft/wiki")
    note = {**NOTE, "content_sha256": content}
    bucket(url).write(MARK_NAME, json.dumps(note).encode())
    assert push.push(caches / "sft/wiki", url).skipped_files == 0
    bucket(url).write(MARK_NAME, json.dumps({**note, "removing": ["../x"]}).encode())
    bucket(url).remove(META_NAME)
    refusal("E610", "not of", lambda: push.push(caches / "sft/wiki", url))


def test_a_draft_vocabulary_has_its_own_content_sha256(tmp_path, url):
    content = canonical_json({"selected_token_ids": [3, 1], "target_vocab_size": 5})
    record = {"bytes": len(content), "name": "draft_vocab.json", "sha256": hashlib.sha256(content).hexdigest()}
    sizes = {"draft_vocab_size": 2, "target_vocab_size": 5, "coverage": 1.0}
    meta = {"built": True, "files": [record], "format_version": 1, "kind": "draft_vocab", **sizes}
    folder = tmp_path / "draft"
    folder.mkdir()
    (folder / "draft_vocab.json").write_bytes(content)
    content_sha256 = hashlib.sha256(canonical_json([record])).hexdigest()
    write_meta(folder, {**meta, "content_sha256": content_sha256, "meta_crc32": ""})
    push.push(folder, url)
    assert whole_version(fetch.pull(url, tmp_path / "vocab").path) == content_sha256


def test_what_a_killed_push_left_half_written_on_a_disk_is_removed(caches, tmp_path):
    mirror, there = tmp_path / "mirror", bucket(str(tmp_path / "mirror"))
    push.push(caches / "pretrain/wiki", str(mirror))
    dead, alive, foreign = (mirror / "train" / f".{name}.tmp" for name in DOTTED)
    for half in (dead, alive, foreign):
        half.write_bytes(b"half")
    with open(alive, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        push.push(caches / "pretrain/wiki", str(mirror))
    assert not dead.exists() and alive.exists() and foreign.exists()
    there.write("notes.txt", b"mine")
    assert there.read("notes.txt", 10) == b"mine" and not list(mirror.glob(".*"))


DOTTED = ("shard_00000.bin.0123abcd", "shard_00001.bin.0123abcd", "notes.txt.0123abcd")


@pytest.mark.parametrize("url", ["", "s3:/bucket/x", "FILE:/x", "s3://", "s3:///x"])
def test_a_mistyped_url_is_no_path(url, caches, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refused("E102", "s3://"):
        push.push(caches / "sft/wiki", url)
    assert not list(tmp_path.iterdir())


def test_schemes_may_be_in_capitals_and_a_file_url_may_name_this_machine(tmp_path):
    assert place_of("file://localhost/data/wiki") == place_of("FILE:///data/wiki") == "/data/wiki"
    pytest.importorskip("s3fs", reason="the extra s3 is not installed")
    assert place_of("S3://team/wiki") == "team/wiki"


def test_a_version_is_not_pushed_over(caches, tmp_path):
    small_builds.pretrain(tmp_path / "wiki", 1)
    before = whole_version(tmp_path / "wiki")
    for target in (tmp_path / "wiki", (tmp_path / "wiki").resolve()):
        refusal("E610", "never", lambda: push.push(caches / "pretrain/wiki", str(target), replace=True))  # noqa: B023
    assert whole_version(tmp_path / "wiki") == before


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_links_and_pipes_in_a_folder_are_not_followed(kind, caches, tmp_path):
    push.push(caches / "pretrain/wiki", str(tmp_path / "mirror"))
    shard, outside = tmp_path / "mirror/train/shard_00001.bin", tmp_path / "outside.bin"
    shard.rename(outside)
    if kind == "link":
        shard.symlink_to(outside)
    else:
        os.mkfifo(shard)
    refusal("E205", "shard_00001", lambda: fetch.pull(str(tmp_path / "mirror"), tmp_path / "wiki"))
    if kind == "link":
        replacing = (caches / "pretrain/other", str(tmp_path / "mirror"))
        refusal("E205", "link", lambda: push.push(*replacing, replace=True))
    assert outside.exists()


def test_the_first_error_ends_the_wait_for_another_attempt(caches, tmp_path, url, monkeypatch):
    import fsspec

    push.push(caches / "pretrain/wiki", url)
    memory, is_waiting = type(fsspec.filesystem("memory")), threading.Event()
    cat_file = memory.cat_file

    def failing(self, path, **more):
        if path.endswith("shard_00000.bin"):
            is_waiting.set()
            raise ConnectionResetError
        if path.endswith("shard_00001.bin"):
            is_waiting.wait()
            raise PermissionError
        return bytes(cat_file(self, path, **more))

    monkeypatch.setattr(memory, "cat_file", failing)
    with waiting():
        refusal("E612", "PermissionError", lambda: fetch.pull(url, tmp_path / "wiki"))


@pytest.mark.parametrize("inside", [".versions/other", ".versions/wiki/0123456789ab", "wiki/copy", ".versions"])
def test_a_folder_among_versions_is_no_destination(inside, tmp_path):
    small_builds.pretrain(tmp_path / "wiki")
    cache, dest = tmp_path / "wiki", tmp_path / inside
    before = sorted(tmp_path.rglob("*"))
    parts = partial(fetch.stage, split="train")
    for act in (fetch.pull, fetch.stage, parts, lambda *_: export_cache(cache, "olmo", dest)):
        refusal("E704", "elsewhere", partial(act, str(cache), dest))
    assert sorted(tmp_path.rglob("*")) == before
