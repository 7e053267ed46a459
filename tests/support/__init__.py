"""Helpers of the tests, and where things are."""

import os
from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
TESTS = SUPPORT.parent
ROOT = TESTS.parent
LONG = "NIELS_GPT_TEST_LONG" in os.environ
"""Whether kills, cuts and replays have their long forms, as before a release: .ci/run --all."""
