"""Resolve a source under the current settings: dataset, files or revision, licence and fingerprint."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from niels_gpt.data.files import mirrors, snapshot
from niels_gpt.data.files.walk import files_fingerprint
from niels_gpt.data.local import LocalFiles
from niels_gpt.data.sources import SOURCES, TREES, credit_of
from niels_gpt.data.spec import Credit, SourceSpec
from niels_gpt.hub import datasets as hub
from niels_gpt.recipes.family import Family, family_of
from niels_gpt.recipes.user_sources import UNSTATED, UserSource, user_sources
from niels_gpt.settings import Settings
from niels_gpt.storage.errors import CacheError, SourceError
from niels_gpt.storage.fileio import canonical_json
from niels_gpt.storage.remedies import did_you_mean

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ResolvedSource:
    """A source under some settings."""

    spec: SourceSpec
    """Row in the table of sources, or of a user-defined source."""
    dataset: str
    """Dataset id on the hub, or the source's own name; dataset_name in meta.json."""
    config: str | None
    """Config on the hub; dataset_config in meta.json."""
    kind: str
    """hub (also a snapshot of it), mirror, sample or own (user-defined)."""
    credit: Credit
    """Licence and attribution, unless a dataset card says otherwise."""
    found: LocalFiles | None = None
    """Files to read; None on the hub."""
    stub: bool = False
    """Whether nothing is read, and the cache is a stub (PR-03)."""
    asked_revision: str | None = None
    """Revision in the settings: a commit, tag or branch; None: main."""
    shuffle: Mapping[str, int] | None = None
    """Seed and buffer of the hub library's shuffle; None if rows keep upstream's order."""
    manifest: Mapping[str, Any] | None = None
    """Manifest of the snapshot, if the files are one."""
    user: UserSource | None = None
    """Definition of a user-defined source."""

    @property
    def family(self) -> Family:
        """Its family. Raises: LookupError if the package is not installed."""
        return family_of(self.spec.key)

    @property
    def source(self) -> str:
        """Name of the source."""
        return self.spec.name

    @property
    def root(self) -> Path | None:
        """Folder that file names are relative to; None on the hub."""
        return self.found.root if self.found else None

    @property
    def files(self) -> tuple[Path, ...]:
        """Files to read, in order; empty on the hub."""
        return self.found.files if self.found else ()

    @cached_property
    def listing(self) -> str | None:
        """`listing_of` this source at the first use, before its text is read."""
        return listing_of(self)

    @property
    def has_samples(self) -> bool:
        """Whether it is read by samples; else `build` of its family handles --exclude."""
        return self.user is None or type(self.family).load is not Family.load

    def is_partitioned(self, settings: Settings) -> bool:
        """Return whether the settings build its cache in partitions; never for a stub or a family without them."""
        return settings.partitions > 1 and self.family.has_partitions and not self.stub

    def budget(self, settings: Settings) -> int | None:
        """Return the tokens of both budgets of its cache; None without budgets."""
        return sum(getattr(settings, each) for each in self.spec.budget_settings) or None

    @property
    def is_partial(self) -> bool:
        """Whether some upstream splits are missing."""
        return len(self.splits) < len(self.spec.splits or {})

    def warn_if_partial(self) -> None:
        """Log a warning if upstream splits are missing, or a snapshot that is read as files is cut short."""
        if self.manifest is not None and not self.streaming and not self.manifest["ended"]:
            logger.warning(
                "%s: the files are a snapshot that is cut short after %s bytes of text: the dataset has more. Make it "
                "longer: niels-gpt snapshot %s %s --tokens N",
                self.source,
                f"{self.manifest['text_bytes']:,}",
                self.source,
                self.root,
                extra={"code": "W301"},
            )
        if self.is_partial:
            there = " and ".join(self.splits) or "test"
            text = "%s: the source has only %s here: the cache is partial"
            logger.warning(text, self.source, there, extra={"code": "W301"})

    @property
    def ordered(self) -> bool:
        """Whether rows come in the order of the hub's stream, so that a builder must not shuffle them again (D8)."""
        return self.kind == "hub"

    @property
    def streaming(self) -> bool:
        """Whether rows are streamed from the hub; files are not."""
        return self.spec.streaming and self.ordered

    @property
    def splits(self) -> dict[str, str]:
        """Our split -> upstream split, for each that exists: a mirror may lack one. {} if upstream has none."""
        wanted = self.spec.splits or {}
        if self.found is None:
            return dict(wanted)
        present = {mirrors.split_of(path) for path in self.files}
        return {split: upstream for split, upstream in wanted.items() if upstream in present}

    def provenance(self, recorded: Mapping[str, Any] | None, *, ask_hub: bool = True) -> dict[str, Any]:
        """Return the source's part of meta.json; its `fingerprint` changes with the text.

        A snapshot has the provenance of its dataset on the hub, because its rows are the same.
        recorded: provenance of the committed cache; the hub is not asked if it has a revision (D12).
        ask_hub: False if an unknown revision may stay unknown. A stub reads nothing and never asks.
        Raises: ConnectionError if the hub must be asked and cannot be reached; CacheError for a damaged snapshot.
        """
        if self.manifest is not None and self.root is not None:
            folder = self.root / mirror_folder(self.spec, self.dataset, self.config)
            snapshot.check_files(folder, self.manifest, self.files)
        if self.kind == "hub":
            return self._hub_provenance(self._known(recorded or {}, ask_hub))
        assert self.root is not None
        _ = self.listing  # fixed before the bytes are read
        fingerprint = files_fingerprint(self.root, self.files)
        if self.user is not None:  # the user's lines are in meta.json, or decide what is read
            stated = [fingerprint, self.user.field, *self.credit]
            fingerprint = hashlib.sha256(canonical_json(stated)).hexdigest()
        about = {"kind": self.kind, **self.credit._asdict(), "files": len(self.files)}
        return {**about, "revision": (self.manifest or {}).get("revision"), "fingerprint": fingerprint}

    def _known(self, recorded: Mapping[str, Any], ask_hub: bool) -> Mapping[str, Any]:
        """Return revision, licence, attribution and versions from a snapshot, the record, or the hub."""
        if self.manifest is not None:
            return self.manifest
        same = str(recorded.get("fingerprint")).startswith(f"{self.dataset}@")
        wanted = (None, recorded.get("revision"), recorded.get("asked_revision"))
        known = recorded if same and self.asked_revision in wanted else {}
        if (known.get("revision") is None or known.get("licence") is None) and ask_hub and not self.stub:
            card = hub.card_of(self.dataset, revision=known.get("revision") or self.asked_revision)
            return {"revision": card.revision, "licence": card.licence, "attribution": card.attribution}
        return known

    def _hub_provenance(self, known: Mapping[str, Any]) -> dict[str, Any]:
        provenance = {
            "kind": "hub",
            "licence": known.get("licence") or self.credit.licence,
            "attribution": known.get("attribution") or self.credit.attribution,
            "revision": known.get("revision"),
            "fingerprint": f"{self.dataset}@{known.get('revision')}",
            "datasets_version": self.manifest["datasets_version"] if self.manifest else version("datasets"),
        }
        return {**provenance, "asked_revision": self.asked_revision} if self.asked_revision else provenance


