"""The bar of a build from Python: text in a notebook without widgets, nothing where nobody looks."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
from support.byte_tokenizer import ByteTokenizer

from niels_gpt.cache import build_pretrain_cache
from niels_gpt.display.bar import progress_bar


def test_a_notebook_sees_a_build_advance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_nothing_is_drawn_where_stderr_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("notes") as progress:
        progress(1, 10, 20)
    assert capsys.readouterr().err == ""
