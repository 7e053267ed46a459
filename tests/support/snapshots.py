"""Snapshots: rows of the hub that are kept as files of a mirror."""

import dataclasses
import json
from contextlib import contextmanager

import pytest

from niels_gpt.data.files import snapshot
from niels_gpt.data.sources import SOURCES
from niels_gpt.recipes import snapshot as recipe

MANIFEST_NAME = "snapshot.json"


def take(folder, about, rows_of, **how):
    """Take or go on with a snapshot of the rows that `rows_of(revision, split)` gives; returns its manifest."""
    return snapshot.take(folder, about, rows_of, **how)


def manifest_of(folder):
    """Return the manifest as it is on disk."""
    manifest = json.loads((folder / MANIFEST_NAME).read_bytes())
    return manifest


def check_manifest(folder):
    """Read a manifest as a build does."""
    snapshot.read_manifest(folder)


def check_files(folder, manifest, files=None):
    """Compare the files of a snapshot, or these, with its manifest, as a build does before it reads them."""
    snapshot.check_files(folder, manifest, sorted(folder.glob("*.jsonl.gz")) if files is None else files)


@contextmanager
def files_of(size):
    """Let a file of a snapshot have so many bytes of JSON."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot, "PART_BYTES", size)
        yield


@contextmanager
def read_ahead(size):
    """Keep so many bytes of text of fineweb_edu beyond what the tokens need, so that a small snapshot can be short."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "READ_AHEAD_BYTES", size)
        patch.setitem(SOURCES, "fineweb_edu", dataclasses.replace(SOURCES["fineweb_edu"], snapshot_margin_bytes=0))
        yield
