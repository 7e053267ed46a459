"""The tokenizer beneath a chat template: one of transformers, or that of a cache, which needs no transformers.

Both give the ids of their own library and the offsets of each token; for the same files their ids are equal.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from niels_gpt.hub.models import is_local
from niels_gpt.storage.errors import CacheError, TokenizerError
from niels_gpt.storage.fileio import META_NAME
from niels_gpt.storage.meta_json import parse_object, read_regular
from niels_gpt.tokenizers.files import (
    COMPANIONS,
    CONFIG_NAME,
    TEMPLATE_NAME,
    TOKENS_MAP_NAME,
    TOOL_TEMPLATE_NAME,
    companion,
)
from niels_gpt.tokenizers.huggingface import HuggingFaceTokenizer
from niels_gpt.tokenizers.protocol import ids_before

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The tokens that a template has as variables."""
_TOOL_FILE = "tool_use.jinja"  # written by the command of an error
_SHOWN = 20  # names of templates, and characters of each, in a message
Tokens = tuple[list[int], list[tuple[int, int]]]
"""Ids of a text, and start and end of each token in characters."""


class Backend(Protocol):
    """What a template needs of a tokenizer."""

    name: str
    """Folder or hub id, for messages."""
    sha256: str
    """Of the tokenizer."""
    template: str | None
    """Its own chat template."""
    tool_template: str
    """How to name the other one that it has for chats with tools; "": it has none."""
    variables: Mapping[str, str]
    """Of a template: bos_token and so on."""
    added_tokens: Sequence[str]
    """Literals of all added tokens."""
    special_tokens: frozenset[str]
    """Literals of those that are special, and of the variables."""
    vocab_size: int
    """All ids are below it."""
    special_token_ids: list[int | None]
    """bos, eos, pad, unk."""

    def encoded(self, texts: list[str]) -> list[Tokens]:
        """Return the tokens of each text, without BOS and EOS of a post-processor."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included."""


