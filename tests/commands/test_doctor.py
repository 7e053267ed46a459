"""niels-gpt doctor: what is installed, and which caches need care."""

import importlib.metadata
import re
import tomllib

import pytest
from support import ROOT
from support.commands import niels_gpt
from support.disk import change_meta


@pytest.fixture
def examine():
    """Return a function that gives the exit code of doctor for a folder, and what --json prints."""

    def run(folder):
        done = niels_gpt("doctor", folder, "--json")
        return done.status, done.json

    return run


def test_every_extra_is_explained(root, examine):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert examine(root)[1]["extras"].keys() == project["optional-dependencies"].keys() - {"all", "pipelines"}


def test_a_missing_extra_is_named_with_its_command(tmp_path, monkeypatch):
    def distribution(name, installed=importlib.metadata.distribution):
        if name == "transformers":
            raise importlib.metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr("importlib.metadata.distribution", distribution)
    done = niels_gpt("doctor", tmp_path)
    assert done.status == 0
    out = done.out
    assert re.search(r"pip install 'niels-gpt\[(\S+,)?eagle3[],]", out) and "none; the first build trains one" in out


def test_no_folder_is_not_called_good(tmp_path):
    (tmp_path / "file").touch()
    for name, problem in (("nowhere", "no such folder"), ("file", "not a folder")):
        done = niels_gpt("doctor", tmp_path / name)
        assert done.status == 1
        out = done.out
        assert f"\n  {problem}\n" in out and "in need of care" not in out


def test_caches_that_are_good_need_no_care(root, examine):
    code, found = examine(root)
    assert (code, found["care"]) == (0, [])
    assert found["caches"] == [f"{root}/pretrain/roam", f"{root}/sft/oasst1"] and str(root) in found["tokenizer"]


def test_each_cache_that_needs_care_is_named_with_a_command(root, examine):
    chats, pages = root / "sft" / "oasst1", root / "pretrain" / "roam"
    (root / "pretrain" / ".versions" / "roam" / "building").mkdir()
    code, found = examine(root)
    assert code == 0 and [care["cache"] for care in found["care"]] == [str(pages)]
    assert found["care"][0]["command"] == f"niels-gpt gc {root}"
    change_meta(pages, builder_version=2)
    with open(chats / "val_tokens.bin", "ab") as file:
        file.write(b"more")
    code, found = examine(root)
    cares = {
        (care["cache"], care["is_damage"]): care
        for care in found["care"]
        if not care["command"].startswith("niels-gpt gc ")
    }
    assert code == 3 and cares.keys() == {(str(chats), True), (str(pages), False)}
    assert cares[str(chats), True]["command"] == f"niels-gpt verify {chats}"
    assert "--restart" in cares[str(pages), False]["command"]


def test_unsealed_partitions_that_gc_keeps_are_not_for_gc(tmp_path, monkeypatch, tiny_model_path, examine):
    monkeypatch.chdir(tmp_path)
    flags = ["--source-root", "sample", "--cache-dir", "c", "--tokenizer", str(tiny_model_path)]
    assert niels_gpt("build", "wikitext", *flags, "--partitions", "2", "--partition", "0").status == 0
    code, found = examine("c")
    (care,) = found["care"]
    assert code == 0 and "not sealed" in care["problem"] and care["command"] == ""
