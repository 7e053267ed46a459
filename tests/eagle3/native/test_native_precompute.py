"""precompute --format native: a sample's rows are what the target says of it alone, whatever made them."""

import json
import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import eagle3_runs as small
from support.causal_models import tiny_model
from support.commands import niels_gpt
from support.eagle3_native import read_weights
from support.eagle3_runs import ALL, FP8, MTP, NATIVE, REPLY, estimated, never, planned, run, samples_of, whole_tree
from support.errors import refused

from niels_gpt.eagle3.cache import CachedEagle3Dataset
from niels_gpt.eagle3.head import TargetHead
from niels_gpt.eagle3.native import NativeEagle3Dataset

Run = Callable[..., tuple[int, str, str]]
FORMS = {"bf16": NATIVE, "fp8": FP8, "reply": REPLY, "all": ALL, "no block": MTP}
CPU = torch.device("cpu")
DRAFT = small.manifest()["selected_token_ids"]


def test_a_program_names_the_target_rows_alone(tmp_path):
    run(tmp_path / "a", given=small.plan(samples_of(), **REPLY))
    run(tmp_path / "b", given=small.plan(samples_of(), **NATIVE, targets="reply"))
    run(tmp_path / "c", given=small.plan(samples_of(), **NATIVE, targets="loss"))
    run(tmp_path / "d", given=small.plan(samples_of(), **NATIVE))
    assert whole_tree(tmp_path / "a") == whole_tree(tmp_path / "b")
    assert whole_tree(tmp_path / "c") == whole_tree(tmp_path / "d")
    wrong = {"every": {}, "loss": {"made_for": "mtp"}, "reply": {"aux_layer_ids": []}, "all": {"made_for": "medusa"}}
    for targets, changed in wrong.items():
        with pytest.raises(ValueError, match=f"targets (is )?'{targets}'"):
            run(tmp_path / "e", given=small.plan(samples_of(), **{**NATIVE, **changed}, targets=targets))
    assert not (tmp_path / "e").exists()


def said_of(ids, layers):
    """Return what the target says of one sample alone: blocks' outputs [L, K, H], the last one's [L, H], logits."""
    model, seen = small.load(CPU), []
    hooks = [block.register_forward_hook(lambda *of: seen.append(of[2])) for block in model.model.layers]
    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    hidden = [each[0] if isinstance(each, tuple) else each for each in seen]
    blocks = [hidden[layer][0] for layer in layers]
    return torch.stack(blocks, 1) if blocks else torch.empty(len(ids), 0, small.HIDDEN), hidden[-1][0], logits


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_sample_has_what_the_target_says_of_it(tmp_path, form):
    meta = run(tmp_path / "c", given=small.plan(samples_of(), **form)).meta
    shards, rows, layers = NativeEagle3Dataset(tmp_path / "c"), small.rows(), form.get("aux_layer_ids", [1, 3, 4])
    rough, sums = {"rtol": 2**-8, "atol": 1e-6}, {"aux_rows": 0, "target_rows": 0, "positions": 0}
    for number, row in enumerate(rows):
        found, (aux, last, logits) = shards[number], said_of(list(row.input_ids), layers)
        at = small.target_rows(row.loss_mask, form.get("targets", "loss"))
        _, end, _ = small.rows_of(row.loss_mask, form.get("targets", "loss"))
        assert found.input_ids.tolist() == row.input_ids and found.loss_mask.tolist() == [*map(bool, row.loss_mask)]
        states = found.aux_hidden_states.float()
        if found.aux_scales is not None:  # off by a sixteenth of a number, or by 2**-18 of the row's largest
            states = states * found.aux_scales[..., None]
            largest = aux[:end].abs().amax(-1, keepdim=True)
            assert bool(((states - aux[:end]).abs() <= aux[:end].abs() / 15 + largest * 2**-17).all())
        else:
            torch.testing.assert_close(states, aux[:end], **rough)
        exact = {"rtol": 1e-4, "atol": 1e-5} if found.last_hidden_states.dtype == torch.float32 else rough
        torch.testing.assert_close(found.last_hidden_states.float(), last[at], **exact)
        torch.testing.assert_close(found.log_normalizers, logits[at].logsumexp(-1), rtol=1e-5, atol=1e-5)
        assert found.argmax_ids.tolist() == logits[at].argmax(-1).tolist()
        sums["aux_rows"], sums["target_rows"] = sums["aux_rows"] + end, sums["target_rows"] + len(at)
        sums["positions"] += sum(int(logits[t].argmax()) in DRAFT for t in at if t and row.loss_mask[t])
    assert {name: meta["totals"][name] for name in sums} == sums and sums["positions"] > 0
    assert meta["totals"]["supervised_tokens"] == sum(sum(row.loss_mask[1:]) for row in rows)
    receipt = json.loads((tmp_path / "c" / "sidecar" / "shard-000000.json").read_bytes())
    assert sorted(receipt["facts"]) == ["aux_rows", "plan", "supervised", "target_rows", "tokens"]


