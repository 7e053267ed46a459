"""The files of a tokenizer: which one decides its ids, which others belong to it, and how they are read.

spm.model               SentencePiece: decides the ids
tokenizer.json          Hugging Face: decides the ids
tokenizer_config.json   Hugging Face: the token that ends a text, the chat template
special_tokens_map.json Hugging Face: the token that ends a text
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
"""The largest SentencePiece model that is opened: 16 MiB. A vocabulary of 262,144 pieces takes 4.7 MB."""
MAX_TOKENIZER_JSON_BYTES: Final = 1 << 27
"""The largest tokenizer.json that is opened: 128 MiB. One of 256,000 ids with its merges takes 34 MB."""

CONFIG_NAME: Final = "tokenizer_config.json"
TOKENS_MAP_NAME: Final = "special_tokens_map.json"
TEMPLATE_NAME: Final = "chat_template.jinja"
COMPANIONS: Final = (CONFIG_NAME, TOKENS_MAP_NAME, TEMPLATE_NAME)
"""Files beside a tokenizer.json that belong to it; they decide no id."""
MAX_COMPANION_BYTES: Final = 1 << 23
TOOL_TEMPLATE_NAME: Final = "additional_chat_templates/tool_use.jinja"
"""A second chat template, for chats with tools, where transformers saves it. Caches have no copy of it."""

FILE_OF: Final = {"sentencepiece": MODEL_NAME, "huggingface": TOKENIZER_JSON}
"""The file that decides the ids, by the kind of tokenizer."""
_REMOVE = "Remove it from the folder, or put a copy of the real file there"
UPSTREAM_MODELS = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")  # SentencePiece, as on the hub
BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
"""Some editors begin a file with it. JSON forbids it, and the library tokenizers refuses it."""
_PARTS = frozenset(("vocab.json", "vocab.txt", "merges.txt", "added_tokens.json", *COMPANIONS))  # without a model
_BEGINNING = 4096  # bytes of a file that are enough to tell JSON from a model


def is_json(beginning: bytes) -> bool:
    """Return whether a file that begins so is JSON, and not a SentencePiece model."""
    return beginning.removeprefix(BYTE_ORDER_MARK).lstrip()[:1] in (b"{", b"[")


def read_file(path: str | os.PathLike[str], max_bytes: int, what: str, *, follow_links: bool) -> bytes:
    """Return the bytes of a regular file; do not block on a FIFO.

    what: the kind of file, for the error of one that is too large.
    Raises: FileNotFoundError; CacheError E206 for more than `max_bytes`; CacheError E205 if it is not a regular file,
        and, without `follow_links`, if it is a link or sparse.
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
    """Return the file that decides the ids of a tokenizer, and the kind: sentencepiece or huggingface.

    path: the file or its folder. If a folder has both kinds of files, its meta.json names the kind. If it has neither
        spm.model nor tokenizer.json, the first of tokenizer.model, spiece.model and sentencepiece.bpe.model counts.
    Raises: TokenizerNotFound E401 without such a file; CacheError E403 for both kinds without a meta.json, and for a
        file without a model, such as merges.txt.
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
    """Return the bytes of a tokenizer's files by their names in a cache; the first decides the ids.

    path: a file or a folder, see `tokenizer_file`. follow_links: True for a snapshot of the hub, False in a cache.
    Raises: TokenizerNotFound E401 without a tokenizer; CacheError E403 if it is unclear which, E205 for a link without
        `follow_links` and anything but a regular file, E206 for a file that is too large.
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
    """Return the bytes of one of COMPANIONS beside a tokenizer.json; None without it. Raises: CacheError E205, E206."""
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
    """Check the files in a tokenizer's folder against the checksums in its meta.json.

    remedy: the way out, for the message; "" for: remove the tokenizer and build.
    Raises: CacheError E204 for an absent file; E403 for another checksum, or a file that meta.json does not list.
    """
    expected = {record["name"]: record["sha256"] for record in file_records(meta, str(tokenizer / META_NAME))}
    name = next(iter(expected), MODEL_NAME)
    if (of_ids := meta.get("tokenizer_sha256")) is not None:
        checked_sha256(of_ids, "tokenizer_sha256", str(tokenizer / META_NAME))
    expected[name] = of_ids  # the file that decides the ids; other tools may list no files
    for name, sha256 in expected.items():
        if not os.path.lexists(tokenizer / name):
            again = remedy or make_again(tokenizer)
            raise CacheError(tokenizer / name, "no such file", "a file of the tokenizer", again, code="E204")
        actual = hashlib.sha256(read_regular(path_inside(tokenizer, name), MAX_TOKENIZER_JSON_BYTES)).hexdigest()
        if sha256 not in (None, actual):
            found, again = f"its sha256 is {actual[:12]}", remedy or make_again(tokenizer)
            raise CacheError(tokenizer / name, found, f"{sha256[:12]}, as in its {META_NAME}", again, code="E403")
    for name in COMPANIONS if TOKENIZER_JSON in expected else ():
        if name not in expected and os.path.lexists(tokenizer / name):  # it would change what ends a document
            again = remedy or make_again(tokenizer)
            raise CacheError(tokenizer / name, f"is not in its {META_NAME}", remedy=again, code="E403")
