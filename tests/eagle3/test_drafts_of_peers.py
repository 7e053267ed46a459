"""A draft of each kind learns from a cache what it learns from the running target: its gradient says so.

The drafts, losses and readers are those of speculators 0.9.0, SpecForge 0.2.0 and NeMo Automodel 0.7.0.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import drafts_run
from support.exchange_files import HIDDEN, LAYERS, VOCAB, chats, export_cache, small_model
from support.peer_caches import PEERS
from support.peer_exchange import Tool

from niels_gpt.eagle3 import make_target_cache
from niels_gpt.eagle3.format.drafters import DRAFTERS, manifest_keys
from niels_gpt.eagle3.target import dspark_features, parse_aux_layers

FOLDERS = {"speculators": "speculators-0.9.0", "specforge": "specforge-0.2.0", "automodel": "0.7.0"}
pytestmark = [
    pytest.mark.skipif(PEERS is None, reason="set NIELS_GPT_PEERS to a folder with the packages, see .ci/run"),
    pytest.mark.usefixtures("one_thread"),
]
KINDS = [
    ("speculators", "peagle"),
    ("speculators", "dflash"),
    ("speculators", "dspark"),
    ("speculators", "mtp"),
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
    return chats(small_model(), 6)


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

    def make(kind, targets=None, dtype="fp32", aux_dtype=None):
        key = kind, targets, dtype, aux_dtype
        if key not in made:
            folder, layers = tmp_path_factory.mktemp("made") / "c", layers_of(kind)
            rows = [
                SimpleNamespace(id=str(n), input_ids=c.ids.tolist(), loss_mask=c.mask.int().tolist())
                for n, c in enumerate(given)
            ]
            manifest = {
                "format_version": "native-1",
                "target_model": "small",
                "target_vocab_size": VOCAB,
                "draft_vocab_size": VOCAB,
                "selected_token_ids": list(range(VOCAB)),
                "hidden_size": HIDDEN,
                "aux_layer_ids": layers,
                "aux_dtype": aux_dtype or dtype,
                "dtype": dtype,
                "seq_length": drafts_run.MAX_LEN,
                "shard_bytes": 20_000,
                **manifest_keys(targets or DRAFTERS[kind].targets, layers, kind),
            }
            about = {"name": "small", "vocab_size": VOCAB, "hidden_size": HIDDEN, "config_sha256": "c" * 64}
            about |= {"num_layers": LAYERS, "model_type": "llama"}
            of_text = {"sha256": "a" * 64, "template_sha256": None, "mask_by": "given", "pad_id": 0}
            run = {"device": "cpu", "threads": 1, "attention": "sdpa", "compute_dtype": "fp32"}
            make_target_cache(folder, rows, lambda _: small_model(), manifest, tokenizer=of_text, target=about, run=run)
            made[key] = folder
        return made[key]

    return make


def layers_of(kind):
    return parse_aux_layers(RULES.get(kind, DRAFTERS[kind].layers), LAYERS)


def distance(found, expected):
    """The length of the difference of two gradients, as a share of the length of the expected one."""
    assert found.keys() == expected.keys() and len(expected) > 10
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


@pytest.mark.parametrize(("tool", "kind"), KINDS)
@pytest.mark.parametrize(
    ("form", "within"),
    [({}, 1e-5), ({"dtype": "bf16"}, 0.03), ({"dtype": "bf16", "aux_dtype": "fp8"}, 0.15)],
    ids=["fp32", "bf16", "fp8"],
)
def test_the_gradient_of_a_cache_is_that_of_the_running_target(
    tools, target, cache, learnt_live, tmp_path, tool, kind, form, within
):
    (loss, gradient), layers = learnt_live(tool, kind)
    export_cache(cache(kind, **form), tool, tmp_path / "e", made_for=kind)
    found, ours = tools(tool).call(tool, kind, target, str(tmp_path / "e"), layers)
    apart = distance(ours, gradient)
    print(tool, kind, form, f"loss {found:.6f} {loss:.6f}, gradient {apart:.1e} away")
    assert apart <= within and abs(found - loss) <= within * abs(loss)
