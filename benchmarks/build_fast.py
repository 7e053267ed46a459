"""How fast a build with gigatoken is: from parquet and jsonl to the committed cache, as a share of gigatoken alone.

Run: python benchmarks/build_fast.py --models FOLDER [--data MIRROR] [--times 1] [--rounds 5] [--quick]
         [--only command reference recipe sentencepiece]

    command   the whole command `niels-gpt build`, from the start of Python on, with one thread and two, in CPU seconds
              beside the limit's on one thread and the peer's
    reference CPU seconds of the reference over gigatoken's for the same text: the ratio behind ONE_COMPARED_OF
    limit     gigatoken on one list of all texts, str, with its own threads, each time with an empty cache of words
    ours      the recipe of a user-defined source: read, digests, shuffle, ids, index, fsync, journal, commit; with
              the comparison of a share of the documents with the reference, and without it
    peer      `datasets.map` with the library tokenizers and two processes, as nanoGPT's prepare.py does; on a tenth of
              the text, since it takes minutes
    sentencepiece  the same limit and ours with a SentencePiece BPE model, against SentencePiece's own library

All of it is in one run and the ways take turns; ratios are medians of the rounds' ratios. The corpus is text of
fineweb-edu (--data, or NIELS_GPT_TEST_DATA; else the packaged sample) with its sentences shuffled over and over. With
--times 10 it is ten times as long, in files that are made one after the other; then the limit encodes one of them.

--models: a folder with gpt2_tokenizer/tokenizer.json; or NIELS_GPT_TEST_MODELS.
"""

import argparse
import dataclasses
import json
import logging
import os
import random
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import gigatoken
import pyarrow as pa
import pyarrow.parquet
from measuring import Ways, fill_memmap, measured, ratio

from niels_gpt.data.fineweb_edu import iter_fineweb_edu
from niels_gpt.recipes.plan import recipes
from niels_gpt.settings import Settings
from niels_gpt.tokenizer import load_tokenizer
from niels_gpt.tokenizer_training import train_tokenizer
from niels_gpt.tokenizers import engine
from niels_gpt.tokenizers.gigatoken import model_of

PEER_SHARE = 10  # the peer encodes one of so many documents
SECTIONS = ("command", "reference", "recipe", "sentencepiece")
AIMS = {"parquet": 0.45, "jsonl": 0.35, "peer": 40.0}


def shuffled_documents(texts: list[str], num_bytes: int, seed: int) -> Iterator[str]:
    """Yield documents of about as many bytes: the texts over and over, their sentences in another order each time."""
    generator = random.Random(seed)
    while num_bytes > 0:
        for text in texts:
            sentences = re.split(r"(?<=[.!?]) ", text)
            generator.shuffle(sentences)
            document = " ".join(sentences)
            num_bytes -= len(document.encode())
            yield document
            if num_bytes <= 0:
                return


