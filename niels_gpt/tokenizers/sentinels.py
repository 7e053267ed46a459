"""Give an existing tokenizer the four sentinels, as ids after its own, so that it can encode chats."""

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

_MOST_COPIES = 100  # names to try for a copy


@dataclass(frozen=True)
class Extended:
    """A tokenizer with the sentinels, and its size before."""

    model_path: str
    """spm.model or tokenizer.json in the new folder."""
    tokenizer_kind: str
    """sentencepiece or huggingface."""
    tokenizer_sha256: str
    special_token_ids: dict[str, int]
    """The ids of the sentinels by sys, usr, asst and eot."""
    vocab_size: int
    vocab_size_before: int


def add_sentinels(path: str | os.PathLike[str], out: str | os.PathLike[str], *, follow_links: bool = False) -> Extended:
    """Write a copy of a tokenizer with the four sentinels; its own tokens keep their ids.

    A tokenizer.json gets special added tokens, a SentencePiece model user-defined pieces. Files beside a tokenizer.json
    are copied.

    path: the file, or its folder.
    out: the new folder; complete or absent, even after a crash.
    follow_links: whether files in a folder may be links; a named file may be one.
    Raises: InTheWay E504 if `out` exists; ValueError if the tokenizer has the sentinels; TokenizerNotFound E401;
        CacheError E403, E205 or E206 if it cannot be opened, E210 if it changes meanwhile, E404 if the sentinels would
        get other ids.
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
    """Return a folder's name for the copy of a tokenizer, and whether that copy exists.

    name: the tokenizer's file, folder or hub id. opened: the path of its files.
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
    """Refuse a copy with other ids than `before`, which has no sentinels, beside the new ones."""
    size = before.vocab_size
    expected = list(range(size, size + len(SPECIAL_TOKENS)))
    same = all(before.token(token_id) == after.token(token_id) for token_id in range(size))
    if not same or list(after.special_token_ids().values()) != expected:
        found = f"would give the sentinels the ids {list(after.special_token_ids().values())}, or change other tokens"
        raise CacheError(source, found, f"{expected}, and no other change", code="E404")
    if [before.encode(text) for text in PROBES] != [after.encode(text) for text in PROBES]:
        raise CacheError(source, "would give texts other ids", "the same ids for texts without a sentinel", code="E404")
