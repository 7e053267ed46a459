"""The caches of message trees, by key: a source of the table of sources, whose chats are kept as trees."""

from __future__ import annotations

from dataclasses import replace

from niels_gpt.data import oasst1
from niels_gpt.data.sources import SOURCES, LoadRequest, Part, SourceSpec


def _load_oasst1(request: LoadRequest) -> list[Part]:
    """The threads of each tree, one after another."""
    settings = request.settings
    trees = oasst1.iter_oasst1_trees(split="all", dataset_id=settings.oasst1_dataset, **request.reading)
    threads = (
        thread
        for tree in trees
        for thread in oasst1.tree_threads(
            tree,
            english_only=settings.oasst1_english_only,
            max_messages=settings.oasst1_max_messages,
            counters=request.counters,
        )
    )
    return [(None, threads)]


TREES: dict[str, SourceSpec] = {
    "trees/oasst1": replace(
        SOURCES["oasst1"],
        family="trees",
        description="Message trees of OpenAssistant: each tree is one group, with a sequence for every thread that "
        "ends with a reply. Folded, every message is in a batch once.",
        load=_load_oasst1,
        training_texts=None,
    )
}
