"""What tests of pipelines/ reach behind the assets: caches, locks that others hold, steps and targets that fail."""

import errno
import itertools
import json
import os
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import dagster as dg
import pytest

from niels_gpt.commands.build import chosen_keys as _chosen_keys
from niels_gpt.eagle3.format.layout import read_header, row_bytes_of, shard_path
from niels_gpt.eagle3.inspect import checks as eagle3_checks
from niels_gpt.eagle3.workers import Workers
from niels_gpt.engine import journal
from niels_gpt.kinds.files import Damage
from niels_gpt.kinds.kind import kind_of_key, kinds
from niels_gpt.recipes import records
from niels_gpt.recipes.asked import settings_fingerprint
from niels_gpt.recipes.eagle3 import prepare
from niels_gpt.recipes.eagle3.request import resolved
from niels_gpt.recipes.exchange import outputs
from niels_gpt.recipes.plan import every_recipe, recipes
from niels_gpt.recipes.units import build_token_cache
from niels_gpt.settings import Settings
from niels_gpt.storage import fileio, versions
from niels_gpt.storage.locks import file_lock
from pipelines import automation, steps
from support.disk import canonical_json, versions_dir

CACHES = tuple(recipes(Settings()))
"""The keys of the caches of the built-in sources."""
SOURCES = tuple(dict.fromkeys(key.split("/")[1] for key in CACHES))
"""What is observed as raw/NAME."""
TARGETS, VOCAB = "eagle3/targets", "eagle3/draft_vocab"
TARGET_CHECKS = tuple(eagle3_checks.CHECKS)


def checks_of(key):
    """The checks of a cache by name."""
    return {each.name: each for each in kind_of_key(key).checks}


def chosen_keys(settings):
    """The keys that `build --all` builds, in its order."""
    return list(_chosen_keys(settings, None))


# --- caches and their records -----------------------------------------------------------------------------------------


def build_targets(settings):
    """Build eagle3/targets, as its asset does."""
    return every_recipe(settings)[TARGETS](settings)


def build_draft_vocab(settings):
    """Build eagle3/draft_vocab, as its asset does."""
    return every_recipe(settings)[VOCAB](settings)


def fingerprints(settings):
    """What the settings alone decide of the two caches: the code versions of their assets."""
    return {key: settings_fingerprint(settings, key) for key in (TARGETS, VOCAB)}


def fingerprint_in_parts(settings, part):
    """The fingerprint of a target cache of which a machine builds partition I of N, as in (0, 2); None: all of it."""
    from dataclasses import replace

    found = resolved(settings, observed=None)
    number, total = part or (None, None)
    options = replace(found.options, partition=number, partitions=total)
    return replace(found, options=options).fingerprint(TARGETS)


def facts_of_target(cache, target, revision=None):
    """What is recorded of a target that a cache is compared with."""
    how = {} if revision is None else {"revision": revision}
    return dict(prepare.target_of(cache, target, **how).facts)


def shard(cache, number):
    """The file of a shard of a target cache."""
    return Path(shard_path(cache, number))


def flip_state(path, row):
    """Change one bit of the first hidden state of a row of a shard."""
    fields, rows, header = read_header(path)
    before = itertools.takewhile(lambda name: name != "aux_hidden_states", fields)
    begin = len(header) + sum(rows * row_bytes_of(fields[name]) for name in before)
    content = bytearray(path.read_bytes())
    content[begin + row * row_bytes_of(fields["aux_hidden_states"])] ^= 1
    path.write_bytes(content)


def record_of_recipe(cache):
    """The file that says which recipe built the cache."""
    return versions_dir(cache) / "recipe.json"


def recorded(cache):
    """Which recipe built the cache."""
    found = json.loads(record_of_recipe(cache).read_bytes())
    assert found["version"] == Path(os.readlink(cache)).name
    return found


def record(cache, recipe):
    """Write another record of which recipe built the cache."""
    record_of_recipe(cache).write_bytes(canonical_json(recipe))


def deliver(settings, name, **how):
    """Export or publish a cache by its line of sources.toml, as its asset does."""
    return outputs.deliver(settings, outputs.lines_of(settings)[name], **how)


# --- locks of others --------------------------------------------------------------------------------------------------