def write_corpus(folder: Path, data: str, num_bytes: int, times: int) -> None:
    """Write the corpus as parquet (zstd) and as jsonl, `times` files of each."""
    texts = [sample.text for sample in iter_fineweb_edu(source_root=data)]
    for kind in ("parquet", "jsonl"):
        (folder / kind).mkdir(parents=True)
    for number in range(times):
        documents = list(shuffled_documents(texts, num_bytes, number))
        table = pa.table({"text": documents, "id": [f"{number}-{at}" for at in range(len(documents))]})
        name = folder / "parquet" / f"{number:02}.parquet"
        pa.parquet.write_table(table, name, compression="zstd", row_group_size=1000)
        with open(folder / "jsonl" / f"{number:02}.jsonl", "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in table.to_pylist())


def first_texts(corpus: Path) -> list[str]:
    """Return the texts of the first file."""
    texts: list[str] = pa.parquet.read_table(corpus / "parquet" / "00.parquet")["text"].to_pylist()
    return texts


def limit(model: bytes, texts: list[str]) -> int:
    """Encode one list; returns the number of tokens."""
    import awkward

    return len(awkward.flatten(gigatoken.Tokenizer.from_json(model).encode_batch(texts)))


def build(settings: Settings, *, compare: bool = True) -> Any:
    """Build from scratch with the recipe of the source; returns its outcome."""
    shutil.rmtree(settings.cache_dir, ignore_errors=True)
    first, share = engine.FIRST_COMPARED, engine.ONE_COMPARED_OF
    if not compare:
        engine.FIRST_COMPARED, engine.ONE_COMPARED_OF = 0, 1 << 62  # type: ignore[misc]
    try:
        return recipes(settings)["pretrain/corpus"](settings)
    finally:
        engine.FIRST_COMPARED, engine.ONE_COMPARED_OF = first, share  # type: ignore[misc]


@lru_cache
def opened(path: str) -> Any:
    """Return the library's tokenizer, opened once in each process."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(path)


def tokenize(row: dict[str, str], path: str) -> dict[str, Any]:
    """Encode one row, as nanoGPT's `process` does."""
    ids = opened(path).encode(row["text"], add_special_tokens=False).ids
    ids.append(0)
    return {"ids": ids, "len": len(ids)}


def nanogpt(dataset: Any, tokenizer: str, out: Path) -> None:
    """Map with two processes, and write the ids."""
    mapped = dataset.map(tokenize, fn_kwargs={"path": tokenizer}, num_proc=2, remove_columns=dataset.column_names)
    fill_memmap(mapped, out)


def peer_dataset(texts: list[str], folder: Path) -> Any:
    """Return one text of PEER_SHARE as a dataset on disk, memory-mapped, with its caching off."""
    import datasets

    datasets.disable_caching()
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"text": texts[::PEER_SHARE]}).save_to_disk(folder / "dataset")
    return datasets.load_from_disk(folder / "dataset")


def bench_gpt2(arguments: argparse.Namespace, folder: Path, tokenizer: str) -> None:
    """Compare the builds of GPT-2's tokenizer with the limit and the peer."""
    texts = first_texts(folder)
    model = Path(tokenizer).read_bytes()
    tokens = limit(model, texts)
    base = Settings(cache_dir=str(folder / "cache"), tokenizer=tokenizer, engine="gigatoken", seed=0)
    ways: Ways = {"limit": partial(limit, model, texts)}
    for kind in ("parquet", "jsonl"):
        settings = dataclasses.replace(base, pretrain=f"corpus={folder / kind}")
        ways[kind] = partial(build, settings)
        ways[f"{kind}, not compared"] = partial(build, settings, compare=False)
    peer_texts = texts[::PEER_SHARE]
    dataset = peer_dataset(texts, folder)
    ways["peer"] = partial(nanogpt, dataset, tokenizer, folder / "train.bin")
    seconds = measured(ways, arguments.rounds)
    # The limit has one file's text and the peer a share of it.
    amount = {name: float(arguments.times) for name in ways}
    amount |= {"limit": 1.0, "peer": sum(map(len, peer_texts)) / sum(map(len, texts))}
    print(f"GPT-2: {arguments.times} times {len(texts):,} documents, {tokens / 1e6:.1f} Mtok")
    for name in ways:
        middle = statistics.median(seconds[name])
        share = ratio(seconds, name, "limit") * amount[name]
        of_peer = ratio(seconds, name, "peer") * amount[name] / amount["peer"]
        speed = tokens * amount[name] / middle / 1e6
        print(f"  {name:<24} {middle:8.3f} s {speed:8.1f} Mtok/s  {share:6.3f} of the limit  {of_peer:6.1f} x peer")
    for kind in ("parquet", "jsonl"):
        for name in (kind, f"{kind}, not compared"):
            judged(f"{name} / limit", ratio(seconds, name, "limit") * amount[name], AIMS[kind])
    for name in ("parquet", "parquet, not compared"):
        judged(f"{name} / peer", ratio(seconds, name, "peer") * amount[name] / amount["peer"], AIMS["peer"])
    peak(dataclasses.replace(base, pretrain=f"corpus={folder / 'parquet'}"))


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def whole_command(corpus: Path, tokenizer: str, threads: int, out: Path) -> None:
    """Build from scratch by the command, in a process of its own."""
    shutil.rmtree(out, ignore_errors=True)
    call = "from niels_gpt.commands.main import main; main()"
    source = f"corpus={corpus / 'parquet'}"
    asked = ["build", "corpus", "--pretrain", source, "--tokenizer", tokenizer, "--cache-dir", str(out)]
    command = [sys.executable, "-c", call, *asked, "--threads", str(threads), "--engine", "gigatoken"]
    subprocess.run(command, check=True, capture_output=True)


