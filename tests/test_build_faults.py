"""Disks that are full or read-only, sources that vanish, locks of others: what and where is said, and nothing is lost.

The disks are real ones: small tmpfs in a mount namespace of a process of their own, which is this file as a script.

Run: pytest tests/test_build_faults.py
"""

import contextlib
import errno
import fcntl
import functools
import json
import logging
import os
import pwd
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from byte_tokenizer import ByteTokenizer, build, train_text

from niels_gpt import fileio, versions
from niels_gpt.build import resume, stream
from niels_gpt.build.pretrain import build_pretrain
from niels_gpt.build.sft import build_sft
from niels_gpt.cache import CacheError
from niels_gpt.recipes.plan import RECIPES
from niels_gpt.settings import Settings

TEXTS = [f"Document {number}. " + "abcdefgh " * 30 for number in range(100)]
NOBODY = 65534
OLD = "the old text"
PAGE = 4096


def tree(folder: Path) -> dict[str, bytes]:
    """Return every file and link below a folder with its content or target."""
    paths = sorted(path for path in folder.rglob("*") if path.is_symlink() or path.is_file())
    return {
        str(path.relative_to(folder)): os.readlink(path).encode() if path.is_symlink() else path.read_bytes()
        for path in paths
    }


def build_new(path: Path, kind: str = "pretrain", texts: Any = TEXTS, **arguments: Any) -> dict[str, Any]:
    """Build the cache that the faults meet, with a checkpoint after each batch."""
    common: dict[str, Any] = {"tokenizer": ByteTokenizer(), "seed": 0, "checkpoint_seconds": 0, "num_threads": 0}
    if kind == "sft":
        chats = ([{"role": "user", "content": text}, {"role": "assistant", "content": "yes"}] for text in texts)
        return build_sft(chats, path, val_frac=0.1, **{**common, **arguments})
    limits = {"max_train_tokens": 10**6, "max_val_tokens": 10**5, "shard_bytes": 8192, "shuffle_buffer": None}
    return build_pretrain(((None, text) for text in texts), path, **{**common, **limits, **arguments})


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "BATCH_ITEMS", 10)


def documents_in_journal(path: Path) -> int:
    """Read the journal of the one unfinished build by its format; returns how many documents its last line has.

    Every line but the last one, which may be cut, has the CRC-32 that it says.
    """
    (journal,) = versions.versions_dir(path).glob("building-*.journal/journal.jsonl")
    lines = journal.read_bytes().split(b"\n")
    whole = [line for line in lines[:-1] if line[:9] == b"%08x " % zlib.crc32(line[9:])]
    assert len(whole) >= len(lines) - 2 and "journal_version" in json.loads(whole[0][9:])
    return int(json.loads(whole[-1][9:])["documents"]) if len(whole) > 1 else 0


def said_to_be_kept(error: BaseException) -> int:
    """Return the number of documents that a message says are kept; 0 where it says nothing of it."""
    found = re.search(r"(\d+) documents are done and kept: once that is mended, the same build goes on", str(error))
    return int(found.group(1)) if found else 0


# --- a disk that is full ----------------------------------------------------------------------------------------------


