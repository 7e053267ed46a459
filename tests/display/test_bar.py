"""The bar of a build from Python: a widget in a notebook, or text without widgets; nothing where nobody looks."""

import sys
import time
from types import ModuleType, SimpleNamespace

from support.byte_tokenizer import ByteTokenizer

from niels_gpt.cache import build_pretrain_cache
from niels_gpt.display.bar import progress_bar, progress_lines


def test_a_notebook_sees_a_build_advance(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    with progress_bar("notes", items="docs") as progress:
        build_pretrain_cache(
            ["a" * 30] * 10,
            str(tmp_path / "notes"),
            tokenizer=ByteTokenizer(),
            max_train_tokens=300,
            max_val_tokens=0,
            shard_bytes=200,
            seed=0,
            shuffle_buffer=None,
            progress=progress,
        )
    assert "notes: 100%" in (drawn := capsys.readouterr().err) and "300/300" in drawn and "docs=10" in drawn


class Widget(SimpleNamespace):
    """What tqdm uses of a widget of ipywidgets."""

    def __init__(self, **given):
        parts = {"layout": SimpleNamespace(), "style": SimpleNamespace()}
        super().__init__(**{"value": 0.0, "bar_style": "", **parts, **given})


def test_a_widget_shows_the_share_that_is_done(monkeypatch):
    from tqdm import auto, notebook

    shown = []
    for name in ("IProgress", "HTML", "TqdmHBox"):
        monkeypatch.setattr(notebook, name, Widget, raising=False)
    monkeypatch.setattr(notebook, "display", shown.append, raising=False)
    monkeypatch.setattr(auto, "tqdm", notebook.tqdm)
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    with progress_bar("notes") as progress:
        _, bar, text = shown[0].children
        progress(0, 5, 20)  # resumed
        assert (bar.max, bar.bar_style) == (20, "")
        time.sleep(0.15)  # tqdm draws ten times a second
        progress(1, 10, 20)
        assert (bar.value, bar.max) == (10, 20) and "10.0/20.0" in text.value
        progress(2, 20, 20)
    assert (bar.value, bar.max, bar.bar_style) == (20, 20, "success")


def test_nothing_is_drawn_where_stderr_is_no_terminal(capsys):
    with progress_bar("notes") as progress:
        progress(1, 10, 20)
    assert capsys.readouterr().err == ""


def test_a_line_says_how_far_and_how_fast_and_a_run_that_is_resumed_is_no_speed(monkeypatch):
    clock, lines = [0.0], []
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    progress = progress_lines(lines.append, "tok", "bytes")
    for report in (
        (0, 500, 1000),  # of an earlier run
        (10**6, 600, 1000),  # a model was loaded before
        (3 * 10**6, 700, 1000),  # 100 tokens and 2 MB in 20 seconds
        (3 * 10**6, 700, None),
        (0, 10, None),  # it begins again
    ):
        clock[0] += 20
        progress(*report)
    assert lines == [
        "500 tok of 1,000, 50%",
        "600 tok of 1,000, 60%",
        "700 tok of 1,000, 70%, 5 tok/s, 0.1 MB/s, 60 s left",
        "700 tok, 2 tok/s, 0.1 MB/s",
        "10 tok",
    ]
