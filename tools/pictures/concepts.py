"""The pictures of the concepts: versions.svg, splits.svg, resume.svg and exactly_once.svg."""

import json
import logging
import os
import tempfile
import warnings
from pathlib import Path

import numpy as np

from niels_gpt.data import sample
from niels_gpt.encoding import split_keys
from niels_gpt.recipes.plan import RECIPES
from niels_gpt.sampling.permutation import ROUNDS, permute, random_keys
from niels_gpt.settings import Settings
from tools.pictures.svg import BLUE, GREEN, INK, LINE, MUTED, ORANGE, PALE, VIOLET, Picture

SAMPLE = Path(sample.__file__).parent


def versions_of_roam() -> list[str]:
    """Return the names of two versions of the sample's notes: with seed 42, and with seed 43."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        names = []
        for seed in (42, 43):
            RECIPES["pretrain/roam"](Settings(source_root="sample", cache_dir=folder, seed=seed))
            names.append(Path(os.readlink(Path(folder) / "sample" / "pretrain" / "roam")).name)
        logging.disable(logging.NOTSET)
    return names


def draw_versions(target: Path) -> None:
    """Write versions.svg: a link, two versions and a reader, before, during and after a build."""
    old, new = versions_of_roam()
    picture = Picture(
        800, 344, "A rebuild: the new version is built beside the old one, then one rename moves the link."
    )
    for number, step in enumerate(("1  before", "2  while a build runs", "3  after one rename")):
        left = 16 + number * 262
        picture.text(left + 8, 32, step, size=13.5, bold=True, fill=MUTED)
        if number:
            picture.path(f"M{left - 9} 20V262", stroke=LINE)
        picture.box(left + 8, 46, 112, 28, fill=PALE[BLUE], stroke=BLUE)
        picture.text(left + 64, 64, "pretrain/roam", size=12, anchor="middle", mono=True)
        picture.box(left, 102, 246, 122, stroke=LINE, dash=True)
        picture.text(left + 238, 217, ".versions/roam/", size=11, mono=True, fill=MUTED, anchor="end")
        version(picture, left + 8, 112, old, BLUE if number < 2 else MUTED, ["train/  val/", "index/", "meta.json"])
        if number == 1:
            version(picture, left + 126, 112, "building-KEY", MUTED, ["train/", "", "a journal"], dash=True)
        if number == 2:
            version(picture, left + 126, 112, new, BLUE, ["train/  val/", "index/", "meta.json"])
        end = left + (182 if number == 2 else 64)
        picture.path(f"M{left + 64} 75V90H{end}V109" if number == 2 else f"M{end} 75V109", stroke=BLUE, head=True)
        picture.box(left + 34, 238, 60, 22, fill=PALE[GREEN], stroke=GREEN)
        picture.text(left + 64, 253, "reader", size=12, anchor="middle", fill=GREEN, bold=True)
        picture.path(f"M{left + 64} 237V201", stroke=GREEN, head=True)
    words = [
        "A reader resolves the link once and keeps its version: a rebuild does not disturb it.",
        "The sha256 of its files names a version. Here another seed made other files, and so another name.",
        "gc removes old versions, but not the two newest, and none that a reader has open.",
    ]
    picture.lines(24, 286, words, size=12.5, step=20)
    picture.write(target / "versions.svg")


def version(
    picture: Picture, left: float, top: float, name: str, colour: str, files: list[str], *, dash: bool = False
) -> None:
    """Draw the folder of one version."""
    picture.box(left, top, 112, 86, fill=PALE[colour], stroke=colour, dash=dash)
    picture.text(left + 56, top + 21, name, size=12, anchor="middle", mono=True, bold=True)
    picture.lines(left + 12, top + 42, files, size=11, mono=True, step=16)


def draw_splits(target: Path) -> None:
    """Write splits.svg: the split keys of the sample's web pages, for seed 42 and a val share of a tenth."""
    rows = (SAMPLE / "HuggingFaceFW" / "fineweb-edu" / "train-00000.jsonl").read_text(encoding="utf-8").splitlines()
    texts = list(dict.fromkeys(json.loads(row)["text"] for row in rows))
    share, left, width = 0.1, 110, 660
    picture = Picture(
        800, 250, "The hash of each text is a point between 0 and 1; points below the share of val are val."
    )
    heading = f"{len(texts)} web pages of the sample: sha256(seed, newline, text) as a number from 0 to 1"
    picture.text(24, 32, heading, size=13, bold=True, fill=MUTED)
    picture.box(left, 50, width * share, 118, fill=PALE[ORANGE], stroke="none", radius=0)
    for number, (name, order) in enumerate(
        (("as streamed", texts), ("reversed", texts[::-1]), ("first half", texts[: len(texts) // 2]))
    ):
        y = 72 + number * 38
        keys = split_keys([text.encode("utf-8", "surrogatepass") for text in order], 42) / 2**64
        picture.text(24, y + 4, name, size=12)
        picture.path(f"M{left} {y}H{left + width}", stroke=LINE)
        for key in sorted(keys.tolist()):
            picture.dot(left + key * width, y, 4.5, ORANGE if key < share else BLUE)
    picture.path(f"M{left + width * share:g} 46V174", stroke=ORANGE, dash=True)
    picture.text(left + width * share / 2, 188, "val", size=12.5, anchor="middle", fill=ORANGE, bold=True)
    picture.text(left + width / 2, 188, "train", size=12.5, anchor="middle", fill=BLUE, bold=True)
    picture.text(left + width * share + 6, 206, "share of val: 0.1", size=11.5, fill=MUTED)
    picture.text(
        24,
        234,
        "The text and the seed decide: not its place, its neighbours or the tokenizer. Equal texts are one point.",
        size=12.5,
    )
    picture.write(target / "splits.svg")


def draw_resume(target: Path) -> None:
    """Write resume.svg: what a killed build has on disk, and what the next run does with it."""
    picture = Picture(800, 326, "A killed build resumes at its last checkpoint; later bytes are truncated.")
    picture.text(24, 32, "Checkpoints of a build: what is on disk when it is killed", size=13, bold=True, fill=MUTED)
    left, unit = 130, 92
    rows = (("source", "documents", BLUE), ("train.bin", "tokens", VIOLET), ("journal.jsonl", "checkpoints", GREEN))
    for number, (name, what, colour) in enumerate(rows):
        y = 60 + number * 52
        picture.text(24, y + 12, name, size=12.5, mono=True)
        picture.text(24, y + 28, what, size=11, fill=MUTED)
        if number < 2:
            picture.box(left, y, unit * 4.6, 22, fill=PALE[colour], stroke=colour, radius=2)
            picture.box(left + unit * 4, y, unit * 0.6, 22, fill="#ffffff", stroke=ORANGE, radius=2, dash=True)
    for number in range(1, 5):
        x = left + number * unit
        picture.path(f"M{x} 52V190", stroke=GREEN, dash=number < 4)
        picture.dot(x, 175, 5, GREEN)
        picture.text(x, 206, f"{number}", size=11.5, anchor="middle", fill=GREEN)
    x = left + unit * 4.6
    picture.path(f"M{x:g} 44V196", stroke=ORANGE, weight=2)
    picture.text(x + 8, 56, "killed here", size=12.5, fill=ORANGE, bold=True)
    picture.lines(x + 8, 76, ["bytes after checkpoint 4", "are truncated and made", "again"], size=11.5, step=15)
    words = [
        "1  The next run takes the last whole line of the journal and compares the files with its lengths and sha256.",
        "2  It reads the source again up to that document, comparing each with its digest, without tokenizing.",
        "    Where the source is unchanged files, it skips the rows that it has.",
        "3  It continues from there. The result has the same bytes as a build that was never killed.",
    ]
    picture.lines(24, 240, words, size=12.5, step=21)
    picture.write(target / "resume.svg")


def draw_exactly_once(target: Path) -> None:
    """Write exactly_once.svg: the order of 24 windows, read by two ranks, then by four."""
    windows, seed, consumed = 24, 0, 12
    order = permute(np.arange(windows), windows, random_keys(seed, ROUNDS + 1)[:ROUNDS], np.array([0])).tolist()
    picture = Picture(
        800, 312, "The order of an epoch follows from the seed; ranks take parts of each batch; a number resumes it."
    )
    colours, left, side = (BLUE, ORANGE, GREEN, VIOLET), 88, 28
    picture.text(
        24,
        32,
        f"Epoch 0 of a split of {windows} windows, seed {seed}: which window is sample 0, 1, 2, ...",
        size=13,
        bold=True,
        fill=MUTED,
    )
    picture.text(24, 74, "order", size=12.5)
    for place, window in enumerate(order):
        x = left + place * side
        picture.box(x, 56, side - 3, 26, fill=PALE[MUTED], stroke=LINE, radius=3)
        picture.text(x + side / 2 - 1.5, 73, str(window), size=12, anchor="middle", mono=True)
    plans = (("2 ranks, batches of 4", 0, consumed, 4, 2, 122), ("4 ranks, batches of 4", consumed, windows, 4, 4, 122))
    for name, start, end, batch, ranks, y in plans:
        for place in range(start, end):
            rank = (place - start) % batch * ranks // batch
            x = left + place * side
            picture.box(x, y, side - 3, 26, fill=PALE[colours[rank]], stroke=colours[rank], radius=3)
            picture.text(
                x + side / 2 - 1.5, y + 17, f"r{rank}", size=11, anchor="middle", fill=colours[rank], bold=True
            )
            if (place - start) % batch == 0 and place != start:
                picture.path(f"M{x - 1.5:g} {y - 5}V{y + 31}", stroke=LINE)
        picture.text(left + (start + end) * side / 2, y + 50, name, size=12, anchor="middle", fill=MUTED)
    picture.text(24, 139, "who", size=12.5)
    x = left + consumed * side - 1.5
    picture.path(f"M{x:g} 48V196", stroke=INK, weight=2)
    picture.text(x, 212, "checkpoint: 12 samples consumed", size=12.5, anchor="middle", bold=True)
    words = [
        "Sample k is window p(k mod 24) of epoch k div 24, where p is a permutation that seed and epoch give.",
        "One count says where the run is: it resumes with other ranks, workers or",
        "batch sizes, at the next window of the same order. Every window comes exactly once an epoch.",
    ]
    picture.lines(24, 250, words, size=12.5, step=21)
    picture.write(target / "exactly_once.svg")