class Heard(logging.Handler):
    """Holds the numbers of documents that builds said they go on after."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[int] = []
        resume.logger.addHandler(self)
        resume.logger.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        found = re.search(r"resuming after (\d+) documents of an earlier run", record.getMessage())
        self.numbers += [int(found.group(1))] if found else []


def mount(folder: Path, *options: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(folder)], check=True)


def with_less_and_less_room(folder: Path, kind: str, unit: str) -> list[dict[str, Any]]:
    """Build on a disk with 0, 1, 2, ... pages (or inodes) left, until it is enough; returns what happened each time."""
    stream.BATCH_ITEMS = 10
    cache, heard, found = folder / "c", Heard(), []
    mount(folder, "size=8m")
    build(cache, [OLD])
    build_new(cache, kind)
    expected = tree(folder)
    subprocess.run(["umount", str(folder)], check=True)
    for room in range(200):
        mount(folder, "size=8m")
        build(cache, [OLD])
        old = tree(cache.resolve())
        disk = os.statvfs(folder)
        used = disk.f_blocks - disk.f_bfree if unit == "pages" else disk.f_files - disk.f_ffree
        limit = f"size={(used + room) * PAGE}" if unit == "pages" else f"nr_inodes={used + room}"
        mount(folder, "remount", limit)
        outcome = None
        try:
            build_new(cache, kind)
        except OSError as error:  # which holds open files, so long as it is there
            outcome = {
                "errno": error.errno,
                "file": str(error.filename),
                "message": str(error),
                "kept": documents_in_journal(cache) if any(folder.glob(".versions/c/*.journal/journal.jsonl")) else 0,
                "said": said_to_be_kept(error),
                "old is readable": train_text(cache) == OLD and tree(cache.resolve()) == old,
            }
        if outcome is not None:
            mount(folder, "remount", "size=8m" if unit == "pages" else "nr_inodes=0")
            heard.numbers.clear()
            build_new(cache, kind)
            found.append({**outcome, "went on": list(heard.numbers), "same bytes": tree(folder) == expected})
        subprocess.run(["umount", str(folder)], check=True)
        if outcome is None:
            return found
    raise AssertionError(f"200 {unit} were not enough")


def skip_unless(*command: str) -> None:
    """Skip the test, with what the system says, where it refuses a command."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"no {command[0]} here")
    probe = subprocess.run(command, capture_output=True, text=True)
    if probe.returncode:
        pytest.skip(f"{' '.join(command)}: {probe.stderr.strip()}")


def in_a_namespace(*arguments: object) -> Any:
    """Run this file as a script, as root of a namespace in which it may mount; returns what it prints."""
    skip_unless("unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt")
    return printed_by(["unshare", "-rm", sys.executable, __file__, *map(str, arguments)])


