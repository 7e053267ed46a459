"""Everything that Dagster knows of this project. `dagster dev` and `dagster asset materialize` load `defs`.

tokenizer                                          one tokenizer for all caches
pretrain/{fineweb_edu,wikitext,roam,gutenberg}     token shards
sft/{dolly15k,oasst1}                              chats with their loss
trees/oasst1                                       message trees, whose threads fold into one row each
eagle3/draft_vocab                                 the tokens that a draft knows
eagle3/targets                                     a target model's outputs over chats, to train a draft
pretrain/NAME, sft/NAME                            the same of your own text and chats: sources.toml
rollouts/NAME                                      recorded rollouts of your own
raw/NAME                                           observed: the text that a cache is made of
sft/                                               observed: what `--select sft/*` starts from
"""

from collections.abc import Sequence
from typing import Any, cast

import dagster as dg

from niels_gpt.recipes.eagle3 import asset as eagle3_asset
from niels_gpt.recipes.eagle3 import draft_vocab
from niels_gpt.recipes.eagle3.of_settings import KEY as TARGETS_KEY
from niels_gpt.recipes.eagle3.of_settings import VOCAB_KEY
from niels_gpt.recipes.plan import recipes, settings_fingerprint
from niels_gpt.recipes.run_recipe import TOKENIZER_KEY
from niels_gpt.recipes.user_sources import user_sources
from niels_gpt.settings import Settings
from pipelines import assets, partitions
from pipelines.checks import check_of_draft_vocab, checks_of, checks_of_targets
from pipelines.resources import SettingsResource, settings_from_environment
from pipelines.steps import BUILD_TAG


def niels_definitions(
    key_prefix: str | Sequence[str] | None = None, settings: Settings | None = None
) -> dg.Definitions:
    """Return the assets, their checks and the `settings` resource, for `dg.Definitions.merge` in any deployment.

    key_prefix: put before every asset key, so that sft/oasst1 becomes PREFIX/sft/oasst1; "team/llm" is two parts.
    settings: of all runs, unless a run's config says otherwise; by default NIELS_GPT_<FIELD> of the environment. The
        user-defined sources are those they name now; a new one is found when the definitions are reloaded.
    """
    chosen = settings_from_environment() if settings is None else settings
    prefix = key_prefix.split("/") if isinstance(key_prefix, str) else list(key_prefix or [])

    def key(path: str) -> dg.AssetKey:
        return dg.AssetKey([*prefix, *path.split("/")])

    paths = (TOKENIZER_KEY, *recipes(chosen))
    versions = {key(path): settings_fingerprint(chosen, path) for path in paths}
    versions[key(TARGETS_KEY)] = eagle3_asset.settings_fingerprint(chosen)
    versions[key(VOCAB_KEY)] = draft_vocab.settings_fingerprint(chosen)
    graphs = {key(path) for path in paths if partitions.is_graph(chosen, path)}
    made: list[dg.AssetsDefinition] = [
        *cast(Any, dg.load_assets_from_modules([assets], key_prefix=prefix or None)),
        *assets.user_assets([user.spec for user in user_sources(chosen).values()], prefix),
        assets.eagle3_draft_vocab(chosen, prefix),
        assets.eagle3_targets(chosen, prefix),
    ]
    return dg.Definitions(
        assets=dg.map_asset_specs(
            lambda spec: spec.replace_attributes(code_version=versions.get(spec.key)),
            [partitions.as_graph(asset) if asset.key in graphs else asset for asset in made],
        ),
        asset_checks=[
            *(checks_of(key(path), path) for path in paths),
            check_of_draft_vocab(key(VOCAB_KEY)),
            checks_of_targets(key(TARGETS_KEY)),
        ],
        resources={"settings": SettingsResource.of(chosen)},
    )


EXECUTOR = dg.multiprocess_executor.configured(
    lambda config: {
        **config,
        "start_method": {"forkserver": {}},  # a step starts in a fraction of spawn's time: docs/decisions/0003
        "tag_concurrency_limits": [{"key": BUILD_TAG, "value": "true", "limit": 1}],
    },
    config_schema={
        "max_concurrent": dg.Field(int, default_value=0, description="steps at a time, one process each; 0: one a core")
    },
)
"""A step is a process. Those that would only wait for their turn at a pretrain build are not started yet."""

defs = dg.Definitions.merge(
    niels_definitions(), dg.Definitions(executor=EXECUTOR, loggers={"console": dg.colored_console_logger})
)
