"""What T makes of examples is counted in blocks of tokens: their size changes no count."""

import pytest
from support.streams import build_caches

from niels_gpt.cache import sft_counts
from niels_gpt.sampling import SFTStream

pytestmark = pytest.mark.filterwarnings("ignore:.*supervised tokens")


RULES = ("split", "truncate", "drop")


def counts_of(root):
    common = {"global_batch_size": 1, "seed": 0, "require_targets": True}
    cases = [(name, T, rule) for name in ("chats", "bits") for T in (5, 12) for rule in RULES]
    return [SFTStream(root / name, T=T, over_length=rule, **common).counts for name, T, rule in cases]


@pytest.mark.parametrize("block", [1, 7, 64])
def test_the_size_of_a_block_changes_no_count(tmp_path, monkeypatch, block):
    expected = counts_of(build_caches(tmp_path))
    monkeypatch.setattr(sft_counts, "_BLOCK_TOKENS", block)
    assert counts_of(tmp_path) == expected