class TransformersBackend(Backend):
    """A fast tokenizer of transformers."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        """tokenizer: from AutoTokenizer. Raises: ValueError for one that gives no offsets."""
        if not tokenizer.is_fast:
            raise TokenizerError(
                f"{name}: {type(tokenizer).__name__} gives no offsets of its tokens, expected a fast tokenizer, with a "
                "file tokenizer.json: AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER) may write one"
            )
        self.name, self._tokenizer = name, tokenizer
        self.sha256 = hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()
        self.template = tokenizer.get_chat_template() if tokenizer.chat_template else None
        has_two = isinstance(tokenizer.chat_template, dict) and "tool_use" in tokenizer.chat_template
        templates = f"AutoTokenizer.from_pretrained({json.dumps(name)}).chat_template"
        code = f'from transformers import AutoTokenizer; print({templates}["tool_use"], end="")'
        of_hub = f"python -c {shlex.quote(code)} > {_TOOL_FILE}; --chat-template {_TOOL_FILE}"
        self.tool_template = _named(name, of_hub) if has_two else ""
        self.variables = dict(tokenizer.special_tokens_map)
        added = list(tokenizer.added_tokens_decoder.values())
        self.added_tokens = [token.content for token in added]
        special = (token.content for token in added if token.special)
        self.special_tokens = frozenset((*special, *tokenizer.all_special_tokens))
        self.vocab_size = max(tokenizer.get_vocab().values()) + 1
        self.special_token_ids = [getattr(tokenizer, f"{kind}_token_id") for kind in ("bos", "eos", "pad", "unk")]

    def encoded(self, texts: list[str]) -> list[Tokens]:
        """Return the tokens of each text."""
        if not texts:
            return []
        encoded = self._tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return list(zip(encoded["input_ids"], encoded["offset_mapping"], strict=True))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


class TransformersTokens:
    """The tokens of a fast tokenizer of transformers by their names, as `document_start` looks one up."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        """tokenizer: from AutoTokenizer. name: folder or hub id, for messages."""
        self.model_path, self._tokenizer = name, tokenizer
        self.control_ids = frozenset(tokenizer.all_special_ids)

    @cached_property
    def start_ids(self) -> tuple[int, ...]:
        """The ids that the tokenizer itself writes before a text, such as BOS; () for none."""
        try:
            whole, plain = (self._tokenizer("a", add_special_tokens=each)["input_ids"] for each in (True, False))
        except Exception:  # of the library tokenizers, for a model that does not know the letter
            return ()
        return ids_before(whole, plain)

    def added_tokens(self) -> list[str]:
        """Return the literals of all added tokens."""
        return [token.content for token in self._tokenizer.added_tokens_decoder.values()]

    def token_id(self, literal: str) -> int | None:
        """Return the id of a token by its literal; None if there is none."""
        found: int | None = self._tokenizer.get_vocab().get(literal)
        return found

    def token(self, token_id: int) -> str:
        """Return the literal of an id."""
        return str(self._tokenizer.convert_ids_to_tokens(token_id))


class CacheBackend(Backend):
    """The tokenizer.json of a cache, with the template and the named tokens of the files beside it."""

    def __init__(self, tokenizer: HuggingFaceTokenizer, copied_from: str = "") -> None:
        """copied_from: file, folder or id of the hub that the tokenizer was copied from, for messages.

        Raises: CacheError for files that are damaged, or have named templates without one that is the default.
        """
        self._tokenizer = tokenizer
        self.name, self.sha256 = os.path.dirname(tokenizer.model_path), tokenizer.sha256
        path = Path(tokenizer.model_path)
        files = {name: companion(path, name, follow_links=tokenizer.follow_links) for name in COMPANIONS}
        config, named = (_object_of(files[name], path.with_name(name)) for name in (CONFIG_NAME, TOKENS_MAP_NAME))
        self.template, has_two = _template_of(files[TEMPLATE_NAME], config, path.parent)
        of_hub = f"hf download {copied_from} {TOOL_TEMPLATE_NAME} --local-dir .; --chat-template {TOOL_TEMPLATE_NAME}"
        origin = self.name if has_two else copied_from or os.path.join(".", "FOLDER")
        self.tool_template = _named(origin, of_hub) if has_two or has_tool_template(path) else ""
        self.variables = _variables({**config, **({} if "added_tokens_decoder" in config else named)})
        added = tokenizer.added_tokens()
        self.added_tokens = list(added)
        special = [literal for literal, is_special in added.items() if is_special]
        special += _added_by(config, tokenizer, path.with_name(CONFIG_NAME))
        self.special_tokens = frozenset((*special, *self.variables.values()))
        self.vocab_size = tokenizer.vocab_size
        literals = [self.variables.get(f"{kind}_token") for kind in ("bos", "eos", "pad", "unk")]
        self.special_token_ids = [None if each is None else tokenizer.token_id(each) for each in literals]

    def encoded(self, texts: list[str]) -> list[Tokens]:
        """Return the tokens of each text."""
        return self._tokenizer.encode_with_offsets(texts)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""
        return self._tokenizer.decode(ids)


def has_tool_template(file: Path) -> bool:
    """Whether another chat template, for chats with tools, lies beside a tokenizer.json, or lay there when this one was
    copied: caches have no such file, only `tool_template` in their meta.json."""
    if os.path.isfile(file.parent / TOOL_TEMPLATE_NAME):
        return True
    try:
        return parse_object(read_regular(file.parent / META_NAME)).get("tool_template") is True
    except (CacheError, OSError, ValueError):
        return False


def _named(name: str, of_hub: str) -> str:
    """Return the flag that names the template for chats with tools; before it the command that writes it to a file.

    name: of the tokenizer: its folder, a file in it, or an id of the hub, for which `of_hub` is returned.
    """
    folder = Path(os.path.expanduser(name))
    if not is_local(name) and not folder.exists():
        return of_hub
    folder = folder.parent if folder.is_file() else folder
    if (folder / TOOL_TEMPLATE_NAME).is_file() or not (folder / CONFIG_NAME).is_file():
        return f"--chat-template {shlex.quote(str(folder / TOOL_TEMPLATE_NAME))}"
    templates = f'json.load(open({json.dumps(str(folder / CONFIG_NAME))}))["chat_template"]'
    code = f'import json; print({{each["name"]: each["template"] for each in {templates}}}["tool_use"], end="")'
    return f"python -c {shlex.quote(code)} > {_TOOL_FILE}; --chat-template {_TOOL_FILE}"


def _object_of(raw: bytes | None, path: Path) -> dict[str, Any]:
    try:
        return {} if raw is None else parse_object(raw)
    except ValueError as error:
        raise CacheError(path, str(error), "a JSON object", code="E403") from error


def _added_by(config: Mapping[str, Any], tokenizer: HuggingFaceTokenizer, path: Path) -> list[str]:
    """Return the special tokens that a tokenizer_config.json names beside those of the variables.

    Raises: CacheError for one that tokenizer.json has not, or with another id: transformers would add it, and a
        template that writes it would give other ids here.
    """
    decoder = config.get("added_tokens_decoder")
    special = []
    for token_id, token in decoder.items() if isinstance(decoder, dict) else ():
        literal = token.get("content") if isinstance(token, dict) else None
        if not isinstance(literal, str) or str(tokenizer.token_id(literal)) != token_id:
            found = (
                f"adds the token {ascii(literal)[:_SHOWN]} as {ascii(token_id)[:_SHOWN]}, which tokenizer.json has not"
            )
            remedy = "Save it again: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(OTHER)"
            raise CacheError(path, found, "the tokens of tokenizer.json with their ids", remedy, code="E403")
        if token.get("special"):
            special.append(literal)
    for name in ("additional_special_tokens", "extra_special_tokens"):
        more = config.get(name)
        named = more.values() if isinstance(more, dict) else more if isinstance(more, list) else ()
        literals = (each.get("content") if isinstance(each, dict) else each for each in named)
        special += [literal for literal in literals if isinstance(literal, str)]
    return special


def _variables(config: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name in _NAMED:
        token = config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            found[name] = token
    return found


def _template_of(file: bytes | None, config: Mapping[str, Any], folder: Path) -> tuple[str | None, bool]:
    """Return the chat template, and whether the config has another one for chats with tools."""
    if file is not None:
        try:
            return file.decode(), False
        except UnicodeDecodeError as error:
            raise CacheError(folder / TEMPLATE_NAME, str(error), "a text in UTF-8", code="E403") from error
    found = config.get("chat_template")
    if isinstance(found, list):  # as configs have them: [{"name": ..., "template": ...}]
        pairs = [each for each in found if isinstance(each, dict)]
        found = {each.get("name"): each.get("template") for each in pairs if isinstance(each.get("name"), str)}
    if not isinstance(found, dict):
        if not isinstance(found, str | None):
            expected = "a text, or a list of names and templates"
            raise CacheError(folder / CONFIG_NAME, "its chat_template is no text", expected, code="E403")
        return found, False
    if not isinstance(found.get("default"), str):
        names = f"chat templates named {', '.join(ascii(name)[:_SHOWN] for name in list(found)[:_SHOWN])}"
        remedy = "Name a file with the one to use: --chat-template FILE"
        raise CacheError(folder / CONFIG_NAME, names, "one named default", remedy, code="E403")
    return found["default"], "tool_use" in found
