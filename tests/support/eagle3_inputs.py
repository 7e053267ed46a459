"""What a target is run over, below the command: facts of an input, and what the project's sources give."""

from collections import Counter
from contextlib import contextmanager

import pytest

from niels_gpt.recipes import sources
from niels_gpt.recipes.eagle3 import input as eagle3_input
from niels_gpt.recipes.resolve import resolve_source


def input_facts(settings, name, **how):
    """What identifies an input. how: `recorded`, the facts of an earlier run."""
    return eagle3_input.input_facts(settings, name, **how)


def fingerprint_of(settings, source):
    """The fingerprint of a source in the meta.json of a cache of it."""
    return str(resolve_source(settings, source).provenance(None)["fingerprint"])


def chats_of(settings, source):
    """The chats of a source by their names."""
    return dict(sources.chats(settings, resolve_source(settings, source), None, Counter()))


@contextmanager
def asked_revisions():
    """Note the revisions of a source that are read."""
    asked = []
    real = sources.template_chats

    def noted(settings, origin, revision, counters):
        asked.append(revision)
        return real(settings, origin, revision, counters)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "template_chats", noted)
        yield asked