@contextmanager
def building(cache, *, wait=False):
    """Hold the lock of a cache, as its builder does."""
    with versions.build_lock(cache, wait=wait):
        yield


@contextmanager
def turn_taken(root):
    """Hold the turn of pretrain builds in a folder of caches."""
    with file_lock(root / ".runs" / "pretrain.turn", "held by the test", wait=False):
        yield


@contextmanager
def turn_of(settings, key):
    """Hold the turn of pretrain builds as a step of another run does."""
    with steps.turn(steps.Run(None, steps.Deployment(settings=settings), settings, wait=False), key):
        yield


# --- steps and functions that do something else -----------------------------------------------------------------------


@contextmanager
def recipe_is(build):
    """Let the steps of token caches call `build(real, settings, name, ...)` in place of `real`."""

    def replaced(settings):
        return every_recipe(settings) | {
            key: lambda given, name=name, **how: build(build_token_cache, given, name, **how)
            for key in every_recipe(settings)
            for family, name in [key.split("/")]
            if family in ("pretrain", "sft")
        }

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "every_recipe", replaced)
        yield


@contextmanager
def noted_restarts(note):
    """Retry at once where the network is asked, and note each time a step begins from scratch."""
    real = steps.restart
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "NETWORK_RETRIES", dg.RetryPolicy(max_retries=1))
        patch.setattr(steps, "restart", lambda *given: (note(), real(*given))[1])
        yield


@contextmanager
def sensor_times(**seconds):
    """Let the sensor of files have another time for one tick: `files`."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in seconds.items():
            patch.setattr(automation, f"{name.upper()}_SECONDS", value)
        yield


@contextmanager
def chats_are(chats):
    """Let a source of chats yield what `chats(revision)` yields."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("niels_gpt.recipes.sources.chats", lambda _settings, _source, revision, *_: chats(revision))
        yield


@contextmanager
def cards_are(text):
    """Let every card of a cache be this text."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("niels_gpt.exchange.card.card_of", lambda *_, **__: text)
        yield


@contextmanager
def check_never_passes(name, problem):
    """Let a check find this in every cache."""
    with pytest.MonkeyPatch.context() as patch:
        for kind in kinds():
            rule = {"rule": lambda *_: iter([Damage("meta.json", 0, 0, problem)])}
            checks = [replace(each, **rule) if each.name == name else each for each in kind.checks]
            patch.setattr(kind, "checks", checks, raising=False)
        yield


@contextmanager
def without_target():
    """Fail where a build loads a target; the check that runs samples once more may."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Workers, "tried", lambda _: pytest.fail("the target was loaded"))
        yield


@contextmanager
def killed_at_write(number):
    """End the process, as OSError, before this one of the small files that are written."""
    real, written = fileio.write_bytes, []

    def write(path, content):
        written.append(path)
        if len(written) == number:
            raise OSError(f"killed before {path}")
        real(path, content)

    with pytest.MonkeyPatch.context() as patch:
        for module in (fileio, records):
            patch.setattr(module, "write_bytes", write)
        yield


_FILES = {
    "journal": (journal, "OutputFile"),
    "link": (os, "link"),
    "shard": (fileio.SizedFile, "write"),
    "sync_tree": (fileio, "sync_tree"),
    "rename": (fileio, "rename"),
    "symlink": (fileio, "symlink"),
}


def _fail(patch, what, when, number):
    owner, name = _FILES[what]
    real = getattr(owner, name)

    def fail(*arguments, **named):
        if when(*arguments):
            raise OSError(number, os.strerror(number), str(arguments[-1]))
        return real(*arguments, **named)

    patch.setattr(owner, name, fail)


@contextmanager
def failing(what, when=lambda *_: True, number=errno.ENOSPC):
    """Let the journal, links or the writing of shards fail, with a full disk if no other number is given."""
    with pytest.MonkeyPatch.context() as patch:
        _fail(patch, what, when, number)
        yield


@contextmanager
def failing_commit(cache, step):
    """Let the disk be full at a step of the commit of a cache: sync_tree, rename or symlink."""
    commit = versions.commit
    with pytest.MonkeyPatch.context() as patch:

        def fail(*arguments):
            if arguments[1] == cache:
                _fail(patch, step, lambda *_: True, errno.ENOSPC)
            return commit(*arguments)

        patch.setattr(versions, "commit", fail)
        yield
