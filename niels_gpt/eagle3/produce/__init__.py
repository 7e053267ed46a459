"""The earlier place of `make_target_cache` and `draft_distribution`, for one release: importing it warns."""

from __future__ import annotations

from niels_gpt.storage.codes import give_earlier_names

_MOVED = {
    "producer": {"make_target_cache": "eagle3.build"},
    "supervision": {"draft_distribution": "eagle3.forward"},
}
"""The documented names of each module, and the module that has them now."""

give_earlier_names(__name__, _MOVED, "niels_gpt.eagle3.produce is gone: import make_target_cache from niels_gpt.eagle3")
