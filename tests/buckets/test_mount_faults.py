"""A cache at a URL over a real S3 server that lies, and among processes that are killed, forked and stopped."""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch
from support.buckets import impatience
from support.disk import META_NAME
from support.eagle3_runs import disk
from support.errors import refused
from support.mounted_caches import SHARD, digest, idle_after, only_mount, patience, pieces, stream, used_bytes
from support.s3_server import SECRET

from niels_gpt.cache.pretrain_dataset import PretrainSplit
from niels_gpt.exchange.transfer.push import push
from niels_gpt.storage.mounted import MOUNTED

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pushed():
    """Names of caches that are in the bucket."""
    return set()


@pytest.fixture
def url(s3_server, pushed, cache):
    if "faults" not in pushed:
        push(cache, "s3://team/faults")
        pushed.add("faults")
    return "s3://team/faults"


def get(name):
    return f"GET /team/faults/{name}".encode()


def answer(status, *headers, body=b""):
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return ["\r\n".join([*lines, "", ""]).encode() + body]


def codes(caplog):
    return {getattr(record, "code", "") for record in caplog.records}


# --- a server that lies -----------------------------------------------------------------------------------------------


def test_answers_that_are_cut_refused_or_altered_once_are_asked_for_again(s3_server, cache, url, local, caplog):
    caplog.set_level(logging.INFO)
    batches = stream(url, local=local)
    s3_server.cut_after, s3_server.refuse = 700_000, 2
    assert digest(batches) == digest(stream(cache))
    assert s3_server.cut_after is None and s3_server.refuse == 0 and "W610" in codes(caplog)
    MOUNTED.clear()
    batches = stream(url, local=local.with_name("other"))
    s3_server.alter = 1
    assert digest(batches) == digest(stream(cache)) and s3_server.alter == 0
    assert SECRET not in caplog.text


def test_answers_that_are_always_altered(s3_server, cache, url, local):
    split = PretrainSplit(url, split="train", local=local)
    s3_server.alter = 1 << 30
    with refused("E611", SHARD, "block", "; then", "push", url):
        split.stream(0, 10)
    s3_server.alter = 0
    assert (split.stream(0, 10) == PretrainSplit(cache, split="train").stream(0, 10)).all()


def without_end(sent):
    sent.append(0)
    yield b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    while True:
        yield b"100000\r\n" + b"a" * (1 << 20) + b"\r\n"
        sent[-1] += 1 << 20


@pytest.mark.parametrize("name", [META_NAME, "index/crc32.bin", SHARD])
def test_an_answer_without_end_is_left(s3_server, url, local, name):
    sent = []
    s3_server.lies = {get(name): lambda: without_end(sent)}
    with refused("E612", name, "bytes"):
        PretrainSplit(url, split="train", local=local).stream(0, 10)
    assert max(sent) < 48 << 20


@pytest.mark.parametrize("name", [META_NAME, SHARD])
def test_a_silent_server_is_said_and_given_up(s3_server, url, local, caplog, name):
    caplog.set_level(logging.INFO)
    end = threading.Event()

    def silent():
        end.wait(20)
        yield b""

    s3_server.lies = {get(name): silent}
    with impatience(0.2, 1.5):
        with refused("E612", name):
            digest(stream(url, local=local), 1)
        assert "no answer" in caplog.text
    end.set()
    s3_server.lies = {}
    digest(stream(url, local=local), 1)


def test_a_redirect_is_not_followed(s3_server, url, local, monkeypatch):
    monkeypatch.setenv("AWS_SESSION_TOKEN", SECRET)
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        elsewhere.settimeout(0.2)
        where = f"Location: http://localhost:{elsewhere.getsockname()[1]}/x"
        split = PretrainSplit(url, split="train", local=local)
        s3_server.lies = {get("train"): lambda: answer("307 Temporary Redirect", where)}
        with refused("E612", SHARD) as caught:
            split.stream(0, 10)
        with pytest.raises(TimeoutError):
            elsewhere.accept()
    assert SECRET not in str(caught)


