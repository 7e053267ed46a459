"""Opens a target's tokenizer, and encodes chats to ids and loss mask.

Which roles are accepted: by the project's own tokenizer those of ROLE_TO_NAME in chat_template.py; by a template of
transformers those that it does not raise an error for, and of these `assistant` carries loss. templates.py finds which
characters of a chat carry loss; a token is supervised if it holds one of them, by its offsets, so a token that merges
across the edge of a reply is supervised.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from niels_gpt.chat.prefix_tokens import checked_edges, first_difference, mask_of
from niels_gpt.chat.template_process import Messages
from niels_gpt.chat.templates import LEADING_REPLY, REMEDY, ChatTemplate, RefusedChat, Rendered
from niels_gpt.chat_template import ROLE_TO_NAME
from niels_gpt.encoding import TextEncoder
from niels_gpt.hub.models import hub_tokenizer, is_local, refuse_large
from niels_gpt.hub.retries import is_network
from niels_gpt.special_tokens import SPECIAL_TOKENS
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.meta_json import parse_object
from niels_gpt.tokenizer import MODEL_NAME, SentencePieceTokenizer, load_tokenizer
from niels_gpt.tokenizers.files import CONFIG_NAME, TEMPLATE_NAME, TOKENIZER_JSON, tokenizer_files
from niels_gpt.tokenizers.protocol import FullTokenizer

SPECIAL_TEXT = "special_text"
"""Counter of chats in which a message holds the literal of a special token, which would become that token's id."""
_DECODED = 8  # tokens whose text is shown in a message about a difference
_ALL_CHECKED, _CHECKED_EVERY = 1000, 100  # the chats whose prefixes are tokenized too: the first ones, then every 100th


class EncodedChat(NamedTuple):
    """One chat."""

    ids: list[int]
    """Of the whole chat, neither shifted nor padded nor truncated."""
    mask: list[int]
    """1 at each id that carries loss, 0 elsewhere; as long as `ids`."""
    merged: bool = False
    """Whether a supervised token also holds characters outside of the replies."""
    unsupervised: tuple[str, ...] = ()
    """Why a reply in it carries no loss: LEADING_REPLY, EMPTY_REPLY of templates.py."""


class ChatTokenizer(Protocol):
    """A target's tokenizer together with its chat template."""

    name: str
    """Folder or hub id that it was opened from."""
    sha256: str
    """Of the tokenizer."""
    template_sha256: str | None
    """Of the template's text; None for the project's chat format, and where there is no template."""
    mask_by: str
    """How the supervised tokens are found: generation, prefix, sentinels, or given where there is no template."""
    vocab_size: int
    """All ids are below it."""
    pad_id: int
    """The id that rows are padded with."""
    special_token_ids: list[int | None]
    """bos, eos, pad, unk."""

    def encode_chats(self, chats: Sequence[tuple[str, Messages]]) -> list[EncodedChat | RefusedChat]:
        """Encode chats, id and messages, together. Raises: ValueError for a template that cannot be used.

        Such a template is also found with no chats.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included."""

    def encode_chat(self, messages: Messages) -> tuple[list[int], list[int]]:
        """Return ids and mask of one chat. Raises: ValueError for a chat or a template that cannot be used."""
        encoded = self.encode_chats([("0", messages)])[0]
        if isinstance(encoded, RefusedChat):
            raise ValueError(f"{self.name}: {encoded.reason}: {encoded.found}")
        return encoded.ids, encoded.mask


