"""A folder that fills is watched: the cache is an import's, whatever the order of the files, kills and faults."""

import fcntl
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from support.commands import niels_gpt
from support.errors import refused
from support.exchange_files import (
    BLOCKS,
    HIDDEN,
    LAYERS,
    VOCAB,
    Chat,
    in_bf16,
    specforge_dict,
    write_specforge,
)
from support.peer_caches import PEERS

from niels_gpt.storage.fileio import recorded

pytestmark = pytest.mark.usefixtures("one_thread")
TOOLS = ("specforge", "speculators")
STATED = {"specforge": (BLOCKS, "post_norm"), "speculators": (BLOCKS, "pre_norm")}


class Stopped(Exception):
    """Ends a watch where a kill could."""


@pytest.fixture(scope="module")
def watching(model):
    """`watch_cache` with the target; it looks a hundred times a second."""
    from niels_gpt.eagle3.exchange.move import Target
    from niels_gpt.eagle3.exchange.proof import Convention, capture_of
    from niels_gpt.eagle3.exchange.watch import Until, watch_cache
    from niels_gpt.eagle3.head import TargetHead

    target = Target("small", TargetHead.of_model(model), HIDDEN, VOCAB, [1, 2])

    def watch(tool, source, out, *, proving=False, **how):
        decided = {"capture": capture_of(model, LAYERS, torch.device("cpu"))}
        decided = decided if proving else {"stated": Convention(*STATED[tool])}
        usual = {"samples": 4, "draft_vocab_size": 300, "shard_bytes": 1 << 13}
        ends = {name: how.pop(name) for name in ("samples_total", "once", "patience") if name in how}
        usual["until"] = Until(**{"poll": 0.01, "patience": 60.0, **ends})
        command = [str(source), str(out), "--from", tool, "--target", "small"]
        return watch_cache(tool, source, out, target, command=command, **{**usual, **decided, **how})

    return watch


def files_of(folder):
    """The bytes of a cache's files by name, without its lock."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def states_of(tool, folder):
    """The files with states, in the order of the samples."""
    return sorted(folder.rglob("data_*" if tool == "specforge" else "hs_*"), key=lambda path: (len(path.stem), path))


def emptied(tool, full, folder):
    """A copy of a folder whose states have not come yet; returns it, and the states that will come."""
    shutil.copytree(full, folder)
    for path in states_of(tool, folder):
        path.unlink()
    return folder, [(path, folder / path.relative_to(full)) for path in states_of(tool, full)]


def come(pairs, *, seconds=0.005):
    """Copy files as a server writes them: slowly, in two parts, under their last names."""
    for source, target in pairs:
        content = source.read_bytes()
        with open(target, "wb", buffering=0) as file:
            file.write(content[: len(content) // 2])
            time.sleep(seconds)
            file.write(content[len(content) // 2 :])


@pytest.fixture(scope="module")
def imported(folders, importing, tmp_path_factory):
    """What an import of each tool's complete folder makes, with stated conventions."""
    made = {}
    for tool in TOOLS:
        out = tmp_path_factory.mktemp("imported") / tool
        importing(tool, folders[tool], out, stated=STATED[tool], shard_bytes=1 << 13)
        made[tool] = files_of(out)
    return made


@pytest.mark.parametrize("tool", TOOLS)
def test_a_folder_that_fills_in_any_order_gives_the_bytes_of_an_import(folders, imported, watching, tmp_path, tool):
    source, pairs = emptied(tool, folders[tool], tmp_path / "f")
    random.Random(0).shuffle(pairs)
    writer = threading.Thread(target=come, args=[pairs])
    writer.start()
    waits = []
    total = {"samples_total": len(pairs)} if tool == "specforge" else {}
    done = watching(tool, source, tmp_path / "c", **total, waiting=waits.append)
    writer.join()
    assert files_of(tmp_path / "c") == imported[tool] and done.imported.samples == len(pairs)
    assert done.removed_files == 0 and len(states_of(tool, source)) == len(pairs)
    assert waits and waits[-1].samples <= len(pairs) and waits[-1].seconds >= 0


