"""NeMo Automodel's DSpark cache, written and read: by the format's rule everywhere, and by its own code where it is.

nemo_automodel 0.7.0 lies in the folder 0.7.0 of NIELS_GPT_PEERS; .ci/run makes it so. Its tests are left out elsewhere.
"""

import gc
import json
import os
import re
import resource
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import drafts_run, eagle3_native, small_eagle3
from support.commands import niels_gpt
from support.errors import refused
from support.exchange_files import (
    HIDDEN,
    LAYERS,
    SLOTS,
    VOCAB,
    Chat,
    assert_same_samples,
    automodel_row,
    chats,
    in_bf16,
    make_native,
    small_model,
    states_of,
    write_automodel,
)
from support.peer_caches import PEERS
from support.peer_exchange import Tool
from support.processes import open_in

from niels_gpt.eagle3.exchange.automodel import AutomodelFiles, shard_tensors
from niels_gpt.eagle3.exchange.export import QWEN3, export_cache
from niels_gpt.eagle3.exchange.move import Target, import_cache
from niels_gpt.eagle3.exchange.proof import Convention, capture_of
from niels_gpt.eagle3.format.layout import row_bytes_of, tensors_header
from niels_gpt.eagle3.head import TargetHead
from niels_gpt.eagle3.native import NativeEagle3Dataset
from niels_gpt.storage import fileio

FOLDER = Path(PEERS or "") / "0.7.0"
with_peer = pytest.mark.skipif(
    PEERS is None or not FOLDER.is_dir(),
    reason="set NIELS_GPT_PEERS to a folder with nemo_automodel 0.7.0, see .ci/run",
)
pytestmark = pytest.mark.usefixtures("one_thread")
BLOCKS, LAST = [1, 3, 5], LAYERS - 1
FEATURES = [*BLOCKS, LAST]
NAMES = ("input_ids", "loss_mask", "target_hidden_states", "target_last_hidden_states")


@pytest.fixture(scope="module")
def qwen3():
    return small_model("qwen3")


@pytest.fixture(scope="module")
def dialogs(qwen3):
    """Ten chats; one ends with two equal tokens without loss, one fills all slots and ends so too."""
    given = chats(qwen3)
    for index, length in ((1, None), (3, SLOTS)):
        ids, mask = given[index].ids, given[index].mask
        if length:
            more = torch.arange(20, 20 + length - len(ids) - 2)
            ids, mask = torch.cat([ids, more]), torch.cat([mask, torch.zeros(len(more), dtype=torch.bool)])
        ids, mask = torch.cat([ids, torch.tensor([9, 9])]), torch.cat([mask, torch.zeros(2, dtype=torch.bool)])
        given[index] = Chat(ids, mask, *states_of(qwen3, ids))
    return given


@pytest.fixture(scope="module")
def cache(qwen3, dialogs, tmp_path_factory):
    """A native cache in fp32 with every state that DSpark reads."""
    return make_native(tmp_path_factory.mktemp("made") / "c", qwen3, dialogs, BLOCKS, made_for="dspark")


@pytest.fixture(scope="module")
def bringing(qwen3):
    """`import_cache` from Automodel's form. trusted: without the target's run. stated: its layers then."""
    facts = {"num_layers": LAYERS, "model_type": "qwen3"}
    target = Target("small", TargetHead.of_model(qwen3), HIDDEN, VOCAB, [1, 2], facts)
    capture = capture_of(qwen3, LAYERS, torch.device("cpu"))

    def run(source, out, *, trusted=None, **how):
        how |= {"capture": capture} if trusted is None else {"stated": Convention(tuple(trusted), "post_norm")}
        return import_cache("automodel", source, out, target, **{"samples": 4, **how})

    return run


@pytest.fixture(scope="module")
def folder(qwen3, dialogs, tmp_path_factory):
    """A folder by Automodel's rule, in bf16; its features are the embedding, three blocks and the last hidden state."""
    given = [in_bf16(chat) for chat in dialogs]
    return write_automodel(tmp_path_factory.mktemp("theirs") / "f", qwen3, given, [-1, *FEATURES])


def read_all(folder):
    """The samples of a folder, as its shards have them."""
    manifest = json.loads((folder / "manifest.json").read_text())
    shards = [load_file(path) for path in sorted(folder.glob("shard-*.safetensors"))]
    assert [len(shard["input_ids"]) for shard in shards][:-1] == [manifest["shard_size"]] * (len(shards) - 1)
    return [{name: shard[name][row] for name in NAMES} for shard in shards for row in range(len(shard["input_ids"]))]


# --- the form ---------------------------------------------------------------------------------------------------------


