"""Peak memory of each build, with the corpus once and N times over, each build in a process of its own.

Run: python benchmarks/memory.py MIRROR SPM_MODEL [--times 10] [--shuffle-buffer 100] [--sources ...]

The copies are real files with other names, and oasst1's ids are made unique, so that no row is a duplicate of another.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCES = ("fineweb_edu", "wikitext", "roam", "gutenberg", "dolly15k", "oasst1")
IDS = ("message_id", "parent_id", "message_tree_id")


def copy_of(row: str, number: int) -> str:
    """Return an oasst1 row whose ids belong to copy `number` alone."""
    message = json.loads(row)
    return json.dumps({**message, **{key: message[key] and f"{number}-{message[key]}" for key in IDS}}) + "\n"


def multiply(mirror: Path, target: Path, times: int) -> None:
    """Write `times` copies of every file of a mirror."""
    for path in sorted(mirror.rglob("*")):
        if not path.is_file():
            continue
        for number in range(times):
            parts = path.relative_to(mirror).parts
            folder = target.joinpath(*parts[:-1], *([f"copy{number}"] if parts[0] == "roam" else []))
            folder.mkdir(parents=True, exist_ok=True)
            copy = folder / (path.name.replace(".", f".{number}.", 1) if parts[0] != "roam" else path.name)
            if "oasst1" in parts and path.suffix == ".jsonl" and number:
                with open(path, encoding="utf-8") as rows:
                    copy.write_text("".join(copy_of(row, number) for row in rows), encoding="utf-8")
            else:
                shutil.copyfile(path, copy)


def measure(mirror: Path, model: str, source: str, shuffle_buffer: int) -> tuple[float, int]:
    """Build one cache in a new process; return its peak resident MiB and its tokens."""
    with tempfile.TemporaryDirectory() as cache:
        where = ["--source-root", str(mirror), "--cache-dir", cache, "--tokenizer", model]
        command = [sys.executable, "-m", "niels_gpt.cache.cli", "build", source, *where]
        subprocess.run([*command, "--shuffle-buffer", str(shuffle_buffer)], check=True, capture_output=True)
        (record,) = [path for path in Path(cache, ".runs").iterdir() if source in path.name]
        run = json.loads(record.read_text().splitlines()[-1])
    return run["peak_bytes"] / 2**20, run["totals"]["train_tokens"] + run["totals"]["val_tokens"]


def main() -> None:
    """Print a row for each source."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mirror", type=Path)
    parser.add_argument("model")
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--shuffle-buffer", type=int, default=100)
    parser.add_argument("--sources", nargs="+", default=SOURCES, choices=SOURCES)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        many = Path(folder) / "mirror"
        multiply(arguments.mirror, many, arguments.times)
        for source in arguments.sources:
            once, tokens = measure(arguments.mirror, arguments.model, source, arguments.shuffle_buffer)
            often, more = measure(many, arguments.model, source, arguments.shuffle_buffer)
            print(
                f"{source}: {once:.1f} MiB for {tokens:,} tokens, {often:.1f} MiB for {more:,} tokens: "
                f"{often - once:+.1f} MiB",
                flush=True,
            )


if __name__ == "__main__":
    main()
