"""Readers that are open, or open themselves, while a cache is rebuilt have one version each (D11), which gc leaves."""

import multiprocessing
import os
import pickle
from pathlib import Path

import pytest
import torch
from support.byte_tokenizer import ByteTokenizer, build
from support.errors import refused

from niels_gpt.cache import PretrainTokenStreamDataset, SFTExampleDataset, build_sft_cache
from niels_gpt.recipes.gc import collect
from niels_gpt.sampling import EpochStream


def test_a_pair_opened_during_a_rebuild_is_of_one_version(tmp_path, monkeypatch):
    def build_chats(reply):
        chats = [[{"role": "assistant", "content": reply}]] * 3
        build_sft_cache(chats, tmp_path / "c", tokenizer=ByteTokenizer(), val_frac=0, seed=0)

    resolve = Path.resolve

    def resolve_then_rebuild(path, strict=False):
        monkeypatch.setattr(Path, "resolve", resolve)
        found = path.resolve()
        build_chats("a much longer reply")
        return found

    build_chats("short")
    monkeypatch.setattr(Path, "resolve", resolve_then_rebuild)
    dataset = SFTExampleDataset(
        tmp_path / "c" / "train_tokens.bin", tmp_path / "c" / "train_idx.npy", T=8, device="cpu", eot_id=4
    )
    assert dataset.tokens_path.parent == dataset.idx_path.parent != (tmp_path / "c").resolve()
    assert [ByteTokenizer().decode(dataset.example(row)) for row in range(3)] == ["short"] * 3


def _read_until(path, connection, stop):
    """Open the cache again and again; report how often, which versions were seen, and what was wrong."""
    opened, seen, last, wrong = 0, set(), None, ""
    generator = torch.Generator().manual_seed(0)
    done = False
    while not (done or wrong):
        done = stop.is_set()  # asked before opening: the last round sees the last version
        try:
            dataset = PretrainTokenStreamDataset(os.path.join(path, "train"), T=4, device="cpu")
            values = {int(value) for _ in range(3) for value in dataset.get_batch(B=4, generator=generator)[0].unique()}
        except Exception as error:
            wrong = repr(error)
            break
        if len(values) != 1:
            wrong = f"one dataset saw the values {values}"
        last = values.pop()
        seen.add(last)
        opened += 1
        if opened == 1:
            connection.send("reading")
    connection.send((opened, sorted(seen), last, wrong))


@pytest.mark.slow
def test_a_reader_sees_one_version_at_a_time_while_the_cache_is_rebuilt_50_times(tmp_path):
    contents = {ord("a") + 10: ["a" * 60], ord("b") + 10: ["b" * 25]}  # 6 full shards, or 3 of which one is shorter
    first, second = contents
    build(tmp_path / "c", contents[first], num_tokens=60)
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    stop = context.Event()
    reader = context.Process(target=_read_until, args=(str(tmp_path / "c"), sender, stop), daemon=True)
    reader.start()
    sender.close()  # so that recv() fails, not waits, where the reader dies
    assert receiver.recv() == "reading"
    for number in range(50):
        build(tmp_path / "c", contents[(second, first)[number % 2]], num_tokens=60)
    build(tmp_path / "c", contents[second], num_tokens=60)
    stop.set()
    opened, seen, last, wrong = receiver.recv()
    reader.join()
    assert wrong == "" and opened > 1 and set(seen) <= {first, second} and last == second


def _read_on(path, connection):
    """Open the cache; wait to be told how to go on; report the values of a batch of all shards; wait for the end."""
    dataset = PretrainTokenStreamDataset(os.path.join(path, "train"), T=4, device="cpu")
    connection.send(str(dataset.shards_dir.parent))
    if connection.recv() == "as a copy":
        dataset = pickle.loads(pickle.dumps(dataset))
    x, _ = dataset.get_batch(B=200, generator=torch.Generator().manual_seed(0))
    connection.send(sorted(set(x.flatten().tolist())))
    connection.recv()


def test_a_version_that_a_dataset_reads_outlives_two_rebuilds_and_gc_until_its_process_ends(tmp_path):
    texts = ["aaaaaaaaaabbbbbbbbbbcccccccccc", "d" * 30, "e" * 30]  # three shards of ten tokens each
    build(tmp_path / "c", texts[:1])
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    reader = context.Process(target=_read_on, args=(str(tmp_path / "c"), theirs), daemon=True)
    reader.start()
    theirs.close()
    version = Path(ours.recv())
    public = f"{tmp_path / 'c'} (version {version.name})"
    for text in texts[1:]:
        build(tmp_path / "c", [text])
    for dry_run in (True, False):
        (line,) = collect(tmp_path, dry_run=dry_run)
        assert line.startswith(f"kept {public} (")
        assert line.endswith(": open in a reader")
    ours.send("as a copy")
    assert ours.recv() == [id + 10 for id in b"abc"]
    (line,) = collect(tmp_path, dry_run=False)
    assert line.startswith("kept ")
    ours.send("end")
    reader.join()
    (line,) = collect(tmp_path, dry_run=False)
    assert line.startswith(f"removed {public} (") and not version.exists()


def test_a_reader_whose_version_was_removed_says_which_one_it_was_and_what_to_open(tmp_path):
    """Pickled, it holds nothing: gc takes its version after two more builds."""
    path = tmp_path / "cache" / "letters"
    build(path, ["abc"])
    readers = [
        PretrainTokenStreamDataset(path / "train", T=1, device="cpu"),
        EpochStream(path / "train", T=1, global_batch_size=1, seed=0),
    ]
    pickled, old = [pickle.dumps(reader) for reader in readers], path.resolve().name
    del readers
    for text in ("def", "ghi", "jkl"):
        build(path, [text])
    list(collect(tmp_path / "cache", dry_run=False))
    now = path.resolve().name
    for one in pickled:
        with refused("E204", old, path, now, kind=FileNotFoundError):
            pickle.loads(one)