def test_an_export_is_the_form_of_automodel_and_pads_with_zeros(cache, dialogs, qwen3, tmp_path):
    done = export_cache(cache, "automodel", tmp_path / "f", layers=[-1, *FEATURES], shard_size=4)
    assert (done.samples, done.without_aux, done.without_last, done.left_out) == (10, 0, 0, 0)
    assert sorted(path.name for path in (tmp_path / "f").iterdir()) == [
        "manifest.json",
        *(f"shard-{shard:06d}.safetensors" for shard in range(3)),
        "target_weights.safetensors",
    ]
    assert len({path.stat().st_mode for path in (tmp_path / "f").iterdir()}) == 1  # all may be read by the same users
    manifest = json.loads((tmp_path / "f" / "manifest.json").read_text())
    expected = {"format_version": 1, "complete": True, "padding_id": 0, "dtype": "fp32", "seq_length": SLOTS}
    expected |= {"target_layer_ids": [-1, *FEATURES], "target_hidden_dim": 5 * HIDDEN, "num_hidden_layers": LAYERS}
    expected |= {"shard_size": 4, "num_samples": 10, "target_model_type": "qwen3", "mask_generation_prompt": True}
    assert {key: manifest[key] for key in expected} == expected
    weights = load_file(tmp_path / "f" / "target_weights.safetensors")
    assert torch.equal(weights["embed_tokens.weight"], qwen3.model.embed_tokens.weight)
    assert torch.equal(weights["lm_head.weight"], qwen3.lm_head.weight)
    for row, chat in zip(read_all(tmp_path / "f"), dialogs, strict=True):
        length, theirs = len(chat.ids), automodel_row(qwen3, chat, [-1, *FEATURES])
        for name in NAMES:
            torch.testing.assert_close(row[name][:length], theirs[name][:length], rtol=1e-4, atol=1e-5)
            assert not row[name][length:].any(), name


def test_complete_is_written_last_and_a_stopped_export_leaves_nothing(cache, tmp_path):
    seen = []

    def look(number, *_):
        (work,) = tmp_path.glob(".f.*.tmp")
        seen.append(json.loads((work / "manifest.json").read_text())["complete"])
        with refused("E711", "manifest.json", "complete is false"):
            AutomodelFiles(work, HIDDEN, VOCAB)
        if number == stop_at:
            raise KeyboardInterrupt

    stop_at = 7
    with pytest.raises(KeyboardInterrupt):
        export_cache(cache, "automodel", tmp_path / "f", shard_size=4, progress=look)
    assert seen == [False] * 7 and not [*tmp_path.iterdir()]
    gc.collect()  # of the error, whose frames hold the writer
    assert open_in(cache) == open_in(tmp_path) == []
    stop_at, trace = 0, []
    with fileio.recorded(trace):
        export_cache(cache, "automodel", tmp_path / "f", shard_size=4, progress=look)
    writes = [place for place, each in enumerate(trace) if each[0] == "write"]
    (flipped,) = (place for place in writes if b'"complete": true' in bytes(trace[place][-1]))
    assert writes[-1] == flipped and trace[flipped + 1][0] == "fsync"
    assert [each[0] for each in trace[-2:]] == ["rename", "fsync_dir"]  # and then the folder gets its name


@pytest.mark.parametrize("shard_size", [1, 3, 256])
def test_a_round_trip_keeps_every_id_mask_and_state(cache, bringing, tmp_path, shard_size):
    post = tmp_path / "post"  # the cache itself has states before the norm, and an export after it
    export_cache(cache, "automodel", tmp_path / "f", layers=[-1, *FEATURES], shard_size=shard_size)
    done = bringing(tmp_path / "f", post)
    assert (done.convention.aux_layer_ids, done.convention.last_hidden) == ((*BLOCKS,), "post_norm")
    assert done.convention.samples == 4 and max(done.convention.distances) < 1e-4
    head = TargetHead.of_cache(cache)
    for ours, theirs in zip(NativeEagle3Dataset(cache), NativeEagle3Dataset(post), strict=True):
        for name in ("input_ids", "loss_mask", "aux_hidden_states", "argmax_ids"):
            assert torch.equal(torch.as_tensor(getattr(ours, name)), torch.as_tensor(getattr(theirs, name))), name
        assert torch.equal(head.normed(ours.last_hidden_states), theirs.last_hidden_states)
    export_cache(post, "automodel", tmp_path / "again", layers=[-1, *FEATURES], shard_size=shard_size)
    bringing(tmp_path / "again", tmp_path / "c")
    assert_same_samples(post, tmp_path / "c")
    slots = len(NativeEagle3Dataset(cache)) * SLOTS - done.tokens
    assert NativeEagle3Dataset(post).manifest["imported"]["padding"]["slots"] == slots
    assert [note for note in done.notes if "padding" in note] == [
        f"{slots:,} slots at the ends of samples were left out as padding"
    ]
    assert any("layers [-1, 7] are the embedding and the last hidden state" in note for note in done.notes)


def test_features_without_blocks_are_a_cache_for_mtp(cache, bringing, tmp_path):
    export_cache(cache, "automodel", tmp_path / "f", layers=[-1, LAST])
    done = bringing(tmp_path / "f", tmp_path / "c")
    assert (done.convention.aux_layer_ids, done.target_rows) == ((), done.tokens)
    manifest = NativeEagle3Dataset(tmp_path / "c").manifest
    assert manifest["enough_for"] == ["mtp"] and "made_for" not in manifest
    with refused("E710", tmp_path / "c", "0 auxiliary layers"):
        export_cache(tmp_path / "c", "automodel", tmp_path / "g", layers=[LAST])