def test_its_files_are_those_of_safetensors_and_its_ids_and_masks_those_of_version_1(tmp_path):
    for name, form in (("native", NATIVE), ("dense", {})):
        run(tmp_path / name, given=small.plan(samples_of(), **form))
    for path in (tmp_path / "native").glob("*.safetensors"):
        save_file(load_file(path), tmp_path / "again")
        assert (tmp_path / "again").read_bytes() == path.read_bytes() and path.stat().st_size <= NATIVE["shard_bytes"]
    shards, dense = NativeEagle3Dataset(tmp_path / "native"), CachedEagle3Dataset(tmp_path / "dense")
    for number in range(10):
        found, item = shards[number], dense[number]
        length = len(found.input_ids)
        assert item["input_ids"][: length - 1].tolist() == found.input_ids[1:].tolist()
        supervised = [t for t in range(1, length) if found.loss_mask[t]]
        assert [p + 1 for p in item["loss_mask"].nonzero().squeeze(-1).tolist()] == supervised
        argmax = dict(zip(found.positions.tolist(), found.argmax_ids.tolist(), strict=True))
        known = [t for t in supervised if argmax[t] in DRAFT]
        assert [p + 1 for p in item["position_mask"][:, 0].nonzero().squeeze(-1).tolist()] == known


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_any_number_of_processes_gives_the_same_bytes(tmp_path, form):
    torch.set_num_threads(1)
    samples = samples_of(22)
    given = small.plan(samples, **form)
    run(tmp_path / "one", samples=samples, given=given)
    run(tmp_path / "three", samples=samples, given=given, workers=3, start="fork")
    assert whole_tree(tmp_path / "one") == whole_tree(tmp_path / "three") and planned(given).num_shards >= 3


def of_kind(device, *, kind, changes):
    """Return a target of another architecture, as `load` does."""
    return tiny_model(kind, "eager", vocab_size=small.VOCAB, **dict(changes)).to(device)


KINDS = {
    "tied": ("llama", {"tie_word_embeddings": True}, {"norm": "rms", "tied": True}),
    "softcap": ("gemma2", {"final_logit_softcapping": 3.0}, {"norm": "gemma_rms", "softcap": 3.0, "tied": True}),
    "layer_norm": ("gpt2", {}, {"norm": "layer", "tied": True}),
    "scale": ("cohere", {"logit_scale": 0.25}, {"norm": "layer", "logit_scale": 0.25}),
}


@pytest.mark.parametrize("name", KINDS)
def test_targets_with_other_heads_have_theirs_in_the_manifest(tmp_path, name):
    kind, changes, facts = KINDS[name]
    samples, load = samples_of(4), partial(of_kind, kind=kind, changes=tuple(changes.items()))
    form = {**NATIVE, "hidden_size": 32, "aux_layer_ids": [1, 0], "dtype": "fp32"}
    given = small.plan(samples, **form, target={"hidden_size": 32})
    run(tmp_path / "c", samples=samples, given=given, load=load)
    shards, head, model = NativeEagle3Dataset(tmp_path / "c"), TargetHead.of_cache(tmp_path / "c"), load(CPU)
    assert facts.items() <= shards.manifest["head"].items()
    assert shards.manifest["conventions"]["last_hidden"] == "pre_norm"
    assert ("lm_head" in read_weights(tmp_path / "c")) is not shards.manifest["head"]["tied"]
    for number in range(4):
        found = shards[number]
        with torch.no_grad():
            logits = model(torch.from_numpy(found.input_ids.astype("int64"))[None], use_cache=False).logits[0]
        torch.testing.assert_close(head.logits(found.last_hidden_states), logits[found.positions], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found.log_normalizers, logits[found.positions].logsumexp(-1), rtol=1e-5, atol=1e-4)