@pytest.mark.parametrize("tool", TOOLS)
def test_a_watch_that_stops_at_any_wait_continues_without_the_files_it_removed(
    folders, imported, watching, tmp_path, tool
):
    source, pairs = emptied(tool, folders[tool], tmp_path / "f")
    out, removed = tmp_path / "c", 0

    def stop(_):
        raise Stopped

    watch = partial(watching, tool, source, out, consume=True)
    for at in range(0, len(pairs), 3):
        come(pairs[at : at + 3], seconds=0)
        with pytest.raises(Stopped):
            watch(waiting=stop)
        gone = [target for _, target in pairs[: at + 3] if not target.exists()]
        journal = json.loads((out / "watch.json").read_text())
        assert len(gone) == journal["taken"] >= removed and journal["shards"] == len([*out.glob("shard-*")])
        assert gone == [target for _, target in pairs[: len(gone)]]
        removed = len(gone)
        if at + 3 >= len(pairs) - 1:
            break
    assert removed > 0
    come(pairs[at + 3 :], seconds=0)
    (source / "done").touch()
    done = watch()
    assert files_of(out) == imported[tool] and not states_of(tool, source)
    assert (done.removed_files, done.kept_files) == (len(pairs), 0)
    assert done.removed_bytes == sum(path.stat().st_size for path, _ in pairs)


def test_a_watch_for_dspark_gives_the_bytes_of_an_import_and_its_settings_stay(given, importing, watching, tmp_path):
    source, out = write_specforge(tmp_path / "f", given, "dspark"), tmp_path / "c"
    how = {"made_for": "dspark", "shard_bytes": 1 << 13, "stated": STATED["specforge"]}
    importing("specforge", source, tmp_path / "imported", **how)
    late = source / "rows_0-2000/data_007.ckpt"
    late.rename(tmp_path / "late")

    def stop(now):
        assert not now.fault  # it is only not there yet
        raise Stopped

    watch = partial(watching, "specforge", source, out, consume=True, samples_total=10)
    for wrong in ({"targets": "loss"}, {"made_for": "mtp"}):
        with refused("E101", f"--for {wrong.get('made_for', 'dspark')}"):
            watch(**{"made_for": "dspark", **wrong})
    with refused("E711", "aux_hidden_state is None", "--for dspark"):  # its remedy works in the same folder
        watch(patience=0.01)
    with pytest.raises(Stopped):
        watch(made_for="dspark", waiting=stop)
    assert 0 < json.loads((out / "watch.json").read_text())["taken"] <= 7
    for other, fields in (
        ({}, "['made_for', 'targets']"),
        ({"targets": "all"}, "['made_for']"),
        ({"made_for": "dspark", "targets": "reply"}, "['targets']"),
    ):
        with refused("E703", out, fields, "Continue it with its settings"):
            watch(**other)
    (tmp_path / "late").rename(late)
    done = watch(made_for="dspark", targets="all")
    assert files_of(out) == files_of(tmp_path / "imported") and done.removed_files == 10
    assert not states_of("specforge", source)


def test_a_shard_that_the_journal_does_not_count_is_made_again(folders, imported, watching, tmp_path, monkeypatch):
    from niels_gpt.eagle3.exchange import watch

    source, out, kept = folders["specforge"], tmp_path / "c", []

    def fails(folder, journal):
        kept.append(journal["shards"])
        if journal["shards"] == 2:
            raise Stopped
        write(folder, journal)

    write = watch.write_journal
    monkeypatch.setattr(watch, "write_journal", fails)
    with pytest.raises(Stopped):
        watching("specforge", source, out, once=True)
    assert len([*out.glob("shard-*")]) == 2 == len([*out.glob("sidecar/shard-*")])
    monkeypatch.undo()
    watching("specforge", source, out, once=True)
    assert files_of(out) == imported["specforge"] and 2 in kept


def test_a_file_is_removed_only_after_its_shard_its_receipt_and_the_journal_are_durable(folders, watching, tmp_path):
    source, out, trace = shutil.copytree(folders["speculators"], tmp_path / "f"), tmp_path / "c", []
    with recorded(trace):
        watching("speculators", source, out, consume=True)
    renamed, removed = list[str](), list[int]()
    for verb, path, *rest in trace:
        if verb == "rename":
            renamed.append(Path(rest[0]).relative_to(out).as_posix())
        elif verb == "unlink" and path.endswith(".safetensors") and path.startswith(str(source)):
            shard = renamed[-3:]
            assert shard[0].startswith("shard-") and shard[1:] == [f"sidecar/{shard[0][:-12]}.json", "watch.json"]
            removed.append(int(Path(path).stem.removeprefix("hs_")))
    assert removed == [*range(10)] and renamed[-1] == "meta.json" and trace[-1] == ("fsync_dir", str(out))