def test_fp8_and_bf16_become_the_wider_dtype(qwen3, dialogs, bringing, tmp_path):
    make_native(tmp_path / "c", qwen3, dialogs, BLOCKS, dtype="bf16", aux_dtype="fp8", made_for="dspark")
    done = export_cache(tmp_path / "c", "automodel", tmp_path / "f")
    assert any("from float8 to bf16" in note for note in done.notes)
    assert json.loads((tmp_path / "f" / "manifest.json").read_text())["dtype"] == "bf16"
    assert bringing(tmp_path / "f", tmp_path / "d").samples == 10
    export_cache(tmp_path / "d", "automodel", tmp_path / "again")  # with the same features, and no option
    ours, theirs = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("f", "again"))
    assert [name for name in ours if ours[name] != theirs[name]] in ([], ["manifest.json"])
    assert ours.keys() == theirs.keys()


# --- the way back -----------------------------------------------------------------------------------------------------


def test_an_import_proves_blocks_and_norm_and_counts_what_it_takes_for_padding(folder, dialogs, bringing, tmp_path):
    done = bringing(folder, tmp_path / "c")
    assert (done.convention.aux_layer_ids, done.convention.last_hidden) == ((*BLOCKS,), "post_norm")
    assert done.convention.samples == 4 and not done.dropped
    lengths = []
    for sample, chat in zip(NativeEagle3Dataset(tmp_path / "c"), map(in_bf16, dialogs), strict=True):
        length = len(sample.input_ids)
        kept = len(chat.ids) - 2 * (len(chat.ids) == SLOTS)  # the one without padding ends with two equal tokens
        assert length == kept
        assert sample.input_ids.tolist() == chat.ids[:length].tolist()
        assert sample.loss_mask.tolist() == chat.mask[:length].tolist()
        assert torch.equal(sample.aux_hidden_states, chat.blocks[:length, BLOCKS])
        assert torch.equal(sample.last_hidden_states, chat.post[:length])
        lengths.append(length)
    padding = NativeEagle3Dataset(tmp_path / "c").manifest["imported"]["padding"]
    assert padding == {"slots": 10 * SLOTS - sum(lengths), "unsure_kept": 0, "unsure_left_out": 10}
    assert any("of 10 the first slot that was left out may be a token" in note for note in done.notes)


def test_one_last_token_without_loss_is_kept_and_counted(qwen3, dialogs, bringing, tmp_path):
    chat = in_bf16(dialogs[0])
    assert chat.mask[-1]
    slots = len(chat.ids) + 1  # a single slot of padding
    write_automodel(tmp_path / "f", qwen3, [chat], FEATURES, slots=slots)
    bringing(tmp_path / "f", tmp_path / "c", trusted=BLOCKS)
    (sample,) = NativeEagle3Dataset(tmp_path / "c")
    assert sample.input_ids.tolist() == [*chat.ids.tolist(), 0]
    padding = NativeEagle3Dataset(tmp_path / "c").manifest["imported"]["padding"]
    assert padding == {"slots": 0, "unsure_kept": 1, "unsure_left_out": 0}
    write_automodel(tmp_path / "g", qwen3, [chat], FEATURES, slots=slots - 1)  # ends with a token with loss
    done = bringing(tmp_path / "g", tmp_path / "d")
    assert "padding" not in NativeEagle3Dataset(tmp_path / "d").manifest["imported"]
    assert not any("padding" in note or "samples end" in note for note in done.notes)


def test_an_import_that_is_trusted_is_compared_with_the_weights_alone(folder, bringing, tmp_path):
    done = bringing(folder, tmp_path / "c", trusted=BLOCKS)
    assert done.not_proved[:3] == ("states", "layers", "last_hidden")
    other = shutil.copytree(folder, tmp_path / "f")
    change(other, train_split="train", train_data_path="x" * 5000)  # too long for meta.json
    bringing(other, tmp_path / "g", trusted=BLOCKS)
    assert json.loads((tmp_path / "g/meta.json").read_text())["source"] == {"kind": "automodel", "train_split": "train"}
    weights = load_file(folder / "target_weights.safetensors")
    weights["lm_head.weight"][5, 5] += 1
    save_file(weights, other / "target_weights.safetensors")
    for how in ({}, {"trusted": BLOCKS}):
        with refused("E706", "target_weights.safetensors", "lm_head.weight", "--target"):
            bringing(other, tmp_path / "d", **how)


def test_a_manifest_with_other_layers_is_refused(folder, bringing, tmp_path):
    other = shutil.copytree(folder, tmp_path / "f")
    change(other, target_layer_ids=[-1, 1, 3, 4, LAST])
    with refused("E706", "blocks [1, 3, 4]", "[1, 3, 5]"):
        bringing(other, tmp_path / "c")
    change(other, target_layer_ids=[-1, *FEATURES], num_hidden_layers=LAYERS + 1)
    with refused("E711", "num_hidden_layers is 9", "8, as the target has"):
        bringing(other, tmp_path / "c")


