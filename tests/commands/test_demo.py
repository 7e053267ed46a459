"""niels-gpt demo: every cache of the sample, and commands that work as they are printed."""

import re
import shlex
import sys

from support.commands import niels_gpt

from niels_gpt.recipes.plan import every_key
from niels_gpt.settings import Settings


def test_the_demo_builds_every_cache_and_what_it_says_to_try_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = niels_gpt("demo", "cache")
    assert done.status == 0
    out = done.out
    for key in every_key(Settings()):
        assert (tmp_path / "cache" / "sample" / key / "meta.json").is_file()
    assert "[[" in out, "no loss mask"
    tries = re.findall(r"^  niels-gpt (.*?)(?:  |$)", out.partition("Try next:")[2], re.MULTILINE)
    assert len(tries) >= 5
    for line in tries:
        assert niels_gpt(*shlex.split(line)).status == 0, line


def test_without_transformers_the_demo_names_the_extra_and_keeps_its_folder(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    done = niels_gpt("demo", "--strict")
    assert done.status == 0
    out, err = done.out, done.err
    assert err.count("warning") == 1 and "warning[W513]" in err and "pip install 'niels-gpt[eagle3]'" in err
    (folder,) = tmp_path.glob("niels-gpt-demo-*")
    assert f"niels-gpt show {folder}/sample/sft/oasst1" in out
    assert not (folder / "sample" / "eagle3").exists()