def test_credentials_that_are_refused_are_an_error_at_once(s3_server, url, local):
    body = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
    s3_server.lies = {get(""): lambda: answer("403 Forbidden", body=body)}
    before = s3_server.requests
    with refused("E612", META_NAME):
        PretrainSplit(url, split="train", local=local)
    assert s3_server.requests - before <= 2 and not local.exists()


def test_a_server_that_asks_to_wait(s3_server, cache, url, local, caplog):
    split, asked = PretrainSplit(url, split="train", local=local), ["3600", "1"]
    lie = {get("train"): lambda: answer("503 Slow Down", f"Retry-After: {asked.pop()}") if asked else None}
    s3_server.lies = lie
    with refused("E612", SHARD, "3600"):
        split.stream(0, 10)
    assert "again in 1." in caplog.text and not asked
    assert (split.stream(0, 10) == PretrainSplit(cache, split="train").stream(0, 10)).all()


def test_threads_that_had_nothing_to_do_end_and_start_again(large, local):
    """The reader pauses for longer than they live, and what is needed next is still fetched ahead of it."""

    def ahead():
        return [thread for thread in threading.enumerate() if thread.name == "ahead"]

    with idle_after(0.1):
        batches = iter(stream(f"file://{large.resolve()}", local=local, max_ahead="1 MiB", global_batch_size=1))
        next(batches)
        for _ in range(200):
            if not ahead():
                break
            time.sleep(0.05)
        assert not ahead() and len(pieces(local)) < 10
        was_there = False
        for _ in range(20):
            next(batches)
            was_there = was_there or bool(ahead())
        assert was_there


# --- processes --------------------------------------------------------------------------------------------------------

READ = """
import os, sys, signal, threading
from support.mounted_caches import digest, stream
url, local, act = sys.argv[1:]
batches = stream(url, local=local)
if act == "leave":
    digest(batches, 1)
else:
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        digest(batches)
        print("not interrupted")
    except KeyboardInterrupt:
        pass
    print(digest(stream(url, local=local)))
"""


def run(url, local, act):
    arguments = [sys.executable, "-c", READ, url, str(local), act]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


