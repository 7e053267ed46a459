"""Where each source comes from under the current settings: its dataset, its files or revision, its licence."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from niels_gpt.data import gutenberg, hub, local, places, roam, snapshot, wikitext
from niels_gpt.data.credits import CREDITS, Credit, credit_of
from niels_gpt.fileio import CacheError, canonical_json
from niels_gpt.recipes.own import UNSTATED, OwnSource, own_sources, text_suffixes
from niels_gpt.settings import Settings


@dataclass(frozen=True)
class Origin:
    """Where one source comes from."""

    source: str
    """fineweb_edu, wikitext, roam, gutenberg, dolly15k, oasst1, or the name of one of one's own."""
    dataset: str
    """The hub's dataset id, or the source's own name; dataset_name in meta.json."""
    config: str | None
    """The hub's config; dataset_config in meta.json."""
    kind: str
    """hub (a snapshot of it included), mirror, sample or own."""
    streaming: bool
    """Whether the hub is streamed; files are not."""
    credit: Credit
    """Of the text, where no dataset card says otherwise."""
    root: Path | None = None
    """Folder that the files are named relative to; None on the hub."""
    files: tuple[Path, ...] = ()
    """What is read, in order; empty on the hub."""
    stub: bool = False
    """Whether nothing is read: gutenberg, unless there is a folder of it or gutenberg_from_hub is set (PR-03)."""
    asked_revision: str | None = None
    """What the settings want of the hub: a commit, a tag or a branch; None: main."""
    shuffle: Mapping[str, int] | None = None
    """The hub library's shuffle: seed and buffer; None where rows keep upstream's order."""
    manifest: Mapping[str, Any] | None = None
    """Of the snapshot that the files are."""
    own: OwnSource | None = None
    """What its user says of a source of one's own."""
    other_files: int = 0
    """Files that match its pattern but are of a kind that is not read."""
    other_kinds: tuple[tuple[str, int], ...] = ()
    """The suffixes of those, each with their number."""
    links: tuple[Path, ...] = ()
    """Links among the files, or on the way to them, that are not followed; of roam and of one's own."""

    @property
    def ordered(self) -> bool:
        """Whether rows come in the order of the hub's stream, so that a builder must not shuffle them again (D8)."""
        return self.kind == "hub"

    def facts(self, recorded: Mapping[str, Any] | None, *, ask_hub: bool = True) -> dict[str, Any]:
        """Return what meta.json says of the source; `fingerprint` in it changes when the text does.

        A snapshot has the facts of the hub's dataset that it was taken from, for its rows are the same.
        recorded: the facts of the committed cache; its hub revision counts, and the hub is not asked (D12).
        ask_hub: False where an unknown revision may stay unknown; a stub, which reads nothing, never asks.
        Raises: ConnectionError if the hub must be asked and cannot be; CacheError for a damaged snapshot.
        """
        if self.manifest is not None and self.root is not None:
            folder = self.root / mirror_folder(self.source, self.dataset, self.config)
            snapshot.check_files(folder, self.manifest, self.files)
        if self.kind == "hub":
            return self._facts_of_hub(self._known(recorded or {}, ask_hub))
        assert self.root is not None
        fingerprint = places.files_fingerprint(self.root, self.files)
        if self.own is not None:  # what its user says of it stands in meta.json, or decides what is read
            said = [fingerprint, self.own.field, *self.credit]
            fingerprint = hashlib.sha256(canonical_json(said)).hexdigest()
        about = {"kind": self.kind, **self.credit._asdict(), "files": len(self.files)}
        return {**about, "revision": (self.manifest or {}).get("revision"), "fingerprint": fingerprint}

    def _known(self, recorded: Mapping[str, Any], ask_hub: bool) -> Mapping[str, Any]:
        """Return revision, licence, attribution and versions from a snapshot, from the record, or from the hub."""
        if self.manifest is not None:
            return self.manifest
        same = str(recorded.get("fingerprint")).startswith(f"{self.dataset}@")
        wanted = (None, recorded.get("revision"), recorded.get("asked_revision"))
        known = recorded if same and self.asked_revision in wanted else {}
        if (known.get("revision") is None or known.get("licence") is None) and ask_hub and not self.stub:
            card = hub.card_of(self.dataset, revision=known.get("revision") or self.asked_revision)
            return {"revision": card.revision, "licence": card.licence, "attribution": card.attribution}
        return known

    def _facts_of_hub(self, known: Mapping[str, Any]) -> dict[str, Any]:
        facts = {
            "kind": "hub",
            "licence": known.get("licence") or self.credit.licence,
            "attribution": known.get("attribution") or self.credit.attribution,
            "revision": known.get("revision"),
            "fingerprint": f"{self.dataset}@{known.get('revision')}",
            "datasets_version": self.manifest["datasets_version"] if self.manifest else version("datasets"),
        }
        return {**facts, "asked_revision": self.asked_revision} if self.asked_revision else facts