def bench_command(arguments: argparse.Namespace, folder: Path, tokenizer: str) -> None:
    """Compare the CPU seconds of the whole command with the limit's on one thread and with the peer's."""
    texts, model = first_texts(folder), Path(tokenizer).read_bytes()
    dataset, cells = peer_dataset(texts, folder / "of command"), folder / "command"
    ways: Ways = {
        "limit": lambda: gigatoken.Tokenizer.from_json(model).encode_batch(texts, parallel=False),
        "one thread": partial(whole_command, folder, tokenizer, 1, cells),
        "two threads": partial(whole_command, folder, tokenizer, 2, cells),
        "peer": partial(nanogpt, dataset, tokenizer, folder / "train.bin"),
    }
    seconds = measured(ways, arguments.rounds, clock=cpu_seconds)
    share = sum(map(len, texts[::PEER_SHARE])) / sum(map(len, texts))
    print(f"the whole command: {len(texts):,} documents; CPU seconds")
    for name, found in seconds.items():
        of_limit = ratio(seconds, name, "limit") * (share if name == "peer" else arguments.times)
        print(f"  {name:<24} {statistics.median(found):8.3f} s  {of_limit:6.3f} of the limit")
        if name.endswith(("thread", "threads")):
            judged(f"{name} / limit", of_limit, 0.35)
            judged(f"{name} / peer", ratio(seconds, name, "peer") * arguments.times / share, AIMS["peer"])


def bench_reference(arguments: argparse.Namespace, folder: Path, tokenizer: str) -> None:
    """Compare the CPU seconds of both engines, for pieces and for whole texts."""
    opened_once = load_tokenizer(Path(tokenizer), sentinels="optional")
    texts = [text.encode() for text in first_texts(folder)]
    cut = [text[: engine.PIECE_BYTES].decode(errors="ignore").encode() for text in texts[:400]]
    some, whole = engine.GigatokenEngine(opened_once), texts[400:440]
    reference = engine.ReferenceEngine(opened_once)
    ways: Ways = {
        "gigatoken": lambda: [some.encode(texts[at : at + 100]) for at in range(0, len(texts), 100)],
        "pieces": partial(reference.encode, cut, first=0),
        "whole texts": partial(reference.encode, whole, first=0),
    }
    seconds = measured(ways, arguments.rounds, clock=cpu_seconds)
    for name, given in (("pieces", cut), ("whole texts", whole)):
        times = sum(map(len, texts)) / sum(map(len, given)) / ratio(seconds, name, "gigatoken")
        print(f"the reference, {name}: {times:.0f} times the CPU seconds of gigatoken")


