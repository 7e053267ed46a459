"""The tokens that begin and end each document: chosen from a tokenizer, and read from a cache's meta.json.

The settings are `document_start` and `document_end`; the first token may also begin each chat of an EAGLE-3 cache, by
the setting `eagle3_document_start`.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from niels_gpt.special_tokens import SPECIAL_TOKEN_NAMES, SPECIAL_TOKENS
from niels_gpt.storage.meta_json import wrong_value
from niels_gpt.tokenizers.protocol import FullTokenizer, Tokenizer, control_ids, id_in, special_id_in

CHOICES = ("auto", "eot", "eos", "none")
"""The choices that are not a token's literal."""

_KNOWN_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|end|>")  # for the text of an error
_NEAR = 4  # tokens in the text of an error


@dataclass(frozen=True)
class DocumentToken:
    """A token that begins or ends a document."""

    token: str
    """The vocabulary's literal."""
    id: int

    @property
    def record(self) -> dict[str, int | str]:
        """Return the record in meta.json and in a plan."""
        return {"id": self.id, "token": self.token}


def document_start(tokenizer: FullTokenizer, choice: str | None = "auto") -> DocumentToken | None:
    """Return the token that begins a document; None for no token.

    choice: "auto" for the token that the tokenizer's own post-processor writes before a text; "none" or None; or a
        token's literal.
    Raises: ValueError for a token that the tokenizer lacks, naming similar ones; for "auto" if the post-processor
        writes several tokens.
    """
    if choice in (None, "none"):
        return None
    if choice != "auto":
        if (known := tokenizer.token_id(str(choice))) is None:
            raise ValueError(f"{tokenizer.model_path}: no token to begin a document with: {_near(tokenizer, choice)}")
        return DocumentToken(tokenizer.token(known), known)
    starts = post_processor_starts(tokenizer)
    if len(starts) > 1:
        names = ", ".join(ascii(each.token) for each in starts)
        raise ValueError(
            f"{tokenizer.model_path}: its post-processor begins a text with {len(starts)} tokens, {names}. Name the "
            "one that begins a document: --document-start TOKEN"
        )
    return starts[0] if starts else None


def post_processor_starts(tokenizer: Tokenizer) -> list[DocumentToken]:
    """Return the tokens that a tokenizer.json's post-processor writes before a text; [] for any other tokenizer."""
    ids: tuple[int, ...] = getattr(tokenizer, "start_ids", ())
    return [DocumentToken(tokenizer.token(each), each) for each in ids]  # type: ignore[attr-defined]


def missing_start_text(what: str, starts: Sequence[DocumentToken], flag: str) -> str:
    """Return the text of a warning that documents or chats begin without the tokens of `post_processor_starts`.

    what: "documents" or "chats". flag: the option that decides how they begin.
    """
    names = " ".join(ascii(each.token)[1:-1] for each in starts)
    choice = "auto" if len(starts) == 1 else shlex.quote(starts[0].token)
    return (
        f"its {what} begin without {names}, which the tokenizer's own post-processor writes before a text. To write "
        f"it: {flag} {choice}. To leave it out: {flag} none"
    )


def document_end(tokenizer: FullTokenizer, choice: str = "auto") -> DocumentToken | None:
    """Return the token that ends a document; None for no token.

    choice: "eot", the sentinel; "eos", the tokenizer's own EOS; "none"; a token's literal; or "auto": eot for a
        tokenizer with the sentinels, else eos.
    Raises: ValueError for a token that the tokenizer lacks, naming one that it has.
    """
    if choice == "none":
        return None
    eot, eos = tokenizer.special_token_ids().get("eot"), tokenizer.eos_id
    if choice in CHOICES:
        chosen = {"eot": eot, "eos": eos, "auto": eos if eot is None else eot}[choice]
    else:
        chosen = tokenizer.token_id(choice)
    if chosen is not None:
        return DocumentToken(tokenizer.token(chosen), chosen)
    named: str | None = getattr(tokenizer, "eos_token", None)
    no_eos = (
        "its files name no eos_token" if named is None else f"its files name eos_token {named!a}, which is no token"
    )
    names = {"eot": "it has no sentinels", "eos": no_eos, "auto": no_eos}
    why = names.get(choice, f"it has no token {choice!a}")
    text = f"{tokenizer.model_path}: no token to end a document with: {why}. {_remedy(tokenizer)}"
    raise ValueError(text)


def _near(tokenizer: FullTokenizer, choice: str | None) -> str:
    """Return an error text that names the added and control tokens most similar to `choice`."""
    from difflib import get_close_matches

    added = getattr(tokenizer, "added_tokens", dict[str, bool])()
    known = dict.fromkeys([*added, *(tokenizer.token(each) for each in sorted(control_ids(tokenizer)))])
    names = [each for each in known if each.isprintable()]
    shown = (get_close_matches(str(choice), names, n=_NEAR) or names[:_NEAR]) + ["auto", "none"]
    return f"it has no token {choice!a}. Pass one that it has: --document-start {' or '.join(map(shlex.quote, shown))}"


def _remedy(tokenizer: FullTokenizer) -> str:
    known = [token for token in _KNOWN_ENDS if tokenizer.token_id(token) is not None]
    control = [tokenizer.token(each) for each in sorted(tokenizer.control_ids)]
    token = next((each for each in (*known, *control) if each.isprintable()), None)
    named = "" if token is None else f"--document-end {shlex.quote(token)} for this token, or "
    return f"Pass {named}--document-end none for no token"


def end_of_documents(meta: Mapping[str, Any] | None, where: str) -> tuple[int, str] | None:
    """Return id and literal of the token after each document of a pretrain cache; None without one.

    Caches of an earlier version have the key `append_eot` instead, for the end-of-turn sentinel.
    Raises: CacheError E202 for a wrong value.
    """
    keys = meta or {}
    if keys.get("document_end") is None:
        eot = special_id_in(keys, "eot", where) if keys.get("append_eot") is True else None
        return None if eot is None else (eot, SPECIAL_TOKENS[SPECIAL_TOKEN_NAMES.index("eot")])
    return _document_token(keys, "document_end", where)


def start_of_documents(meta: Mapping[str, Any] | None, where: str) -> tuple[int, str] | None:
    """Return id and literal of the token before each document of a pretrain cache; None without one.

    Raises: CacheError E202 for a wrong value.
    """
    return _document_token(meta or {}, "document_start", where)


def _document_token(keys: Mapping[str, Any], key: str, where: str) -> tuple[int, str] | None:
    known = keys.get(key)
    if known is None:
        return None
    if not isinstance(known, dict) or not isinstance(known.get("token"), str):
        verb = key.removeprefix("document_")
        raise wrong_value(where, key, known, f"null, or the id and the token that {verb} a document")
    return id_in(keys, known.get("id"), f"{key}.id", where), known["token"]
