"""What the page of an asset says before it is ever materialized: text, code that reads it, columns, tags, source code.

Nothing is read from a cache, and no torch is loaded: every command of Dagster loads the definitions.
"""

import json
import re
import shlex
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import dagster as dg

from niels_gpt.data.sources import SOURCES, SourceSpec, credit_of
from niels_gpt.recipes.eagle3.asset import build_targets
from niels_gpt.recipes.eagle3.draft_vocab import build_draft_vocab
from niels_gpt.recipes.eagle3.of_settings import KEY as TARGETS_KEY
from niels_gpt.recipes.eagle3.of_settings import VOCAB_KEY, raw_source
from niels_gpt.recipes.rollouts.caches import build_rollout_cache
from niels_gpt.recipes.rollouts.trees import TREES
from niels_gpt.recipes.run_recipe import TOKENIZER_KEY, cache_root
from niels_gpt.recipes.token_caches import build_token_cache
from niels_gpt.recipes.tokenizer import ensure_tokenizer
from niels_gpt.recipes.user_sources import UNSTATED, user_sources
from niels_gpt.settings import Settings
from niels_gpt.storage.remedies import PROGRAM
from pipelines.deployment import Deployment

Columns = tuple[tuple[str, str, str], ...]
"""Of each thing that a reader gives: its name, its dtype and shape, and what it is."""
_KIND = "dagster/kind/"  # before a kind, which is a tag too
_MAX_TAG = 63  # characters that Dagster takes in the value of a tag
_IDS: Columns = (
    ("x", "int64 [B, T]", "ids of the tokens"),
    ("y", "int64 [B, T]", "the token after each: y[:, :-1] == x[:, 1:]"),
)
_OF_GROUPS: Columns = (
    ("ids", "int64 [L]", "ids of one sample's tokens, the prompt first"),
    ("prompt_length", "int", "tokens of the prompt"),
    ("loss_mask", "bool [L]", "which tokens carry loss"),
    ("fields", "float32 [scored tokens], or [1]", "advantages, log-probabilities and such, by name"),
)
_OF_SAMPLES: Columns = (
    ("input_ids", "int64 [S]", "ids of the tokens, shifted by one"),
    ("attention_mask", "int64 [S]", "1 where there is a token, 0 in the padding"),
    ("loss_mask", "int64 [S]", "1 where a token carries loss"),
    ("aux_hidden_states", "float [S, 3H]", "hidden states of some of the target's layers"),
    (
        "position_mask",
        "bool [S, 1]",
        "where a draft learns: with loss, its vocabulary has the likeliest token",
    ),
    ("target_probs", "float [S, D]", "the target's distribution over the draft's vocabulary"),
)


@dataclass(frozen=True)
class _Page:
    """What all assets of a family have in common."""

    recipe: Callable[..., Any]
    """Builds it."""
    reader: str
    """Lines of Python with {path} within double quotes, and {T}."""
    kinds: frozenset[str]
    """Of those that Dagster has an icon for."""
    look: str = "show"
    """The command that prints what is inside."""
    columns: Columns = ()


_GROUPS = _Page(
    build_rollout_cache,
    "from niels_gpt.prefix_tree.rollouts.reader import RolloutDataset\n\n"
    'groups = RolloutDataset("{path}", "train")\n'
    "samples = groups.read(0)  # of the first group",
    frozenset({"numpy"}),
    columns=_OF_GROUPS,
)
_PAGES = {
    TOKENIZER_KEY: _Page(
        ensure_tokenizer,
        "from niels_gpt.tokenizer import load_tokenizer\n\n"
        'tokenizer = load_tokenizer("{path}")\n'
        'ids = tokenizer.encode("A text.")',
        frozenset({"file"}),
        look="verify",
    ),
    "pretrain": _Page(
        build_token_cache,
        "import torch\nfrom niels_gpt.cache import PretrainTokenStreamDataset\n\n"
        'data = PretrainTokenStreamDataset(\n    "{path}/train", T={T}, device="cpu"\n)\n'
        "x, y = data.get_batch(B=8, generator=torch.Generator().manual_seed(0))",
        frozenset({"numpy", "pytorch"}),
        columns=_IDS,
    ),
    "sft": _Page(
        build_token_cache,
        "import torch\nfrom niels_gpt.cache import SFTExampleDataset\n\n"
        'data = SFTExampleDataset.open("{path}", "train", T=1024)\n'
        "x, y, y_masked = data.get_batch(B=8, generator=torch.Generator().manual_seed(0))",
        frozenset({"numpy", "pytorch"}),
        columns=(*_IDS, ("y_masked", "int64 [B, T]", "y, but -100 where there is no loss")),
    ),
    "trees": _GROUPS,
    "rollouts": _GROUPS,
    VOCAB_KEY: _Page(
        build_draft_vocab,
        "from niels_gpt.cache import read_meta\nfrom niels_gpt.eagle3.vocab import load_token_mapping\n\n"
        'size = read_meta("{path}/meta.json")["target_vocab_size"]\n'
        'ids, is_known = load_token_mapping("{path}", target_vocab_size=size, draft_vocab_size=None)',
        frozenset({"json"}),
        look="stats",
        columns=(
            ("selected_token_ids", "int64 [D]", "draft id -> id of the target"),
            ("selected_token_mask", "bool [V]", "which ids of the target the draft knows"),
        ),
    ),
    TARGETS_KEY: _Page(
        build_targets,
        "from niels_gpt.eagle3.cache import CachedEagle3Dataset\n\n"
        'data = CachedEagle3Dataset("{path}")\n'
        "sample = data[0]  # the columns by name",
        frozenset({"huggingface", "pytorch"}),
        look="eagle3 inspect",
        columns=_OF_SAMPLES,
    ),
}
_OBSERVED = (
    "An observation takes the fingerprint of its files, or asks the hub for the newest revision of a dataset. Where "
    "the hub cannot be reached it takes the revision that the cache was built from, and warns. It shows its files, its "
    "revision and its fingerprint. Another fingerprint than before makes the cache stale."
)
_ROOT = (
    "The place above the sft caches. It holds nothing and never changes; it is there so that "
    "`dagster asset materialize --select sft/*` selects them. An observation shows nothing but its time."
)