def open_tokenizer(name: str, *, revision: str | None = None, chat_template: str | None = None) -> ChatTokenizer:
    """Open a target's tokenizer.

    name: a folder, or an id on the hub. A folder with spm.model, or with a tokenizer.json that has the sentinels and no
        chat template, has the project's chat format.
    revision: commit, tag or branch on the hub.
    chat_template: text of a jinja template to use instead of the tokenizer's own.
    Raises: ValueError where there is no tokenizer, or one without offsets, and for what the hub does not have, or does
        not give to this user; ConnectionError where the hub does not answer; ImportError without transformers.
    """
    folder = os.path.expanduser(name)
    if os.path.isfile(os.path.join(folder, MODEL_NAME)):
        if chat_template is not None:
            raise ValueError(f"{name}: has the project's own tokenizer and chat format; leave --chat-template out")
        return ProjectTokenizer(SentencePieceTokenizer(os.path.join(folder, MODEL_NAME), follow_links=False), name)
    if chat_template is None and _is_of_project(folder):
        return ProjectTokenizer(load_tokenizer(os.path.join(folder, TOKENIZER_JSON), sentinels="required"), name)
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ImportError(
            f"{name}: its tokenizer needs transformers. Install the extra: pip install 'niels-gpt[eagle3]'"
        ) from error
    local = is_local(name)
    commit, is_cached = (None, True) if local else hub_tokenizer(name, revision)
    try:
        if local and not os.path.isdir(folder):
            raise FileNotFoundError("there is no such folder")
        if local:
            refuse_large(Path(folder))
        tokenizer = AutoTokenizer.from_pretrained(
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
        raise ValueError(
            f"{name}: no tokenizer can be opened there ({first}). Expected a folder with tokenizer.json or "
            f"{MODEL_NAME}, or the id of a model on the hub"
        ) from error
    return TransformersTokenizer(tokenizer, name, chat_template)


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

    def __init__(self, tokenizer: FullTokenizer, name: str) -> None:
        self.name, self.sha256, self.vocab_size = name, tokenizer.sha256, tokenizer.vocab_size
        self._tokenizer, self._encoder = tokenizer, TextEncoder(tokenizer)
        self._special = tokenizer.special_token_ids()
        self.pad_id = self._special["eot"]
        self.special_token_ids = [None, self.pad_id, self.pad_id, None]

    def encode_chats(self, chats: Sequence[tuple[str, Messages]]) -> list[EncodedChat | RefusedChat]:
        """Encode chats; one that holds a sentinel is refused. Raises: ValueError for an unknown role."""
        encoded = self._encoder.encode([message["content"] for _, messages in chats for message in messages])
        ends = np.cumsum(encoded.lengths)
        results: list[EncodedChat | RefusedChat] = []
        text = 0
        for name, messages in chats:
            ids: list[int] = []
            mask: list[int] = []
            problem = None
            for message in messages:
                problem = problem or encoded.problems.get(text)
                content = encoded.ids[ends[text] - encoded.lengths[text] : ends[text]].tolist()
                ids += [self._role_id(name, message["role"]), *content, self._special["eot"]]
                mask += [0, *[int(message["role"] == "assistant")] * (len(content) + 1)]
                text += 1
            refused = None if problem is None else RefusedChat(SPECIAL_TEXT, f"chat {name!r}: {problem[1]}")
            results.append(refused or EncodedChat(ids, mask))
        return results

    def _role_id(self, chat: str, role: str) -> int:
        if role not in ROLE_TO_NAME:
            raise ValueError(f"chat {chat!r}: role {role!r}, expected one of {', '.join(ROLE_TO_NAME)}")
        return self._special[ROLE_TO_NAME[role]]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, with short names such as <|eot|> for the sentinels, whose literals are long."""
        text = self._tokenizer.decode(ids)
        for literal, short in zip(SPECIAL_TOKENS, self._special, strict=True):
            text = text.replace(literal, f"<|{short}|>")
        return text


class TransformersTokenizer(ChatTokenizer):
    """A fast tokenizer of transformers with a chat template."""

    def __init__(self, tokenizer: Any, name: str, chat_template: str | None) -> None:
        """tokenizer: from AutoTokenizer. Raises: ValueError for one that gives no offsets."""
        if not tokenizer.is_fast:
            raise ValueError(
                f"{name}: {type(tokenizer).__name__} gives no offsets of its tokens, expected a fast tokenizer, with a "
                "file tokenizer.json: AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER) may write one"
            )
        self.name = name
        self.sha256 = hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()
        self._tokenizer = tokenizer
        self._num_encoded = 0
        text = tokenizer.get_chat_template() if tokenizer.chat_template and chat_template is None else chat_template
        added = list(tokenizer.added_tokens_decoder.values())
        ends = tuple(token.content for token in added if token.content.strip())
        self._template = ChatTemplate(name, text, dict(tokenizer.special_tokens_map), ends, self._difference)
        self.template_sha256 = self._template.sha256
        self.mask_by = self._template.mask_by
        # Added tokens that are not special, such as <think>, are text that a chat may hold.
        special = {token.content for token in added if token.special} | set(tokenizer.all_special_tokens)
        literals = sorted(literal for literal in special if literal.strip())
        self._literal = re.compile("|".join(map(re.escape, literals)) or r"(?!)")
        self.vocab_size = max(tokenizer.get_vocab().values()) + 1
        pads = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        self.pad_id = next(token for token in pads if token is not None)
        self.special_token_ids = [getattr(tokenizer, f"{kind}_token_id") for kind in ("bos", "eos", "pad", "unk")]

    def encode_chats(self, chats: Sequence[tuple[str, Messages]]) -> list[EncodedChat | RefusedChat]:
        """Encode chats; one whose messages hold a special token's literal, or that the template refuses, is refused.

        Where the template has no marks, this checks that tokenization is prefix-stable: the tokens of a chat's text up
        to each reply, and up to its end, must be the first tokens of the whole chat. The last word before the edge and
        the white space around it may differ, for they can merge with what follows. The mask does not depend on it. The
        check takes half as long as tokenizing for chats of one reply, and four times as long for four replies. So it is
        made for the first 1000 chats and then for every 100th, at the first 16 edges and the last.

        Raises: ValueError without a template; for one that `ChatTemplate` refuses, or that marks no token of a chat
            with a reply; and for a tokenizer that is not prefix-stable.
        """
        self._template.check()
        rendered = self._rendered(chats)
        pairs = zip((name for name, _ in chats), rendered, strict=True)
        encoded = iter(self._encoded([(name, each) for name, each in pairs if not isinstance(each, RefusedChat)]))
        results = [each if isinstance(each, RefusedChat) else next(encoded) for each in rendered]
        for (name, messages), result in zip(chats, results, strict=True):
            self._check_mask(name, messages, result)
        return results

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _rendered(self, chats: Sequence[tuple[str, Messages]]) -> list[Rendered | RefusedChat]:
        refused = [self._special_text(name, messages) for name, messages in chats]
        kept = [
            (name, [{**message, "content": _encodable(message["content"])} for message in messages])
            for (name, messages), problem in zip(chats, refused, strict=True)
            if problem is None
        ]
        rendered = self._template.rendered_all(kept)
        return [problem or next(rendered) for problem in refused]

    def _special_text(self, name: str, messages: Messages) -> RefusedChat | None:
        for message in messages:
            if literal := self._literal.search(message["content"]):
                return RefusedChat(
                    SPECIAL_TEXT, f"a message of chat {name!r} holds the special token {literal.group()}"
                )
        return None

    def _encoded(self, rendered: list[tuple[str, Rendered]]) -> list[EncodedChat]:
        chats = []
        tokens = self._tokens([each.text for _, each in rendered])
        for (name, each), (ids, offsets) in zip(rendered, tokens, strict=True):
            mask, merged = mask_of(np.asarray(offsets, dtype=np.int64).reshape(-1, 2), each.spans)
            chats.append(EncodedChat(ids, mask.astype(np.uint8).tolist(), merged, each.unsupervised))
            if self._num_encoded < _ALL_CHECKED or self._num_encoded % _CHECKED_EVERY == 0:
                self._check_prefixes(name, each, ids, offsets)
            self._num_encoded += 1
        return chats

    def _check_prefixes(self, name: str, rendered: Rendered, ids: list[int], offsets: list[tuple[int, int]]) -> None:
        text = rendered.text
        edges = checked_edges(rendered.edges, text)
        for edge, (alone, _) in zip(edges, self._tokens([text[:edge] for edge in edges]), strict=True):
            at = first_difference(ids, offsets, text, edge, alone)
            if at is not None:
                raise ValueError(
                    f"{self.name}: its tokenizer gives the beginning of a chat other tokens than the chat. Chat "
                    f"{name!r}, token {at}: {self.decode(alone[at : at + _DECODED])!r} in its first {edge} characters "
                    f"alone, and {self.decode(ids[at : at + _DECODED])!r} in all of it. {REMEDY}"
                )

    def _tokens(self, texts: list[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Return ids and offsets of each text."""
        if not texts:
            return []
        encoded = self._tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return list(zip(encoded["input_ids"], encoded["offset_mapping"], strict=True))

    def _difference(self, text: str, other: str) -> tuple[int, str, str]:
        left, right = (ids for ids, _ in self._tokens([text, other]))
        pairs = enumerate(zip(left, right, strict=False))
        at = next((place for place, (one, two) in pairs if one != two), min(len(left), len(right)))
        return at, self.decode(left[at : at + _DECODED]), self.decode(right[at : at + _DECODED])

    def _check_mask(self, name: str, messages: Messages, result: EncodedChat | RefusedChat) -> None:
        if isinstance(result, RefusedChat) or any(result.mask):
            return
        supervised = messages[1:] if LEADING_REPLY in result.unsupervised else messages
        if any(message["role"] == "assistant" and message["content"].strip() for message in supervised):
            raise ValueError(
                f"{self.name}: its chat template marks not one of the {len(result.ids)} tokens of chat {name!r}, which "
                f"has a reply. {REMEDY}"
            )


def _encodable(text: str) -> str:
    """Return a text with U+FFFD for each lone surrogate, which utf-8 cannot hold."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
