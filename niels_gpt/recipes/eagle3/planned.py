"""What a build of eagle3/draft_vocab or eagle3/targets would do, for --dry-run: no weights, no hub, nothing written.

Decides from the record of a committed cache whether it is current. Where that needs the hub, it counts as to be built.
"""

from __future__ import annotations

from niels_gpt.display.numbers import many
from niels_gpt.recipes.eagle3 import asset, draft_vocab
from niels_gpt.recipes.eagle3.asset import are_current_targets
from niels_gpt.recipes.eagle3.draft_vocab import current_draft_vocab, resolved_for_vocab
from niels_gpt.recipes.eagle3.of_settings import (
    KEY,
    SMALL_TARGET,
    VOCAB_KEY,
    folder_with_plan,
    has_small_target,
    raw_source,
    resolved,
    small_target_folder,
    stable_name,
    unfinished_versions,
    why_left_out,
)
from niels_gpt.recipes.home_recipes import HomeRecipes
from niels_gpt.recipes.records import TOKENIZER_KEY, cache_root, recorded_recipe
from niels_gpt.recipes.tokenizer import no_sentinels
from niels_gpt.settings import Settings
from niels_gpt.storage.errors import LeftOut
from niels_gpt.tokenizers.protocol import FullTokenizer


def planned_action(settings: Settings, key: str, tokenizer: FullTokenizer | None) -> tuple[str, str]:
    """Return what a build would do, and from what.

    The first is "up to date", "build", or "left out" or "cannot be built" and why; what is not configured is said in
    the second. tokenizer: of the caches; None for one that is to be trained or downloaded.
    """
    problem = why_left_out(settings)
    if problem is not None:
        return "left out", problem.found
    source = f"{SMALL_TARGET if has_small_target(settings) else settings.eagle3_target} over {settings.eagle3_source}"
    try:
        if has_small_target(settings) and tokenizer is not None and not tokenizer.special_token_ids():
            raise no_sentinels(settings, [key], cache_root(settings) / TOKENIZER_KEY)
        if _is_current(settings, key, tokenizer):
            return "up to date", source
    except LeftOut as error:
        return f"left out: {error.found}", source
    except (OSError, ValueError, ImportError) as error:
        return f"cannot be built: {error}", source
    action = "build" if settings.partitions == 1 or key != KEY else f"build in {many(settings.partitions, 'partition')}"
    is_there = key == KEY and unfinished_versions(cache_root(settings) / key)
    return f"{action} (an unfinished one is there)" if is_there else action, source


def _is_current(settings: Settings, key: str, tokenizer: FullTokenizer | None) -> bool:
    if not recorded_recipe(cache_root(settings) / key).get("fingerprint"):
        return False
    target, how = None, {"reads_hub": False}
    if has_small_target(settings):
        if tokenizer is None or not (target := small_target_folder(settings, tokenizer.sha256)).is_dir():
            return False
    elif not _is_known_without_hub(settings):
        return False
    if key == VOCAB_KEY:
        return current_draft_vocab(resolved_for_vocab(settings, target=target), **how) is not None
    return are_current_targets(resolved(settings, observed=None, target=target), **how)


def _is_known_without_hub(settings: Settings) -> bool:
    """Whether revisions of the target and of the chats are recorded, where these are on the hub."""
    from niels_gpt.eagle3.resume import recorded_plan
    from niels_gpt.hub.models import is_local
    from niels_gpt.recipes.resolve import resolve_whole

    target = str(settings.eagle3_target)
    plan = recorded_plan(folder_with_plan(cache_root(settings) / KEY))
    name, input_data = plan.get("target", {}).get("name"), plan.get("source", {}).get("input_data")
    chats = raw_source(settings)
    is_file = chats is None or resolve_whole(settings, chats).kind != "hub"
    is_target_known = is_local(target) or name == stable_name(settings, target)
    return is_target_known and (is_file or input_data == settings.eagle3_source)


def _settings_fingerprint(settings: Settings, key: str) -> str:
    of_key = draft_vocab.settings_fingerprint if key == VOCAB_KEY else asset.settings_fingerprint
    return of_key(settings)


EAGLE3_RECIPES = HomeRecipes(
    {VOCAB_KEY: draft_vocab.build_draft_vocab, KEY: asset.build_targets},
    planned_action,
    _settings_fingerprint,
    units={KEY: asset.TargetUnits},
)
