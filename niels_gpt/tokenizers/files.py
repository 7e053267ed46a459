"""The files of a tokenizer: which one decides its ids, which others belong to it, and how they are read.

spm.model               SentencePiece: decides the ids
tokenizer.json          Hugging Face: decides the ids
tokenizer_config.json   Hugging Face: the end of a text, the chat template
special_tokens_map.json Hugging Face: the end of a text
chat_template.jinja     Hugging Face: the chat template
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, Final

from niels_gpt.storage.errors import CacheError, TokenizerNotFound
from niels_gpt.storage.fileio import META_NAME, NotRegularError, open_for_reading
from niels_gpt.storage.meta_json import (
    checked_sha256,
    file_records,
    open_regular,
    parse_object,
    path_inside,
    read_regular,
)
from niels_gpt.storage.remedies import make_again

MODEL_NAME: Final = "spm.model"
TOKENIZER_JSON: Final = "tokenizer.json"
TRAIN_COMMAND: Final = "niels-gpt train-tokenizer --input-glob 'FOLDER/**/*.txt'"

MAX_MODEL_BYTES: Final = 1 << 24
"""Larger SentencePiece models are refused: 16 MiB. A vocabulary of 262,144 pieces takes 4.7 MB."""
MAX_TOKENIZER_JSON_BYTES: Final = 1 << 27
"""Larger tokenizer.json are refused: 128 MiB. One of 256,000 ids with its merges takes 34 MB."""

CONFIG_NAME: Final = "tokenizer_config.json"
TOKENS_MAP_NAME: Final = "special_tokens_map.json"
TEMPLATE_NAME: Final = "chat_template.jinja"
COMPANIONS: Final = (CONFIG_NAME, TOKENS_MAP_NAME, TEMPLATE_NAME)
"""Files beside a tokenizer.json that belong to it; they decide no id."""
MAX_COMPANION_BYTES: Final = 1 << 23
TOOL_TEMPLATE_NAME: Final = "additional_chat_templates/tool_use.jinja"
"""Another chat template, for chats with tools, as transformers saves a second one. It is not copied into caches."""

FILE_OF: Final = {"sentencepiece": MODEL_NAME, "huggingface": TOKENIZER_JSON}
"""The file that decides the ids, by the kind of tokenizer."""
_REMOVE = "Remove it from the folder, or put a copy of the real file there"
UPSTREAM_MODELS = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")  # SentencePiece, as on the hub
BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
"""Some editors write it first; JSON has none, and the library tokenizers refuses it."""
_PARTS = frozenset(("vocab.json", "vocab.txt", "merges.txt", "added_tokens.json", *COMPANIONS))  # no model in itself
_BEGINNING = 4096  # bytes of a file that tell JSON from a model


def is_json(beginning: bytes) -> bool:
    """Whether a file with this beginning is JSON, and so no SentencePiece model."""
    return beginning.removeprefix(BYTE_ORDER_MARK).lstrip()[:1] in (b"{", b"[")


def read_file(path: str | os.PathLike[str], max_bytes: int, what: str, *, follow_links: bool) -> bytes:
    """Return the bytes of a regular file; does not block on a FIFO.

    what: the file, for the error of one that is larger than `max_bytes`.
    Raises: FileNotFoundError; CacheError for a larger file, for what is no regular file, and unless `follow_links` for
        a link and for a sparse file.
    """
    try:
        handle = open_for_reading(path, follow_links=True) if follow_links else open_regular(path)
    except NotRegularError as error:
        remedy = _REMOVE if Path(path).name in COMPANIONS else "Name the file or folder of a tokenizer"
        raise CacheError(path, "is not a regular file", remedy=remedy, code="E205") from error
    except CacheError as error:
        if os.path.lexists(Path(path).with_name(META_NAME)):  # of a cache, which can be built again
            raise
        if os.path.islink(path):
            remedy = "Name the file itself, or pass --follow-links"
            raise CacheError(
                path, "is a link", "a file: links in a folder are not followed", remedy, code="E205"
            ) from error
        found = "is a sparse file" if error.code == "E203" else "is not a regular file"
        raise CacheError(path, found, remedy=_REMOVE, code="E205") from error
    with open(handle, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise CacheError(path, f"{size:,} bytes", f"{what} of {max_bytes:,} at most", code="E206")
        return file.read(size)


def tokenizer_file(path: str | os.PathLike[str]) -> tuple[Path, str]:
    """Return the file that decides the ids of a tokenizer, and its kind, of KINDS in protocol.py.

    path: this file or its folder. A folder that has both kinds is of the kind that its meta.json names; without one it
        is refused. In a folder without spm.model and tokenizer.json, tokenizer.model, spiece.model and
        sentencepiece.bpe.model count, in this order.
    Raises: FileNotFoundError; CacheError.
    """
    if not os.path.isdir(path):
        if Path(path).name in _PARTS and os.path.isfile(path):
            whole = Path(path).with_name(TOKENIZER_JSON)
            remedy = f"Name {whole}" if whole.is_file() else f"Name a {TOKENIZER_JSON} or a SentencePiece model"
            raise CacheError(path, "is a part of a tokenizer, without its model", remedy=remedy, code="E403")
        return Path(path), "huggingface" if _begins_as_json(path) else "sentencepiece"
    folder = Path(path)
    there = [kind for kind, name in FILE_OF.items() if os.path.lexists(folder / name)]
    if len(there) == 2:
        there = [kind for kind in there if kind == _kind_in_meta(folder)]
        if not there:
            found, expected = f"has both {MODEL_NAME} and {TOKENIZER_JSON}", "one of them"
            raise CacheError(folder, found, expected, "Name the file itself instead of its folder", code="E403")
    if not there:
        upstream = next((name for name in UPSTREAM_MODELS if os.path.lexists(folder / name)), None)
        if upstream is None:
            missing = f"{folder / MODEL_NAME}: there is no tokenizer model, and no {TOKENIZER_JSON} beside"
            raise TokenizerNotFound(f"{missing}. Train one: {TRAIN_COMMAND}")
        return folder / upstream, "sentencepiece"
    return folder / FILE_OF[there[0]], there[0]


def tokenizer_files(path: str | os.PathLike[str], *, follow_links: bool = False) -> dict[str, bytes]:
    """Return the files of a tokenizer by the names that they have in a cache: first the one that decides its ids.

    path: a file or a folder, as for `tokenizer_file`. follow_links: True for a snapshot of the hub, False in a cache.
    Raises: FileNotFoundError; CacheError for a file that is too large, and for a link unless `follow_links`.
    """
    file, kind = tokenizer_file(path)
    if kind == "sentencepiece":
        return {MODEL_NAME: read_file(file, MAX_MODEL_BYTES, "a SentencePiece model", follow_links=follow_links)}
    files = {TOKENIZER_JSON: read_file(file, MAX_TOKENIZER_JSON_BYTES, TOKENIZER_JSON, follow_links=follow_links)}
    for name in COMPANIONS:
        if (raw := companion(file, name, follow_links=follow_links)) is not None:
            files[name] = raw
    return files


def companion(file: Path, name: str, *, follow_links: bool) -> bytes | None:
    """Return the file of COMPANIONS beside a tokenizer.json; None if there is none. Raises as `tokenizer_files`."""
    try:
        return read_file(file.parent / name, MAX_COMPANION_BYTES, name, follow_links=follow_links)
    except FileNotFoundError:
        return None


def _begins_as_json(path: str | os.PathLike[str]) -> bool:
    try:
        with open(open_for_reading(path, follow_links=True), "rb") as file:
            return is_json(file.read(_BEGINNING))
    except (FileNotFoundError, NotRegularError):  # the adapter reports it
        return Path(path).suffix == ".json"


def _kind_in_meta(folder: Path) -> str | None:
    try:
        kind = parse_object(read_regular(folder / META_NAME)).get("tokenizer_kind")
    except FileNotFoundError:
        return None
    return kind if isinstance(kind, str) else None


def check_model(tokenizer: Path, meta: dict[str, Any], remedy: str = "") -> None:
    """Raise CacheError unless the files in a tokenizer's folder have the checksums in its meta.json.

    remedy: what to do; "": remove the tokenizer and build.
    """
    remedy = remedy or make_again(tokenizer)
    expected = {record["name"]: record["sha256"] for record in file_records(meta, str(tokenizer / META_NAME))}
    name = next(iter(expected), MODEL_NAME)
    if (of_ids := meta.get("tokenizer_sha256")) is not None:
        checked_sha256(of_ids, "tokenizer_sha256", str(tokenizer / META_NAME))
    expected[name] = of_ids  # of the file that decides the ids; other tools may record no files
    for name, sha256 in expected.items():
        if not os.path.lexists(tokenizer / name):
            raise CacheError(tokenizer / name, "no such file", "a file of the tokenizer", remedy, code="E204")
        actual = hashlib.sha256(read_regular(path_inside(tokenizer, name), MAX_TOKENIZER_JSON_BYTES)).hexdigest()
        if sha256 not in (None, actual):
            found = f"its sha256 is {actual[:12]}"
            raise CacheError(tokenizer / name, found, f"{sha256[:12]}, as in its {META_NAME}", remedy, code="E403")
    for name in COMPANIONS if TOKENIZER_JSON in expected else ():
        if name not in expected and os.path.lexists(tokenizer / name):  # it would change what ends a document
            raise CacheError(tokenizer / name, f"is not in its {META_NAME}", remedy=remedy, code="E403")
