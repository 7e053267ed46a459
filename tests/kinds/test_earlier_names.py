"""The earlier names of niels_gpt.kinds and niels_gpt.exchange: for one release they warn, and give the same objects."""

import re
import sys
from importlib import import_module

import pytest

from niels_gpt.storage.codes import CodedWarning

NAMES = {
    "inspection": {
        "verify.verify": "kinds.verify.verify",
        "verify.find_damage": "kinds.verify.find_damage",
        "verify.Limits": "kinds.kind.Limits",
        "file_checks.Damage": "kinds.files.Damage",
        "caches.caches_below": "kinds.folders.caches_below",
        "show.show": "kinds.look.show",
        "show.show_data": "kinds.look.show_data",
        "show.tokenizer_of": "kinds.look.tokenizer_of",
        "stats.stats": "kinds.look.stats",
        "stats.stats_data": "kinds.look.stats_data",
        "stats.lengths": "cache.documents.lengths",
        "stats.supervised_counts": "cache.documents.supervised_counts",
        "diff.diff": "kinds.diff.diff",
        "locate.locate": "kinds.look.locate",
        "locate.locate_data": "kinds.look.locate_data",
        "readers.refusal": "kinds.verify.refusal",
        "plot.plot": "kinds.look.plot",
    },
    "interop": {
        "exporting.export_cache": "exchange.exporting.export_cache",
        "exporting.Exported": "exchange.exporting.Exported",
        "importing.Imported": "exchange.importing.Imported",
        "transfer.push.push": "exchange.transfer.push.push",
        "transfer.described.Pushed": "exchange.transfer.described.Pushed",
        "transfer.fetch.pull": "exchange.transfer.fetch.pull",
        "transfer.fetch.stage": "exchange.transfer.fetch.stage",
        "transfer.fetch.Fetched": "exchange.transfer.fetch.Fetched",
        "card.card_of": "exchange.card.card_of",
    },
    "builders": {
        "pretrain.build_pretrain": "cache.build_pretrain.build_pretrain",
        "pretrain.build_stub": "cache.build_pretrain.build_stub",
        "sft.build_sft": "cache.build_sft.build_sft",
        "meta_keys.Source": "engine.meta.Source",
        "source.Seek": "engine.stream.Seek",
        "journal.unfinished_builds": "engine.journal.unfinished_builds",
        "resume.NoTextError": "engine.build.NoTextError",
    },
    "prefix_tree.backends": {"architectures.AttentionRouteError": "prefix_tree.architectures.AttentionRouteError"},
}
"""The documented names of each, and what has them now."""
NOW = {"inspection": "kinds", "interop": "exchange", "builders": "engine", "prefix_tree.backends": "prefix_tree"}


def named(place):
    module, _, attribute = place.rpartition(".")
    return getattr(import_module(f"niels_gpt.{module}"), attribute)


@pytest.mark.parametrize("name", NAMES)
def test_an_earlier_name_warns_and_gives_the_same_objects(name):
    for known in [each for each in sys.modules if f"{each}.".startswith(f"niels_gpt.{name}.")]:
        del sys.modules[known]
    with pytest.warns(CodedWarning, match=rf"niels_gpt\.{name} is niels_gpt\.{NOW[name]} now.* \[W104\]$"):
        import_module(f"niels_gpt.{name}")
    for old, new in NAMES[name].items():
        assert named(f"{name}.{old}") is named(new), old
    package = import_module(f"niels_gpt.{name}")
    for module in {old.rpartition(".")[0] for old in NAMES[name]}:
        found = package
        for part in module.split("."):
            found = getattr(found, part)
        assert found is sys.modules[f"niels_gpt.{name}.{module}"]


EARLIER_MODULES = {
    "prefix_tree.fold_checks": {"FoldReport": "prefix_tree.verify.FoldReport"},
    "recipes.run_recipe": {
        "Outcome": "recipes.records.Outcome",
        "cache_root": "recipes.records.cache_root",
        "is_current": "recipes.records.is_current",
        "restart": "recipes.request.restart",
    },
    "recipes.token_caches": {"build_token_cache": "recipes.units.build_token_cache"},
    "storage.leftovers": {"removable": "storage.versions.removable"},
    "storage.locks.readers": {"hold_version": "storage.locks.hold_version"},
}
"""Earlier modules: the documented names of each, and what has them now."""


@pytest.mark.parametrize("module", EARLIER_MODULES)
def test_an_earlier_module_warns_and_gives_the_same_objects(module):
    name = f"niels_gpt.{module}"
    sys.modules.pop(name, None)
    with pytest.warns(CodedWarning, match=rf"{re.escape(name)} is niels_gpt\..* now.* \[W104\]$"):
        import_module(name)
    for old, new in EARLIER_MODULES[module].items():
        assert named(f"{module}.{old}") is named(new)


@pytest.mark.parametrize(
    ("module", "name", "now"),
    [("settings", "UsageError", "storage.errors"), ("storage.codes", "explained", "commands.doctor")],
)
def test_the_earlier_place_of_one_name_warns_and_gives_the_same_object(module, name, now):
    with pytest.warns(CodedWarning, match=rf"niels_gpt\.{module}\.{name} is in niels_gpt\.{now} now \[W104\]$"):
        assert named(f"{module}.{name}") is named(f"{now}.{name}")
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        named(f"{module}.nothing")
