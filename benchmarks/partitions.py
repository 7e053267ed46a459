"""What building in partitions costs, and what two machines gain: as ratios within one run.

Run: python benchmarks/partitions.py [--data MIRROR] [--models FOLDER] [--megabytes 26] [--rounds 3] [--quick]

    one core        tokens that a build without partitions makes in a second of CPU, in a new process
    two processes   four of eight partitions each, at once, beside one process that builds all eight; each process is
                    pinned to one core, and has one thread that encodes. Bare encoding beside it, two processes of half
                    the texts each to one of all of them, says what two cores of this machine give
    seal            its share of the whole: of the seconds of all partitions and of the seal, deep and by sizes
    partitions      eight partitions in one process and their seal, beside one build without partitions; by files, and
                    by rows, where there are fewer files than partitions

--only-core: the first alone. All ways are in each round, in another order each time; a ratio is the median of the
rounds' ratios. The corpus is fineweb-edu's text (--data, or NIELS_GPT_TEST_DATA; else the packaged sample), copied with
a prefix for each copy, as lines of JSON in 16 files, and once more in two. --models: a folder with
gpt2_tokenizer/tokenizer.json, or NIELS_GPT_TEST_MODELS; without it the tokenizer is trained. --folder: where the
temporary folder is made. In memory, as in /dev/shm, no process waits for a disk, which two machines do not share
either.

--engine gigatoken: its comparison with the reference is left out, for the first hundred texts of each partition
are few in a real one. --compare share: one of 2,000 pieces, as behind the first hundred texts. --compare all: both.
Text of fineweb-edu that does not repeat is 26 MB; with more, gigatoken meets words that it has seen.
"""

import argparse
import dataclasses
import itertools
import json
import logging
import os
import shutil
import statistics
import tempfile
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from measuring import Ways, measured, ratio

from niels_gpt.data.fineweb_edu import iter_fineweb_edu
from niels_gpt.recipes.plan import recipes
from niels_gpt.recipes.units import Units
from niels_gpt.settings import Settings
from niels_gpt.tokenizer import load_tokenizer
from niels_gpt.tokenizer_training import train_tokenizer
from niels_gpt.tokenizers import engine

PARTITIONS = 8
FILES = {"files": 16, "rows": 2}
"""Of the corpus, by how its partitions are made: of whole files, or of rows."""
AIM = 1.8  # times the tokens a second of one process, of two


def write_corpus(folder: Path, data: str, num_bytes: int) -> int:
    """Write the corpus in many files, and in few; returns its utf-8 bytes."""
    texts = [sample.text for sample in iter_fineweb_edu(source_root=data)]
    copies = max(1, round(num_bytes / sum(len(text.encode()) for text in texts)))
    documents = [f"Copy {number}. {text}" for number, text in itertools.product(range(copies), texts)]
    for kind, count in FILES.items():
        (folder / kind).mkdir(parents=True)
        for number in range(count):
            with open(folder / kind / f"{number:02}.jsonl", "w", encoding="utf-8") as file:
                for at, text in enumerate(documents[number::count]):
                    file.write(json.dumps({"text": text, "id": f"{number}-{at}"}, ensure_ascii=False) + "\n")
    return sum(len(document.encode()) for document in documents)


# --- in other processes -----------------------------------------------------------------------------------------------


def begin(compare: str, core: int | None = None) -> None:
    """Prepare a process: one core, no messages that are meant, and the comparison with the reference that is wanted."""
    if core is not None:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[core % len(cores)]})
    logging.getLogger("niels_gpt").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if compare != "all":
        engine.FIRST_COMPARED = 0  # type: ignore[misc]
    if compare == "none":
        engine.ONE_COMPARED_OF = 1 << 62  # type: ignore[misc]


@cache
def texts_of(folder: Path, numbers: range) -> list[bytes]:
    """Return the texts of some files of the corpus; they are read once in each process."""
    lines = (line for number in numbers for line in open(folder / f"{number:02}.jsonl", encoding="utf-8"))
    return [json.loads(line)["text"].encode() for line in lines]


