"""Where texts and chats come from: a loader for each built-in source, and one for user-defined sources.

fineweb_edu.py    web pages: how FineWeb-Edu's rows become documents
wikitext.py       encyclopedia lines: which rows of WikiText are documents
gutenberg.py      books: a file of a mirror is one book, or has one in each row
roam.py           a folder of markdown notes, and how its files are split into train and val
dolly.py          instructions: how a row of Dolly becomes a chat
oasst1.py         trees of messages: which paths of a tree become chats
reader.py         where a loader is in the files of its source, and how it resumes there
upstream_rows.py  what these loaders share: which rows of a built-in source are dropped, counted and logged
local.py          user-defined sources: which files a pattern matches, and how their rows become texts or chats
chat_shapes.py    what a chat may look like in a user's file, and which roles are known
exclude.py        which documents and chats are left out by --exclude
sources.py        the table of built-in sources: how each is found, loaded and credited; a new source is a row here
trees.py          the table of the caches of message trees: trees/oasst1
types.py          what loaders yield: PretrainSample, ChatSample, and the id that a sample has in its source
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
