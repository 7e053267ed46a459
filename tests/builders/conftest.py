"""What the tests of the builders share."""

import pytest
from support.small_builds import BATCH_ITEMS

from niels_gpt.builders import source


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make batches of five items, so that a small build has many."""
    monkeypatch.setattr(source, "BATCH_ITEMS", BATCH_ITEMS)