def test_features_that_are_not_the_last_state_or_the_embedding_are_refused(folder, bringing, tmp_path):
    for layer, at, words in ((-1, 0, "not the embedding"), (LAST, 4, "not the last hidden state")):
        other = shutil.copytree(folder, tmp_path / f"f{at}")
        shard(other, 1, lambda held, at=at: held["target_hidden_states"][2, 3].__setitem__(at * HIDDEN, 7.0))
        with refused("E711", "sample 6", f"layer {layer}", words):
            bringing(other, tmp_path / "c")
        done = bringing(other, tmp_path / f"c{at}", drop_bad=True)
        assert done.dropped == {"mismatched": 1} and done.samples == 9


def test_an_export_of_fewer_rows_is_imported_with_as_many(qwen3, dialogs, bringing, tmp_path):
    make_native(tmp_path / "c", qwen3, dialogs, BLOCKS, targets="reply", made_for="dspark")
    done = export_cache(tmp_path / "c", "automodel", tmp_path / "f")
    assert done.without_last > done.without_aux > 0
    with refused("E711", "zeros", "--targets all", "pass --targets reply"):
        bringing(tmp_path / "f", tmp_path / "d")
    back = bringing(tmp_path / "f", tmp_path / "d", targets="reply")
    assert (back.tokens, back.target_rows) == (done.tokens, done.tokens - done.without_last)


# --- attacks ----------------------------------------------------------------------------------------------------------


def change(folder, **keys):
    """Change keys of the manifest; None removes one."""
    manifest = json.loads((folder / "manifest.json").read_text()) | keys
    (folder / "manifest.json").write_text(json.dumps({key: each for key, each in manifest.items() if each is not None}))


def shard(folder, number, edit):
    """Change the tensors of a shard; what `edit` returns, if anything, replaces them."""
    path = folder / f"shard-{number:06d}.safetensors"
    held = load_file(path)
    changed = edit(held)
    save_file(held if not isinstance(changed, dict) else changed, path)


def in_shard(folder, name, place, value):
    shard(folder, 1, lambda held: held[name][1].__setitem__(place, value))


def of_each(folder, edit):
    shard(folder, 1, lambda held: {name: edit(each) for name, each in held.items()})


def linked(folder):
    path, elsewhere = folder / "shard-000001.safetensors", folder.parent / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def holes(folder):
    path = folder / "shard-000001.safetensors"
    begin = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    size, head = path.stat().st_size, path.read_bytes()[:begin]
    path.unlink()
    with path.open("wb") as file:
        file.write(head)
        file.truncate(size)


HUGE = 1 << 40
FOLDER_ATTACKS = {
    **{
        f"{key} of {value}": (lambda f, key=key, value=value: change(f, **{key: value}), [key, str(value)[:20]])
        for key, values in {
            "num_samples": [HUGE, 0, "10", True],
            "seq_length": [HUGE, -1],
            "shard_size": [HUGE, 0, 4.0],
            "hidden_size": [HUGE],
            "target_vocab_size": [401],
            "num_hidden_layers": [HUGE],
            "target_hidden_dim": [HUGE],
            "dtype": ["fp8", 7],
            "target_layer_ids": [[HUGE], ["1"], [], [3, 1], [-2, 1]],
            "format_version": [2],
        }.items()
        for value in values
    },
    **{
        f"no {key}": (lambda f, key=key: change(f, **{key: None}), [key])
        for key in ("num_samples", "seq_length", "shard_size", "hidden_size", "dtype", "target_layer_ids")
    },
    "hidden_size of the target's": (lambda f: change(f, hidden_size=32), ["80 and 16 values a token", "hidden size"]),
    "not complete": (lambda f: change(f, complete=False), ["complete is false"]),
    "complete is a text": (lambda f: change(f, complete="yes"), ["complete"]),
    "more samples": (lambda f: change(f, num_samples=9_999_999), ["9,999,999", "shard-000003"]),
    "a shard less": (lambda f: (f / "shard-000001.safetensors").unlink(), ["shard-000001.safetensors is missing"]),
    "a shard more": (
        lambda f: shutil.copy(f / "shard-000001.safetensors", f / "shard-000003.safetensors"),
        ["4 shards", "shard-000003.safetensors is too many"],
    ),
    "no shards": (lambda f: [path.unlink() for path in f.glob("shard-*")], ["0 shards", "shard-000000"]),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), ["manifest.json", "no such file"]),
    "a manifest that is no JSON": (lambda f: (f / "manifest.json").write_text("[" * 99), ["manifest.json", "JSON"]),
    "no weights": (lambda f: (f / "target_weights.safetensors").unlink(), ["target_weights", "no such file"]),
    "cut weights": (
        lambda f: os.truncate(f / "target_weights.safetensors", 1000),
        ["target_weights", "1,000 bytes", "Write the folder again"],
    ),
    "other weights": (
        lambda f: save_file({"embed_tokens.weight": torch.zeros(2, 2)}, f / "target_weights.safetensors"),
        ["target_weights", "lm_head.weight"],
    ),
}


