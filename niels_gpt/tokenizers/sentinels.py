"""Give an existing tokenizer the four sentinels, as the ids after its own, so that chats can be encoded with it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from niels_gpt.special_tokens import SPECIAL_TOKENS
from niels_gpt.storage import fileio
from niels_gpt.storage.errors import CacheError, InTheWay
from niels_gpt.tokenizer import load_tokenizer
from niels_gpt.tokenizers.files import FILE_OF, UPSTREAM_MODELS, tokenizer_file, tokenizer_files
from niels_gpt.tokenizers.probes import PROBES
from niels_gpt.tokenizers.protocol import FullTokenizer
from niels_gpt.tokenizers.sentencepiece_proto import with_pieces

_MOST_COPIES = 100  # names that are tried for one


@dataclass(frozen=True)
class Extended:
    """A tokenizer with the sentinels, and what it was before."""

    model_path: str
    """spm.model or tokenizer.json in the new folder."""
    tokenizer_kind: str
    """Of KINDS in protocol.py."""
    tokenizer_sha256: str
    special_token_ids: dict[str, int]
    """Of the sentinels, by sys, usr, asst and eot."""
    vocab_size: int
    vocab_size_before: int


def add_sentinels(path: str | os.PathLike[str], out: str | os.PathLike[str], *, follow_links: bool = False) -> Extended:
    """Write a copy of a tokenizer that has the four sentinels; the ids of its own tokens stay.

    path: a SentencePiece model, a tokenizer.json, or a folder with one. A tokenizer.json gets special added tokens, a
        model user-defined pieces; the files beside a tokenizer.json are copied.
    follow_links: whether the files in a folder may be links; a file that is named may be one.
    out: the new folder. It is complete or absent.
    Raises: FileExistsError for an existing `out`; ValueError for a tokenizer that has the sentinels; FileNotFoundError
        and CacheError as `load_tokenizer`; CacheError for a tokenizer that would give the sentinels other ids.
    """
    final = Path(out).absolute()
    if os.path.lexists(final):
        text = f"{final}: is there already, and is not overwritten. Name a new folder, or move it away"
        raise InTheWay(text)
    source, kind = tokenizer_file(path)
    follow_links = follow_links or not os.path.isdir(path)
    before = load_tokenizer(source, follow_links=follow_links)
    if before.special_token_ids():
        raise ValueError(f"{source}: has the four sentinels already")
    files = tokenizer_files(source, follow_links=follow_links)
    name = FILE_OF[kind]
    if hashlib.sha256(files[name]).hexdigest() != before.sha256:
        raise CacheError(source, "was changed while it was read", remedy="Run the command again", code="E210")
    if kind == "sentencepiece":
        files[name] = with_pieces(files[name], SPECIAL_TOKENS)
    else:
        files[name] = _with_added_tokens(files[name], before.vocab_size)
    temporary = final.with_name(f".{final.name}.{secrets.token_hex(4)}.tmp")
    try:
        fileio.make_dir(temporary)
        for each, content in files.items():
            fileio.write_bytes(temporary / each, content)
        after = load_tokenizer(temporary, sentinels="required")
        _check(before, after, source)
        fileio.rename(temporary, final)
    except BaseException:
        fileio.remove(temporary)
        raise
    ids, sizes = after.special_token_ids(), (after.vocab_size, before.vocab_size)
    return Extended(str(final / name), kind, after.sha256, ids, *sizes)


def folder_of_copy(name: str, opened: str | os.PathLike[str]) -> tuple[str, bool]:
    """Return the name of a folder for the copy of a tokenizer, and whether the copy is there already.

    name: of the tokenizer, a file, a folder or an id of the hub. opened: where its files are.
    """
    named = Path(os.path.abspath(name))
    of_folder = named.is_file() and named.name in (*FILE_OF.values(), *UPSTREAM_MODELS)
    stem = f"{(named.parent if of_folder else named).name.removesuffix('.model')}_with_sentinels"
    for number in range(1, _MOST_COPIES):
        out = stem if number == 1 else f"{stem}_{number}"
        if not os.path.lexists(out):
            break
        with contextlib.suppress(CacheError, OSError):
            before, after = load_tokenizer(opened, follow_links=True), load_tokenizer(out, sentinels="required")
            _check(before, after, Path(out))
            return out, True
    return out, False


def _with_added_tokens(raw: bytes, first: int) -> bytes:
    content: dict[str, Any] = json.loads(raw)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"] = [
        *(content.get("added_tokens") or []),
        *({"id": first + at, "content": token, **flags, "special": True} for at, token in enumerate(SPECIAL_TOKENS)),
    ]
    return json.dumps(content, ensure_ascii=False).encode() + b"\n"


def _check(before: FullTokenizer, after: FullTokenizer, source: Path) -> None:
    """Refuse a copy that gives another id than it should; `before` has no sentinels."""
    size = before.vocab_size
    expected = list(range(size, size + len(SPECIAL_TOKENS)))
    same = all(before.token(token_id) == after.token(token_id) for token_id in range(size))
    if not same or list(after.special_token_ids().values()) != expected:
        found = f"would give the sentinels the ids {list(after.special_token_ids().values())}, or change other tokens"
        raise CacheError(source, found, f"{expected}, and no other change", code="E404")
    if [before.encode(text) for text in PROBES] != [after.encode(text) for text in PROBES]:
        raise CacheError(source, "would give texts other ids", "the same ids for texts without a sentinel", code="E404")
