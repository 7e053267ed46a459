"""The kind of draft vocabularies: a file of the target's ids that a draft knows, and a meta.json."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from niels_gpt.display.numbers import share_text
from niels_gpt.kinds.files import FileChecks, Record
from niels_gpt.kinds.kind import CHECK_RECORDS, CHECKED_RECORDS, Cache, Card, Finding, Held, Kind, Limits, Page, Rows
from niels_gpt.kinds.rows import described
from niels_gpt.storage.checks import Check, Figures
from niels_gpt.storage.errors import PositionError
from niels_gpt.storage.fileio import META_NAME, canonical_json
from niels_gpt.storage.meta_json import wrong_value

_IDS = 200  # printed where the caller does not say how many
_SHOWN_IDS = 10  # a line


def _mapping_fits(files: FileChecks, limits: Limits, figures: Figures) -> Iterator[Finding]:
    yield from files.size_damages()
    yield from (damages := list(files.sha256_damages()))
    if damages:
        return  # its content disagrees with meta.json
    meta = files.meta
    _load(files.folder, meta)
    ids, of, coverage = meta["draft_vocab_size"], meta["target_vocab_size"], meta["coverage"]
    figures.say(
        f"The draft knows {ids:,} of the target's {of:,} tokens: {share_text(coverage)} of the supervised ones.",
        tokens=ids,
        coverage=coverage,
    )


def _load(folder: Any, meta: Mapping[str, Any]) -> list[int]:
    """Return the target's id of each draft token. Raises: CacheError if the file contradicts meta.json."""
    from niels_gpt.eagle3.vocab import load_token_mapping

    for name, kinds in (("target_vocab_size", (int,)), ("draft_vocab_size", (int,)), ("coverage", (int, float))):
        if type(meta.get(name)) not in kinds:
            raise wrong_value(str(folder / META_NAME), name, meta.get(name), "a number")
    sizes = {name: meta[name] for name in ("target_vocab_size", "draft_vocab_size")}
    ids, _ = load_token_mapping(folder, **sizes)
    return [int(number) for number in ids]


def _reader(meta: Mapping[str, Any]) -> Iterator[str]:
    sizes = ", ".join(f"{name}={int(meta[name])}" for name in ("target_vocab_size", "draft_vocab_size"))
    yield from ("from niels_gpt.eagle3.vocab import load_token_mapping", "")
    yield f'selected_token_ids, _ = load_token_mapping("FOLDER", {sizes})'
    yield from ("", "# without this library", "import json", "")
    yield from ('with open("FOLDER/draft_vocab.json") as file:', '    ids = json.load(file)["selected_token_ids"]')