@cache
def opened(tokenizer: str, choice: str) -> engine.Engine:
    return engine.open_engine(load_tokenizer(Path(tokenizer)), choice)


def encode(settings: Settings, folder: Path, numbers: range) -> int:
    """Encode the texts of some files, and write nothing: the limit. Returns the number of tokens."""
    texts, encoder = texts_of(folder, numbers), opened(str(settings.tokenizer), settings.engine)
    return sum(len(encoder.encode(texts[at : at + 256], first=at)[0]) for at in range(0, len(texts), 256))


def build_some(settings: Settings, numbers: range) -> float:
    """Build some partitions; returns the cores that this process used meanwhile."""
    wall, cpu = time.perf_counter(), time.process_time()
    for number in numbers:
        Units(settings, "corpus").build(number)
    return (time.process_time() - cpu) / (time.perf_counter() - wall)


def build_whole(settings: Settings) -> float:
    """Build without partitions; returns tokens a second of CPU."""
    cpu = time.process_time()
    made = recipes(settings)["pretrain/corpus"](settings)
    return float(sum(made.meta["totals"].values())) / (time.process_time() - cpu)


def build_cold(settings: Settings, data: str, folder: Path) -> float:
    """Build a few documents, for the imports, then build without partitions."""
    with open(folder / "few.jsonl", "w", encoding="utf-8") as file:
        file.writelines(
            json.dumps({"text": sample.text}) + "\n"
            for sample in itertools.islice(iter_fineweb_edu(source_root=data), 9)
        )
    build_whole(dataclasses.replace(settings, pretrain=f"corpus={folder}", cache_dir=str(folder / "cache")))
    return build_whole(settings)


# --- the ways ---------------------------------------------------------------------------------------------------------


