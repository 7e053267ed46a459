"""Any JSON, with the values that a parser of journals and meta.json must not trust."""

import hashlib

from hypothesis import strategies as st

SOME_SHA256 = hashlib.sha256(b"").hexdigest()
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([2**31, 2**62, 2**63, 10**40, -1, 8, 40, SOME_SHA256, "train.bin", "texts.bin", "meta.json"])
    | st.sampled_from(["../../outside/precious", "/etc/passwd", "train/../../../x", "a\0b", ".", "\ud800", "x" * 300])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