def origin_of(settings: Settings, source: str) -> Origin:
    """Return where a source comes from.

    Raises: FileNotFoundError if the mirror, the folder of notes, or what a pattern names is not there; ValueError for
        a name that no source has; CacheError for a snapshot that cannot be used.
    """
    own = own_sources(settings).get(source)
    if own is not None:
        more = (*local.TEXT_SUFFIXES, *text_suffixes(settings))
        suffixes = more if own.family == "pretrain" else local.CHAT_SUFFIXES
        found = local.find(own.files, base=own.base, suffixes=suffixes, follow_links=settings.follow_links)
        credit = Credit(own.licence, own.attribution)
        return own_origin(source, credit, found, own)
    dataset, config, streaming, shuffle = _upstream(settings, source)
    root = places.mirror_root(settings.source_root)
    sample = settings.source_root == "sample"
    credit = credit_of(source, settings.source_root)
    if dataset != _upstream(Settings(), source)[0]:
        credit = Credit(UNSTATED, f"https://huggingface.co/datasets/{dataset}")
    if source == "roam":
        follow, links = settings.follow_links, list[Path]()
        root = roam.roam_dir_of(settings.source_root, roam_dir=settings.roam_dir, follow_links=follow)
        files = tuple(Path(path) for path in roam.list_roam_paths(root, follow_links=follow, links=links))
        if links and not files:
            raise FileNotFoundError(
                f"expected .md files in {root}, found symbolic links only, such as {min(links)}, which are not "
                "followed: pass --follow-links if they may be"
            )
        kind = "sample" if sample else "mirror"
        return Origin(source, dataset, None, kind, False, credit, root, files, links=tuple(links))
    asked = asked_revisions(settings).get(source)
    on_hub = Origin(source, dataset, config, "hub", streaming, credit, asked_revision=asked, shuffle=shuffle)
    if source == "gutenberg" and (not settings.gutenberg_from_hub if root is None else _no_books(root)):
        return replace(on_hub, stub=True)
    if root is None:
        return on_hub
    files = tuple(_mirror_files(root, source, dataset, config, settings.follow_links))
    folder = root / mirror_folder(source, dataset, config)
    manifest = snapshot.read_manifest(folder)
    if manifest is not None and _stands_for(manifest, on_hub, folder):
        return replace(on_hub, root=root, files=files, manifest=manifest)
    if manifest is not None:
        credit = Credit(str(manifest.get("licence")), str(manifest.get("attribution")))
    kind = "sample" if sample else "mirror"
    return Origin(source, dataset, config, kind, False, credit, root, files, manifest=manifest)


def own_origin(source: str, credit: Credit, found: local.LocalFiles, own: OwnSource) -> Origin:
    """Return where a source of one's own comes from, given its files."""
    return Origin(
        source,
        source,
        None,
        "own",
        False,
        credit,
        found.root,
        found.files,
        own=own,
        other_files=found.other_files,
        other_kinds=found.other_kinds,
        links=found.links,
    )


def mirror_folder(source: str, dataset: str, config: str | None) -> str:
    """Return the folder of a mirror where a snapshot of the source belongs."""
    if source == "gutenberg":
        return gutenberg.FOLDER
    return f"{dataset}/{config}" if config else dataset


def asked_revisions(settings: Settings) -> dict[str, str]:
    """Parse settings.revision: "SOURCE=REVISION,..." -> revision by source; ValueError for anything else."""
    found: dict[str, str] = {}
    for item in (settings.revision or "").split(","):
        source, equals, revision = (part.strip() for part in item.partition("="))
        if not item.strip():
            continue
        if not (equals and revision) or source not in CREDITS or source == "roam":
            known = ", ".join(name for name in CREDITS if name != "roam")
            raise ValueError(f"--revision {item.strip()!r}: expected SOURCE=REVISION, SOURCE one of {known}")
        found[source] = revision
    return found


def _upstream(settings: Settings, source: str) -> tuple[str, str | None, bool, dict[str, int] | None]:
    """Return dataset, config, whether it is streamed, and the shuffle of its stream."""

    def shuffle(buffer: int) -> dict[str, int] | None:
        return {"seed": settings.seed, "buffer": buffer} if buffer > 0 else None

    known: dict[str, tuple[str, str | None, bool, dict[str, int] | None]] = {
        "fineweb_edu": (
            settings.fineweb_edu_dataset,
            settings.fineweb_edu_config,
            True,
            shuffle(settings.shuffle_buffer),
        ),
        "wikitext": (settings.wikitext_dataset, settings.wikitext_config, False, None),
        "roam": ("roam", None, False, None),
        "gutenberg": (settings.gutenberg_dataset, None, True, shuffle(settings.gutenberg_shuffle_buffer)),
        "dolly15k": (settings.dolly_dataset, None, False, None),
        "oasst1": (settings.oasst1_dataset, None, False, None),
    }
    if source not in known:
        raise ValueError(f"no source is called {source!r}, expected one of {', '.join(known)} or one of your own")
    return known[source]


def _stands_for(manifest: Mapping[str, Any], on_hub: Origin, folder: Path) -> bool:
    """Whether a snapshot's rows are the hub's, in the order in which these settings would read them there.

    With another seed or buffer it is text like any mirror's, and the builder shuffles it.
    """
    if on_hub.asked_revision not in (None, manifest["revision"], manifest.get("asked_revision")):
        raise CacheError(
            f"{folder}: a snapshot of revision {manifest['revision']}, asked was {on_hub.asked_revision}. "
            "Take another snapshot with that --revision, or leave it out"
        )
    found = (manifest["dataset"], manifest["config"], manifest["shuffle"])
    return found == (on_hub.dataset, on_hub.config, on_hub.shuffle)


def _no_books(root: Path) -> bool:
    return not (root / gutenberg.FOLDER).is_dir()


def _mirror_files(root: Path, source: str, dataset: str, config: str | None, follow_links: bool) -> list[Path]:
    """Return the files that the source's loader reads: what else lies there changes no fingerprint."""
    files = partial(places.split_files, root, split="all", follow_links=follow_links)
    if source == "fineweb_edu":
        return files(dataset, split="train", folders=(str(config), f"data/{config}"))
    if source == "wikitext":
        return files(dataset, suffixes=wikitext.SUFFIXES, folders=(str(config),))
    if source == "gutenberg":
        return files(gutenberg.FOLDER, suffixes=places.KNOWN_SUFFIXES)
    return files(dataset, folders=("data",) if source == "oasst1" else ())
