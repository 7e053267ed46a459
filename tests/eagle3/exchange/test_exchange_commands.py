"""eagle3 import and export from the command line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.exchange_files import BLOCKS, Chat, in_bf16, specforge_dict

from niels_gpt.commands.eagle3.group import main
from niels_gpt.eagle3.native import NativeEagle3Dataset

pytestmark = pytest.mark.usefixtures("one_thread")
Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def target(model: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    from transformers.utils import logging

    folder = tmp_path_factory.mktemp("target")
    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder)
    finally:
        logging.enable_progress_bar()
    return str(folder)


def test_import_says_what_it_found_and_export_what_it_left_zero(
    folders: dict[str, Path], target: str, tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "c").mkdir()  # an empty folder is accepted
    source, cache, out = str(folders["speculators"]), str(tmp_path / "c"), str(tmp_path / "f")
    assert main(["import", source, cache, "--from", "speculators", "--target", target, "--aux-dtype", "fp8"]) == 0
    text = capsys.readouterr().out
    for words in (
        "outputs of blocks 1, 3, 4",
        "last hidden       pre_norm",
        "raw, checked",
        "of 8 samples: 0.00",
        "to float8",
    ):
        assert words in text
    assert NativeEagle3Dataset(cache).manifest["aux_layer_ids"] == [*BLOCKS]
    assert main(["inspect", cache]) == 0
    assert "from speculators; layers and norm found with the target on 8 samples" in capsys.readouterr().out
    assert main(["export", cache, out, "--to", "specforge", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["without_last"] > found["without_aux"] > 0 and found["last_hidden"] == "post_norm"


def test_a_trusted_import_needs_layers_and_a_name_of_a_file_never_commands_the_terminal(
    given: list[Chat], target: str, tmp_path: Path, capsys: Captured
) -> None:
    folder, out = tmp_path / "f", str(tmp_path / "c")
    folder.mkdir()
    for index, chat in enumerate(given[:3]):
        torch.save(specforge_dict(in_bf16(chat)), folder / f"{index}.ckpt")
    (folder / "\x1b[31m\n.ckpt").write_bytes(b"no archive")
    command = ["import", str(folder), out, "--from", "specforge", "--target", target]
    assert main([*command, "-k", "0"]) == 2 == main([*command, "--seed", str(1 << 70)])
    assert main([*command, "--trust"]) == 2 and "--trust needs --layers" in capsys.readouterr().err
    assert main([*command, "--trust", "--layers", "0,2,5"]) == 1
    assert "\x1b" not in (text := capsys.readouterr().err) and "[31m\\n.ckpt is unreadable" in text
    assert main([*command, "--trust", "--layers", "0,2,5", "--drop-bad"]) == 0
    text = capsys.readouterr().out
    assert (
        "\x1b" not in text
        and "left out          1 unreadable" in text
        and "loss mask         raw, not checked" in text
        and "compared          nothing" in text
    )
    manifest = NativeEagle3Dataset(out).manifest
    assert (manifest["aux_layer_ids"], manifest["conventions"]["last_hidden"]) == ([0, 2, 5], "post_norm")
