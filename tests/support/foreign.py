"""What an import finds in a folder of another tool, and the tokens of a cache as an export takes them."""

import importlib
from contextlib import contextmanager

import pytest

from niels_gpt.cache.kind.tokens import SFT
from niels_gpt.exchange import output
from niels_gpt.exchange.foreign import ForeignFile, ForeignFolder
from niels_gpt.exchange.formats import FORMATS
from niels_gpt.exchange.importing import ImportOptions, import_folder
from niels_gpt.exchange.output import TokenCache

MANIFEST_NAME = "niels_gpt.json"
NAMES = tuple(FORMATS)
"""Of the formats."""
WITH_LOSS = tuple(name for name in FORMATS if name in SFT.formats)


def read_folder(folder, name, **asked):
    """Look into a folder, and into all that its files yield."""
    found = FORMATS[name].read(folder, **asked)
    for file in found.files:
        assert sum(map(len, file.pieces())) == file.tokens
        assert file.ends is None or file.ends()[-1] == file.tokens
        assert file.loss is None or sum(map(len, file.loss())) == file.tokens
    return found


def tokens_of(cache):
    """Open a cache as an export does: `.files(split)` with their ids, `.bounds(split)` of documents, `.dtype`."""
    return TokenCache(cache)


def import_files(files, out, *, tokenizer, **options):
    """Import files that are given as arrays, without a folder of another tool."""
    how = {"format": "datatrove", "tokenizer": tokenizer, "options": ImportOptions(**options)}
    return import_folder(out.parent, ForeignFolder(files), out, **how)


def foreign_file(name, pieces, tokens, **more):
    """A file of train; pieces and ends: functions that give them."""
    return ForeignFile("train", name, tokens, pieces, **more)


@contextmanager
def small_limits(name, **limits):
    """Let the module of a format have small limits, such as MAX_ROW of hf."""
    module = importlib.import_module(f"niels_gpt.exchange.formats.{name}")
    with pytest.MonkeyPatch.context() as patch:
        for limit, value in limits.items():
            patch.setattr(module, limit, value)
        yield


@contextmanager
def no_chmod():
    """Let an export be on a disk where it may not change the rights of a file."""

    def refuse(path, mode):
        raise PermissionError(1, "Operation not permitted", str(path))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output.os, "chmod", refuse)
        yield
