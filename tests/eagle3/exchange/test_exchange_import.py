"""Other tools' folders become native caches: conventions found by the target, bad samples refused by name."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.eagle3_looks import problems_of, run_again
from support.errors import refused
from support.exchange_files import (
    BLOCKS,
    HEADER,
    in_bf16,
    specforge_dict,
    write_row,
    write_specforge,
    write_speculators,
)

from niels_gpt.eagle3.native import NativeEagle3Dataset

pytestmark = pytest.mark.usefixtures("one_thread")
Import = Callable[..., Any]
TOOLS = {"specforge": "post_norm", "speculators": "pre_norm"}
WRITE = {"specforge": write_specforge, "speculators": write_speculators}


def rows_of(mask):
    """Positions of target rows, as docs/formats.md has them."""
    return [t for t in range(1, len(mask)) if mask[t] or mask[t - 1]]


@pytest.mark.parametrize("tool", TOOLS)
def test_an_import_finds_blocks_and_norm_and_stores_every_state_that_a_loss_needs(
    folders, given, importing, model, tmp_path, tool
):
    done = importing(tool, folders[tool], tmp_path / "c", shard_bytes=1 << 13)
    assert problems_of(tmp_path / "c") == []
    again = run_again(tmp_path / "c", {}, lambda device: model, {"device": "cpu", "threads": 1}, k=10)
    assert (again.problems, again.note) == ([], None)
    assert (done.convention.aux_layer_ids, done.convention.last_hidden) == (BLOCKS, TOOLS[tool])
    assert done.convention.samples == 4 and max(done.convention.distances) < 0.01 and done.notes == ()
    stored = NativeEagle3Dataset(tmp_path / "c")
    assert len(stored) == len(given) == done.samples and stored.num_shards > 1
    manifest = stored.manifest
    assert manifest["aux_layer_ids"] == [*BLOCKS] and manifest["conventions"]["last_hidden"] == TOOLS[tool]
    assert manifest["imported"]["from"] == tool and manifest["imported"]["proved"] == done.convention.as_json()
    for sample, chat in zip(stored, map(in_bf16, given), strict=True):
        rows = rows_of(chat.mask.tolist())
        assert sample.input_ids.tolist() == chat.ids.tolist() and sample.loss_mask.tolist() == chat.mask.tolist()
        assert torch.equal(sample.aux_hidden_states, chat.aux[: rows[-1]])
        assert torch.equal(sample.last_hidden_states, (chat.post if tool == "specforge" else chat.pre)[rows])
        normed = chat.post.float() if tool == "specforge" else model.model.norm(chat.pre.float())
        logits = model.lm_head(normed[rows])
        torch.testing.assert_close(sample.log_normalizers, logits.logsumexp(-1), rtol=1e-5, atol=1e-5)
        assert torch.equal(sample.argmax_ids, logits.argmax(-1))


def test_states_that_fit_no_block_name_the_nearest(given, importing, tmp_path):
    def of_other_blocks(chat, *, noise=0.0, shift=0, last=-1):
        blocks = chat.blocks.roll(shift, dims=0) + noise * chat.blocks.std() * torch.randn(chat.blocks.shape)
        return replace(chat, blocks=blocks, pre=chat.blocks[:, last])

    torch.manual_seed(0)
    faults = {
        "noise": ({"noise": 0.5}, ["auxiliary layer 0 of 3", "nearest is block 1, 0.9 away"]),
        "shifted": ({"shift": 1}, ["auxiliary layer 0 of 3", "block 1 fits, 0 away", "the token before"]),
        "last": ({"last": 5}, ["last hidden state", "nearest is pre_norm, 0.54 away"]),
    }
    for name, (fault, words) in faults.items():
        folder = write_speculators(tmp_path / name, [of_other_blocks(chat, **fault) for chat in given])
        with refused("E706", folder, *words):
            importing("speculators", folder, tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_a_convention_that_is_not_the_tools_own_is_found_and_named(given, importing, tmp_path):
    before = [replace(chat, post=chat.pre, blocks=chat.blocks.roll(-1, dims=1)) for chat in given]
    done = importing("specforge", write_specforge(tmp_path / "f", before), tmp_path / "c")
    assert done.convention.aux_layer_ids == tuple(block + 1 for block in BLOCKS)
    assert done.convention.last_hidden == "pre_norm" and done.convention.distances == (0.0, 0.0, 0.0, 0.0)
    assert done.notes == ("the last hidden states are pre_norm, where specforge has post_norm",)


def test_a_drawn_sample_with_the_states_of_another_is_named(given, importing, tmp_path):
    swapped = [*given[:-1], replace(given[-1], ids=given[-1].ids.roll(1))]
    folder = write_speculators(tmp_path / "f", swapped)
    with refused("E706", "row 9"):
        importing("speculators", folder, tmp_path / "c", samples=10)


def spoiled(chat):
    """With infinity in one state."""
    blocks = chat.blocks.clone()
    blocks[3, BLOCKS[1], 2] = torch.inf
    return replace(chat, blocks=blocks)


def cut(path):
    path.write_bytes(path.read_bytes()[:-40])


HS, CKPT = "hidden_states/hs_2.safetensors", "rows_0-2000/data_002.ckpt"
DAMAGE = {
    "no file": ("speculators", lambda f, c: (f / HS).unlink(), ["row 2 is missing", "hs_2.safetensors"]),
    "cut": (
        "speculators",
        lambda f, c: cut(f / HS),
        ["row 2 is unreadable", "hs_2.safetensors: ", "its header"],
    ),
    "lock": ("speculators", lambda f, c: (f / f"{HS}.lock").touch(), ["row 2 is unreadable", "hs_2.safetensors.lock"]),
    "a link": (
        "speculators",
        lambda f, c: ((f / HS).unlink(), (f / HS).symlink_to(f / "hidden_states/hs_1.safetensors")),
        ["row 2 is unreadable", "hs_2.safetensors", "link", "--follow-links"],
    ),
    "infinity": ("speculators", lambda f, c: write_row(f, 2, spoiled(c)), ["row 2 is not finite", "token 3"]),
    "zeros": (
        "speculators",
        lambda f, c: write_row(f, 2, replace(c, pre=c.pre * (torch.arange(len(c.ids)) != 6)[:, None])),
        ["row 2 is mismatched", "token 6 are zeros"],
    ),
    "other ids": (
        "speculators",
        lambda f, c: write_row(f, 2, c, token_ids=c.ids + 1),
        ["row 2 is mismatched", "token_ids", "hs_2.safetensors"],
    ),
    "a state less": (
        "speculators",
        lambda f, c: write_row(f, 2, c, hidden_states=torch.zeros(len(c.ids) - 1, 4, 16)),
        ["row 2 is mismatched", "19 input_ids, 19 loss_mask, 18 auxiliary"],
    ),
    "a layer less": (
        "speculators",
        lambda f, c: write_row(f, 2, c, hidden_states=torch.ones(len(c.ids), 3, 16)),
        ["row 2 is mismatched", "2 layers"],
    ),
    "cut archive": ("specforge", lambda f, c: cut(f / CKPT), ["data_002.ckpt is unreadable", "torch.save", "zip"]),
    "nan": (
        "specforge",
        lambda f, c: torch.save(specforge_dict(c, hidden_state=c.post[None] * torch.nan), f / CKPT),
        ["data_002.ckpt is not finite", "last states of token 0"],
    ),
    "a key less": (
        "specforge",
        lambda f, c: torch.save({"input_ids": c.ids}, f / CKPT),
        ["data_002.ckpt is unreadable", "loss_mask is None"],
    ),
    "ids": (
        "specforge",
        lambda f, c: torch.save(specforge_dict(c, input_ids=c.ids + 400), f / CKPT),
        ["data_002.ckpt is mismatched", "ids from 405 to 765", "400"],
    ),
    "mask of 2": (
        "specforge",
        lambda f, c: torch.save(specforge_dict(c, loss_mask=2 * c.mask.long()), f / CKPT),
        ["data_002.ckpt is mismatched", "loss_mask from 0 to 2"],
    ),
    "width": (
        "specforge",
        lambda f, c: torch.save(specforge_dict(c, hidden_state=c.post[None, :, :8]), f / CKPT),
        ["data_002.ckpt is mismatched", "48 auxiliary", "[8] last", "16"],
    ),
    "code": (
        "specforge",
        lambda f, c: torch.save({"input_ids": Path("x")}, f / CKPT),
        ["data_002.ckpt is unreadable", "'pathlib PosixPath'"],
    ),
    "another form": (
        "specforge",
        lambda f, c: torch.save(specforge_dict(c, hidden_state=c.post[None].float()), f / CKPT),
        ["data_002.ckpt is mismatched", "3 layers of torch.bfloat16, last torch.float32"],
    ),
}


SEED = next(seed for seed in range(100) if torch.randperm(10, generator=torch.Generator().manual_seed(seed))[0] == 2)
"""With which the sample that is damaged is the first one drawn."""


@pytest.mark.parametrize("fault", DAMAGE)
def test_a_bad_sample_is_refused_by_name_or_left_out_and_counted(folders, given, importing, tmp_path, fault):
    tool, damage, words = DAMAGE[fault]
    folder = shutil.copytree(folders[tool], tmp_path / "f")
    damage(folder, in_bf16(given[2]))
    with refused("E711", *words):
        importing(tool, folder, tmp_path / "c", seed=SEED)
    assert [path.name for path in tmp_path.iterdir()] == ["f"]
    done = importing(tool, folder, tmp_path / "c", seed=SEED, drop_bad=True)
    assert done.samples == len(given) - 1 and sum(done.dropped.values()) == 1 and len(done.first_dropped) == 1
    left = [sample.input_ids.tolist() for sample in NativeEagle3Dataset(tmp_path / "c")]
    assert left == [chat.ids.tolist() for index, chat in enumerate(given) if index != 2]


def test_the_fp8_files_of_speculators_are_dequantized(folders, given, importing, tmp_path):
    folder = shutil.copytree(folders["speculators"], tmp_path / "f")
    for index, chat in enumerate(given):  # the rule of hs_connectors' quantize_tensor_to_fp8
        states = torch.cat([chat.aux, chat.pre[:, None]], dim=1)
        scale = (states.abs().amax(dim=(1, 2), keepdim=True) / 448).clamp(min=1e-12)
        values = (states / scale).to(torch.float8_e4m3fn)
        write_row(folder, index, chat, hidden_states=values, hidden_states_scales=scale)
    done = importing("speculators", folder, tmp_path / "c")
    assert done.convention.aux_layer_ids == BLOCKS and "float8" in done.notes[0]
    for sample, chat in zip(NativeEagle3Dataset(tmp_path / "c"), given, strict=True):
        aux = chat.aux[: len(sample.aux_hidden_states)]
        assert float((sample.aux_hidden_states.float() - aux).abs().max()) < 0.08 * float(aux.abs().max())


def test_a_mask_of_the_next_token_is_noticed_and_taken_where_it_is_named(given, importing, tmp_path):
    shifted = [replace(chat, mask=torch.cat([chat.mask[1:], torch.tensor([False])])) for chat in given]
    folder = write_specforge(tmp_path / "f", shifted)
    with refused("E711", HEADER, "in 16 of 16 replies"):
        importing("specforge", folder, tmp_path / "c", samples=8)
    importing("specforge", folder, tmp_path / "c", loss_mask="shifted")
    masks = [sample.loss_mask.tolist() for sample in NativeEagle3Dataset(tmp_path / "c")]
    assert masks == [chat.mask.tolist() for chat in given]
    importing("specforge", folder, tmp_path / "raw", samples=8, loss_mask="raw")


def test_a_stated_convention_is_taken_and_said_to_be_unproved(folders, given, importing, tmp_path):
    done = importing("specforge", folders["specforge"], tmp_path / "c", stated=((0, 2, 6), "post_norm"))
    assert done.convention.samples == 0
    assert NativeEagle3Dataset(tmp_path / "c").manifest["imported"]["proved"]["samples"] == 0
    with refused("E711", "3 auxiliary layers", "expected 2", "[1, 2]"):
        importing("specforge", folders["specforge"], tmp_path / "d", stated=((1, 2), "post_norm"))
    unsupervised = write_specforge(tmp_path / "f", [replace(given[0], mask=given[0].mask & False)])
    with refused("E709", unsupervised):
        importing("specforge", unsupervised, tmp_path / "e")
    with refused("E704", tmp_path / "c"):
        importing("specforge", folders["specforge"], tmp_path / "c")
    with refused("E704", "lies in"):
        importing("specforge", unsupervised, unsupervised / "c")


def test_rows_that_are_no_integers_are_mismatched(given, importing, tmp_path):
    import datasets

    chat = given[0]
    good = {"input_ids": chat.ids.tolist(), "loss_mask": chat.mask.long().tolist(), "seq_len": len(chat.ids)}
    for key, value, words in (
        ("input_ids", None, "input_ids is Value('null')"),
        ("input_ids", [0.5] * len(chat.ids), "input_ids is List(Value('float64'))"),
        ("loss_mask", [None] * len(chat.ids), "loss_mask is List(Value('null'))"),
        ("loss_mask", [*good["loss_mask"][:-1], None], "row 0 is mismatched: loss_mask is not a list of integers"),
        ("loss_mask", good["loss_mask"][:-1], "row 0 is mismatched: 15 input_ids, 14 loss_mask"),
        ("seq_len", 14, "row 0 is mismatched: 15 input_ids, seq_len 14"),
    ):
        folder = write_speculators(tmp_path / "f", [chat])
        datasets.disable_progress_bars()
        datasets.Dataset.from_list([{**good, key: value}]).save_to_disk(str(folder))
        datasets.enable_progress_bars()
        with refused("E711", words):
            importing("speculators", folder, tmp_path / "c")
        shutil.rmtree(folder)


def test_a_folder_never_leads_to_other_files_or_loses_samples_by_links(folders, given, importing, tmp_path):
    import datasets

    folder = shutil.copytree(folders["specforge"], tmp_path / "s")
    (folder / "more").symlink_to(shutil.copytree(folder, tmp_path / "more"))
    with refused("E711", "s/more"):
        importing("specforge", folder, tmp_path / "c")
    assert importing("specforge", folder, tmp_path / "c", follow_links=True).samples == 2 * len(given)
    (folder / "circle").symlink_to(folder)
    with refused("E711", "s/circle"):
        importing("specforge", folder, tmp_path / "d", follow_links=True)
    for name, code in (("hidden_states", "E711"), ("dataset_info.json", "E205")):
        folder = shutil.copytree(folders["speculators"], tmp_path / f"f-{name}")
        (folder / name).rename(tmp_path / name)
        (folder / name).symlink_to(tmp_path / name)
        with refused(code, f"f-{name}/{name}"):
            importing("speculators", folder, tmp_path / "d")
    chat = {"input_ids": [{"path": "/etc/hostname", "bytes": None}], "loss_mask": [[0, 1]], "seq_len": [2]}
    kinds = {"input_ids": datasets.Image(), "loss_mask": datasets.Sequence(datasets.Value("int64"))}
    features = datasets.Features({**kinds, "seq_len": datasets.Value("int64")})
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(chat, features).save_to_disk(str(tmp_path / "i"))
    datasets.enable_progress_bars()
    with refused("E711", "input_ids", "Image"):
        importing("speculators", tmp_path / "i", tmp_path / "d")
