"""The kind tokenizer: a folder with a model and a meta.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from niels_gpt.cache.meta import checked_meta
from niels_gpt.display.numbers import number_of, size_text
from niels_gpt.kinds.checks import SMALL_FILES, vocabulary_sums
from niels_gpt.kinds.kind import Cache, Card, Held, Kind, Page, Rows
from niels_gpt.kinds.rows import described
from niels_gpt.storage.errors import CacheError, PositionError
from niels_gpt.storage.fileio import META_NAME
from niels_gpt.storage.meta_json import shortened
from niels_gpt.storage.remedies import make_again
from niels_gpt.tokenizer import load_tokenizer
from niels_gpt.tokenizers.files import FILE_OF, MODEL_NAME, check_model
from niels_gpt.tokenizers.protocol import FullTokenizer


def _reader(_: Mapping[str, Any]) -> Iterator[str]:
    yield from ("from niels_gpt.tokenizer import load_tokenizer", "", 'tokenizer = load_tokenizer("FOLDER")')


class TokenizerKind(Kind):
    """A model, and the files that belong to it."""

    name = "tokenizer"
    keys = ("tokenizer",)
    checks = (SMALL_FILES,)
    is_small = True
    why_not: ClassVar[Mapping[str, str]] = {
        "locate": "A tokenizer holds no tokens of a text",
        "digests": "Tokenizers differ by what meta.json says of them",
        "plot": "A tokenizer has no lengths to draw",
        "formats": "A tokenizer is copied unchanged: its model is a file of SentencePiece or Hugging Face",
    }
    page = Page(
        "from niels_gpt.tokenizer import load_tokenizer\n\n"
        'tokenizer = load_tokenizer("{path}")\n'
        'ids = tokenizer.encode("A text.")',
        frozenset({"file"}),
        look="stats",
    )

    card = Card("The tokenizer of token caches", _reader)

    def remedy(self, path: Path) -> str:
        """Return the command that replaces the folder, since a build keeps an existing one."""
        return make_again(path)

    def refuse(self, cache: Cache, *, models: bool) -> None:
        """Compare the files and the opened model with meta.json."""
        folder, meta = cache.folder, cache.meta
        checked_meta(meta, str(folder / META_NAME))
        check_model(folder, meta)
        if not models:
            return
        tokenizer = load_tokenizer(folder, follow_links=False)
        known = {
            "tokenizer_kind": tokenizer.kind,
            "vocab_size": tokenizer.vocab_size,
            "special_token_ids": tokenizer.special_token_ids(),
            "control_ids": sorted(tokenizer.control_ids),
        }
        for key, value in known.items():
            if meta.get(key, value) != value:
                found = f"its {key} is {shortened(value)}, but {shortened(meta[key])} in {META_NAME}"
                raise CacheError(tokenizer.model_path, found, code="E402")

    def wrong_sums(self, cache: Cache) -> Iterator[tuple[str, str]]:
        """Compare the vocabulary and the sha256 of the model."""
        yield from vocabulary_sums(cache.meta)
        models = [record for record in cache.records if record["name"] in FILE_OF.values()]
        if [record["sha256"] for record in models] != [cache.meta["tokenizer_sha256"]]:
            name = models[0]["name"] if models else MODEL_NAME
            yield "tokenizer_sha256", f"tokenizer_sha256 is not the sha256 of {name}"

    def held(self, meta: Mapping[str, Any]) -> Held:
        """Return the number of ids."""
        return Held({"id": {"": int(meta["vocab_size"])}}, note=str(meta.get("tokenizer_kind", "")))

    def stats(self, cache: Cache, progress: Any = None) -> Rows:
        """Return the model's kind, size, special tokens and training texts."""
        meta, size = cache.meta, sum(record["bytes"] for record in cache.records)
        asked, seen = meta.get("requested_vocab_size"), meta.get("bytes_seen")
        named = ", ".join(f"{name} {number}" for name, number in (meta.get("special_token_ids") or {}).items())
        rows = [
            ("cache", f"{cache.shown} (tokenizer, built)"),
            ("kind", meta.get("tokenizer_kind", "not stated")),
            ("ids", f"{meta['vocab_size']:,}" + (f" of {asked:,} asked for" if asked else "")),
            ("sentinels", named or "none"),
            ("other special tokens", f"{len(meta.get('control_ids', [])):,} ids"),
            ("trained on", meta.get("trained_on") or "not stated"),
            *([("text seen", size_text(seen))] if isinstance(seen, int) else []),
            ("files", f"{number_of(len(cache.records), 'file')}, {size_text(size)}"),
        ]
        return [*rows, ("tokenizer", str(meta["tokenizer_sha256"])[:12])]

    def stats_data(self, cache: Cache, progress: Any = None) -> dict[str, Any]:
        """Return meta.json without its list of files."""
        return described(cache.meta)

    def show(
        self, cache: Cache, tokenizer: FullTokenizer | None, *, split: str, at: int, tokens: int, color: bool
    ) -> str:
        """Return a line for each id from `at` on: its piece, and its text."""
        found = self.show_data(cache, tokenizer, split=split, at=at, tokens=tokens)
        lines = [f"{each['id']:>8,}  {each['token']!r:24} {each['text']!r}" for each in found["ids"]]
        head = f"{cache.shown}: ids {at:,} to {at + len(lines) - 1:,} of {found['vocab_size']:,}"
        return "\n".join([head, *lines])

    def show_data(
        self, cache: Cache, tokenizer: FullTokenizer | None, *, split: str, at: int, tokens: int | None
    ) -> dict[str, Any]:
        """Return the same, ready for JSON. tokens: how many ids; None: 200."""
        model, size = load_tokenizer(cache.folder, follow_links=False), int(cache.meta["vocab_size"])
        if not 0 <= at < size:
            raise PositionError(f"position {at:,}: there are {size:,} ids, expected 0 to {size - 1:,}")
        ids = range(at, min(size, at + (200 if tokens is None else tokens)))
        named = [{"id": number, "token": model.token(number), "text": model.decode([number])} for number in ids]
        return {"kind": self.name, "vocab_size": size, "ids": named}


TOKENIZER = TokenizerKind()