@pytest.mark.parametrize("fault", FOLDER_ATTACKS)
def test_a_folder_that_does_not_fit_is_refused_before_any_sample(folder, bringing, tmp_path, fault):
    attack, words = FOLDER_ATTACKS[fault]
    other = shutil.copytree(folder, tmp_path / "f")
    attack(other)
    for how in ({}, {"drop_bad": True}):
        with refused("E711", *words):
            bringing(other, tmp_path / "c", **how)
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


SAMPLE_ATTACKS = {
    "NaN": (
        lambda f: in_shard(f, NAMES[3], (3, 2), torch.nan),
        ["sample 5 is not finite", "last states of token 3"],
        1,
    ),
    "infinity": (
        lambda f: in_shard(f, NAMES[2], (3, 20), torch.inf),
        ["sample 5 is not finite", "auxiliary states of token 3"],
        1,
    ),
    "an id": (lambda f: in_shard(f, "input_ids", 3, 400), ["sample 5 is mismatched", "to 400", "400"], 1),
    "a negative id": (lambda f: in_shard(f, "input_ids", 3, -1), ["sample 5 is mismatched", "from -1"], 1),
    "a mask": (lambda f: in_shard(f, "loss_mask", 3, 2), ["sample 5 is mismatched", "to 2"], 1),
    "other dtypes": (
        lambda f: of_each(f, lambda each: each.half() if each.is_floating_point() else each.int()),
        ["sample 4 is unreadable", "shard-000001", "float16", "bfloat16", "int32"],
        4,
    ),
    "a tensor less": (
        lambda f: shard(f, 1, lambda held: {name: held[name] for name in NAMES[:3]}),
        ["sample 4 is unreadable", "target_last_hidden_states"],
        4,
    ),
    "a row less": (
        lambda f: of_each(f, lambda each: each[:3].clone()),
        ["sample 4 is unreadable", "[3, 64]", "[4, 64]"],
        4,
    ),
    "cut": (
        lambda f: os.truncate(f / "shard-000001.safetensors", 1000),
        ["sample 4 is unreadable", "shard-000001.safetensors", "1,000 bytes"],
        4,
    ),
    "a link": (linked, ["sample 4 is unreadable", "link", "--follow-links"], 4),
    "a hole": (holes, ["sample 4", "zeros"], 4),
}


@pytest.mark.parametrize("fault", SAMPLE_ATTACKS)
def test_a_bad_sample_is_refused_by_name_or_left_out_and_counted(qwen3, dialogs, bringing, tmp_path, fault):
    attack, words, bad = SAMPLE_ATTACKS[fault]
    other = write_automodel(tmp_path / "f", qwen3, [in_bf16(chat) for chat in dialogs], FEATURES)
    attack(other)
    with refused("E711", *words):
        bringing(other, tmp_path / "c", trusted=BLOCKS, samples=1, seed=SEED)
    done = bringing(other, tmp_path / "c", drop_bad=True)
    assert (done.samples, sum(done.dropped.values())) == (10 - bad, bad)


SEED = next(seed for seed in range(100) if torch.randperm(10, generator=torch.Generator().manual_seed(seed))[0] == 0)
"""With which a good sample is drawn, and the bad one is met in order."""


def test_links_are_followed_only_if_asked_for(folder, bringing, tmp_path):
    for name in ("manifest.json", "target_weights.safetensors"):
        other = shutil.copytree(folder, tmp_path / "f")
        (other / name).unlink()
        (other / name).symlink_to(folder / name)
        with refused("E205", name, "link"):
            bringing(other, tmp_path / "c")
        assert bringing(other, tmp_path / name[:8], follow_links=True).samples == 10
        shutil.rmtree(other)


def test_a_shard_of_holes_and_a_sample_of_many_bytes_are_refused_unread(qwen3, dialogs, bringing, tmp_path):
    other = write_automodel(tmp_path / "f", qwen3, dialogs[:1], range(-1, LAYERS), shard_size=1)
    change(other, seq_length=1 << 24)
    tensors = shard_tensors(json.loads((other / "manifest.json").read_text()), 1)
    head = tensors_header(tensors)
    size = len(head) + sum(map(row_bytes_of, tensors.values()))
    assert size > 10 << 30
    for written, words in (
        (b"", ["shard-000000.safetensors", "almost all of it is holes"]),
        (
            bytes(1 << 20) + b"\1".ljust(8, b"\0"),
            ["16,777,216 tokens have 10,737,418,240 bytes of states", "8,589,934,592"],
        ),
    ):
        with (other / "shard-000000.safetensors").open("wb") as file:
            file.write(head)
            file.seek(len(head) + (8 << 24) - len(written))  # the last id is another one than all before it
            file.write(written)
            file.truncate(size)
        with refused("E711", *words):
            bringing(other, tmp_path / "c", trusted=range(LAST))
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 30), hard))
    try:  # too little memory is no fault of the sample, which is not left out
        with refused("E507", "shard-000000.safetensors", "ulimit"):
            bringing(other, tmp_path / "c", trusted=range(LAST), drop_bad=True)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


