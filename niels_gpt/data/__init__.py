"""Where texts and chats come from: a loader for each built-in source, and one for user-defined sources.

A built-in source is one module, with its loader and its row of the table:

fineweb_edu.py    web pages of FineWeb-Edu
wikitext.py       encyclopedia lines of WikiText, by upstream's splits
gutenberg.py      books: a file of a mirror is one book, or has one in each row
roam.py           a folder of markdown notes, split by file into train and val
dolly.py          instructions of Dolly 15k: which rows become chats
oasst1.py         message trees of OpenAssistant: the paths that become chats, and whole trees
sources.py        the table of built-in sources; a new one is a line here
spec.py           a row of the table: how a source is found, loaded, split, credited and built
upstream_rows.py  rows of a built-in source from a mirror or the hub: their numbers, and which are too large
local.py          user-defined sources: the files that a pattern matches, and their texts, chats and rollouts
reader.py         reads a source's files from a position on; counts and logs dropped rows
chat_shapes.py    the forms of a chat in a user's file, such as messages or ShareGPT, and the known roles
exclude.py        documents and chats that --exclude leaves out
types.py          samples: PretrainSample, ChatSample, ...; and the id of a sample in its source
files/            rows and texts of files of any format

Importing these modules is cheap: datasets, pyarrow, huggingface_hub and torch are imported on first use. So are the
names below.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from niels_gpt.data.exclude import remaining
    from niels_gpt.data.local import LocalFiles, open_files
    from niels_gpt.data.types import ChatMessage, ChatSample, PretrainSample, RawChat, SequenceGroup, source_id

_HOMES = {
    "ChatMessage": "niels_gpt.data.types",
    "ChatSample": "niels_gpt.data.types",
    "LocalFiles": "niels_gpt.data.local",
    "PretrainSample": "niels_gpt.data.types",
    "RawChat": "niels_gpt.data.types",
    "SequenceGroup": "niels_gpt.data.types",
    "open_files": "niels_gpt.data.local",
    "remaining": "niels_gpt.data.exclude",
    "source_id": "niels_gpt.data.types",
}

__all__ = [
    "ChatMessage",
    "ChatSample",
    "LocalFiles",
    "PretrainSample",
    "RawChat",
    "SequenceGroup",
    "open_files",
    "remaining",
    "source_id",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
