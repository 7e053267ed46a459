"""What the tests of loaders share."""

from collections import Counter

import pytest


@pytest.fixture
def counters():
    """Counters of a loader that has read nothing yet."""
    return Counter()
