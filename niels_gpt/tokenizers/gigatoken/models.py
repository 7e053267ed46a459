"""Which tokenizers gigatoken knows, and the tokenizer.json that it opens for one."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from hashlib import sha256
from importlib.util import find_spec
from typing import Any, Final

from niels_gpt.storage.errors import CacheError
from niels_gpt.tokenizers.files import BYTE_ORDER_MARK, MAX_TOKENIZER_JSON_BYTES, read_file
from niels_gpt.tokenizers.huggingface import is_of_library
from niels_gpt.tokenizers.protocol import FullTokenizer

INSTALL: Final = "pip install 'niels-gpt[fast]'"
SHOWN: Final = 200
"""Characters of an error of the library that a message shows."""
_BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")
_SPACES = ["Replace"]
_PREFIX_AND_SPACES = ["Prepend", "Replace"]


@dataclass(frozen=True)
class Model:
    """What gigatoken opens for a tokenizer."""

    json: bytes
    """A tokenizer.json."""
    composes: bool
    """Whether the tokenizer composes characters (NFC). The normalizer in `json` does not."""
    literals: tuple[str, ...]
    """Of the added tokens, or of the control and user-defined pieces of SentencePiece."""


class UnusableError(Exception):
    """gigatoken cannot encode with a tokenizer."""

    def __init__(self, reason: str, remedy: str = "", *, code: str = "E411", is_usual: bool = False) -> None:
        """is_usual: it is for no tokenizer of this kind, and nobody would expect it to."""
        super().__init__(reason)
        self.reason, self.remedy, self.code, self.is_usual = reason, remedy, code, is_usual


def is_bpe(tokenizer: FullTokenizer) -> bool:
    """Whether gigatoken would probably know a tokenizer, without having it: SentencePiece's models are left out."""
    raw = read_file(tokenizer.model_path, MAX_TOKENIZER_JSON_BYTES, "a tokenizer", follow_links=True)
    return tokenizer.kind == "huggingface" and re.search(rb'"type"\s*:\s*"BPE"', raw) is not None


def model_of(tokenizer: FullTokenizer) -> Model:
    """Return what gigatoken opens for a tokenizer: its tokenizer.json, or one made from a SentencePiece model.

    Raises: UnusableError for a model that is not BPE, or that gigatoken would encode differently; CacheError.
    """
    if find_spec("gigatoken") is None:
        raise UnusableError("gigatoken is not installed", INSTALL, code="E901")
    path = tokenizer.model_path
    raw = read_file(path, MAX_TOKENIZER_JSON_BYTES, "a tokenizer", follow_links=True)
    if sha256(raw).hexdigest() != tokenizer.sha256:
        remedy = "Do not change the tokenizer during a run, and start again"
        raise CacheError(path, "has changed since it was opened", remedy=remedy, code="E402")
    if tokenizer.kind == "sentencepiece":
        return _of_sentencepiece(raw)
    content = json.loads(raw)  # the library tokenizers has read it, so it has the expected form
    if content["model"].get("type") != "BPE":
        raise UnusableError(f"its model is {content['model'].get('type')!a}, not BPE")
    if any(content["model"].get(key) for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")):
        raise UnusableError("its model has dropout, a prefix or a suffix of its pieces")
    added = content.get("added_tokens") or []
    if any(token.get("single_word") for token in added):
        raise UnusableError("it has added tokens that are whole words only (single_word)")
    literals = tuple(token["content"] for token in added)
    parts = _normalizers(content.get("normalizer"))
    unknown = next((each["type"] for each in parts if each["type"] not in ("NFC", "Replace", "Prepend")), None)
    if unknown is not None:
        raise UnusableError(f"it normalizes text by {unknown!a}")
    kept = [each for each in parts if each["type"] != "NFC"]
    if len(kept) == len(parts):
        return Model(raw.removeprefix(BYTE_ORDER_MARK), composes=False, literals=literals)
    content["normalizer"] = {"type": "Sequence", "normalizers": kept} if kept else None
    return Model(json.dumps(content).encode(), composes=True, literals=literals)


def _normalizers(normalizer: Any) -> list[Any]:
    if normalizer is None:
        return []
    if normalizer["type"] != "Sequence":
        return [normalizer]
    return [part for each in normalizer["normalizers"] for part in _normalizers(each)]


def _of_sentencepiece(raw: bytes) -> Model:
    try:
        from gigatoken._load.sentencepiece import sentencepiece_to_tokenizer_json
    except ImportError:  # a private module
        raise UnusableError("this version of gigatoken is not known here", INSTALL) from None
    try:
        content = json.loads(sentencepiece_to_tokenizer_json(raw))
    except ValueError as error:  # unigram, or without byte fallback
        raise UnusableError(str(error)[:SHOWN], is_usual=True) from None
    types = [each["type"] for each in _normalizers(content["normalizer"])]
    literals = {each["content"] for each in content["added_tokens"] if not each["special"]}
    if types not in (_SPACES, _PREFIX_AND_SPACES):
        raise UnusableError("its model normalizes text (SentencePiece's rule is not identity)")
    if literals and types == _PREFIX_AND_SPACES:
        raise UnusableError("its model has user-defined pieces and a dummy prefix")
    if any(" " in literal or "\u2581" in literal for literal in literals):
        raise UnusableError("its model has user-defined pieces with spaces")
    # SentencePiece gives control pieces for no text, and merges into pieces that are normal ones only.
    special = {each["content"] for each in content["added_tokens"]}
    content["added_tokens"] = [each for each in content["added_tokens"] if not each["special"]]
    content["model"]["merges"] = [
        [left, right]
        for left, right in content["model"]["merges"]
        if left + right not in special and _BYTE_PIECE.fullmatch(left + right) is None
    ]
    return Model(json.dumps(content).encode(), composes=False, literals=tuple(sorted(special)))


def opened(model: Model) -> Any:
    """Return gigatoken's tokenizer with a model. Raises: UnusableError."""
    from gigatoken import Tokenizer

    try:
        return Tokenizer.from_json(model.json)
    except BaseException as error:
        if not is_of_library(error):
            raise
        first_line = str(error).partition("\n")[0]
        raise UnusableError(f"gigatoken does not know it ({first_line[:SHOWN]!a})") from error
