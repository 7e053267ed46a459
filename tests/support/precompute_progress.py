"""How `eagle3 precompute` shows its progress: lines in place of none, and a bar."""

from contextlib import contextmanager

import pytest

from niels_gpt.commands.eagle3 import precompute


@contextmanager
def lines_at_once():
    """Let each progress be a line, not one in ten seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precompute, "_LINE_EVERY_S", 0.0)
        yield
