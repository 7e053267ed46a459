"""Any chat template: a chat becomes ids, and a mask of those that carry loss.

    tokenizers.py        opens a target's tokenizer, or that of a cache
    protocol.py          what encodes chats, what it returns, and the counters of what is dropped
    template_tokenizer.py  chats -> ids and mask by a template; which roles are accepted, which tokens are supervised
    backends.py          the tokenizer beneath a template: of transformers, or of a cache without transformers
    turns.py             which turns of the assistant carry loss
    values.py            which values a chat may hold
    rows.py              chats or given ids -> rows: what is truncated, dropped and counted; prints rows
    templates.py         which characters of a chat carry loss, for a template with marks and for one without
    template_code.py     what a template's jinja says: has it marks, does it ask for the date
    template_process.py  where templates are rendered safely: starts and limits the process below
    template_worker.py   the process that renders templates, with limits on memory and CPU time
    prefix_tokens.py     offsets -> mask of tokens; checks that a chat's beginning has the same ids alone

The project's own chats: niels_gpt/chat_template.py makes their ids, niels_gpt/cache/formats.py their loss mask.
The names below are imported at their first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from niels_gpt.chat.protocol import ChatTokenizer, EncodedChat, RefusedChat
    from niels_gpt.chat.rows import Row, chat_rows, given_rows, show_rows
    from niels_gpt.chat.template_process import Chat
    from niels_gpt.chat.tokenizers import open_tokenizer
    from niels_gpt.chat.turns import LOSS_ON

_HOMES = {
    "Chat": "niels_gpt.chat.template_process",
    "ChatTokenizer": "niels_gpt.chat.protocol",
    "EncodedChat": "niels_gpt.chat.protocol",
    "LOSS_ON": "niels_gpt.chat.turns",
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