def test_a_watch_that_stops_before_any_rename_or_removal_continues_to_the_same_bytes(
    folders, imported, watching, tmp_path, monkeypatch
):
    from niels_gpt.storage import fileio

    def stopped(step, at, count):
        def run(*arguments):
            count.append(arguments)
            if len(count) == at:
                raise Stopped
            return step(*arguments)

        return run

    for at in itertools.count(1):
        source, out, count = shutil.copytree(folders["speculators"], tmp_path / f"{at}f"), tmp_path / f"{at}c", []
        with monkeypatch.context() as patched:
            for name in ("rename", "remove"):
                patched.setattr(fileio, name, stopped(getattr(fileio, name), at, count))
            with suppress(Stopped):
                watching("speculators", source, out, consume=True)
        if len(count) < at:
            break
        if (out / "watch.json").exists():
            done = watching("speculators", source, out, consume=True)
            assert (done.removed_files, done.kept_files) == (10, 0), at
        elif not (out / "meta.json").exists():
            watching("speculators", source, out, consume=True)
        assert files_of(out) == imported["speculators"] and not states_of("speculators", source), at
    assert at > 30


def test_the_conventions_are_proved_on_the_first_samples_and_once(folders, importing, watching, tmp_path):
    source, pairs = emptied("speculators", folders["speculators"], tmp_path / "f")
    come(pairs[:7], seconds=0)

    def stop(_):
        raise Stopped

    with pytest.raises(Stopped):
        watching("speculators", source, tmp_path / "c", proving=True, waiting=stop, consume=True)
    proved = json.loads((tmp_path / "c/watch.json").read_text())["proved"]
    assert proved["convention"]["samples"] == 4 and proved["convention"]["aux_layer_ids"] == [*BLOCKS]
    come(pairs[7:], seconds=0)
    watching("speculators", source, tmp_path / "c", proving=True, consume=True)
    watching("speculators", folders["speculators"], tmp_path / "once", proving=True, once=True)
    assert files_of(tmp_path / "c") == files_of(tmp_path / "once")
    importing("speculators", folders["speculators"], tmp_path / "i", shard_bytes=1 << 13)
    ours, theirs = files_of(tmp_path / "c"), files_of(tmp_path / "i")
    differing = {name for name in ours if ours[name] != theirs[name]}
    assert ours.keys() == theirs.keys() and differing == {"manifest.json", "meta.json"}
    manifests = [json.loads(each["manifest.json"]) for each in (ours, theirs)]
    assert all(manifest["imported"].pop("proved")["samples"] == 4 for manifest in manifests)
    assert manifests[0] == manifests[1]


def test_numbers_in_names_give_the_order_of_an_import_too(given, importing, watching, tmp_path):
    chats = [in_bf16(chat) for chat in [*given, *given[:2]]]
    (tmp_path / "f/rows_0-10").mkdir(parents=True)
    (tmp_path / "f/rows_10-20").mkdir()
    for index, chat in enumerate(chats):  # as prepare_hidden_states.py names them
        torch.save(
            specforge_dict(chat), tmp_path / f"f/rows_{index // 10 * 10}-{index // 10 * 10 + 10}/data_{index}.ckpt"
        )
    importing("specforge", tmp_path / "f", tmp_path / "i", stated=STATED["specforge"], shard_bytes=1 << 13)
    watching("specforge", tmp_path / "f", tmp_path / "w", once=True)
    assert files_of(tmp_path / "i") == files_of(tmp_path / "w")
    from niels_gpt.eagle3.native import NativeEagle3Dataset

    stored = NativeEagle3Dataset(tmp_path / "i")
    assert [len(sample.input_ids) for sample in stored] == [len(chat.ids) for chat in chats]


