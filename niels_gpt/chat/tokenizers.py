"""Opens a target's tokenizer: the project's own, one of transformers, or that of a cache.

Which roles are accepted: by the project's own tokenizer those of ROLE_TO_NAME in chat_template.py; by a template those
that it raises no error for, see template_tokenizer.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from niels_gpt.chat.backends import CacheBackend, TransformersBackend, TransformersTokens
from niels_gpt.chat.protocol import SPECIAL_TEXT, ChatTokenizer, EncodedChat, RefusedChat
from niels_gpt.chat.template_process import Chat
from niels_gpt.chat.template_tokenizer import TemplateTokenizer
from niels_gpt.chat.turns import calls_tools, check_loss_on, has_weight
from niels_gpt.chat_template import ROLE_TO_NAME, is_weight
from niels_gpt.encoding import TextEncoder
from niels_gpt.hub.models import CONFIG, hub_tokenizer, is_local, refuse_large
from niels_gpt.hub.retries import is_network
from niels_gpt.special_tokens import SPECIAL_TOKENS
from niels_gpt.storage.errors import CacheError, NotFound, TokenizerError, errors_as
from niels_gpt.storage.meta_json import parse_object, shortened
from niels_gpt.tokenizer import MODEL_NAME, SentencePieceTokenizer, load_tokenizer
from niels_gpt.tokenizers.document_tokens import document_start, post_processor_starts
from niels_gpt.tokenizers.files import CONFIG_NAME, TEMPLATE_NAME, TOKENIZER_JSON, tokenizer_files
from niels_gpt.tokenizers.huggingface import HuggingFaceTokenizer
from niels_gpt.tokenizers.protocol import FullTokenizer

__all__ = [
    "SPECIAL_TEXT",
    "Chat",
    "ChatTokenizer",
    "EncodedChat",
    "ProjectTokenizer",
    "RefusedChat",
    "open_tokenizer",
    "template_tokenizer",
]


def open_tokenizer(
    name: str,
    *,
    revision: str | None = None,
    chat_template: str | None = None,
    loss_on: str = "assistant",
    start: str | None = None,
) -> ChatTokenizer:
    """Open a target's tokenizer.

    name: a folder, or an id on the hub. A folder with spm.model, or with a tokenizer.json that has the sentinels and no
        chat template, has the project's chat format.
    revision: commit, tag or branch on the hub.
    chat_template: text of a jinja template to use instead of the tokenizer's own.
    loss_on: which turns of the assistant carry loss, one of turns.LOSS_ON; only "assistant" for the project's format.
    start: what begins each chat that does not begin with it by its template: a choice of `document_start`.
    Raises: ValueError where there is no tokenizer, or one without offsets, for what the hub does not have, or does not
        give to this user, and as `document_start`; ConnectionError where the hub does not answer; ImportError without
        transformers.
    """
    with errors_as("E408", (ValueError,)):
        check_loss_on(loss_on)
    folder = os.path.expanduser(name)
    if os.path.isfile(os.path.join(folder, MODEL_NAME)):
        if chat_template is not None:
            raise TokenizerError(f"{name}: has the project's own tokenizer and chat format; leave --chat-template out")
        return ProjectTokenizer(
            SentencePieceTokenizer(os.path.join(folder, MODEL_NAME), follow_links=False), name, loss_on, start
        )
    if chat_template is None and _is_of_project(folder):
        return ProjectTokenizer(
            load_tokenizer(os.path.join(folder, TOKENIZER_JSON), sentinels="required"), name, loss_on, start
        )
    tokenizer = _of_transformers(name, revision)
    tokens = cast(FullTokenizer, TransformersTokens(tokenizer, name))
    return TemplateTokenizer(
        TransformersBackend(tokenizer, name),
        chat_template,
        loss_on=loss_on,
        start=document_start(tokens, start),
        usual_starts=post_processor_starts(tokens),
    )


def _of_transformers(name: str, revision: str | None) -> Any:
    """Return a tokenizer of transformers. Raises: as `open_tokenizer`."""
    folder = os.path.expanduser(name)
    try:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast
    except ImportError as error:
        raise ImportError(
            f"{name}: its tokenizer needs transformers. Install the extra: pip install 'niels-gpt[eagle3]'"
        ) from error
    local = is_local(name)
    commit, is_cached = (None, True) if local else hub_tokenizer(name, revision)
    try:
        if local and not os.path.isdir(folder):
            raise NotFound("there is no such folder", code="E408")
        if local:
            refuse_large(Path(folder))
            _refuse_other_classes(Path(folder))
        has_file, has_model = (os.path.isfile(os.path.join(folder, name)) for name in (TOKENIZER_JSON, CONFIG))
        # Without a model beside it transformers 5 takes the class that tokenizer_config.json names, which may split
        # words in a way of its own: it gave other ids than the file, without a word.
        opener: Any = PreTrainedTokenizerFast if local and has_file and not has_model else AutoTokenizer
        return opener.from_pretrained(
            folder, revision=commit or revision or "main", local_files_only=is_cached, trust_remote_code=False
        )
    except ImportError as error:  # of a format that needs one more library
        raise ImportError(f"{name}: {error}") from error
    except Exception as error:  # of the hub, the library tokenizers or the tokenizer's own class
        first = str(error).strip().partition("\n")[0]
        if not is_cached and is_network(error):
            raise ConnectionError(
                f"{name}: the hub did not give its tokenizer ({first}). Run it again later"
            ) from error
        raise TokenizerError(
            f"{name}: no tokenizer can be opened there ({first}). Expected a folder with tokenizer.json or "
            f"{MODEL_NAME}, or the id of a model on the hub"
        ) from error


def _refuse_other_classes(folder: Path) -> None:
    """Raise TokenizerError for a tokenizer_class that is no tokenizer: transformers would load a model, too."""
    import transformers

    for path in (folder / CONFIG_NAME, folder / CONFIG):
        name = json.loads(path.read_bytes()).get("tokenizer_class") if path.is_file() else None
        kind = getattr(transformers, str(name), None)
        if kind is not None and not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedTokenizerBase)):
            raise TokenizerError(f"{path.name} names {shortened(name)} as tokenizer_class")


def template_tokenizer(
    tokenizer: HuggingFaceTokenizer,
    template: str | None,
    *,
    loss_on: str = "assistant",
    file: str | None = None,
    copied_from: str = "",
) -> ChatTokenizer:
    """Return a tokenizer of chats with the ids of a cache's tokenizer. It needs no transformers.

    template: text of a jinja template; None: the one in the tokenizer's folder.
    loss_on: one of turns.LOSS_ON. file: that the template was read from, for messages. copied_from: as of CacheBackend.
    Raises: ValueError for a template that is too long, and for another `loss_on`; CacheError for damaged files beside
        the tokenizer.
    """
    return TemplateTokenizer(CacheBackend(tokenizer, copied_from), template, loss_on=loss_on, file=file)


def _is_of_project(folder: str) -> bool:
    """Whether a folder has a tokenizer.json with the sentinels, and no chat template."""
    if not os.path.isfile(os.path.join(folder, TOKENIZER_JSON)):
        return False
    try:
        files = tokenizer_files(os.path.join(folder, TOKENIZER_JSON), follow_links=True)
        config = parse_object(files.get(CONFIG_NAME, b"{}"))
    except (CacheError, OSError, ValueError):  # transformers reports it
        return False
    has_sentinels = all(token.encode() in files.get(TOKENIZER_JSON, b"") for token in SPECIAL_TOKENS)
    return has_sentinels and TEMPLATE_NAME not in files and not config.get("chat_template")


class ProjectTokenizer(ChatTokenizer):
    """A tokenizer with the sentinels: ids, checks and supervised tokens as in an sft cache."""

    template_sha256: str | None = None
    mask_by: str = "sentinels"
    loss_on: str = "assistant"

    def __init__(
        self, tokenizer: FullTokenizer, name: str, loss_on: str = "assistant", start: str | None = None
    ) -> None:
        """start: as of `open_tokenizer`.

        Raises: ValueError for another `loss_on` than "assistant": in this format every reply carries loss.
        """
        if loss_on != "assistant":
            raise TokenizerError(f"{name}: loss_on={loss_on!r}: expected 'assistant' for the project's own chat format")
        self.name, self.sha256, self.vocab_size = name, tokenizer.sha256, tokenizer.vocab_size
        self._tokenizer, self._encoder = tokenizer, TextEncoder(tokenizer)
        self._special = tokenizer.special_token_ids()
        self.start = document_start(tokenizer, start)
        self.pad_id = self._special["eot"]
        self.special_token_ids = [None, self.pad_id, self.pad_id, None]
        self.special_ids = frozenset(self._special.values())

    def encode_chats(self, chats: Sequence[Chat]) -> list[EncodedChat | RefusedChat]:
        """Encode chats; one that holds a sentinel is refused.

        Raises: ValueError for an unknown role, for tools or calls, for a content that is no text, and for another
            weight than 0 and 1.
        """
        encoded = self._encoder.encode([_text_of(chat, message) for chat in chats for message in chat.messages])
        ends = np.cumsum(encoded.lengths)
        results: list[EncodedChat | RefusedChat] = []
        text = 0
        for name, messages, _ in chats:
            ids: list[int] = []
            mask: list[int] = []
            problem = None
            for message in messages:
                problem = problem or encoded.problems.get(text)
                content = encoded.ids[ends[text] - encoded.lengths[text] : ends[text]].tolist()
                ids += [self._role_id(name, message["role"]), *content, self._special["eot"]]
                mask += [0, *[int(message["role"] == "assistant" and has_weight(message))] * (len(content) + 1)]
                text += 1
            refused = None if problem is None else RefusedChat(SPECIAL_TEXT, f"chat {name!r}: {problem[1]}")
            start = self.missing_start(ids)
            results.append(refused or EncodedChat([*start, *ids], [0] * len(start) + mask))
        return results

    def plain_ids(self, chats: Sequence[Chat], *, prompt: bool) -> list[list[int] | RefusedChat]:
        """Return the ids of chats without a mask, with the assistant's sentinel behind each for a prompt."""
        more = [self._special["asst"]] * prompt
        return [each if isinstance(each, RefusedChat) else each.ids + more for each in self.encode_chats(chats)]

    def turn_ends(self) -> tuple[int, ...]:
        """Return the id of the end-of-turn sentinel."""
        return (self._special["eot"],)

    def _role_id(self, chat: str, role: str) -> int:
        if role not in ROLE_TO_NAME:
            raise TokenizerError(f"chat {chat!r}: role {role!r}, expected one of {', '.join(ROLE_TO_NAME)}")
        return self._special[ROLE_TO_NAME[role]]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, with short names such as <|eot|> for the sentinels, whose literals are long."""
        text = self._tokenizer.decode(ids)
        for literal, short in zip(SPECIAL_TOKENS, self._special, strict=True):
            text = text.replace(literal, f"<|{short}|>")
        return text


def _text_of(chat: Chat, message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if not isinstance(content, str) or calls_tools(message) or chat.tools or not is_weight(message.get("weight")):
        raise TokenizerError(
            f"chat {chat.name!r}: found tools, a call of one, a content that is no text, or a weight that is neither 0 "
            "nor 1; the project's own chat format has none of these"
        )
    return content