def described(deployment: Deployment, spec: dg.AssetSpec) -> dg.AssetSpec:
    """Return the spec with description, owners, kinds, tags and metadata; the deployment's own tags win."""
    path = deployment.path_of(spec.key)
    family, _, name = path.partition("/")
    source = _source(deployment.settings, path)
    page = _PAGES.get(path) or _PAGES.get(family)
    if family == "raw":
        text, kinds, metadata = _of_raw(deployment.settings, name, source)
    elif page is None or path.endswith("/"):
        text, kinds, metadata = _ROOT, set(spec.kinds), {}
    else:
        text, kinds, metadata = _of_cache(deployment.settings, spec, path, page, source)
    licence = _licence(deployment.settings, source)
    return spec.replace_attributes(
        description=text,
        owners=[*spec.owners, *deployment.owners],
        kinds=kinds,
        tags={
            **{key: value for key, value in spec.tags.items() if not key.startswith(_KIND)},
            "family": family,
            **({"licence": _as_tag(licence)} if licence else {}),
            **deployment.tags,
        },
        metadata={**spec.metadata, **metadata},
    )


def look_inside(path: str, where: object) -> str:
    """Return the command that prints what is in an asset's cache. path: of the asset; where: the cache's folder."""
    page = _PAGES.get(path) or _PAGES[path.split("/")[0]]
    return f"{PROGRAM} {page.look} {shlex.quote(str(where))}"


def _source(settings: Settings, path: str) -> SourceSpec | None:
    """Return the source that an asset's text is from; None of the tokenizer, which may have several."""
    if path in (VOCAB_KEY, TARGETS_KEY):
        path = raw_source(settings) or ""
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


def _as_tag(text: str) -> str:
    """Return a text as the value of a tag: "CC BY-SA 4.0" becomes CC-BY-SA-4.0."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text)[:_MAX_TAG].strip("-")


def _of_cache(
    settings: Settings, spec: dg.AssetSpec, path: str, page: _Page, source: SourceSpec | None
) -> tuple[str, set[str], dict[str, Any]]:
    where = str(cache_root(settings) / path)
    windows = 64 if settings.source_root == "sample" else 1024  # shards of the sample are short
    code = page.reader.replace("{path}", json.dumps(where)[1:-1]).replace("{T}", str(windows))
    metadata: dict[str, Any] = {
        "path": dg.MetadataValue.path(where),
        "look inside": look_inside(path, where),
        "dagster/uri": dg.MetadataValue.text(where),
        **_code_of(page.recipe, *([source.load] if source else [])),
    }
    if page.columns:
        columns = [dg.TableColumn(name, kind, description=text) for name, kind, text in page.columns]
        metadata["dagster/column_schema"] = dg.TableSchema(columns)
    return f"{spec.description}\n\n```python\n{code}\n```", set(page.kinds), metadata


def _of_raw(settings: Settings, name: str, source: SourceSpec | None) -> tuple[str, set[str], dict[str, Any]]:
    where, kinds = _text_of(settings, name, source)
    text = f"The text that {source.key if source else name} is made of: {where}.\n\n{_OBSERVED}"
    code = _code_of(source.load) if source else {}
    return text, kinds, {"dagster/uri": dg.MetadataValue.text(where), **code}


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


def _code_of(*functions: Any) -> dict[str, Any]:
    """Return the places of functions for the page's "Source code", as files of this machine."""
    with warnings.catch_warnings():  # Dagster calls them beta
        warnings.simplefilter("ignore", dg.BetaWarning)
        places = [
            dg.LocalFileCodeReference(
                file_path=made.__code__.co_filename,
                line_number=made.__code__.co_firstlineno,
                label=made.__name__.strip("_"),
            )
            for function in functions
            if isinstance(made := _plain(function), FunctionType)
        ]
        return {"dagster/code_references": dg.CodeReferencesMetadataValue(code_references=[*places])} if places else {}


def _plain(function: Any) -> Any:
    """Return the function below a partial, a method or a decorator."""
    while not isinstance(function, FunctionType) or hasattr(function, "__wrapped__"):
        inner = getattr(function, "func", None) or getattr(function, "__wrapped__", None)
        inner = inner or (function.__func__ if isinstance(function, MethodType) else None)
        if inner is None:
            return function
        function = inner
    return function
