"""The earlier place of niels_gpt.prefix_tree.architectures, kept for one release: importing it warns."""

from __future__ import annotations

from niels_gpt.storage.codes import give_earlier_names

give_earlier_names(
    __name__,
    {"architectures": {"AttentionRouteError": "prefix_tree.architectures"}},
    "niels_gpt.prefix_tree.backends is niels_gpt.prefix_tree now: import AttentionRouteError from its architectures",
)
