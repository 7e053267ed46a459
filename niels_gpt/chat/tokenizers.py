"""Open the tokenizer of a target or a cache, for chats.

A target has the project's own tokenizer, with the roles of chat_template.py, or one of transformers. A cache has
a copy of its tokenizer's files, which needs no transformers. With a chat template, the template decides the roles.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np

from niels_gpt.chat.chats import calls_tools, check_loss_on, has_weight
from niels_gpt.chat.protocol import SPECIAL_TEXT, Chat, ChatTokenizer, EncodedChat, RefusedChat
from niels_gpt.chat.template_tokenizer import Backend, TemplateTokenizer, Tokens
from niels_gpt.chat_template import ROLE_TO_NAME, is_weight
from niels_gpt.encoding import TextEncoder
from niels_gpt.hub.models import CONFIG, hub_tokenizer, is_local, refuse_large
from niels_gpt.hub.retries import is_network
from niels_gpt.special_tokens import SPECIAL_TOKENS
from niels_gpt.storage.errors import CacheError, NotFound, TokenizerError, errors_as
from niels_gpt.storage.fileio import META_NAME
from niels_gpt.storage.meta_json import parse_object, read_regular, shortened
from niels_gpt.tokenizer import MODEL_NAME, SentencePieceTokenizer, load_tokenizer
from niels_gpt.tokenizers.document_tokens import document_start, post_processor_starts
from niels_gpt.tokenizers.files import (
    COMPANIONS,
    CONFIG_NAME,
    TEMPLATE_NAME,
    TOKENIZER_JSON,
    TOKENS_MAP_NAME,
    TOOL_TEMPLATE_NAME,
    companion,
    tokenizer_files,
)
from niels_gpt.tokenizers.huggingface import HuggingFaceTokenizer
from niels_gpt.tokenizers.library import needs_transformers
from niels_gpt.tokenizers.protocol import FullTokenizer, ids_before

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The tokens that a template can use as variables."""
_TOOL_FILE = "tool_use.jinja"  # the file that the command in an error message writes
_SHOWN = 20  # names of templates, and characters of each, in a message


def open_tokenizer(
    name: str,
    *,
    revision: str | None = None,
    chat_template: str | None = None,
    loss_on: str = "assistant",
    start: str | None = None,
) -> ChatTokenizer:
    """Open a target's tokenizer.

    name: a folder, or a hub id. A folder has the project's chat format if it has spm.model, or a tokenizer.json with
        the sentinels and no chat template.
    revision: commit, tag or branch on the hub.
    chat_template: text of a jinja template that replaces the tokenizer's own.
    loss_on: which of the assistant's turns carry loss, a member of LOSS_ON; only "assistant" for the project's format.
    start: the token that begins each chat, unless the template writes it: a choice of `document_start`.
    Raises: TokenizerError E408 if there is no tokenizer, it gives no offsets, or an argument does not fit it;
        ValueError if it lacks the token `start`, and for an unknown `loss_on`; HubRefusal E602 if the hub refuses it;
        ConnectionError if the hub does not answer; ImportError without transformers.
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
    """Open a tokenizer of transformers, from a folder or the hub."""
    folder = os.path.expanduser(name)
    try:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast
    except ImportError as error:
        raise needs_transformers(f"{name}: its tokenizer") from error
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
    """Raise TokenizerError E408 if a config names a class that is not a tokenizer; transformers would load a model."""
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
    """Return a tokenizer of chats with the ids of a cache's tokenizer, without transformers.

    template: text of a jinja template; None for the one in the tokenizer's folder.
    loss_on: which of the assistant's turns carry loss, a member of LOSS_ON.
    file: the template's file, for messages.
    copied_from: file, folder or hub id that the tokenizer was copied from, for messages.
    Raises: TemplateError E407 if the template is too long; ValueError E407 for an unknown `loss_on`; CacheError E403 if
        a file beside the tokenizer is damaged, or has named templates and none is the default.
    """
    return TemplateTokenizer(CacheBackend(tokenizer, copied_from), template, loss_on=loss_on, file=file)


def _is_of_project(folder: str) -> bool:
    """Return whether a folder has a tokenizer.json with the sentinels, and no chat template."""
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
    """A tokenizer with the sentinels: the same ids, checks and supervised tokens as in an sft cache."""

    template_sha256: str | None = None
    mask_by: str = "sentinels"
    loss_on: str = "assistant"

    def __init__(
        self, tokenizer: FullTokenizer, name: str, loss_on: str = "assistant", start: str | None = None
    ) -> None:
        """Take a tokenizer and its name. start: a choice of `document_start`.

        Raises: TokenizerError E408 unless `loss_on` is "assistant": in this format every reply carries loss.
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
        """Encode chats; refuse a chat that holds a sentinel.

        Raises: TokenizerError E408 for an unknown role, tools, a call, a content that is not text, or a weight other
            than 0 and 1.
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
        """Return the ids of chats; a prompt ends in the assistant's sentinel."""
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
        """Return the text of ids, with <|eot|> and so on for the sentinels, since their literals are long."""
        text = self._tokenizer.decode(ids)
        for literal, short in zip(SPECIAL_TOKENS, self._special, strict=True):
            text = text.replace(literal, f"<|{short}|>")
        return text


