"""Random JSON, random damage to bytes, and how many examples of them a test draws."""

import contextlib
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from niels_gpt.cache.kind import plot
from niels_gpt.cache.meta import read_meta
from niels_gpt.kinds import look
from niels_gpt.storage.meta_json import file_records, path_inside
from support.disk import META_NAME

Files = dict[str, bytes]


def fuzz(max_examples):
    """The same examples at every run; FUZZ_TIMES=100 for a hundred times as many, others at each run."""
    times = int(os.environ.get("FUZZ_TIMES", "1"))
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
    return settings(max_examples=max_examples * times, derandomize=times == 1, suppress_health_check=quiet)


@contextlib.contextmanager
def written(files, tokenizer=None):
    """Write the files of a cache, and of a tokenizer beside it, to a folder that lives as long as the block."""
    with tempfile.TemporaryDirectory(prefix="fuzzed-") as name:
        folder = Path(os.path.realpath(name)) / "cache"
        for place, contents in ((folder, files), (folder.parent / "tokenizer", tokenizer or {})):
            for file, content in contents.items():
                (place / file).parent.mkdir(parents=True, exist_ok=True)
                (place / file).write_bytes(content)
        yield folder


def named_files(folder):
    """The files that the meta.json of a folder names, as readers take them. Raises: CacheError for a bad one."""
    return [path_inside(folder, record["name"]) for record in file_records(read_meta(str(folder / META_NAME)))]


def counted_for_a_plot(folder):
    """Count what `plot` draws of a cache; drawing itself takes too long to be done so often."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(plot, "png", lambda figure, colours: b"")
        for name in ("_examples_figure", "_documents_figure", "_notice"):
            patched.setattr(plot, name, lambda *_: None)
        look.plot(folder)


NUMBERS = st.sampled_from(
    [0, 1, -1, 2, 4, 20, 300, 65535, 65536, 65537, 100_300, 2**31, 2**53, 2**63 - 1, 2**63, -(2**63), 10**99]
)
TEXTS = st.sampled_from(
    [
        *("", "..", "../x", "/etc/passwd", "train", "train/", "val/shard_00000.bin", META_NAME, "\0", "f" * 64),
        *("uint16-le", "uint32-le"),
    ]
)
LEAVES = (
    st.none() | st.booleans() | NUMBERS | st.floats(allow_nan=False, allow_infinity=False) | TEXTS | st.text(max_size=9)
)
JSON = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS | st.text(max_size=5), inner, max_size=3)
)


@st.composite
def damaged(draw, content):
    """Some bytes with bits flipped, pieces inserted, taken out, cut off, swapped or repeated."""
    raw = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        first, second = sorted((draw(st.integers(0, len(raw))), draw(st.integers(0, len(raw)))))
        piece = raw[first:second]
        match draw(st.sampled_from(("flip", "flip", "insert", "delete", "truncate", "swap", "repeat", "fill"))):
            case "flip" if raw:
                raw[min(first, len(raw) - 1)] ^= 1 << draw(st.integers(0, 7))
            case "insert":
                raw[first:first] = draw(st.binary(max_size=9))
            case "delete":
                del raw[first:second]
            case "truncate":
                del raw[first:]
            case "swap":
                raw[first:second] = piece[len(piece) // 2 :] + piece[: len(piece) // 2]
            case "repeat":
                raw[first:first] = piece
            case "fill":
                raw[first:second] = bytes([draw(st.sampled_from((0, 255)))]) * len(piece)
    return bytes(raw)