# --- what an export cannot hold ---------------------------------------------------------------------------------------


def by_remedy(error):
    """The layers that a refusal's remedy names."""
    return [int(each) for each in re.search(r"--layers (\S+)", str(error)).group(1).split(",")]


def test_features_that_the_cache_lacks_are_refused_with_layers_that_work(cache, qwen3, dialogs, tmp_path):
    for name, blocks in (("reply", BLOCKS), ("last", [LAST])):
        make_native(tmp_path / name, qwen3, dialogs, blocks, targets="reply", made_for="dspark")
    with refused("E710", "no other block", "--for dspark"):
        export_cache(tmp_path / "last", "automodel", tmp_path / "f")
    for source, layers, words, works in (
        (tmp_path / "reply", FEATURES, ["reply only", "layer 7"], BLOCKS),
        (cache, [1, 2, 3, LAST], ["blocks [1, 3, 5]", "[2]"], [1, 3, LAST]),
        (cache, [3, 1], ["[3, 1]", "rising"], [1, 3]),
        (cache, [1, 1, 3], ["[1, 1, 3]", "rising"], [1, 3]),
        (cache, [1, 3, LAYERS], ["-1", "to 7"], [1, 3]),
        (cache, [-2, 1], ["-1", "to 7"], [1]),
        (cache, [2], ["[2]"], [-1, *FEATURES]),
        (cache, [3, -1], ["[3, -1]", "rising"], [-1, 3]),
        (tmp_path / "reply", [-1, LAST], ["reply only", "layer 7"], [-1]),
        (tmp_path / "last", [LAST], ["reply only", "layer 7"], [-1]),
        (tmp_path / "reply", [2], ["[2]"], [-1, *BLOCKS]),
    ):
        with refused("E710", source, *words) as caught:
            export_cache(source, "automodel", tmp_path / "f", layers=layers)
        assert not (tmp_path / "f").exists() and by_remedy(caught.error) == works
        done = export_cache(source, "automodel", tmp_path / "f", layers=works)
        assert bool(done.without_aux) == (source.name == "reply" and works != [-1])
        shutil.rmtree(tmp_path / "f")


def test_caches_of_other_forms_are_refused(folders, importing, tmp_path):
    small_eagle3.write_cache(tmp_path / "v1", samples=2, shard_size=2)
    small_eagle3.write_cache(tmp_path / "v2", samples=2, shard_size=2, topk=2)
    eagle3_native.write_native(tmp_path / "n", [[0, 1, 1]])
    importing("specforge", folders["specforge"], tmp_path / "loss")
    for name, words in (
        ("v1", ["version 1", "--format native"]),
        ("v2", ["version 2", "--format native"]),
        ("n", ["target rows for loss", "--for dspark"]),
        ("loss", ["target rows for loss", "--for dspark"]),
    ):
        with refused("E710", tmp_path / name, *words):
            export_cache(tmp_path / name, "automodel", tmp_path / "f")
    with refused("E710", "asked for eagle3", "dspark"):
        export_cache(tmp_path / "n", "automodel", tmp_path / "f", made_for="eagle3")


@pytest.mark.parametrize(
    ("model_type", "changed", "words"),
    [
        ("cohere", {"logit_scale": 0.25}, "a logit scale of 0.25"),
        ("gemma2", {"final_logit_softcapping": 30.0}, "a softcap of 30"),
        ("phi", {}, "a bias of lm_head"),
    ],
)
def test_a_head_that_the_loss_of_automodel_does_not_apply_is_refused(model_type, changed, words, tmp_path):
    model = small_model(model_type, **changed)
    given = heads_chats(model)
    make_native(tmp_path / "c", model, given, [1, 3], made_for="dspark")
    with refused("E710", tmp_path / "c", words, "lm_head's weights alone", "NativeEagle3Dataset"):
        export_cache(tmp_path / "c", "automodel", tmp_path / "f")


def heads_chats(model):
    """Two chats whose states no test looks at."""
    chance = torch.Generator().manual_seed(3)
    made = []
    for length in (9, 12):
        ids = torch.randint(20, VOCAB, (length,), generator=chance)
        none = torch.zeros(0)
        made.append(Chat(ids, torch.arange(length) > 3, none, none, none))
    return made


def test_another_type_of_target_is_named_and_gets_no_embedding(tmp_path):
    model = small_model("gemma", head_dim=8)  # multiplies its embedding by 4
    make_native(tmp_path / "c", model, heads_chats(model), [1, 3], made_for="dspark")
    done = export_cache(tmp_path / "c", "automodel", tmp_path / "f")
    assert any("qwen3 and qwen3_moe" in note and "gemma" in note for note in done.notes)
    with refused("E710", "gemma", "embedding may be scaled") as caught:
        export_cache(tmp_path / "c", "automodel", tmp_path / "g", layers=[-1, 1, 3, LAST])
    assert by_remedy(caught.error) == [1, 3, LAST]


