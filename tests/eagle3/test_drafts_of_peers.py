"""A draft of each kind learns from a cache what it learns from the running target: its gradient says so.

The drafts, losses and readers come from speculators 0.9.0, SpecForge 0.2.0 and NeMo Automodel 0.7.0.
"""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import ROOT, drafts_run
from support.errors import refused
from support.exchange_files import LAYERS, chats, make_native, small_model
from support.peer_caches import PEERS
from support.peer_exchange import Tool

from niels_gpt.eagle3.exchange import export
from niels_gpt.eagle3.exchange.export import export_cache
from niels_gpt.eagle3.format.drafters import DRAFTERS, TARGETS, enough_for
from niels_gpt.eagle3.target import dspark_features, parse_aux_layers

FOLDERS = {"speculators": "speculators-0.9.0", "specforge": "specforge-0.2.0", "automodel": "0.7.0"}
pytestmark = [
    pytest.mark.skipif(PEERS is None, reason="set NIELS_GPT_PEERS to a folder with the packages, see .ci/run"),
    pytest.mark.usefixtures("one_thread"),
]
KINDS = [
    ("speculators", "eagle3"),
    ("speculators", "peagle"),
    ("speculators", "dflash"),
    ("speculators", "dspark"),
    ("speculators", "mtp"),
    ("specforge", "eagle3"),
    ("specforge", "dflash"),
    ("specforge", "dspark"),
    ("automodel", "dspark"),
]
RULES = {"dflash": "dflash:3", "dspark": "dspark:4"}  # fewer blocks than a large target's


@pytest.fixture(scope="module")
def tools():
    made: dict[str, Tool] = {}

    def tool(name):
        if name not in made:
            made[name] = Tool(Path(str(PEERS)) / FOLDERS[name], drafts_run.__file__)
        return made[name]

    yield tool
    for each in made.values():
        each.close()


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    small_model().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def given():
    text = chats(model := small_model(), 6)[4]  # has loss on each token
    return [*chats(model, 6), replace(text, mask=text.mask | True)]


@pytest.fixture(scope="module")
def live(given):
    """The samples as the running target gives them, for the drafts."""
    return [
        {"input_ids": c.ids, "loss_mask": c.mask.long(), "blocks": c.blocks, "pre": c.pre, "post": c.post}
        for c in given
    ]


@pytest.fixture(scope="module")
def cache(tmp_path_factory, given):
    """Return a function that makes a native cache for a kind of draft."""
    made = {}

    def make(kind, targets=None, dtype="fp32", aux_dtype=None, given=given):
        key = kind, targets, dtype, aux_dtype, len(given)
        if key not in made:
            folder, layers = tmp_path_factory.mktemp("made") / "c", layers_of(kind)
            rows_of = targets or DRAFTERS[kind].targets
            how = {"targets": rows_of, "dtype": dtype, "aux_dtype": aux_dtype, "batch_size": 8}
            how["shard_bytes"] = 1 << 20 if targets else 20_000  # one shard has the same batches with any rows
            made_for = kind if kind in enough_for(rows_of, layers) else None
            make_native(folder, small_model(), given, layers, made_for=made_for, **how)
            made[key] = folder
        return made[key]

    return make


def layers_of(kind):
    return parse_aux_layers(RULES.get(kind, DRAFTERS[kind].layers), LAYERS)


def distance(found, expected):
    """The length of the difference of two gradients, as a share of the length of the expected one."""
    assert found.keys() == expected.keys() and len(expected) > 9
    assert all(bool(each.isfinite().all()) for each in found.values())
    ours, theirs = (torch.cat([each[name].flatten() for name in sorted(expected)]) for each in (found, expected))
    assert float(theirs.norm()) > 0
    return float((ours - theirs).norm() / theirs.norm())


@pytest.fixture(scope="module")
def learnt_live(tools, target, live):
    """Return a function that gives a draft's loss and gradient from the running target."""
    made = {}

    def learn(tool, kind):
        if (tool, kind) not in made:
            layers = dspark_features(LAYERS, 4) if tool == "automodel" else layers_of(kind)
            source = tools(tool).call("automodel_items", target, live, layers, "fp32") if tool == "automodel" else live
            made[tool, kind] = tools(tool).call(tool, kind, target, source, layers), layers
        return made[tool, kind]

    return learn