def _of_draft_vocab(meta: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "target", str(meta["target_model"])
    yield "draft's tokens", f"{int(meta['draft_vocab_size']):,} of {int(meta['target_vocab_size']):,}"
    yield "supervised tokens that are among them", f"{float(meta['coverage']):.2%}"
    yield from ((name.replace("_", " "), f"{int(number):,}") for name, number in sorted(meta["totals"].items()))


class DraftVocabKind(Kind):
    """The tokens that a draft knows."""

    name = "draft_vocab"
    keys = ("eagle3/draft_vocab",)
    checks = (
        Check(
            "mapping_fits",
            "The file of tokens has the bytes that meta.json names, and as many distinct ids of the target as it says.",
            rule=_mapping_fits,
        ),
    )
    is_small = True
    counted = "samples"
    why_not: ClassVar[Mapping[str, str]] = {
        "locate": "A draft vocabulary holds no tokens of a text",
        "digests": "Draft vocabularies differ by their ids and by what meta.json says of them",
        "plot": "Its coverage is one number: see stats",
        "formats": "Its file is the one that nemo-automodel reads",
    }
    page = Page(
        "from niels_gpt.cache import read_meta\nfrom niels_gpt.eagle3.vocab import load_token_mapping\n\n"
        'size = read_meta("{path}/meta.json")["target_vocab_size"]\n'
        'ids, is_known = load_token_mapping("{path}", target_vocab_size=size, draft_vocab_size=None)',
        frozenset({"json"}),
        look="stats",
        columns=(
            ("selected_token_ids", "int64 [D]", "draft id -> id of the target"),
            ("selected_token_mask", "bool [V]", "which ids of the target the draft knows"),
        ),
    )

    card = Card(
        "The tokens of a target model that a draft knows",
        _reader,
        figures=_of_draft_vocab,
        check=CHECK_RECORDS,
        checked=CHECKED_RECORDS,
    )

    def content_sha256(self, records: Sequence[Record]) -> str:
        """Return the sha256 of the records as canonical JSON."""
        return hashlib.sha256(canonical_json(list(records))).hexdigest()

    def refuse(self, cache: Cache, *, models: bool) -> None:
        """Load the ids as a draft does."""
        _load(cache.folder, cache.meta)

    def held(self, meta: Mapping[str, Any]) -> Held:
        """Return the number of ids, and the share of the supervised tokens that they cover."""
        note = f"{meta['coverage']:.2%} of the supervised tokens"
        return Held({"id": {"": int(meta["draft_vocab_size"])}}, note=note)

    def stats(self, cache: Cache, progress: Any = None) -> Rows:
        """Return the coverage, and the samples that were counted."""
        meta, totals, source = cache.meta, cache.meta["totals"], cache.meta["source"]
        return [
            ("cache", f"{cache.shown} (draft_vocab, built)"),
            ("target", meta["target_model"]),
            ("tokens", f"{meta['draft_vocab_size']:,} of the target's {meta['target_vocab_size']:,}"),
            ("coverage", f"{meta['coverage']:.2%} of {totals['supervised_tokens']:,} supervised tokens"),
            ("samples", f"{totals['samples']:,}, of {totals['tokens']:,} tokens"),
            ("dropped", ", ".join(f"{reason} {number:,}" for reason, number in meta["dropped"].items()) or "none"),
            *((name, source.get(name) or "not stated") for name in ("input_data", "licence", "attribution")),
            ("tokenizer", meta["tokenizer_sha256"][:12]),
        ]

    def stats_data(self, cache: Cache, progress: Any = None) -> dict[str, Any]:
        """Return meta.json without its list of files."""
        return described(cache.meta)

    def show(self, cache: Cache, tokenizer: Any, *, split: str, at: int, tokens: int, color: bool) -> str:
        """Return target ids in the order of the draft's, with their text if there is a tokenizer."""
        found = self.show_data(cache, tokenizer, split=split, at=at, tokens=tokens)
        ids = [each["target_id"] for each in found["ids"]]
        head = f"{cache.shown}: draft ids {at:,} to {at + len(ids) - 1:,} of {found['draft_vocab_size']:,}"
        if tokenizer is not None:
            return "\n".join([head, *(f"{each['target_id']:>8,}  {each['token']!r}" for each in found["ids"])])
        lines = (ids[first : first + _SHOWN_IDS] for first in range(0, len(ids), _SHOWN_IDS))
        return "\n".join([head, *(" ".join(map(str, line)) for line in lines)])

    def show_data(self, cache: Cache, tokenizer: Any, *, split: str, at: int, tokens: int | None) -> dict[str, Any]:
        """Return the same, ready for JSON."""
        ids = _load(cache.folder, cache.meta)
        if not 0 <= at < len(ids):
            raise PositionError(f"position {at:,}: there are {len(ids):,} ids, expected 0 to {len(ids) - 1:,}")
        some = range(at, min(len(ids), at + (_IDS if tokens is None else tokens)))
        named = [{"draft_id": number, "target_id": ids[number]} for number in some]
        if tokenizer is not None:
            named = [{**each, "token": tokenizer.token(each["target_id"])} for each in named]
        return {"kind": self.name, "draft_vocab_size": len(ids), "ids": named}


DRAFT_VOCAB = DraftVocabKind()