def listing_of(source: ResolvedSource) -> str | None:
    """Return the sha256 of the names, sizes and times of the source's files; None on the hub, which has a revision.

    For user-defined text it also covers field, licence and attribution.
    """
    if source.found is None:
        return None
    digest = hashlib.sha256(canonical_json([source.kind, source.user and source.user.field, *source.credit]))
    for path in source.files:
        about = path.stat()
        name = os.fsencode(path.relative_to(source.found.root))
        digest.update(name + f"\0{about.st_size}\0{about.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def resolve_source(settings: Settings, name: str) -> ResolvedSource:
    """Resolve a source. name: of the source, or the key of one of its caches.

    Raises: FileNotFoundError if the mirror, the folder of notes, or the files of a pattern do not exist; ValueError for
        an unknown name; CacheError for a snapshot that cannot be used.
    """
    if name in TREES:
        return replace(resolve_whole(settings, TREES[name].name), spec=TREES[name])
    name = name.rpartition("/")[2]
    user = user_sources(settings).get(name)
    if user is not None:
        return resolve_user_source(user, user.find(settings))
    if name not in SOURCES:
        near = did_you_mean(name, known := [*SOURCES, *user_sources(settings)])
        raise SourceError(f"no source is called {name!r}.{near} Sources: {', '.join(known)}", code="E103")
    spec = SOURCES[name]
    dataset = getattr(settings, spec.dataset) if spec.dataset else name
    config = getattr(settings, spec.config) if spec.config else None
    credit = credit_of(name, settings.source_root)
    if spec.dataset and dataset != getattr(Settings, spec.dataset):
        credit = Credit(UNSTATED, f"https://huggingface.co/datasets/{dataset}")
    root = mirrors.mirror_root(settings.source_root)
    kind = "sample" if settings.source_root == "sample" else "mirror"
    if not spec.dataset:
        return ResolvedSource(spec, dataset, config, kind, credit, spec.files(settings, root))
    buffer = getattr(settings, spec.shuffle_buffer) if spec.shuffle_buffer else 0
    on_hub = ResolvedSource(
        spec,
        dataset,
        config,
        "hub",
        credit,
        asked_revision=asked_revisions(settings).get(name),
        shuffle={"seed": settings.seed, "buffer": buffer} if buffer > 0 else None,
    )
    if _is_stub(settings, spec, root):
        return replace(on_hub, stub=True)
    if root is None:
        return on_hub
    found = spec.files(settings, root)
    folder = root / mirror_folder(spec, dataset, config)
    manifest = snapshot.read_manifest(folder)
    if manifest is not None and _stands_for(manifest, on_hub, folder) and settings.partitions == 1:
        return replace(on_hub, found=found, manifest=manifest)
    if manifest is not None:
        credit = Credit(str(manifest.get("licence")), str(manifest.get("attribution")))
    return ResolvedSource(spec, dataset, config, kind, credit, found, manifest=manifest)


def resolve_whole(settings: Settings, name: str) -> ResolvedSource:
    """Resolve a source for a cache that is always built whole: `partitions` counts as 1."""
    return resolve_source(replace(settings, partitions=1), name)


def resolve_user_source(user: UserSource, found: LocalFiles) -> ResolvedSource:
    """Resolve a user-defined source, given its files."""
    spec = user.spec
    return ResolvedSource(spec, user.name, None, "own", spec.credit, found, user=user)


def mirror_folder(spec: SourceSpec, dataset: str, config: str | None) -> str:
    """Return the folder of a mirror for a snapshot of the source."""
    return spec.folder or (f"{dataset}/{config}" if config else dataset)


def asked_revisions(settings: Settings) -> dict[str, str]:
    """Parse settings.revision: "SOURCE=REVISION,..." -> revision by source. Raises: ValueError for anything else."""
    on_hub = [*(spec.name for spec in SOURCES.values() if spec.dataset), "tokenizer"]
    revisions: dict[str, str] = {}
    for item in (settings.revision or "").split(","):
        source, equals, revision = (part.strip() for part in item.partition("="))
        if not item.strip():
            continue
        if not (equals and revision) or source not in on_hub:
            expected = f"SOURCE=REVISION, SOURCE one of {', '.join(on_hub)}"
            raise ValueError(f"--revision {item.strip()!r}: expected {expected}")
        revisions[source] = revision
    return revisions


def _is_stub(settings: Settings, spec: SourceSpec, root: Path | None) -> bool:
    if spec.from_hub is None:
        return False
    return not (getattr(settings, spec.from_hub) if root is None else (root / str(spec.folder)).is_dir())


def _stands_for(manifest: Mapping[str, Any], on_hub: ResolvedSource, folder: Path) -> bool:
    """Return whether a snapshot has the hub's rows in the order in which these settings would read them there.

    With another seed or buffer it is text like any mirror's, and the builder shuffles it. In a partitioned cache too:
    files decide which rows a partition has, and the hub's files are others.
    """
    if on_hub.asked_revision not in (None, manifest["revision"], manifest.get("asked_revision")):
        raise CacheError(
            folder,
            f"a snapshot of revision {manifest['revision']}",
            f"{on_hub.asked_revision}, the revision in the settings",
            "Take another snapshot with that --revision, or leave it out",
            code="E307",
        )
    found = (manifest["dataset"], manifest["config"], manifest["shuffle"])
    return found == (on_hub.dataset, on_hub.config, on_hub.shuffle)