def stated(tool, kind, column):
    """Return the distance of gradients that a column of the table in docs/drafters.md has."""
    names = {"eagle3": "EAGLE-3", "peagle": "P-EAGLE", "dflash": "DFlash", "dspark": "DSpark", "mtp": "MTP"}
    of_tools = {"speculators": "speculators", "specforge": "SpecForge", "automodel": "Automodel"}
    page = (ROOT / "docs" / "drafters.md").read_text(encoding="utf-8")
    (line,) = (each for each in page.splitlines() if each.startswith(f"| {names[kind]} of {of_tools[tool]} |"))
    number, percent = re.match(r" ([\d.e-]+)( %)?", line.split("|")[column + 1]).groups()
    return float(number) / (100 if percent else 1)


@pytest.mark.parametrize(("tool", "kind"), KINDS)
@pytest.mark.parametrize(
    ("column", "form"),
    [(1, {}), (2, {"dtype": "bf16"}), (3, {"dtype": "bf16", "aux_dtype": "fp8"})],
    ids=["fp32", "bf16", "fp8"],
)
def test_the_gradient_of_a_cache_is_that_of_the_running_target(
    tools, target, cache, learnt_live, tmp_path, tool, kind, column, form
):
    within = 3 * stated(tool, kind, column)  # other processors round otherwise
    (loss, gradient), layers = learnt_live(tool, kind)
    export_cache(cache(kind, **form), tool, tmp_path / "e", made_for=kind)
    found, ours = tools(tool).call(tool, kind, target, str(tmp_path / "e"), layers)
    apart = distance(ours, gradient)
    print(tool, kind, form, f"loss {found:.6f} {loss:.6f}, gradient {apart:.1e} away")
    assert apart <= within and abs(found - loss) <= within * abs(loss)


READS = {(tool, kind): DRAFTERS[kind].reads for tool, kind in KINDS} | {("specforge", "dflash"): "loss"}
"""SpecForge's DFlash reads no last hidden state: any cache with its blocks is enough."""
BLOCKS_OF = {"mtp": "eagle3"}
"""A cache without blocks must have every row, so MTP has some here, which it does not read."""


@pytest.mark.parametrize(("tool", "kind"), KINDS)
def test_a_cache_of_the_fewest_rows_gives_the_same_gradient_and_a_level_less_another(
    tools, target, cache, tmp_path, monkeypatch, tool, kind
):
    """Equal bits: the rows of format/drafters.py are enough, and each kind needs them."""
    blocks = BLOCKS_OF.get(kind, kind)
    layers = layers_of(blocks)
    how = {"layers": layers} if tool == "automodel" else {}  # without the last one, the last hidden state of each token

    def learnt(targets):
        if not (out := tmp_path / targets).exists():
            export_cache(cache(blocks, targets), tool, out, made_for=kind, **how)
        return tools(tool).call(tool, kind, target, str(out), layers)

    (loss, gradient), reads = learnt("all"), READS[tool, kind]
    fewest, found = learnt(reads)
    assert fewest == loss and found.keys() == gradient.keys()
    assert all(torch.equal(found[name], each) for name, each in gradient.items())
    if reads != "loss":
        less = TARGETS[TARGETS.index(reads) - 1]
        with refused("E710", f"has target rows for {less} only", f"--targets {reads}"):
            learnt(less)
        monkeypatch.setattr(export, "refuse_for", lambda *_: None)
        assert distance(learnt(less)[1], gradient) > 1e-3


def test_specforge_refuses_the_samples_that_are_left_out(tools, target, cache, live, learnt_live, given, tmp_path):
    """Without two tokens with loss side by side, in files for DFlash and DSpark."""
    alone = torch.arange(len(given[0].ids)) % 2 == 1
    sample = {**live[0], "loss_mask": alone.long()}
    for kind in ("dflash", "dspark"):
        with pytest.raises(RuntimeError, match="require two consecutive supervised tokens"):
            tools("specforge").call("specforge", kind, target, [sample], layers_of(kind))
        cache_of = cache(kind, given=[replace(given[0], mask=alone), *given])
        done = export_cache(cache_of, "specforge", tmp_path / kind, made_for=kind)
        assert (done.samples, done.left_out, done.tokens) == (7, 1, sum(len(each.ids) for each in given))
        _, ours = tools("specforge").call("specforge", kind, target, str(tmp_path / kind), layers_of(kind))
        assert distance(ours, learnt_live("specforge", kind)[0][1]) <= 1e-5
    assert export_cache(cache("eagle3"), "specforge", tmp_path / "eagle3").left_out == 0