def peak(settings: Settings) -> None:
    """Print the peak memory of a build in a process of its own, and the CPU seconds of its comparison."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        peaks = {compare: process.submit(measured_build, settings, compare).result() for compare in (True, False)}
    (with_it, cpu), (without, cpu_without) = peaks[True], peaks[False]
    print(f"  peak memory {with_it:.0f} MiB; CPU {cpu:.2f} s, of them {cpu - cpu_without:.2f} s for the comparison")
    print(f"  peak memory without the comparison {without:.0f} MiB")


def measured_build(settings: Settings, compare: bool) -> tuple[float, float]:
    """Return the peak MiB and the CPU seconds of a build in this process."""
    quiet()
    begin = time.process_time()
    outcome = build(settings, compare=compare)
    return (outcome.peak_bytes or 0) / 2**20, time.process_time() - begin


def bench_sentencepiece(arguments: argparse.Namespace, folder: Path, data: str) -> None:
    """Compare builds of a SentencePiece BPE model by both engines with gigatoken alone."""
    path = folder / "spm.model"
    texts = first_texts(folder)[: 400 if arguments.quick else 4000]
    corpus = (sample.text for sample in iter_fineweb_edu(source_root=data))
    path.write_bytes(train_tokenizer(corpus, vocab_size=2000, model_type="bpe", max_bytes=5_000_000).model)
    tokenizer = load_tokenizer(path)
    (folder / "some").mkdir()
    pa.parquet.write_table(pa.table({"text": texts}), folder / "some" / "00.parquet", row_group_size=1000)
    base = Settings(cache_dir=str(folder / "cache"), tokenizer=str(path), seed=0, pretrain=f"corpus={folder / 'some'}")
    ways: Ways = {
        "limit": partial(limit, model_of(tokenizer).json, texts),
        "gigatoken, not compared": partial(build, dataclasses.replace(base, engine="gigatoken"), compare=False),
        "gigatoken": partial(build, dataclasses.replace(base, engine="gigatoken")),
        "sentencepiece": partial(build, dataclasses.replace(base, engine="reference")),
    }
    seconds = measured(ways, arguments.rounds)
    print(f"SentencePiece BPE: {len(texts):,} documents, {sum(map(len, texts)) / 1e6:.1f} M characters")
    for name in ways:
        times = ratio(seconds, name, "sentencepiece")
        share = ratio(seconds, name, "limit")
        print(
            f"  {name:<24} {statistics.median(seconds[name]):8.3f} s  {share:6.3f} of the limit"
            f"  {times:6.2f} x reference"
        )


def judged(name: str, found: float, aim: float) -> None:
    """Print one aim."""
    print(f"  {name:<32} at least {aim:5.2f}  {found:8.3f}  {'ok' if found >= aim else 'NOT OK'}")


def quiet() -> None:
    """Leave out what is meant: budgets that are not met, a short last shard."""
    logging.getLogger("niels_gpt").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def main() -> None:
    """Make the corpus and run both sections."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=os.environ.get("NIELS_GPT_TEST_MODELS"), help="folder of tokenizers")
    parser.add_argument("--data", default=os.environ.get("NIELS_GPT_TEST_DATA") or "sample", help="a mirror folder")
    parser.add_argument("--megabytes", type=int, default=205, help="of text in a file of the corpus")
    parser.add_argument("--times", type=int, default=1, help="files of the corpus")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS, help="sections; default: all")
    parser.add_argument("--quick", action="store_true", help="one round of little text: does it run at all?")
    arguments = parser.parse_args()
    if not arguments.models:
        parser.error("--models: name a folder with gpt2_tokenizer/tokenizer.json")
    if arguments.quick:
        arguments.megabytes, arguments.rounds = 8, 1
    quiet()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder, arguments.data, arguments.megabytes * 10**6, arguments.times)
        print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        gpt2 = str(Path(arguments.models) / "gpt2_tokenizer" / "tokenizer.json")
        for name, bench, about in (
            ("command", bench_command, gpt2),
            ("reference", bench_reference, gpt2),
            ("recipe", bench_gpt2, gpt2),
            ("sentencepiece", bench_sentencepiece, arguments.data),
        ):
            if name in arguments.only:
                bench(arguments, folder, about)


if __name__ == "__main__":
    main()