def squashed(device):
    """Return a target whose final norm is none that a head could have."""
    model = tiny_model("llama", vocab_size=small.VOCAB)
    model.model.norm = torch.nn.Tanh()
    return model.to(device)


def test_where_the_norm_is_not_known_the_lm_heads_input_is_stored(tmp_path):
    form = {**NATIVE, "hidden_size": 32, "aux_layer_ids": [1], "dtype": "fp32", "aux_dtype": "fp32"}
    given = small.plan(samples_of(4), **form, target={"hidden_size": 32})
    run(tmp_path / "c", samples=samples_of(4), given=given, load=squashed)
    shards = NativeEagle3Dataset(tmp_path / "c")
    assert shards.manifest["conventions"]["last_hidden"] == "post_norm" and shards.manifest["head"]["norm"] == "none"
    found = next(sample for sample in shards if len(sample.positions) > 2)
    inner = found.positions[found.positions < len(found.aux_hidden_states)]
    last = found.last_hidden_states[: len(inner)]
    torch.testing.assert_close(last, found.aux_hidden_states[inner, 0].tanh())


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_the_estimate_is_the_size_of_the_files_and_a_little_more(tmp_path, form):
    samples = samples_of(60)
    given = small.plan(samples, **form)
    plan = planned(given)
    whole, part = (estimated(tmp_path / "c", given, part=part) for part in (None, (2, 3)))
    run(tmp_path / "c", samples=samples, given=given, part=(2, 3))
    assert sum(map(len, whole_tree(tmp_path / "c").values())) <= part.to_write_bytes < whole.to_write_bytes
    assert part.shards_left == len([*(tmp_path / "c").glob("shard-*")]) < whole.shards_left == plan.num_shards
    left = estimated(tmp_path / "c", given, resume=True).to_write_bytes
    run(tmp_path / "c", samples=samples, given=given, resume=True)
    size = sum(map(len, whole_tree(tmp_path / "c").values()))
    assert size <= whole.apparent_bytes < 1.5 * size and left < whole.to_write_bytes
    shards = sum(path.stat().st_size for path in (tmp_path / "c").glob("shard-*"))
    assert shards == sum(map(plan.bytes_of, range(plan.num_shards)))
    assert whole.bytes_per_token == shards / whole.tokens > sum(whole.token_bytes.values())


# --- what is not finite, and another draft vocabulary -----------------------------------------------------------------


def spoiled(device, *, block, value):
    """Return a target that gives a value of its own in one block, at token 7 only."""
    model = tiny_model("llama", num_hidden_layers=8, vocab_size=small.VOCAB, hidden_size=16)
    ids = []
    model.model.embed_tokens.register_forward_pre_hook(lambda _, inputs: ids.append(inputs[0]))

    def spoil(_module, _inputs, output):
        states = output[0] if isinstance(output, tuple) else output
        states[..., 3] = torch.where(ids[-1] == 7, value, states[..., 3])
        return output

    model.model.layers[block].register_forward_hook(spoil)
    return model


@pytest.mark.parametrize(
    ("form", "block", "value", "said"),
    [
        ({}, 4, float("nan"), ["'b', position 1, block 4: nan", "1 such places"]),
        (
            {"dtype": "fp16", "aux_dtype": "fp16"},
            4,
            1e5,
            ["'b', position 1, block 4: 100000.0", "torch.float16", "1 such places"],
        ),
        ({"dtype": "fp16"}, 7, 1e5, ["'a', position 3, last hidden state: 100000.0", "torch.float16"]),
        ({"aux_dtype": "fp8"}, 4, float("inf"), ["'b', position 1, block 4: inf"]),
    ],
)
def test_what_is_not_finite_is_refused_with_sample_and_layer(tmp_path, form, block, value, said):
    rows = [small.Row("a", [1, 2, 3, 7], [0, 1, 1, 0]), small.Row("b", [8, 7, 9], [1, 1, 1])]
    given = small.plan(rows, **{**NATIVE, **form})  # of a, position 3 has no auxiliary row
    with refused("E708", *said, kind=RuntimeError):
        run(tmp_path / "c", given=given, load=partial(spoiled, block=block, value=value))
    assert not list((tmp_path / "c").glob("*shard-*"))


