"""Small caches in partitions: which documents each has, how they are built, and their seal."""

import json

from niels_gpt.cache.kind.tokens import PRETRAIN, SFT
from niels_gpt.documents import Partition
from niels_gpt.engine.meta import Source
from niels_gpt.engine.units import Commands, discard_plan, fix_plan, plans_of, seal, states_of
from niels_gpt.prefix_tree.rollouts.kind import ROLLOUTS
from niels_gpt.recipes import dask, units
from niels_gpt.storage.versions import build_lock, clear_leftovers, discard_unfinished
from support.byte_tokenizer import ByteTokenizer
from support.disk import meta_bytes, versions_dir
from support.small_builds import BUILDERS, ITEMS, counting

TOTAL = 4
SHA256 = "ab" * 32
RULE = "document f to f mod P"
UNITS = {"pretrain": PRETRAIN.units, "sft": SFT.units, "templated": SFT.units, "rollouts": ROLLOUTS.units}
"""By what is built: chats by the own template, by another one, and so on."""


def content(total=TOTAL, of="pretrain", **changed):
    """Return what plan.json holds. of: one of UNITS; recorded ids have no tokenizer."""
    sha256 = None if of == "rollouts" else SHA256
    return {
        "plan_version": 1,
        "kind": "partition_plan",
        "cache": "c",
        "partitions": total,
        "rule": RULE,
        "fingerprint": "f" * 64,
        "recipe": {"seed": 0, "kind": of},
        "source": {},
        "tokenizer_sha256": sha256,
        "tokenizer_content_sha256": sha256,
        "code": {"version": "1"},
        **changed,
    }


COMMANDS = Commands(lambda number: f"build --partition {number}", "build", "seal")
"""What a refused seal tells to run."""


class HashedBytes(ByteTokenizer):
    """The byte tokenizer, with the sha256 that the plans name."""

    sha256 = SHA256


def planned(path, total=TOTAL, of="pretrain", **changed):
    """Fix the plan of a cache. of: one of UNITS."""
    with build_lock(path):
        return fix_plan(path, content(total, of, **changed))


def kind_of(plan):
    """Return which of UNITS a plan is of."""
    return plan.content["recipe"]["kind"]


def items_of(number, total=TOTAL, kind="pretrain"):
    """Return the documents, chats or groups of a partition."""
    return ITEMS[kind](0)[number::total]


def held(plan, meta):
    """Return how many items a receipt or a cache holds."""
    return UNITS[kind_of(plan)].items(meta)


def build_part(plan, number, *, items=None, **changed):
    """Build a partition; by default without budgets, so that nothing is dropped for them."""
    counters, kind = {}, kind_of(plan)
    arguments = {
        "val_frac": 0.2,
        "source": Source(name="small", counters=counters),
        "partition": Partition(number, plan.total),
        "plan": plan.sha256,
    }
    arguments |= {"max_train_tokens": None, "max_val_tokens": None} if kind == "pretrain" else {}
    arguments |= {} if kind == "rollouts" else {"tokenizer": HashedBytes()}
    found = counting(items_of(number, plan.total, kind) if items is None else items, counters)
    return BUILDERS[kind](plan.unit_path(number), items=found, **{**arguments, **changed})


def plans(path):
    """The plans of a cache that is not sealed."""
    return plans_of(path)


def states(plan, *, deep=False, progress=None):
    """What each partition of a plan is; deep: by all its bytes."""
    return states_of(plan, UNITS[kind_of(plan)], deep=deep, progress=progress)


def seal_small(plan, **changed):
    """Seal a plan; returns the cache's meta.json."""
    return seal(plan, UNITS[kind_of(plan)], **{"source": Source(name="small"), **changed})


def seal_again(path):
    """Seal what is there, as a run that is started again does: nothing to do where the cache is there."""
    for plan in plans_of(path):
        if path.exists():
            with build_lock(path):
                discard_plan(plan)
        else:
            seal_small(plan)
    clear_leftovers(path)


def remove_plan(plan):
    """Remove the folder of a plan, as its seal does; False where a partition is being built."""
    return discard_plan(plan)


def restart(path):
    """Remove all that is unfinished of a cache, its plans too."""
    with build_lock(path) as folder:
        discard_unfinished(folder)


def build_on_dask(settings, name, address):
    """Build a cache on the Dask cluster of a scheduler."""
    return dask.build_on_dask(settings, name, address)


def be_patient(patch, *, seconds=None, deaths=None):
    """Let a build on Dask wait so long for workers, or for so many deaths of them at one partition."""
    if seconds is not None:
        patch.setattr(dask, "PATIENCE_S", seconds)
    if deaths is not None:
        patch.setattr(dask, "MOST_DEATHS", deaths)


def prepared_partitions(settings, name):
    """What a build of all holds of a cache in partitions: its plan, how one is built, and how all are sealed."""
    return units.Units(settings, name)


def forget_prepared(patch):
    """Let the next look at a source read it again, as another process does."""
    patch.setattr(units.Units, "_fixed", None)


def be_other_code(patch):
    """Let plans be made by another version of this program."""
    patch.setattr(units, "code_identity", lambda: {"format": 1, "builder": 0, "libraries": {"torch": "0"}})


def whole(path, order=range(TOTAL), of="pretrain", **changed):
    """Fix a plan, build its partitions in an order, and seal them."""
    plan = planned(path, of=of)
    for number in order:
        build_part(plan, number, **changed)
    return seal_small(plan)


def cloned(plan, numbers, *, elsewhere=True):
    """Make further partitions of the files of partition 0, linked: the same documents under other numbers.

    elsewhere: as if each came from a file of its own.
    """
    first = plan.unit_path(0).resolve()
    meta = json.loads((first / "meta.json").read_bytes())
    for number in numbers:
        path = plan.unit_path(number)
        folder = versions_dir(path) / first.name
        for file in first.rglob("*"):
            if file.is_file() and file.name != "meta.json":
                (folder / file.relative_to(first)).parent.mkdir(parents=True, exist_ok=True)
                (folder / file.relative_to(first)).hardlink_to(file)
        place = {"end": {"file": number}} if elsewhere else {}
        claim = {"partition": {**meta["partition"], "number": number, **place}}
        (folder / "meta.json").write_bytes(meta_bytes(meta | claim))
        path.symlink_to(f".versions/{path.name}/{first.name}")