def _text_of(chat: Chat, message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if not isinstance(content, str) or calls_tools(message) or chat.tools or not is_weight(message.get("weight")):
        raise TokenizerError(
            f"chat {chat.name!r}: found tools, a call of one, content that is not text, or a weight that is neither 0 "
            "nor 1; the project's own chat format has none of these"
        )
    return content


class TransformersBackend(Backend):
    """A fast tokenizer of transformers."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        """tokenizer: from AutoTokenizer. Raises: TokenizerError E408 if it gives no offsets."""
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
    """The tokens of a fast tokenizer of transformers, by the methods of FullTokenizer that `document_start` calls."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        """tokenizer: from AutoTokenizer. name: folder or hub id, for messages."""
        self.model_path, self._tokenizer = name, tokenizer
        self.control_ids = frozenset(tokenizer.all_special_ids)

    @cached_property
    def start_ids(self) -> tuple[int, ...]:
        """The ids that the tokenizer itself writes before a text, such as BOS."""
        try:
            whole, plain = (self._tokenizer("a", add_special_tokens=each)["input_ids"] for each in (True, False))
        except Exception:  # of the library tokenizers: the model does not know the letter
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
    """The tokenizer.json of a cache; the files beside it have the template and the named tokens."""

    def __init__(self, tokenizer: HuggingFaceTokenizer, copied_from: str = "") -> None:
        """copied_from: file, folder or hub id that the tokenizer was copied from, for messages.

        Raises: CacheError E403 if a file is damaged, or has named templates and none is the default.
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
    """Return whether a second chat template, for chats with tools, belongs to a tokenizer.json.

    A cache has no copy of that file; `tool_template` in its meta.json says that there was one.
    """
    if os.path.isfile(file.parent / TOOL_TEMPLATE_NAME):
        return True
    try:
        return parse_object(read_regular(file.parent / META_NAME)).get("tool_template") is True
    except (CacheError, OSError, ValueError):
        return False


def _named(name: str, of_hub: str) -> str:
    """Return the flag that selects the template for chats with tools, after the command that writes its file, if any.

    name: the tokenizer's folder, a file in it, or a hub id, for which `of_hub` is returned.
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
    """Return the special tokens that a tokenizer_config.json names, without the template's variables.

    Raises: CacheError E403 for a token that tokenizer.json lacks, or has with another id: transformers would add it,
        and a template that writes it would give other ids here.
    """
    decoder = config.get("added_tokens_decoder")
    special = []
    for token_id, token in decoder.items() if isinstance(decoder, dict) else ():
        literal = token.get("content") if isinstance(token, dict) else None
        if not isinstance(literal, str) or str(tokenizer.token_id(literal)) != token_id:
            found = (
                f"adds the token {ascii(literal)[:_SHOWN]} as {ascii(token_id)[:_SHOWN]}, which tokenizer.json lacks"
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
    """Return the chat template, and whether the config has a second one for chats with tools."""
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
            raise CacheError(folder / CONFIG_NAME, "its chat_template is not text", expected, code="E403")
        return found, False
    if not isinstance(found.get("default"), str):
        names = f"chat templates named {', '.join(ascii(name)[:_SHOWN] for name in list(found)[:_SHOWN])}"
        remedy = "Name a file with the one to use: --chat-template FILE"
        raise CacheError(folder / CONFIG_NAME, names, "one named default", remedy, code="E403")
    return found["default"], "tool_use" in found