def test_the_last_block_itself_is_no_feature_and_is_left_out_by_name(qwen3, dialogs, tmp_path):
    make_native(tmp_path / "c", qwen3, dialogs, [5, 1, LAST])
    done = export_cache(tmp_path / "c", "automodel", tmp_path / "f", layers=[1, LAST])
    assert any("blocks [5, 7] are left out" in note for note in done.notes)
    for row, chat in zip(read_all(tmp_path / "f"), dialogs, strict=True):
        expected = torch.cat([chat.blocks[:, 1], chat.post], dim=1)
        torch.testing.assert_close(row["target_hidden_states"][: len(chat.ids)], expected, rtol=1e-4, atol=1e-5)


# --- the commands -----------------------------------------------------------------------------------------------------


def test_the_commands_print_the_recipe_the_notes_and_what_was_not_proved(cache, qwen3, tmp_path):
    from transformers.utils import logging

    logging.disable_progress_bar()
    qwen3.save_pretrained(tmp_path / "target")
    logging.enable_progress_bar()
    out, back = tmp_path / "a folder", tmp_path / "c"
    done = niels_gpt("eagle3", "export", cache, out, "--to", "automodel", "--layers", "-1,1,3,5,7", "--shard-size", "4")
    assert done.status == 0 and len([*out.glob("shard-*")]) == 3
    assert recipe_in(done.out) == {
        "cached_target_path": str(out),
        "target_layer_ids": [-1, *FEATURES],
        "seq_length": SLOTS,
        "mask_reasoning_content": False,
        "mask_generation_prompt": True,
    }
    of_import = ("eagle3", "import", out, back, "--from", "automodel", "--target", tmp_path / "target")
    assert "--from automodel" in niels_gpt(*of_import, "--trust", "--layers", "1,3,5").err
    done = niels_gpt(*of_import)
    assert done.status == 0 and "outputs of blocks 1, 3, 5" in done.out and "slots at the ends" in done.out
    assert niels_gpt(*shlex.split(done.out.rpartition("next: niels-gpt ")[2])).status == 0
    shutil.rmtree(back)
    done = niels_gpt(*of_import, "--trust")
    assert done.status == 0 and "not proved        states, layers, last_hidden" in done.out
    for option in ("--layers", "--shard-size"):
        done = niels_gpt("eagle3", "export", cache, tmp_path / "g", "--to", "specforge", option, "1")
        assert done.status == 2 and f"{option} is for --to automodel" in done.err
    assert niels_gpt("eagle3", "export", cache, tmp_path / "g", "--to", "automodel", "--layers", "a").status == 2


def recipe_in(text):
    """The keys of the recipe that a command printed."""
    import yaml

    return yaml.safe_load(re.search("recipe_args: .*", text).group())["recipe_args"]


# --- with Automodel's own code ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def automodel():
    tool = Tool(FOLDER, drafts_run.__file__)
    yield tool
    tool.close()


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def made(request, dialogs, qwen3, tmp_path_factory):
    """A target's folder, its chats, and their native cache."""
    from transformers.utils import logging

    work = tmp_path_factory.mktemp("peer")
    model = small_model("qwen3", tie_word_embeddings=True) if request.param else qwen3
    given = [Chat(c.ids, c.mask, *states_of(model, c.ids)) for c in dialogs] if request.param else dialogs
    logging.disable_progress_bar()
    model.save_pretrained(work / "target")
    logging.enable_progress_bar()
    return str(work / "target"), given, make_native(work / "c", model, given, BLOCKS, made_for="dspark")


def their_items(automodel, target, given, layers, **how):
    samples = [{"input_ids": chat.ids, "loss_mask": chat.mask.long()} for chat in given]
    return automodel.call("automodel_items", target, samples, layers, "fp32", **how)


@with_peer
@pytest.mark.parametrize(("layers", "shard_size"), [(FEATURES, 4), ([-1, *FEATURES], 3), ([3], 256)])
def test_its_dataset_gives_what_its_producer_makes_and_the_files_are_its_own(
    automodel, made, tmp_path, layers, shard_size
):
    target, given, cache = made
    export_cache(cache, "automodel", tmp_path / "ours", layers=layers, shard_size=shard_size)
    theirs = their_items(automodel, target, given, layers, multiple=8)  # as precompute pads a batch
    read, batches, manifest, _ = automodel.call("automodel_read", str(tmp_path / "ours"))
    assert len(read) == len(theirs) == 10
    for found, expected in zip(read, theirs, strict=True):
        length = len(expected["input_ids"])
        for name in NAMES:
            assert found[name].dtype == expected[name].dtype
            assert torch.equal(found[name][:length], expected[name]), name
            assert not found[name][length:].any()
    whole = {name: torch.cat([batch[name] for batch in batches]) for name in NAMES}
    assert all(torch.equal(whole[name], torch.stack([each[name] for each in read])) for name in NAMES)
    automodel.call("automodel_write", str(tmp_path / "theirs"), target, theirs, layers, SLOTS, shard_size)
    ours, own = ({path.name: path.read_bytes() for path in (tmp_path / n).iterdir()} for n in ("ours", "theirs"))
    assert ours.keys() == own.keys()
    assert [name for name in ours if ours[name] != own[name]] == ["manifest.json"]
    described = json.loads(own["manifest.json"])
    differing = {key for key in manifest.keys() | described.keys() if manifest.get(key) != described.get(key)}
    assert differing == {
        "padding_id",  # not one of its keys
        *("target_model", "train_data_path", "chat_template_sha256", "mask_generation_prompt"),  # of the run
    }