def printed_by(command: list[str], **arguments: Any) -> Any:
    done = subprocess.run(command, capture_output=True, text=True, **arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


PHASES = {
    ("pretrain", "pages"): {
        "shards": r"(train|val)\.bin",
        "index": r"index_(train|val)_docs\.npy|index_crc32\.bin|(train|val)_docs\.bin",
        "meta": r"\.meta\.json\.\w+\.tmp",
    },
    ("sft", "pages"): {
        "spool": r"tokens\.bin",
        "splits": r"(train|val)_tokens\.bin",
        "index": r"(train|val)_idx\.npy|index_\w+\.(bin|txt)",
        "meta": r"\.meta\.json\.\w+\.tmp",
    },
    ("pretrain", "inodes"): {
        "begin": r"building-\w{12}(\.journal)?",
        "shards": r"train\.bin",
        "index": r"index_(train|val)_docs\.npy",
        "meta": r"\.meta\.json\.\w+\.tmp",
        "commit": r"link",
    },
    ("sft", "inodes"): {
        "begin": r"building-\w{12}(\.journal)?",
        "splits": r"(train|val)_tokens\.bin",
        "index": r"(train|val)_idx\.npy",
        "meta": r"\.meta\.json\.\w+\.tmp",
        "commit": r"link",
    },
}


@pytest.mark.parametrize(("kind", "unit"), PHASES)
def test_a_disk_that_is_full_at_any_moment_costs_nothing_that_was_done(tmp_path: Path, kind: str, unit: str) -> None:
    found = in_a_namespace("full", tmp_path, kind, unit)
    for outcome in found:
        assert outcome["errno"] == errno.ENOSPC and outcome["old is readable"], outcome
        assert outcome["file"].startswith(str(tmp_path)) and outcome["file"] in outcome["message"], outcome
        assert "No space left on device" in outcome["message"], outcome
        assert outcome["said"] == outcome["kept"], outcome
        only_the_link = Path(outcome["file"]).name == "link"  # the version is there, so nothing of the build is left
        expected = [outcome["kept"]] if outcome["kept"] and not only_the_link else []
        assert outcome["went on"] == expected and outcome["same bytes"], outcome
    names = {Path(outcome["file"]).name for outcome in found}
    for phase, pattern in PHASES[kind, unit].items():
        assert any(re.fullmatch(pattern, name) for name in names), (phase, names)
    kept = [outcome["kept"] for outcome in found]
    assert kept == sorted(kept) and kept[-1] == len(TEXTS)  # at the end all is done but the description and the commit


@pytest.mark.usefixtures("small_batches")
def test_a_file_that_may_not_grow_further_is_named_and_the_build_goes_on_when_it_may(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for name in ("expected", "found"):
        build(tmp_path / name / "c", [OLD])
    build_new(tmp_path / "expected" / "c", shard_bytes=1 << 16)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(OSError, match=r"File too large\. \d+ documents are done and kept.*train\.bin") as error:
            build_new(tmp_path / "found" / "c", shard_bytes=1 << 16)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert error.value.errno == errno.EFBIG
    assert 0 < said_to_be_kept(error.value) == documents_in_journal(tmp_path / "found" / "c") < len(TEXTS)
    assert train_text(tmp_path / "found" / "c") == OLD
    build_new(tmp_path / "found" / "c", shard_bytes=1 << 16)
    assert f"resuming after {said_to_be_kept(error.value)} documents" in caplog.text
    assert tree(tmp_path / "found") == tree(tmp_path / "expected")


def on_a_full_disk(folder: Path) -> dict[str, Any]:
    """Fill a disk to the last byte, and make room with gc."""
    mount(folder, "size=1m")
    for text in ("one", "two", "three", OLD):
        build(folder / "c", [text])
    with open(folder / "filling", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"x" * PAGE):
            pass
    free = os.statvfs(folder).f_bfree
    command = [sys.executable, "-m", "niels_gpt.cache.cli", "gc", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    left = [entry.name for entry in versions.versions_dir(folder / "c").iterdir() if entry.is_dir()]
    return {
        "free": free,
        "status": done.returncode,
        "error": done.stderr,
        "left": left,
        "text": train_text(folder / "c"),
    }


def test_gc_makes_room_on_a_disk_that_is_full_to_the_last_byte(tmp_path: Path) -> None:
    found = in_a_namespace("gc", tmp_path)
    assert found["free"] == 0 and found["text"] == OLD
    assert (found["status"], len(found["left"])) == (0, 2), found["error"]


# --- a folder that may not be written ---------------------------------------------------------------------------------


def on_a_read_only_disk(folder: Path) -> dict[str, Any]:
    """Build on a disk that is read-only, and on the same one when it may be written again."""
    mount(folder, "size=1m")
    build(folder / "c", [OLD])
    before = tree(folder)
    mount(folder, "remount", "ro")
    found: dict[str, Any] = error_of(folder / "c")
    found["same"] = tree(folder) == before and train_text(folder / "c") == OLD
    mount(folder, "remount", "rw")
    build(folder / "c", ["new"])
    return {**found, "then": train_text(folder / "c")}


def error_of(path: Path) -> dict[str, Any]:
    """Return the error that a build of a cache ends with."""
    try:
        build(path, ["new"])
    except Exception as error:
        return {"type": type(error).__name__, "message": str(error), "errno": getattr(error, "errno", None)}
    return {"type": None}


def test_a_read_only_disk_is_named_and_left_as_it_is(tmp_path: Path) -> None:
    found = in_a_namespace("read-only", tmp_path)
    assert found["errno"] == errno.EROFS and found["same"] and found["then"] == "new"
    assert re.search(r"Read-only file system; user \S+ cannot write there\. Let it, or name another", found["message"])
    assert str(tmp_path / ".versions" / "c" / "lock") in found["message"]


def serve() -> None:
    """Give up the rights of root, if there are any, and do what is asked, line by line."""
    with tempfile.TemporaryDirectory() as folder:  # all that a build imports, while it may be read
        build(Path(folder, "c"), ["abc"])
        build_new(Path(folder, "s"), "sft", TEXTS[:3])
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    for line in sys.stdin:
        action, folder = json.loads(line)
        if action == "hold":
            with versions.build_lock(Path(folder, "c")):
                print(json.dumps(os.getpid()), flush=True)
                sys.stdin.readline()
            print(json.dumps("let go"), flush=True)
        else:
            actions = {"build": lambda path: error_of(path / "c"), "lose the right": lose_the_right}
            print(json.dumps(actions[action](Path(folder))), flush=True)


Ask = Callable[[str, Path], Any]


@pytest.fixture(scope="module")
def nobody() -> Iterator[Ask]:
    """Asks a process of a user without rights to do something in a folder, and returns what it says."""
    environment = {key: text for key, text in os.environ.items() if key not in ("LOGNAME", "USER", "LNAME", "USERNAME")}
    with subprocess.Popen(
        [sys.executable, __file__, "serve", "/"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
        env=environment,
    ) as process:

        def ask(action: str, folder: Path) -> Any:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(json.dumps([action, str(folder)]) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        try:
            yield ask
        finally:
            process.communicate()


def name_of_nobody() -> str:
    number = NOBODY if os.geteuid() == 0 else os.geteuid()
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that other users may enter, which those of pytest are not, and may not write."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        for path in [folder, *folder.rglob("*")]:
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o755)
        shutil.rmtree(folder)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")


@pytest.mark.parametrize("place", [".", ".versions", ".versions/c"])
def test_a_folder_that_may_not_be_written_is_named_with_the_user_and_left_as_it_is(
    shared: Path, nobody: Ask, place: str
) -> None:
    build(shared / "c", [OLD])
    (shared / ".versions" / "c" / "lock").unlink()
    if place != ".versions/c":  # nothing of this cache is there yet
        shutil.rmtree(shared / ".versions" / "c")
        (shared / "c").unlink()
    if place == ".":
        (shared / ".versions").rmdir()
    (shared / place).chmod(0o555)
    before = tree(shared)
    found = nobody("build", shared)
    assert (found["type"], found["errno"]) == ("PermissionError", errno.EACCES)
    told = f"user {name_of_nobody()} cannot write there. Let it, or name another folder for the caches"
    assert told in found["message"] and str(shared / ".versions") in found["message"]
    assert tree(shared) == before


@needs_root
@pytest.mark.parametrize("mode", [0o700, 0o755])
@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("lock_mode", [0o600, 0o644])
def test_a_lock_file_of_another_user_says_who_holds_it_or_that_it_may_not_be_written(
    shared: Path, nobody: Ask, lock_mode: int, held: bool, mode: int
) -> None:
    build(shared / "c", [OLD])
    folder = versions.versions_dir(shared / "c")
    (folder / "lock").chmod(lock_mode)
    folder.chmod(mode)
    before = tree(shared)
    with versions.build_lock(shared / "c") if held else contextlib.nullcontext():
        found = nobody("build", shared)
    if held and (lock_mode, mode) == (0o644, 0o755):
        name = rf"user \S+, host {re.escape(socket.gethostname())}, pid {os.getpid()}\."
        assert found["type"] == "CacheError" and re.search(f"/c: is being built by {name}", found["message"])
    else:
        assert (found["type"], found["errno"]) == ("PermissionError", errno.EACCES)
        assert f"user {name_of_nobody()} cannot write there. Let it, or name another" in found["message"]
    assert ".versions/c" in found["message"] and tree(shared) == before


def lose_the_right(folder: Path) -> dict[str, Any]:
    """Build while the folder of the finished files becomes read-only; then build again."""
    stream.BATCH_ITEMS = 10
    build(folder / "c", [OLD])

    def texts() -> Iterator[str]:
        yield from TEXTS[:50]
        (work,) = (folder / ".versions" / "c").glob("building-*[!l]")
        (work / "train").chmod(0o555)
        yield from TEXTS[50:]

    error = None
    try:
        build_new(folder / "c", texts=texts())
    except OSError as caught:
        error = caught
    found = {
        "errno": None if error is None else error.errno,
        "message": str(error),
        "kept": documents_in_journal(folder / "c"),
        "old is readable": train_text(folder / "c") == OLD,
    }
    (work,) = (folder / ".versions" / "c").glob("building-*[!l]")
    (work / "train").chmod(0o755)
    heard = Heard()
    meta = build_new(folder / "c")
    return {**found, "went on": heard.numbers, "content_sha256": meta["content_sha256"]}


def test_a_folder_that_becomes_read_only_in_mid_build_is_named_and_the_build_goes_on(
    shared: Path, nobody: Ask, tmp_path: Path
) -> None:
    (shared / "theirs").mkdir()
    if os.geteuid() == 0:
        os.chown(shared / "theirs", NOBODY, NOBODY)
    found = nobody("lose the right", shared / "theirs")
    assert found["errno"] == errno.EACCES and found["old is readable"]
    assert re.search(r"Permission denied.*train\.bin|Permission denied.*train/shard_\d+\.bin", found["message"])
    assert 40 <= found["kept"] < 100 and found["went on"] == [found["kept"]]
    assert found["content_sha256"] == build_new(tmp_path / "c")["content_sha256"]


# --- a source that is removed -----------------------------------------------------------------------------------------


@pytest.fixture
def quick_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the recipes, too, make a batch of each document and a checkpoint after each batch."""
    monkeypatch.setattr(stream, "BATCH_ITEMS", 1)
    for family, builder in (("pretrain", build_pretrain), ("sft", build_sft)):
        quick = functools.partial(builder, checkpoint_seconds=0)
        monkeypatch.setattr(f"niels_gpt.recipes.{family}.{builder.__name__}", quick)


def jsonl(path: Path, rows: list[dict[str, str]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def mirror_of(key: str, root: Path) -> Path:
    """Make a mirror of two files, or of many notes, and return the file that is read last."""
    rows = [{"text": f"Page {number} of the book."} for number in range(30)]
    if key == "pretrain/fineweb_edu":
        jsonl(root / "HuggingFaceFW/fineweb-edu/a.jsonl", rows)
        return jsonl(root / "HuggingFaceFW/fineweb-edu/b.jsonl", rows)
    if key == "sft/dolly15k":
        chats = [{"instruction": row["text"], "context": "", "response": "Yes."} for row in rows]
        jsonl(root / "databricks/databricks-dolly-15k/a.jsonl", chats)
        return jsonl(root / "databricks/databricks-dolly-15k/b.jsonl", chats)
    (root / "roam").mkdir(parents=True)
    for number, row in enumerate(rows):
        (root / "roam" / f"{number:02d}.md").write_text(row["text"])
    return root / "roam" / "29.md"


@pytest.mark.usefixtures("quick_checkpoints")
@pytest.mark.parametrize("key", ["pretrain/fineweb_edu", "pretrain/roam", "sft/dolly15k"])
def test_a_file_of_a_mirror_that_is_removed_in_mid_build_is_named_and_the_recipe_goes_on_with_it_back(
    tmp_path: Path, tiny_model_path: Path, caplog: pytest.LogCaptureFixture, key: str
) -> None:
    caplog.set_level(logging.INFO)
    last, away = mirror_of(key, tmp_path / "m"), tmp_path / "away"
    # No note at the end of the list may be of val, which is read behind train.
    common: dict[str, Any] = {"tokenizer_model": str(tiny_model_path), "shuffle_buffer": 0, "roam_val_frac": 0}
    settings = Settings(source_root=str(tmp_path / "m"), threads=1, cache_dir=str(tmp_path / "found"), **common)

    def progress(documents: int, tokens: int, expected: int | None) -> None:
        if documents == 5 and last.exists():
            last.rename(away)

    with pytest.raises(FileNotFoundError, match=re.escape(str(last))):
        RECIPES[key](settings, progress=progress)
    cache = tmp_path / "found" / key
    kept = documents_in_journal(cache)
    assert 5 <= kept <= 30 and not cache.exists()
    away.rename(last)
    outcome = RECIPES[key](settings)
    assert f"resuming after {kept} documents of an earlier run" in caplog.text
    whole = RECIPES[key](Settings(source_root=settings.source_root, cache_dir=str(tmp_path / "expected"), **common))
    assert outcome.meta == whole.meta and tree(tmp_path / "found" / key) == tree(tmp_path / "expected" / key)
    assert [entry.name for entry in versions.versions_dir(cache).iterdir() if "building" in entry.name] == []


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("kind", ["pretrain", "sft"])
def test_a_file_that_is_removed_under_a_builder_is_named_and_the_build_goes_on_with_it_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    caplog.set_level(logging.INFO)
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for path, texts in zip(files, (TEXTS[:60], TEXTS[60:]), strict=True):
        path.write_text("\n".join(texts))

    def texts() -> Iterator[str]:
        for path in files:
            yield from path.read_text().splitlines()

    def progress(documents: int, tokens: int, expected: int | None) -> None:
        files[1].unlink(missing_ok=True)

    build(tmp_path / "c", [OLD])
    with pytest.raises(FileNotFoundError, match=re.escape(str(files[1]))):
        build_new(tmp_path / "c", kind, texts(), progress=progress)
    kept = documents_in_journal(tmp_path / "c")
    assert 10 <= kept < 60 and train_text(tmp_path / "c") == OLD
    files[1].write_text("\n".join(TEXTS[60:]))
    found = build_new(tmp_path / "c", kind, texts())
    assert f"resuming after {kept} documents of an earlier run" in caplog.text
    assert found == build_new(tmp_path / "expected", kind)


# --- a lock that somebody else holds ----------------------------------------------------------------------------------


HOLD_THE_LOCK = """
import sys
from niels_gpt import versions
with versions.build_lock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


@needs_root
def test_a_lock_that_another_user_holds_is_refused_by_the_users_name(shared: Path, nobody: Ask) -> None:
    build(shared / "c", [OLD])
    folder = versions.versions_dir(shared / "c")
    for path in (folder, folder / "lock"):
        os.chown(path, NOBODY, NOBODY)
    before = tree(shared)
    host = re.escape(socket.gethostname())
    pid = nobody("hold", shared)
    name = rf"/c: is being built by user {name_of_nobody()}, host {host}, pid {pid}\. Wait for it, or stop"
    for kind in ("pretrain", "sft"):
        with pytest.raises(CacheError, match=name):
            build_new(shared / "c", kind)
    assert nobody("let go", shared) == "let go" and tree(shared) == before
    build(shared / "c", ["new"])
    assert train_text(shared / "c") == "new"


def test_a_lock_that_another_host_holds_is_refused_by_the_hosts_name(tmp_path: Path) -> None:
    skip_unless("unshare", "-ru", "hostname", "elsewhere")
    build(tmp_path / "c", [OLD])
    named = ["unshare", "-ru", "sh", "-c", 'hostname elsewhere && exec "$0" "$@"']
    command = [*named, sys.executable, "-c", HOLD_THE_LOCK, str(tmp_path / "c")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "held\n"
            where = re.escape(str(tmp_path / "c"))
            with pytest.raises(
                CacheError, match=rf"{where}: is being built by user \S+, host elsewhere, pid {holder.pid}\."
            ):
                build(tmp_path / "c", ["new"])
            assert train_text(tmp_path / "c") == OLD and socket.gethostname() != "elsewhere"
        finally:
            holder.kill()


def test_a_file_system_without_locks_is_named_and_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    build(tmp_path / "c", [OLD])
    before = tree(tmp_path)
    monkeypatch.setattr(fcntl, "flock", refused)
    told = r"No locks available: this file system has no locks\. Name another folder for the caches.*versions/c/lock"
    with pytest.raises(OSError, match=told) as error:
        build(tmp_path / "c", ["new"])
    assert error.value.errno == errno.ENOLCK and tree(tmp_path) == before


# --- what can be removed ----------------------------------------------------------------------------------------------


def removable(path: Path) -> dict[str, str]:
    """Return what `removable` lists, by name."""
    found = versions.removable(path)
    assert len({entry for entry, _ in found}) == len(found)
    return {str(entry.relative_to(versions.versions_dir(path))): why for entry, why in found}


@pytest.mark.usefixtures("small_batches")
def test_old_versions_dead_builds_and_leftovers_are_removable_each_with_its_reason(tmp_path: Path) -> None:
    cache, folder = tmp_path / "c", versions.versions_dir(tmp_path / "c")
    names = []
    for number, text in enumerate(("one", "two", "three", OLD)):
        names.append(build(cache, [text])["content_sha256"][:12])
        os.utime(folder / names[-1], ns=(number, number))
    assert removable(cache) == dict.fromkeys(names[:2], "an old version")

    def breaking() -> Iterator[str]:
        yield from TEXTS
        raise RuntimeError("upstream broke")

    with pytest.raises(RuntimeError):
        build_new(cache, texts=breaking())
    with pytest.raises(RuntimeError):
        build_new(cache, "sft", breaking())
    dead = sorted(entry.name for entry in folder.glob("building-*") if entry.suffix != ".journal")
    assert len(dead) == 2
    for name in ("building", "damaged"):
        (folder / name / "train").mkdir(parents=True)
    (folder / "link").symlink_to("nowhere")
    for leftover in (folder / ".recipe.json.0a1b2c3d.tmp", folder / names[-1] / ".meta.json.0a1b2c3d.tmp"):
        leftover.write_text("half")
    (folder / "recipe.json").write_text("{}")
    left = "left by a process that was killed"
    assert removable(cache) == {
        names[0]: "an old version",
        names[1]: "an old version",
        **{name: "an unfinished build: the same build would go on with it" for name in dead},
        **{f"{name}.journal": "an unfinished build: its journal" for name in dead},
        "building": left,
        "damaged": left,
        "link": left,
        ".recipe.json.0a1b2c3d.tmp": left,
        f"{names[-1]}/.meta.json.0a1b2c3d.tmp": left,
    }
    for entry, _ in versions.removable(cache):
        fileio.remove(entry)
    assert {entry.name for entry in folder.iterdir()} == {*names[2:], "lock", "recipe.json"}
    assert removable(cache) == {} and train_text(cache) == OLD


@pytest.mark.parametrize("committed", [0, 1, 2, 3])
def test_the_committed_version_stays_however_old_it_is(tmp_path: Path, committed: int) -> None:
    cache, folder = tmp_path / "c", versions.versions_dir(tmp_path / "c")
    texts = ("one", "two", "three", "four")
    names = [build(cache, [text])["content_sha256"][:12] for text in texts]
    for number, name in enumerate(names):
        os.utime(folder / name, ns=(number, number))
    cache.unlink()
    cache.symlink_to(Path(".versions", "c", names[committed]))
    newest = next(name for name in reversed(names) if name != names[committed])  # it and one more are kept
    assert set(removable(cache)) == set(names) - {names[committed], newest}
    for entry, _ in versions.removable(cache):
        fileio.remove(entry)
    assert train_text(cache) == texts[committed]


def test_without_a_committed_version_the_newest_is_kept(tmp_path: Path) -> None:
    cache, folder = tmp_path / "c", versions.versions_dir(tmp_path / "c")
    names = [build(cache, [text])["content_sha256"][:12] for text in ("one", "two", "three")]
    for number, name in enumerate(names):
        os.utime(folder / name, ns=(number, number))
    cache.unlink()
    assert names[2] not in removable(cache) and names[0] in removable(cache)


def main(action: str, path: Path, *rest: str) -> None:
    """Do what a test above needs a process of its own for, and print what was found as JSON."""
    actions = {
        "full": lambda: with_less_and_less_room(path, *rest),
        "gc": lambda: on_a_full_disk(path),
        "read-only": lambda: on_a_read_only_disk(path),
        "serve": serve,
    }
    found = actions[action]()
    if found is not None:
        print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