def test_another_draft_vocabulary_writes_the_manifest_and_meta_json_alone(tmp_path):
    samples = samples_of()
    run(tmp_path / "c", given=small.plan(samples, **NATIVE))
    before = whole_tree(tmp_path / "c")
    other = small.plan(samples, **NATIVE, selected_token_ids=[*range(40)], draft_vocab_size=40)
    made = run(tmp_path / "c", given=other, resume=True, load=never)
    after = whole_tree(tmp_path / "c")
    assert (made.shards, made.is_described) == (0, True)
    assert {name for name in after if after[name] != before[name]} == {"manifest.json", "meta.json"}
    assert made.meta["totals"]["positions"] == made.meta["totals"]["supervised_tokens"]
    assert run(tmp_path / "c", given=other, resume=True, load=never).is_described is False
    run(tmp_path / "d", given=other)
    assert whole_tree(tmp_path / "d") == after
    (tmp_path / "c" / "shard-000001.safetensors").unlink()  # an unfinished one is continued, too
    run(tmp_path / "c", given=small.plan(samples, **NATIVE), resume=True)
    assert whole_tree(tmp_path / "c") == before
    with refused("E703", "['manifest.aux_dtype']"):
        run(tmp_path / "c", given=small.plan(samples, **{**NATIVE, "aux_dtype": "fp16"}), resume=True, load=never)


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_makes_one_and_says_what_it_takes(tmp_path, native_run, caplog):
    caplog.set_level("INFO", "niels_gpt")
    status, out, _ = native_run("--dry-run")
    assert status == 0 and "native form, bf16 of the blocks 1, 3, 4, bf16 of the last one, draft vocabulary " in out
    status, out, errors = native_run("--shard-bytes", "20000")
    assert (status, errors) == (0, ""), errors
    meta = json.loads((tmp_path / "c" / "meta.json").read_bytes())
    shown = f"{meta['bytes_per_token']:,.0f} bytes a token (aux_hidden_states "
    assert out.count(shown) == 2 and f"{meta['totals']['target_rows']:,} target rows" in out
    assert meta["totals"]["shards"] > 1 and meta["draft_mass"] is None
    again, size = ("--shard-bytes", "20000", "--resume"), "--draft-vocab-size"
    whole, before = meta["manifest"]["draft_vocab_size"], whole_tree(tmp_path / "c")
    status, _, errors = native_run(*again, size, "64")
    assert status == 1 and f"manifest.draft_vocab_size: {whole}, now 64" in errors and "eagle3 redraft /" in errors
    status, _, errors = native_run("--resume", "--format", "1")
    assert status == 1 and "(mismatched fields: ['manifest.format_version']): manifest.format_version: 'nat" in errors
    assert whole_tree(tmp_path / "c") == before
    (tmp_path / "c" / "meta.json").unlink()  # what is not finished may get another one that is stated
    status, out, _ = native_run(*again, size, "64")
    assert status == 0 and "all shards were there, meta.json was written" in out
    assert "the draft vocabulary has 64 tokens now, " in caplog.text
    (tmp_path / "c" / "meta.json").unlink()
    status, _, errors = native_run(*again)
    assert status == 1 and f"manifest.draft_vocab_size: 64, now {whole}" in errors
    assert native_run(*again, size, "64")[0] == 0
    status, out, _ = native_run("--output-dir", str(tmp_path / "d"), "--aux-layers", "dflash:2", "--aux-dtype", "fp8")
    assert status == 0 and "fp8 of the blocks 1, 5" in out


MADE_FOR = {
    "eagle3": ([1, 3, 4], "loss", "eagle3, peagle"),
    "peagle": ([1, 3, 4], "loss", "eagle3, peagle"),
    "dflash": ([1, 2, 3, 4, 5], "reply", "dflash, dspark, eagle3, peagle"),
    "dspark": ([1, 2, 4, 6], "all", "dflash, dspark, eagle3, mtp, peagle"),
    "mtp": ([], "all", "mtp"),
}
"""Kind of draft -> blocks of a target of 8, target rows, and the kinds for which they are enough."""