@with_peer
def test_its_trainer_accepts_the_recipe_that_is_printed_and_on_a_cpu_fp32_alone(automodel, made, tmp_path):
    target, given, cache = made
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    drafts = automodel.call("automodel_drafts")
    of_qwen3 = [name for name, draft in drafts.items() if draft == "Qwen3DSparkModel"]
    assert of_qwen3 == [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name] for name in QWEN3]
    done = niels_gpt("eagle3", "export", cache, tmp_path / "f", "--to", "automodel")
    recipe = recipe_in(done.out)
    automodel.call("automodel_accepts", target, recipe)
    for changed, words in (
        ({"target_layer_ids": BLOCKS}, "target_hidden_dim"),
        ({"seq_length": 65}, "seq_length"),
        ({"mask_generation_prompt": False}, "mask_generation_prompt"),
    ):
        with pytest.raises(RuntimeError, match=words):
            automodel.call("automodel_accepts", target, recipe | changed)
    model = small_model("qwen3")
    make_native(tmp_path / "c", model, given, BLOCKS, dtype="bf16", made_for="dspark")
    done = niels_gpt("eagle3", "export", tmp_path / "c", tmp_path / "bf16", "--to", "automodel")
    with pytest.raises(RuntimeError, match="requires fp32"):
        automodel.call("automodel_accepts", target, recipe_in(done.out))
    automodel.call("automodel_accepts", target, recipe_in(done.out), "bfloat16")
    read, _, manifest, weights = automodel.call("automodel_read", str(tmp_path / "bf16"))
    assert manifest["dtype"] == "bf16" and {each.dtype for each in weights} == {torch.bfloat16}
    for row, ours in zip(read, read_all(tmp_path / "bf16"), strict=True):
        assert all(torch.equal(row[name], ours[name]) for name in NAMES)


@with_peer
def test_its_dataset_refuses_an_export_that_was_stopped(automodel, cache, tmp_path):
    def look(number, *_):
        if number == 10:
            (work,) = tmp_path.glob(".f.*.tmp")
            shutil.copytree(work, tmp_path / "stopped")

    export_cache(cache, "automodel", tmp_path / "f", progress=look)
    with pytest.raises(RuntimeError, match="marked incomplete"):
        automodel.call("automodel_read", str(tmp_path / "stopped"))


@with_peer
def test_a_folder_of_its_producer_is_imported_and_given_back(automodel, made, tmp_path):
    target, given, _ = made
    layers = [-1, *FEATURES]
    samples = [{"input_ids": chat.ids, "loss_mask": chat.mask.long()} for chat in given]
    argv = ["--output-dir", str(tmp_path / "f"), "--seq-length", str(SLOTS), "--batch-size", "2", "--shard-size", "4"]
    argv += ["--dtype", "fp32", "--target-force-hf", "--mask-generation-prompt"]
    argv += ["--target-layer-ids", *map(str, layers)]
    assert automodel.call("automodel_produce", target, samples, *argv) == 0
    padded = read_all(tmp_path / "f")
    assert all(bool(each["target_last_hidden_states"].any(-1).all()) for each in padded)  # also in the slots of padding
    done = niels_gpt(*("eagle3", "import", tmp_path / "f", tmp_path / "c", "--from", "automodel", "--target", target))
    assert done.status == 0 and "outputs of blocks 1, 3, 5" in done.out and "post_norm" in done.out
    export_cache(tmp_path / "c", "automodel", tmp_path / "again", layers=layers, shard_size=4)
    read, _, _, weights = automodel.call("automodel_read", str(tmp_path / "again"))
    whole = json.loads((tmp_path / "f" / "manifest.json").read_text())["num_samples"]
    assert len(read) == whole == 10
    described, again = (json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("f", "again"))
    same = ("train_data_path", "train_split", "shuffle_seed", "chat_template_sha256", "mask_generation_prompt")
    assert {key: again[key] for key in same} == {key: described[key] for key in same}
    assert described["mask_generation_prompt"] is True and described["shuffle_seed"] == 42
    for found, expected, chat in zip(read, padded, given, strict=True):
        length = len(chat.ids) - 2 * (len(chat.ids) == SLOTS)  # two equal tokens at the end, see above
        for name in NAMES:
            assert torch.equal(found[name][:length], expected[name][:length]), name
    theirs = load_file(tmp_path / "f" / "target_weights.safetensors")
    assert torch.equal(weights[0], theirs["embed_tokens.weight"]) and torch.equal(weights[1], theirs["lm_head.weight"])
