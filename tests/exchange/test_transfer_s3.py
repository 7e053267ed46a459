"""push and pull over a real S3 server: faults of the network, killed clients, several at once, damage."""

import hashlib
import logging
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from support import small_builds
from support.buckets import MARK_NAME, bucket, impatience
from support.disk import META_NAME
from support.errors import refused
from support.s3_server import SECRET
from support.small_builds import whole_version

from niels_gpt.exchange.transfer import fetch, push
from niels_gpt.storage.errors import CacheError

pytestmark = pytest.mark.slow

RUN = """
import sys
from pathlib import Path
from niels_gpt.exchange.transfer import fetch, push
if sys.argv[1] == "push":
    push.push(Path(sys.argv[2]), sys.argv[3], jobs=2)
else:
    fetch.pull(sys.argv[3], Path(sys.argv[2]), jobs=2)
"""


@pytest.fixture
def server(s3_server):
    return s3_server


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache of more than 100 files."""
    path = tmp_path_factory.mktemp("caches") / "wiki"
    items = small_builds.documents(0, 3000)
    small_builds.pretrain(path, items=items, max_train_tokens=12_000, max_val_tokens=300)
    assert len(list(path.rglob("*.bin"))) > 100
    return path


@pytest.fixture
def url(request):
    return f"s3://team/caches/{request.node.name}"


def killed(server, act, path, url, when):
    """Push or pull in a process, and kill it once `when` holds."""
    process = subprocess.Popen([sys.executable, "-c", RUN, act, str(path), url])
    for _ in range(3000):
        if when() or process.poll() is not None:
            break
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def test_a_hundred_files_with_eight_jobs(server, cache, tmp_path, url):
    sent = push.push(cache, url, check=True)
    assert sent.files > 100 and push.push(cache, url).sent_bytes == 0
    assert fetch.pull(url, tmp_path / "wiki").files == sent.files
    assert whole_version(tmp_path / "wiki") == whole_version(cache)


def test_faults_of_the_network_are_waited_out(server, cache, tmp_path, url, caplog):
    caplog.set_level(logging.INFO)
    server.refuse = 2
    push.push(cache, url)
    server.cut_after, server.refuse = 20_000, 1
    fetch.pull(url, tmp_path / "wiki")
    assert server.cut_after is None and server.refuse == 0
    assert whole_version(tmp_path / "wiki") == whole_version(cache)
    server.refuse = 10_000
    with refused("E612") as caught:
        fetch.pull(url, tmp_path / "more")
    server.refuse = 0
    assert "W610" in {getattr(record, "code", "") for record in caplog.records}
    assert SECRET not in caplog.text + str(caught) and "AKIA" not in caplog.text + str(caught)


def test_a_killed_push_is_no_cache_and_is_resumed(server, cache, tmp_path, url):
    server.delay_s, there = 0.02, bucket(url)
    killed(server, "push", cache, url, lambda: len(there.sizes()) > 10)
    server.delay_s = 0
    with refused("E612", "being pushed"):
        fetch.pull(url, tmp_path / "wiki")
    assert push.push(cache, url, check=True).skipped_files >= 9
    assert MARK_NAME not in there.sizes()
    fetch.pull(url, tmp_path / "wiki")


def test_a_killed_pull_is_resumed(server, cache, tmp_path, url):
    push.push(cache, url)
    server.delay_s = 0.02
    killed(
        server, "pull", tmp_path / "wiki", url, lambda: len(list(tmp_path.glob(".versions/wiki/building-*/*/*"))) > 10
    )
    server.delay_s = 0
    assert not (tmp_path / "wiki").exists()
    assert fetch.pull(url, tmp_path / "wiki").kept_bytes > 0
    assert whole_version(tmp_path / "wiki") == whole_version(cache)


def at_once(*acts):
    """Do several things at the same time; return their errors."""
    errors = []

    def act(one):
        try:
            one()
        except CacheError as error:
            errors.append(error)

    threads = [threading.Thread(target=act, args=(one,)) for one in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_two_pushes_and_two_pulls_at_once(server, cache, tmp_path, url):
    assert not at_once(*[lambda: push.push(cache, url)] * 2)
    assert MARK_NAME not in bucket(url).sizes()
    assert not at_once(*[lambda: fetch.pull(url, tmp_path / "wiki", wait=True)] * 2)
    errors = at_once(*[lambda: fetch.pull(url, tmp_path / "other")] * 2)
    assert [error.code for error in errors] == ["E503"] * len(errors) and len(errors) < 2
    assert whole_version(tmp_path / "wiki") == whole_version(tmp_path / "other") == whole_version(cache)


def test_of_two_different_pushes_one_fails(server, cache, tmp_path, url):
    small_builds.pretrain(tmp_path / "other", 1)
    errors = at_once(lambda: push.push(cache, url), lambda: push.push(tmp_path / "other", url))
    assert [error.code for error in errors] == ["E610"]
    fetch.pull(url, tmp_path / "wiki")


def test_damage_and_foreign_files_are_refused(server, cache, tmp_path, url):
    push.push(cache, url)
    name, there = "train/shard_00007.bin", bucket(url)
    there.write(name, bytes(there.sizes()[name]))
    with refused("E611", name):
        fetch.pull(url, tmp_path / "wiki")
    assert not (tmp_path / "wiki").exists()
    bucket(f"{url}-mine").write("train/shard_00000.bin", b"mine")
    with refused("E610", "not of"):
        push.push(cache, f"{url}-mine", replace=True)
    with refused("E612", "no-such-bucket"):
        push.push(cache, "s3://no-such-bucket/wiki")
    assert META_NAME not in bucket(f"{url}-mine").sizes()


def in_pieces_without_end(sent):
    """Answer with a body that does not end; `sent` gets the bytes of each answer."""
    sent.append(0)
    yield b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    while True:
        yield b"100000\r\n" + b"a" * (1 << 20) + b"\r\n"
        sent[-1] += 1 << 20


def page_of_a_listing(sent):
    """Answer with one page of a listing, of 15 MiB, after which another one comes."""
    sent.append(15 << 20)
    next_page = f"<IsTruncated>true</IsTruncated><NextContinuationToken>{len(sent)}</NextContinuationToken>".encode()
    page = b"<ListBucketResult>%s%s</ListBucketResult>" % (next_page, b" " * sent[-1])
    yield b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(page) + page


@pytest.mark.parametrize("what", ["meta.json", "train/shard_00000.bin", "a listing", "pages of a listing"])
def test_an_answer_without_end_is_left_after_what_was_asked_for(server, cache, tmp_path, what):
    place, sent, is_listing = f"/team/endless/{len(what)}", [], "listing" in what
    push.push(cache, f"s3:/{place}")
    begin = "/team?list" if is_listing else f"{place}/{what}"
    answer = page_of_a_listing if what.startswith("pages") else in_pieces_without_end
    server.lies = {f"GET {begin}".encode(): lambda: answer(sent)}
    with refused("E612", "bytes"):
        if is_listing:
            push.push(cache, f"s3:/{place}")
        else:
            fetch.pull(f"s3:/{place}", tmp_path / "there", jobs=2)
    assert max(sent) < 32 << 20 and sum(sent) < 200 << 20 and not (tmp_path / "there").exists()


def test_a_redirect_is_not_followed(server, cache, tmp_path, url, monkeypatch):
    monkeypatch.setenv("AWS_SESSION_TOKEN", SECRET)
    push.push(cache, url)
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        elsewhere.settimeout(0.2)
        location = f"http://localhost:{elsewhere.getsockname()[1]}/x"
        answer = f"HTTP/1.1 307 Temporary Redirect\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n".encode()
        server.lies = {
            f"{method} {url.removeprefix('s3:/')}/meta.json".encode(): lambda: [answer] for method in ("GET", "HEAD")
        }
        with refused("E612", "Redirect"):
            fetch.pull(url, tmp_path / "there")
        with pytest.raises(TimeoutError):
            elsewhere.accept()


def drops(sent, stopped):
    """Answer with a byte at a time; with `sent` empty, with nothing at all."""
    yield sent and b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    while not stopped.wait(0.02):
        yield sent


@pytest.mark.parametrize(
    ("what", "sent"), [("meta.json", b""), ("train/shard_00000.bin", b"1\r\n \r\n"), ("a listing", b"1\r\n \r\n")]
)
def test_a_silent_server_is_named_and_left(server, cache, tmp_path, caplog, what, sent):
    place, stopped = f"/team/silent/{len(what)}", threading.Event()
    push.push(cache, f"s3:/{place}")
    begin = "/team?list" if what == "a listing" else f"{place}/{what}"
    server.lies = {f"GET {begin}".encode(): lambda: drops(sent, stopped)}
    caplog.set_level(logging.INFO)
    with impatience(0.1, 3.0), refused("E612", "no whole answer", "--jobs 1"):
        if what == "a listing":
            push.push(cache, f"s3:/{place}")
        else:
            fetch.pull(f"s3:/{place}", tmp_path / "there", jobs=1)
    stopped.set()
    named = f"s3:/{place}" if what == "a listing" else f"s3:/{place}/{what}"
    assert f"{named}: no answer for" in caplog.text and not (tmp_path / "there").exists()


@pytest.mark.parametrize("name", ["meta.json", "train/shard_00003.bin"])
def test_a_cut_or_altered_file_is_fetched_once_more(server, cache, tmp_path, name):
    url = f"s3://team/altered/{len(name)}"
    push.push(cache, url)
    good = bucket(url).read(name, 1 << 20)
    bad = [bytes([good[0] ^ 1]) + good[1:], good[:-9], b"", good + b"x"]
    answers = []

    def answer():
        if not answers:
            return None
        body = answers.pop()
        head = f"HTTP/1.1 206 Partial Content\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        return [head.encode() + body]

    server.lies = {f"GET {url.removeprefix('s3:/')}/{name}".encode(): answer}
    for number, content in enumerate(bad):
        answers.append(content)
        fetch.pull(url, tmp_path / str(number))
    answers += [bad[0], good[:-1] + b"x"]
    with refused("E611", name, "The connection", *[hashlib.sha256(each).hexdigest()[:12] for each in answers]):
        fetch.pull(url, tmp_path / "none")
    assert not answers and not (tmp_path / "none").exists()