@pytest.mark.parametrize("kind", MADE_FOR)
def test_the_command_makes_a_cache_for_a_kind_of_draft(tmp_path, native_run, model, kind):
    layers, targets, enough = MADE_FOR[kind]
    flags = ("--shard-bytes", "20000", "--for", kind)
    status, out, _ = native_run(*flags, "--dry-run")
    assert status == 0 and f"target rows {targets}: enough for {enough}\n" in out
    (estimate,) = re.findall(r"([\d,]+) bytes a token", out)
    status, out, _ = native_run(*flags)
    assert status == 0 and ("rows of auxiliary states" in out) == bool(layers)
    cache, meta = NativeEagle3Dataset(tmp_path / "c"), json.loads((tmp_path / "c" / "meta.json").read_bytes())
    manifest, before = meta["manifest"], whole_tree(tmp_path / "c")
    assert (manifest["aux_layer_ids"], manifest.get("targets")) == (layers, None if targets == "loss" else targets)
    assert manifest.get("enough_for") == (None if targets == "loss" else enough.split(", "))
    assert manifest.get("made_for") == (None if kind == "eagle3" else kind)
    assert json.loads(before["sidecar/plan.json"])["manifest"].get("targets") == manifest.get("targets")
    rows = zip(*(small.rows_of(sample.loss_mask.tolist(), targets) for sample in cache), strict=True)
    assert [meta["totals"][name] for name in ("tokens", "aux_rows", "target_rows")] == [*map(sum, rows)]
    assert estimate == f"{meta['bytes_per_token']:,.0f}"
    for command in (["stats"], ["eagle3", "stats"]):
        said = " ".join(niels_gpt(*command, tmp_path / "c").out.split())
        assert ("auxiliary rows none: no block is stored" in said) == (not layers)
        assert f"target rows {meta['totals']['target_rows']:,} (" in said and f"{targets}: enough for {enough}" in said
    assert bool(niels_gpt("eagle3", "stats", tmp_path / "c", "--json").json["aux_rows"]) == bool(layers)
    assert ("aux rows" in niels_gpt("eagle3", "inspect", tmp_path / "c").out) == bool(layers)
    named = re.findall(r"^- \*\*(.+?)\*\*", niels_gpt("card", tmp_path / "c").out, re.MULTILINE)
    assert {"targets", "target rows"} < {*named} and len({*named}) == len(named)
    assert ("aux rows" in named) == bool(layers)
    for more in ((), ("--head-only",)):
        done = niels_gpt("eagle3", "verify", tmp_path / "c", "--target", model, "-k", "3", *more)
        assert done.status == 0 and "recomputed    ok" in done.out, done.out
    for name in ("meta.json", "sidecar/shard-000001.json", "shard-000000.safetensors"):  # as a killed run leaves it
        (tmp_path / "c" / name).unlink()
    assert native_run(*flags, "--resume")[0] == 0 and whole_tree(tmp_path / "c") == before
    other = "mtp" if kind == "dspark" else "dspark"
    status, _, errors = native_run("--shard-bytes", "20000", "--for", other, "--resume")
    assert status == 1 and "error[E703]" in errors and "manifest.made_for" in errors
    status, _, errors = native_run(*flags, "--aux-layers", "dflash:3", "--targets", "all", "--resume")
    assert status == 1 and "error[E703]" in errors and "manifest.aux_layer_ids" in errors
    assert whole_tree(tmp_path / "c") == before


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--for", "dflash", "--targets", "loss"), "--for dflash .* and --targets loss: .* enough for eagle3, peagle"),
        (("--for", "dspark", "--aux-layers", "none"), "--for dspark with --aux-layers none .* enough for mtp"),
        (("--for", "mtp", "--targets", "reply"), "--aux-layers none with --targets reply: .* Pass --targets all"),
        (("--aux-layers", "none"), "--targets loss: .* Pass --targets all"),
        (("--for", "eagle3", "--aux-layers", "none"), "--targets loss: .* Leave --aux-layers and --targets out"),
        (("--for", "dspark", "--format", "1"), "--for is dspark, .*--format native only, .*pass --format native"),
        (("--targets", "loss", "--format", "2"), "--targets is loss, .*pass --format native"),
        (("--aux-layers", "dspark:8"), "--aux-layers dspark:8: .* a target of 8 layers has no 8 different"),
    ],
)
def test_states_that_a_draft_would_lack_are_refused(tmp_path, native_run, flags, said):
    status, _, errors = native_run(*flags)
    assert status in (1, 2) and re.search(said, " ".join(errors.split())), errors
    assert not (tmp_path / "c").exists()
