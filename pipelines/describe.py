"""The page of an asset before it is materialized: description, code that reads it, columns, tags.

Reads no cache and loads no torch, because every command of Dagster loads the definitions.
"""

import json
import re
import warnings
from typing import Any

import dagster as dg

from niels_gpt.data.sources import SOURCES, TREES, credit_of
from niels_gpt.data.spec import SourceSpec
from niels_gpt.kinds.kind import Page, kind_of_key, look_command
from niels_gpt.recipes.family import family_named
from niels_gpt.recipes.plan import HOME_OF
from niels_gpt.recipes.records import TOKENIZER_KEY, cache_root
from niels_gpt.recipes.user_sources import UNSTATED, user_sources
from niels_gpt.settings import Settings
from pipelines.deployment import Deployment

_KIND = "dagster/kind/"  # before a kind, which is a tag too
_MAX_TAG = 63  # characters that Dagster takes in the value of a tag
_MODULES = {TOKENIZER_KEY: "niels_gpt.recipes.tokenizer", "sft/": "pipelines.assets"}
_OBSERVED = (
    "An observation computes the fingerprint of the files, or asks the hub for the dataset's newest revision. If "
    "the hub is unreachable, it takes the revision that the cache was built from, and warns. A new fingerprint makes "
    "the cache stale."
)
_ROOT = (
    "The root of the sft caches. It is empty and never changes. It exists so that "
    "`dagster asset materialize --select sft/*` selects the sft caches."
)


def described(deployment: Deployment, spec: dg.AssetSpec) -> dg.AssetSpec:
    """Return the spec with description, owners, kinds, tags and metadata. The deployment's own tags win."""
    path = deployment.path_of(spec.key)
    family, _, name = path.partition("/")
    source = _source(deployment.settings, path)
    kind = kind_of_key(path)
    if family == "raw":
        text, kinds, metadata = _of_raw(deployment.settings, name, source)
    elif kind is None or path.endswith("/"):
        text, kinds, metadata = _ROOT, set(spec.kinds), {}
    else:
        text, kinds, metadata = _of_cache(deployment.settings, spec, path, kind.page)
    licence = re.sub(r"[^A-Za-z0-9_.-]+", "-", _licence(deployment.settings, source) or "")  # as the value of a tag
    return spec.replace_attributes(
        description=text,
        owners=[*spec.owners, *deployment.owners],
        kinds=kinds,
        tags={
            **{key: value for key, value in spec.tags.items() if not key.startswith(_KIND)},
            "family": family,
            **({"licence": licence[:_MAX_TAG].strip("-")} if licence else {}),
            **deployment.tags,
        },
        metadata={**spec.metadata, **metadata},
    )


def code_link(deployment: Deployment, path: str) -> dict[str, Any]:
    """Return a link to the module that makes an asset; nothing where the deployment names no repository."""
    if deployment.repository is None:
        return {}
    family, source = family_named(path), _source(deployment.settings, path)
    if path in HOME_OF:
        module = HOME_OF[path].recipes[path].__module__
    elif path in _MODULES or family is not None:
        module = _MODULES.get(path) or type(family).__module__
    else:
        module = source.load.__module__ if source is not None else "niels_gpt.recipes.exchange.outputs"
    file = f"{module.replace('.', '/')}.py"
    with warnings.catch_warnings():  # Dagster calls both classes beta
        warnings.simplefilter("ignore", dg.BetaWarning)
        link = dg.UrlCodeReference(url=f"{deployment.repository.rstrip('/')}/{file}", label=file)
        return {"dagster/code_references": dg.CodeReferencesMetadataValue(code_references=[link])}


def _source(settings: Settings, path: str) -> SourceSpec | None:
    """Return the source of an asset's text; None for the tokenizer, which may have several."""
    if path in HOME_OF:
        path = HOME_OF[path].source(settings) or ""
    if path in TREES:
        return TREES[path]
    name = path.rpartition("/")[2]
    if name in SOURCES:
        return SOURCES[name]
    user = user_sources(settings).get(name) if name else None
    return user.spec if user else None


def _licence(settings: Settings, source: SourceSpec | None) -> str | None:
    if source is None:
        return None
    if source.dataset and getattr(settings, source.dataset) != getattr(Settings, source.dataset):
        return UNSTATED  # of a dataset that the project does not know
    return credit_of(source.name, settings.source_root).licence if source.name in SOURCES else source.credit.licence


def _of_cache(settings: Settings, spec: dg.AssetSpec, path: str, page: Page) -> tuple[str, set[str], dict[str, Any]]:
    where = str(cache_root(settings) / path)
    windows = 64 if settings.source_root == "sample" else 1024  # shards of the sample are short
    code = page.reader.replace("{path}", json.dumps(where)[1:-1]).replace("{T}", str(windows))
    metadata: dict[str, Any] = {
        "path": dg.MetadataValue.path(where),
        "look inside": look_command(path, where),
        "dagster/uri": dg.MetadataValue.text(where),
    }
    if page.columns:
        columns = [dg.TableColumn(name, kind, description=text) for name, kind, text in page.columns]
        metadata["dagster/column_schema"] = dg.TableSchema(columns)
    return f"{spec.description}\n\n```python\n{code}\n```", set(page.icons), metadata


def _of_raw(settings: Settings, name: str, source: SourceSpec | None) -> tuple[str, set[str], dict[str, Any]]:
    where, kinds = _text_of(settings, name, source)
    text = f"The source text of {source.key if source else name}: {where}.\n\n{_OBSERVED}"
    return text, kinds, {"dagster/uri": dg.MetadataValue.text(where)}


def _text_of(settings: Settings, name: str, source: SourceSpec | None) -> tuple[str, set[str]]:
    """Return where the text of a source comes from, and its kinds."""
    user = None if name in SOURCES else user_sources(settings).get(name)
    if user is not None:
        return user.files, {"file"}
    if settings.source_root == "sample":
        return "the sample bundled with niels_gpt", {"file"}
    if source is None or source.dataset is None:
        return settings.source_root, {"file"}
    dataset = getattr(settings, source.dataset)
    if settings.source_root == "hub":
        return f"https://huggingface.co/datasets/{dataset}", {"huggingface"}
    return f"{dataset} in {settings.source_root}", {"file"}