class Bench:
    """The corpus, two processes, and a folder of caches that is empty before each way."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.folder, self.rounds, self.data = folder, int(arguments.rounds), str(arguments.data)
        tokenizer = (
            str(Path(arguments.models) / "gpt2_tokenizer") if arguments.models else self._trained(arguments.data)
        )
        self.bytes = write_corpus(folder, arguments.data, arguments.megabytes * 10**6)
        common = {"cache_dir": str(folder / "cache"), "tokenizer": tokenizer, "engine": arguments.engine, "seed": 0}
        self.whole = Settings(**common, pretrain=f"corpus={folder / 'files'}", threads=1)
        self.parts = {
            kind: dataclasses.replace(self.whole, pretrain=f"corpus={folder / kind}", partitions=PARTITIONS)
            for kind in FILES
        }
        context = get_context("spawn")
        self.processes = [ProcessPoolExecutor(1, context, begin, (arguments.compare, core)) for core in range(2)]
        self.cores: list[float] = []
        self.seals: dict[str, list[float]] = {"deep": [], "by sizes": []}

    def _trained(self, data: str) -> str:
        corpus = (sample.text for sample in iter_fineweb_edu(source_root=data))
        (self.folder / "spm.model").write_bytes(train_tokenizer(corpus, vocab_size=8000, max_bytes=5_000_000).model)
        return str(self.folder / "spm.model")

    def core(self) -> None:
        """Print the speed of one core."""
        (self.folder / "few").mkdir()
        (speed,) = self._wait(build_cold, [(self.whole, self.data, self.folder / "few")])
        shutil.rmtree(self.folder / "cache")
        print(f"  one core: {speed / 1e6:.2f} million tokens a second of CPU", flush=True)

    def encoded(self, processes: int) -> None:
        """Encode all files, each process as many of them."""
        share = [range(number, FILES["files"], processes) for number in range(processes)]
        self._wait(encode, [(self.whole, self.folder / "files", numbers) for numbers in share])

    def built(self, processes: int) -> None:
        """Build all partitions of files, each process as many of them, and no seal."""
        Units(self.parts["files"], "corpus")
        share = [range(number, PARTITIONS, processes) for number in range(processes)]
        found = self._wait(build_some, [(self.parts["files"], numbers) for numbers in share])
        self.cores += found if processes == 1 else []

    def in_parts(self, kind: str) -> None:
        """Build all partitions in one process, and seal them by sizes, as `build --partitions 8` does."""
        self._wait(build_some, [(self.parts[kind], range(PARTITIONS))])
        self._seal(kind, "by sizes")

    def clear(self) -> None:
        """Seal what is not sealed, deep, and remove the caches."""
        if not (self.folder / "cache" / "pretrain" / "corpus").exists() and (self.folder / "cache").exists():
            self._seal("files", "deep")
        shutil.rmtree(self.folder / "cache", ignore_errors=True)

    def _seal(self, kind: str, how: str) -> None:
        start = time.perf_counter()
        Units(self.parts[kind], "corpus", fixes=False).seal(deep=how == "deep")
        self.seals[how].append(time.perf_counter() - start)

    def _wait(self, work: Any, calls: list[tuple[Any, ...]]) -> list[Any]:
        waiting = [process.submit(work, *call) for process, call in zip(self.processes, calls, strict=False)]
        return [future.result() for future in waiting]

    def run(self) -> None:
        """Time all ways and print their ratios."""
        one, two = "one process, 8 partitions", "two processes, 4 partitions each"
        ways: Ways = {
            "one encodes": partial(self.encoded, 1),
            "two encode": partial(self.encoded, 2),
            one: partial(self.built, 1),
            two: partial(self.built, 2),
            "not partitioned": partial(self._wait, build_whole, [(self.whole,)]),
            "8 partitions of files": partial(self.in_parts, "files"),
            "8 partitions of rows": partial(self.in_parts, "rows"),
        }
        seconds = measured(ways, self.rounds, self.clear)
        for name, times in seconds.items():
            rounds = ", ".join(f"{time:.2f}" for time in times)
            speed = self.bytes / 1e6 / statistics.median(times)
            print(f"  {name:<34} {statistics.median(times):7.2f} s  {speed:6.1f} MB/s  ({rounds})")
        limit, found = ratio(seconds, "two encode", "one encodes"), ratio(seconds, two, one)
        print(f"  one process of builds used {statistics.median(self.cores):.2f} cores")
        print(
            f"  two processes: {found:.2f} times one, aim {AIM}; bare encoding {limit:.2f}; of that {found / limit:.2f}"
        )
        for how, times in self.seals.items():
            seal, build = statistics.median(times), statistics.median(seconds[one])
            print(f"  seal, {how}: {seal:.2f} s, {seal / (seal + build):.3f} of the whole")
        for kind in FILES:
            name = f"8 partitions of {kind}"
            print(f"  {name}: {ratio(seconds, name, 'not partitioned'):.3f} of the speed without partitions")


def main() -> None:
    """Make the corpus and run everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=os.environ.get("NIELS_GPT_TEST_MODELS"), help="folder of tokenizers")
    parser.add_argument("--data", default=os.environ.get("NIELS_GPT_TEST_DATA") or "sample", help="a mirror folder")
    parser.add_argument("--engine", default="reference", choices=engine.CHOICES)
    parser.add_argument(
        "--compare", default="none", choices=("none", "share", "all"), help="gigatoken with the reference"
    )
    parser.add_argument("--only-core", action="store_true", help="the speed of one core alone")
    parser.add_argument("--folder", type=Path, help="where the temporary folder is made")
    parser.add_argument("--megabytes", type=int, default=26, help="of text in the corpus")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round of little text: does it run at all?")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.megabytes, arguments.rounds = 2, 1
    begin(arguments.compare)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        bench = Bench(arguments, Path(name))
        print(
            f"{bench.bytes / 1e6:.0f} MB of text; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True
        )
        bench.core()
        if not arguments.only_core:
            bench.run()
        for process in bench.processes:
            process.shutdown()


if __name__ == "__main__":
    main()
