"""The picture of a cache: a small PNG that depends on the cache and on nothing else."""

import io
import subprocess
import sys

import numpy as np
import pytest
from support.byte_tokenizer import ByteTokenizer, build
from support.looking import notices, pretended

from niels_gpt.cache import build_sft_cache
from niels_gpt.cache.build_pretrain import build_stub
from niels_gpt.engine.meta import Source
from niels_gpt.kinds.look import plot

pytest.importorskip("matplotlib", reason="the extra `plot` brings it")

MOST_BYTES = 14_000


def plotted(cache):
    """Draw a cache; check that the picture is a PNG of the promised size, and return its width and height."""
    from PIL import Image

    png = plot(cache)
    assert png.startswith(b"\x89PNG\r\n\x1a\n") and len(png) < MOST_BYTES
    assert plot(cache) == png
    return Image.open(io.BytesIO(png)).size


@pytest.mark.parametrize("kind", ["pretrain", "sft"])
def test_many_random_lengths_fit_into_a_small_png(tmp_path, kind):
    draw = np.random.default_rng(0)
    train, val = (np.ceil(draw.lognormal(6, 2, size=size)).astype(np.int64) for size in (200_000, 1_000))
    with pretended(tmp_path / "own", kind, train=train, val=val) as cache:
        assert plotted(cache) == (720, 280)


@pytest.mark.parametrize("kind", ["pretrain", "sft"])
@pytest.mark.parametrize("train", [[1], [7], [5, 5, 5], [1, 2], [1, 10**9]])
def test_few_extreme_lengths_are_drawn(tmp_path, kind, train):
    with pretended(tmp_path / "own", kind, train=np.array(train)) as cache:
        assert plotted(cache) == (720, 280)


def test_other_lengths_give_another_picture(tmp_path):
    pictures = set()
    for kind in ("pretrain", "sft"):
        for train, val in (([30, 50], [40]), ([30, 60], [40]), ([30, 50], [45]), ([30, 50, 50], [40])):
            with pretended(tmp_path / "own", kind, train=np.array(train), val=np.array(val)) as cache:
                pictures.add(plot(cache))
    assert len(pictures) == 8


def test_a_built_cache_and_its_version_have_one_picture(tmp_path):
    build(tmp_path / "own", ["A", "BCD", "EF" * 6])
    assert plotted(tmp_path / "own") == (720, 280)
    assert plot(tmp_path / "own") == plot((tmp_path / "own").resolve())
    chats = [[{"role": "user", "content": "A"}, {"role": "assistant", "content": "B" * n}] for n in range(20)]
    build_sft_cache(chats, str(tmp_path / "sft"), tokenizer=ByteTokenizer(), val_frac=0.2, seed=0)
    assert plotted(tmp_path / "sft") == (720, 280)


def test_a_stub_has_a_picture_that_says_so(tmp_path):
    build_stub(tmp_path / "s", tokenizer=ByteTokenizer(), source=Source(), seed=0, shard_bytes=20)
    with notices() as said:
        assert plotted(tmp_path / "s") == (720, 60)
        with pretended(tmp_path / "own", "sft") as cache:
            assert plotted(cache) == (720, 60)
    assert list(dict.fromkeys(said)) == ["pretrain/s: not built", "sft/own: no examples"]


def test_importing_it_loads_no_matplotlib():
    program = "import sys, niels_gpt.kinds.look, niels_gpt.cache.kind.plot; "
    program += "print({'matplotlib', 'PIL', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
