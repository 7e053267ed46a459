"""Turn chats into ids and a loss mask, by any chat template.

    tokenizers.py          opens the tokenizer of a target or a cache, with its chat template or the project's format
    protocol.py            a chat, its ids and mask, and what makes them; the counters of chats that are dropped
    chats.py               which values a chat may hold; which turns carry loss: replies, calls of tools; unused words
    template_tokenizer.py  chats -> ids and mask by a template; which tokens a span of characters supervises
    template.py            which characters of a chat carry loss, for a template with marks and for one without
    rendering.py           sends templates and chats to a process of their own, and ends it at a limit
    worker.py              that process: jinja's sandbox, its limits of memory and CPU time; imports nothing of ours
    rows.py                chats, or given ids, -> rows: truncates, drops, counts; prints rows

The project's own chats: niels_gpt/chat_template.py makes their ids, niels_gpt/cache/formats.py their loss mask.
The names below are imported at their first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from niels_gpt.chat.chats import LOSS_ON
    from niels_gpt.chat.protocol import Chat, ChatTokenizer, EncodedChat, RefusedChat
    from niels_gpt.chat.rows import Row, chat_rows, given_rows, show_rows
    from niels_gpt.chat.tokenizers import open_tokenizer

_HOMES = {
    "Chat": "niels_gpt.chat.protocol",
    "ChatTokenizer": "niels_gpt.chat.protocol",
    "EncodedChat": "niels_gpt.chat.protocol",
    "LOSS_ON": "niels_gpt.chat.chats",
    "RefusedChat": "niels_gpt.chat.protocol",
    "Row": "niels_gpt.chat.rows",
    "chat_rows": "niels_gpt.chat.rows",
    "given_rows": "niels_gpt.chat.rows",
    "open_tokenizer": "niels_gpt.chat.tokenizers",
    "show_rows": "niels_gpt.chat.rows",
}

__all__ = [
    "LOSS_ON",
    "Chat",
    "ChatTokenizer",
    "EncodedChat",
    "RefusedChat",
    "Row",
    "chat_rows",
    "given_rows",
    "open_tokenizer",
    "show_rows",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