class Reading:
    """A process that reads an epoch, or the next `count` batches, in a folder."""

    def __init__(self, url, local, count=None, **how):
        self._said, written = os.pipe()
        self.id = os.fork()
        if self.id == 0:
            try:
                MOUNTED.clear()
                found = digest(stream(url, local=local, **how), count)
                os.write(written, f"{found} {only_mount().fetched_bytes}".encode())
                os._exit(0)
            finally:
                os._exit(1)
        os.close(written)

    def is_over(self):
        return os.waitid(os.P_PID, self.id, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def result(self):
        """The digest and the bytes that it fetched."""
        status = os.waitpid(self.id, 0)[1]
        said = os.read(self._said, 1000).decode().split()
        os.close(self._said)
        assert status == 0, status
        return said[0], int(said[1])

    def kill(self):
        os.kill(self.id, signal.SIGKILL)
        assert os.waitpid(self.id, 0)[1] == signal.SIGKILL
        os.close(self._said)


def wait_for_half(local, more=0):
    for _ in range(2000):
        if len(pieces(local)) > more and any(name.endswith(".half") for name in pieces(local)):
            return
        time.sleep(0.01)


def test_killed_processes_leave_nothing_that_another_cannot_use(s3_server, cache, url, local):
    s3_server.bytes_per_s = 2 << 20
    for number in range(3):
        process = Reading(url, local)
        wait_for_half(local, number)
        process.kill()
    s3_server.bytes_per_s = None
    assert Reading(url, local).result()[0] == digest(stream(cache))
    assert not list(local.glob("*/.pieces/*.half"))


def test_processes_share_a_folder_and_each_piece_comes_about_once(s3_server, cache, url, local):
    s3_server.delay_s = 0.02
    said = [process.result() for process in [Reading(url, local) for _ in range(4)]]
    assert {found for found, _ in said} == {digest(stream(cache))}
    size = sum(path.stat().st_size for path in cache.glob("train/*.bin"))
    assert sum(fetched for _, fetched in said) <= 1.3 * size
    sizes = [path.stat().st_size for path in local.glob("*/**/*") if path.is_file()]
    assert int((local / "used").read_text()) == sum(sizes)


def test_processes_that_share_a_small_folder_stay_below_its_size(large, tmp_path):
    with disk(tmp_path / "disk", "64m") as local:
        url, most = f"file://{large.resolve()}", 0
        local.chmod(0o700)
        processes = [Reading(url, local, 150, max_bytes="16 MiB") for _ in range(2)]
        while not all(process.is_over() for process in processes):
            most = max(most, used_bytes(local))
            time.sleep(0.005)
        assert {process.result()[0] for process in processes} == {digest(stream(large), 150)}
        assert 8 << 20 < most <= 17 << 20


def test_a_stopped_process_holds_up_no_other_for_long(s3_server, cache, url, local):
    s3_server.bytes_per_s = 1 << 20
    stopped = Reading(url, local)
    wait_for_half(local)
    os.kill(stopped.id, signal.SIGSTOP)
    s3_server.bytes_per_s = None
    with patience(1.0):
        assert Reading(url, local).result()[0] == digest(stream(cache))
    os.kill(stopped.id, signal.SIGCONT)
    assert stopped.result()[0] == digest(stream(cache))


def test_a_process_ends_while_its_threads_fetch(s3_server, url, local):
    s3_server.bytes_per_s = 1 << 20
    begin = time.monotonic()
    out, err = (process := run(url, local, "leave")).communicate(timeout=60)
    assert (process.returncode, out) == (0, "") and "Traceback" not in err and "rror" not in err, err
    assert time.monotonic() - begin < 60


def test_a_process_that_ends_warns_of_no_failed_request(s3_server, large, local):
    push(large, "s3://team/ends")
    s3_server.delay_s = 0.05
    for number in range(3):
        process = run("s3://team/ends", local.with_name(f"local{number}"), "leave")
        assert process.communicate(timeout=60) == ("", "") and process.returncode == 0


def test_an_interrupt_during_a_fetch(s3_server, cache, url, local):
    s3_server.bytes_per_s = 1 << 20
    out, err = (process := run(url, local, "interrupt")).communicate(timeout=60)
    assert process.returncode == 0 and out.split() == [digest(stream(cache))], err


def test_a_fork_while_threads_fetch(s3_server, cache, url, local):
    """Neither reads wrong rows or waits for a lock of the other, whatever the threads did at the moment of the fork."""
    s3_server.delay_s, expected = 0.005, digest(stream(cache))
    children = []
    for number in range(5):
        batches = iter(stream(url, local=local.with_name(f"local{number}"), max_ahead="4 MiB"))
        next(batches)
        time.sleep(0.01 * number)
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            found = digest(stream(url, local=local.with_name(f"local{number}")))
            os._exit(0 if found == expected else 1)
        children.append(child)
        for _ in batches:
            pass
        MOUNTED.clear()
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 5


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_workers_of_a_data_loader(s3_server, cache, url, local, how):
    expected = [batch.x for batch in stream(cache)]
    batches = stream(url, local=local)
    digest(batches, 2)
    options = {"batch_size": None, "num_workers": 2, "persistent_workers": True, "multiprocessing_context": how}
    loader = torch.utils.data.DataLoader(stream(url, local=local), **options)
    found = [batch.x for batch in loader]
    assert len(found) == len(expected) and all(a.equal(b) for a, b in zip(found, expected, strict=True))
    del loader
