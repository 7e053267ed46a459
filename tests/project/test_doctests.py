"""The examples in docstrings give what they show."""

import doctest
from importlib import import_module

import pytest
from support import ROOT

FILES = sorted(path for path in (ROOT / "niels_gpt").rglob("*.py") if ">>> " in path.read_text(encoding="utf-8"))
MODULES = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in FILES]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = doctest.testmod(import_module(name), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert found.attempted and not found.failed