@pytest.mark.parametrize(
    "names",
    [
        ["a/data_0", "a/data_1", "b/data_0", "b/data_1"],  # numbers twice
        ["0/data_10", "0/data_9", "10/last", "9/data_1"],  # one without a number
        ["data_00000000000000000010", "data_2", "data_3", "rows"],
    ],
    ids=["twice", "one without", "long"],
)
def test_an_import_orders_names_that_give_no_order_by_their_paths_and_leaves_none_out(
    given, importing, tmp_path, names
):
    from niels_gpt.eagle3.native import NativeEagle3Dataset

    chats = given[: len(names)]
    for name, chat in zip(names, chats, strict=True):
        path = tmp_path / "f" / f"{name}.ckpt"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(specforge_dict(in_bf16(chat)), path)
    importing("specforge", tmp_path / "f", tmp_path / "i", stated=STATED["specforge"], loss_mask="raw")
    stored = NativeEagle3Dataset(tmp_path / "i")
    assert [sample.input_ids.tolist() for sample in stored] == [chat.ids.tolist() for chat in chats]


# --- faults and gaps --------------------------------------------------------------------------------------------------


def a_link(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def cut(path):
    path.write_bytes(path.read_bytes()[:-40])


HS, CKPT = "hidden_states/hs_2.safetensors", "rows_0-2000/data_002.ckpt"
FAULTS = {
    "a link": ("speculators", lambda f: a_link(f / HS), ["row 2 is unreadable", "link", "--follow-links"]),
    "cut": ("speculators", lambda f: cut(f / HS), ["row 2 is unreadable", "its header states"]),
    "a lock": ("speculators", lambda f: (f / f"{HS}.lock").touch(), ["row 2 is unreadable", "still being written"]),
    "a gap": ("speculators", lambda f: (f / HS).unlink(), ["row 2 is missing", "hs_2.safetensors"]),
    "cut archive": ("specforge", lambda f: cut(f / CKPT), ["data_002.ckpt is unreadable", "torch.save"]),
    "a gap in the numbers": ("specforge", lambda f: (f / CKPT).unlink(), ["number 2 is missing", "data_2.ckpt"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_that_stays_bad_is_refused_by_name_or_counted_after_the_patience(folders, watching, tmp_path, fault):
    tool, spoil, words = FAULTS[fault]
    source = shutil.copytree(folders[tool], tmp_path / "f")
    spoil(source)
    watch = partial(watching, tool, source, tmp_path / "c", **({"samples_total": 10} if tool == "specforge" else {}))
    began = time.monotonic()
    with refused("E711", source, *words):
        watch(patience=0.2, samples=2)
    assert time.monotonic() - began >= 0.2
    done = watch(patience=0.2, samples=2, drop_bad=True, consume=True)  # the same run continues
    assert sum(done.imported.dropped.values()) == 1 and done.imported.samples == 9
    assert done.removed_files == 9 and (source / HS).exists() == (fault in ("a link", "cut", "a lock"))
    assert not os.path.lexists(source / HS) or not (source / "hidden_states/hs_1.safetensors").exists()


def test_a_file_is_taken_once_it_is_whole(folders, imported, watching, tmp_path):
    source = shutil.copytree(folders["specforge"], tmp_path / "f")
    whole = (source / CKPT).read_bytes()
    cut(source / CKPT)
    waits = []

    def mend(now):
        waits.append(now)
        if len(waits) == 3:
            (source / CKPT).write_bytes(whole)

    watching("specforge", source, tmp_path / "c", samples_total=10, waiting=mend)
    assert files_of(tmp_path / "c") == imported["specforge"]
    assert {now.name for now in waits} == {CKPT} and len(waits) >= 3 and all(now.fault for now in waits)


def test_no_file_at_all_is_no_gap(folders, watching, tmp_path):
    source, pairs = emptied("speculators", folders["speculators"], tmp_path / "f")
    come(pairs[:6], seconds=0)
    with refused("E711", source, "no file came for 0.1 s", "row 6", "--once"):
        watching("speculators", source, tmp_path / "c", patience=0.1, drop_bad=True)
    done = watching("speculators", source, tmp_path / "c", drop_bad=True, once=True)
    assert done.imported.dropped == {"missing": 4} and done.imported.samples == 6


def test_a_file_that_changed_after_it_was_read_is_never_removed(folders, imported, watching, tmp_path):
    source, pairs = emptied("speculators", folders["speculators"], tmp_path / "f")
    come(pairs[:1], seconds=0)
    first = pairs[0][1]

    def replaced(now):
        if now.name == "row 1" and first.stat().st_size == pairs[0][0].stat().st_size:
            first.unlink()
            first.write_bytes(b"another run's")
            come(pairs[1:], seconds=0)

    done = watching("speculators", source, tmp_path / "c", consume=True, waiting=replaced, samples=1)
    assert first.read_bytes() == b"another run's" and (done.kept_files, done.removed_files) == (1, 9)
    found = files_of(tmp_path / "c")
    assert done.imported.not_proved[-1] == "loss_mask"  # one sample has too few replies; the manifest says so
    assert {name for name, content in found.items() if imported["speculators"].get(name) != content} == {
        "manifest.json",
        "meta.json",
    }


def test_a_file_that_is_written_over_after_its_checks_gives_the_states_that_were_checked(
    folders, imported, watching, tmp_path, monkeypatch
):
    from niels_gpt.eagle3.exchange.move import Importer

    for tool in TOOLS:
        source = shutil.copytree(folders[tool], tmp_path / tool)
        paths, add = states_of(tool, source), Importer.add

        def late(run, folder, index, sample, paths=paths, add=add):
            with open(paths[index], "r+b") as file:  # in place, with the length and the time that it had
                about = os.fstat(file.fileno())
                file.seek(about.st_size // 2)
                file.write(bytes(about.st_size - about.st_size // 2))
                file.flush()
                os.utime(file.fileno(), ns=(about.st_atime_ns, about.st_mtime_ns))
            add(run, folder, index, sample)

        with monkeypatch.context() as patched:
            patched.setattr(Importer, "add", late)
            ends = {"samples_total": len(paths)} if tool == "specforge" else {}
            done = watching(tool, source, tmp_path / f"{tool}-c", consume=True, **ends)
        assert files_of(tmp_path / f"{tool}-c") == imported[tool]
        assert (done.removed_files, done.kept_files) == (0, len(paths)) and all(path.exists() for path in paths)


def test_names_without_a_number_and_one_number_twice_are_refused(given, watching, tmp_path):
    folder = tmp_path / "f"
    (folder / "a").mkdir(parents=True)
    torch.save(specforge_dict(given[0]), folder / "a/data_1.ckpt")
    torch.save(specforge_dict(given[0]), folder / "data_01.ckpt")
    with refused("E711", folder / "data_01.ckpt", "has the number 1 like a/data_1.ckpt"):
        watching("specforge", folder, tmp_path / "c", once=True)
    (folder / "data_01.ckpt").rename(folder / "data.ckpt")
    with refused("E711", folder / "data.ckpt", "has no number below 10,000,000 in its name", "eagle3 import"):
        watching("specforge", folder, tmp_path / "c", once=True)
    (folder / "data.ckpt").rename(folder / "data_10000000.ckpt")  # ten million gaps before it
    with refused("E711", folder / "data_10000000.ckpt", "has no number below 10,000,000 in its name"):
        watching("specforge", folder, tmp_path / "c", once=True, drop_bad=True)


# --- the unfinished folder --------------------------------------------------------------------------------------------


@pytest.fixture
def unfinished(folders, watching, tmp_path):
    source, pairs = emptied("speculators", folders["speculators"], tmp_path / "f")
    come(pairs[:8], seconds=0)

    def stop(_):
        raise Stopped

    with pytest.raises(Stopped):
        watching("speculators", source, tmp_path / "caches/eagle3/c", waiting=stop)
    return source, tmp_path / "caches/eagle3/c"


def test_an_unfinished_folder_names_the_command_that_continues_it(unfinished):
    source, out = unfinished
    from niels_gpt.eagle3.native import NativeEagle3Dataset

    with pytest.raises(FileNotFoundError, match="is being built by eagle3 watch"):
        NativeEagle3Dataset(out)
    before = files_of(out)
    command = f"niels-gpt eagle3 watch {source} {out} --from speculators --target small"
    asked = (["eagle3", "verify", out], ["eagle3", "inspect", out], ["verify", out], ["show", out])
    for words in asked:
        done = niels_gpt(*words)
        assert done.status != 0 and command in " ".join((done.out + done.err).split()), words
    done = niels_gpt("list", out.parent.parent)
    assert done.status != 0 and command in " ".join((done.out + done.err).split())
    niels_gpt("gc", out.parent.parent)
    assert files_of(out) == before


def test_another_setting_another_process_and_another_folder_are_refused(unfinished, folders, watching, tmp_path):
    from niels_gpt.storage.locks import file_lock

    source, out = unfinished
    watch = partial(watching, "speculators", source, out, once=True, drop_bad=True)
    with refused("E703", out, "['aux_dtype', 'shard_bytes']", "aux_dtype: 'stored', now 'fp8'", "eagle3 watch"):
        watch(aux_fp8=True, shard_bytes=1 << 14)
    with refused("E703", out, "layers", "last_hidden"):
        watch(proving=True)
    rows = shutil.copytree(source, tmp_path / "rows")  # the same rows, at another place
    state = json.loads((rows / "state.json").read_text())
    (rows / "state.json").write_text(json.dumps(state | {"_fingerprint": "another run's"}))
    with refused("E703", out, "['state_json_sha256']"):
        watching("speculators", rows, out, once=True)
    with file_lock(out / "sidecar/lock", out, wait=False), refused("E503", out):
        watch()
    with refused("E704", source / "c", "lies in"):
        watching("speculators", source, source / "c")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").touch()
    with refused("E704", tmp_path / "other", "belong to no EAGLE-3 cache"):
        watching("speculators", source, tmp_path / "other")
    watch(draft_vocab_size=200)  # decides no shard
    assert json.loads((out / "manifest.json").read_text())["draft_vocab_size"] == 200
    with refused("E704", out, "is a cache already"):
        watch()


@pytest.mark.parametrize(
    "change",
    [
        {"taken": -1},
        {"taken": 10},  # two more than are in shards
        {"proved": {}},
        {"shards": 9},
        {"shards": 10**30},
        {"command": [1]},
        {"dropped": {"missing": -1}},
        {"end": 3},
        {"watch_version": 2},
        {"removing": [[0]]},
        {"removing": [["/../../other", [1, 1, 1, 1, 0]]]},
        {"removing": [[9, [1, 1, 1, 1, 0]]]},
    ],
    ids=str,
)
def test_a_journal_of_strangers_is_refused_and_removes_nothing(unfinished, watching, change):
    source, out = unfinished
    path = out / "watch.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    before = len(states_of("speculators", source))
    with refused("E701", out):
        watching("speculators", source, out, consume=True)
    assert len(states_of("speculators", source)) == before


def test_fewer_samples_than_are_in_shards_and_another_folder_are_refused(folders, watching, tmp_path):
    def stop(_):
        raise Stopped

    source, out = shutil.copytree(folders["specforge"], tmp_path / "f"), tmp_path / "c"
    with pytest.raises(Stopped):
        watching("specforge", source, out, samples_total=11, waiting=stop)
    taken = json.loads((out / "watch.json").read_text())["taken"]
    with refused("E703", out, f"has {taken} samples already", "['samples_total']", f"now {taken - 1}"):
        watching("specforge", source, out, samples_total=taken - 1)
    with refused("E703", out, "['folder']"):
        watching("specforge", shutil.copytree(source, tmp_path / "other"), out, samples_total=10)
    assert watching("specforge", source, out, samples_total=10).imported.samples == 10


# --- kills ------------------------------------------------------------------------------------------------------------


def long_chats(number, length=150):
    """Chats of random states in bf16: a shard of the least size holds three."""
    chance, chats = torch.Generator().manual_seed(2), []
    for index in range(number):
        tokens = length + index
        ids = torch.randint(20, VOCAB, (tokens,), generator=chance)
        blocks = torch.randn(tokens, LAYERS, HIDDEN, generator=chance)
        mask = torch.arange(tokens) % 50 > 10
        chats.append(in_bf16(Chat(ids, mask, blocks, blocks[:, -1], blocks[:, 0])))
    return chats


@pytest.mark.slow
def test_a_watch_that_is_killed_twice_while_the_folder_fills_equals_one_import(model, tmp_path):
    from transformers.utils import logging

    logging.disable_progress_bar()
    model.save_pretrained(tmp_path / "target")
    logging.enable_progress_bar()
    full = write_specforge(tmp_path / "full", long_chats(12))
    source, pairs = emptied("specforge", full, tmp_path / "f")
    out = tmp_path / "c"
    shared = ["--from", "specforge", "--target", tmp_path / "target", "--trust", "--layers", "1,3,4", "-k", "2"]
    shared += ["--shard-bytes", 1 << 16, "--draft-vocab-size", 300]
    words = [source, out, *shared, "--consume", "--samples-total", 12]
    command = [sys.executable, "-m", "niels_gpt.eagle3", "watch", *map(str, words)]

    def writes(begin, end):
        writer = threading.Thread(target=come, args=[pairs[begin:end]], kwargs={"seconds": 0.05})
        writer.start()
        return writer

    def shards():
        return json.loads((out / "watch.json").read_text())["shards"] if (out / "watch.json").exists() else 0

    for begin, end, least in ((0, 6, 1), (6, 10, 2)):
        writer, run = writes(begin, end), subprocess.Popen(command, stderr=subprocess.PIPE)
        limit = time.monotonic() + 120
        while shards() < least and run.poll() is None and time.monotonic() < limit:
            time.sleep(0.01)
        run.send_signal(signal.SIGKILL)
        error = run.communicate()[1]
        writer.join()
        assert run.returncode == -signal.SIGKILL and shards() >= least, error.decode()
    writer = writes(10, 12)
    again = json.loads((out / "watch.json").read_text())["command"]  # what readers of the folder print
    subprocess.run([sys.executable, "-m", "niels_gpt.eagle3", "watch", *again], check=True, capture_output=True)
    writer.join()
    assert not states_of("specforge", source)
    assert niels_gpt("eagle3", "import", full, tmp_path / "i", *shared).status == 0
    assert files_of(out) == files_of(tmp_path / "i")


# --- speculators' own writer ------------------------------------------------------------------------------------------

SPECULATORS = Path(PEERS or "") / "speculators-0.9.0"


class Served(BaseHTTPRequestHandler):
    """vLLM's side of hidden state extraction: each prompt's file is written under a lock while its path is sent."""

    def do_GET(self):
        self.answer({"object": "list", "data": [{"id": "m", "object": "model", "created": 0, "owned_by": "vllm"}]})

    def do_POST(self):
        ids = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
        staging, files = self.server.states
        path = staging / f"{len(ids)}-{ids[0]}-{ids[-1]}.safetensors"
        lock = open(f"{path}.lock", "w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        threading.Thread(target=self.write, args=[files[tuple(ids)], path, lock]).start()
        choice = {"index": 0, "text": "", "finish_reason": "length", "logprobs": None, "prompt_token_ids": ids}
        about = {"id": "1", "object": "text_completion", "created": 0, "model": "m", "choices": [choice]}
        self.answer(about | {"kv_transfer_params": {"hidden_states_path": str(path)}})

    def write(self, source, path, lock):
        come([(source, path)], seconds=0.05)
        lock.close()

    def answer(self, value):
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.mark.slow
@pytest.mark.skipif(
    not SPECULATORS.is_dir(), reason="set NIELS_GPT_PEERS to a folder with speculators-0.9.0, see .ci/run"
)
def test_a_folder_that_speculators_own_generator_fills_is_watched(folders, given, imported, watching, tmp_path):
    source, pairs = emptied("speculators", folders["speculators"], tmp_path / "f")
    (tmp_path / "staging").mkdir()
    files = {tuple(chat.ids.tolist()): path for chat, (path, _) in zip(given, pairs, strict=True)}
    with ThreadingHTTPServer(("127.0.0.1", 0), Served) as server:
        server.states = tmp_path / "staging", files
        threading.Thread(target=server.serve_forever, daemon=True).start()
        words = ["--endpoint", f"http://127.0.0.1:{server.server_port}/v1", "--preprocessed-data", source]
        command = [sys.executable, "-m", "speculators", "generate-offline-data", *words, "--concurrency", "3"]
        env = os.environ | {"PYTHONPATH": str(SPECULATORS), "NO_PROXY": "127.0.0.1"}
        tool = subprocess.Popen([*map(str, command)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            done = watching("speculators", source, tmp_path / "c", consume=True, patience=120.0)
        finally:
            output = tool.communicate()[0].decode()
            server.shutdown()
    assert tool.returncode == 0, output
    assert files_of(tmp_path / "c") == imported["speculators"] and done.removed_files == len(given)
