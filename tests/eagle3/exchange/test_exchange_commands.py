"""eagle3 import and export from the command line."""

from functools import partial

import pytest
import torch
from support.commands import niels_gpt
from support.exchange_files import BLOCKS, in_bf16, specforge_dict

from niels_gpt.eagle3.native import NativeEagle3Dataset

pytestmark = pytest.mark.usefixtures("one_thread")
eagle3 = partial(niels_gpt, "eagle3")


@pytest.fixture(scope="module")
def target(model, tmp_path_factory):
    from transformers.utils import logging

    folder = tmp_path_factory.mktemp("target")
    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder)
    finally:
        logging.enable_progress_bar()
    return str(folder)


def test_import_says_what_it_found_and_export_what_it_left_zero(folders, target, tmp_path):
    (tmp_path / "c").mkdir()  # an empty folder is accepted
    source, cache, out = str(folders["speculators"]), str(tmp_path / "c"), str(tmp_path / "f")
    done = eagle3("import", source, cache, "--from", "speculators", "--target", target, "--aux-dtype", "fp8")
    assert done.status == 0
    for words in (
        "outputs of blocks 1, 3, 4",
        "last hidden       pre_norm",
        "raw, checked",
        "of 8 samples: 0.00",
        "to float8",
    ):
        assert words in done.out
    assert NativeEagle3Dataset(cache).manifest["aux_layer_ids"] == [*BLOCKS]
    done = eagle3("inspect", cache)
    assert done.status == 0 and "from speculators; layers and norm found with the target on 8 samples" in done.out
    done = eagle3("export", cache, out, "--to", "specforge", "--json")
    found = done.json
    assert done.status == 0 and found["without_last"] > found["without_aux"] > 0 and found["last_hidden"] == "post_norm"


def test_a_trusted_import_needs_layers_and_a_name_of_a_file_never_commands_the_terminal(given, target, tmp_path):
    folder, out = tmp_path / "f", str(tmp_path / "c")
    folder.mkdir()
    for index, chat in enumerate(given[:3]):
        torch.save(specforge_dict(in_bf16(chat)), folder / f"{index}.ckpt")
    (folder / "\x1b[31m\n.ckpt").write_bytes(b"no archive")
    command = partial(eagle3, "import", folder, out, "--from", "specforge", "--target", target)
    assert command("-k", "0").status == 2 == command("--seed", str(1 << 70)).status
    done = eagle3("import", folder, out, "--from", "specforge", "--target", tmp_path / "none", "--for", "dflash")
    assert done.status == 2 and "no last hidden states" in done.err  # said before a target is opened
    done = command("--trust")
    assert done.status == 2 and "--trust needs --layers" in done.err
    done = command("--trust", "--layers", "0,2,5")
    assert done.status == 1 and "\x1b" not in done.err and "[31m\\n.ckpt is unreadable" in done.err
    done = command("--trust", "--layers", "0,2,5", "--drop-bad")
    assert done.status == 0 and "\x1b" not in done.out
    for words in ("left out          1 unreadable", "loss mask         raw, not checked", "compared          nothing"):
        assert words in done.out
    manifest = NativeEagle3Dataset(out).manifest
    assert (manifest["aux_layer_ids"], manifest["conventions"]["last_hidden"]) == ([0, 2, 5], "post_norm")
