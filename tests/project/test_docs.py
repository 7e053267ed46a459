"""The documents say what is true: commands, links, settings, keys."""

import re
import shlex
from pathlib import Path

import pytest
from support import ROOT

from niels_gpt.cache.meta import read_meta
from niels_gpt.commands import cache as cli
from niels_gpt.commands import eagle3, precompute, prefix_tree, train_tokenizer
from niels_gpt.prefix_tree import demo
from niels_gpt.recipes.plan import RECIPES
from niels_gpt.settings import Settings

DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_to_a_file(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text(encoding="utf-8")):
        assert (document.parent / target).exists(), target


PARSERS = {
    "cache.cli": cli._parser,
    "eagle3": eagle3._parser,
    "eagle3.precompute": precompute._parser,
    "prefix_tree": prefix_tree._parser,
    "prefix_tree.demo": demo._parser,
}


@pytest.mark.parametrize("document", ["README.md", "docs/own_data.md", "docs/eagle3.md", "docs/prefix_tree.md"])
def test_every_command_of_a_document_parses(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    commands = re.findall(r"^    python -m niels_gpt\.(\S+) ?(.*?)(?:  +#.*)?$", text, flags=re.MULTILINE)
    found = [(PARSERS[module](), arguments) for module, arguments in commands if module in PARSERS]
    assert len(found) >= 5
    for parser, arguments in found:
        parser.parse_args(shlex.split(arguments))


def test_every_flag_named_in_a_document_exists(capsys: pytest.CaptureFixture[str]) -> None:
    of_caches = ("build-all", "build", "snapshot", "list", "stats", "show", "verify", "diff", "locate", "gc")
    for main, commands in (
        (cli.main, of_caches),
        (eagle3.main, ("verify", "inspect", "convert", "stats")),
        (prefix_tree.main, ("stats", "show")),
        *((main, ("",)) for main in (train_tokenizer.main, precompute.main, demo.main)),
    ):
        for command in commands:
            with pytest.raises(SystemExit):
                main([*command.split(), "--help"])
    known = capsys.readouterr().out
    known += "".join(path.read_text(encoding="utf-8") for path in (ROOT / "benchmarks").glob("*.py"))
    for document in DOCUMENTS:
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z_-]+", document.read_text(encoding="utf-8")):
            if flag not in ("--strict", "--fix", "--select", "--config-json", "--config-settings"):  # of other tools
                assert flag in known, f"{document.name}: {flag}"


def test_every_make_target_named_in_a_document_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for document in DOCUMENTS:
        for target in re.findall(r"(?:^|`|    )make ([a-z]+)", document.read_text(encoding="utf-8"), re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{document.name}: make {target}"


def test_formats_md_names_every_key_of_every_meta_json(tmp_path: Path, tiny_model_path: Path) -> None:
    formats = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")
    settings = Settings(source_root="sample", cache_dir=str(tmp_path), tokenizer_model=str(tiny_model_path))
    for key, recipe in RECIPES.items():
        path = recipe(settings).path
        for name in read_meta(str(path / "meta.json")):
            plain = re.sub(r"^(train|val)_(tokens|examples)$", "train_tokens", name)
            assert f"`{plain}`" in formats, f"{key}: {name}"


def test_every_rule_that_the_code_cites_stands_in_the_table_of_decisions() -> None:
    table = (ROOT / "docs" / "decisions" / "README.md").read_text()
    known = set(re.findall(r"^\| (D\d+|PR-\d+) \|", table, re.MULTILINE))
    files = [path for folder in ("niels_gpt", "pipelines", "tools") for path in (ROOT / folder).rglob("*.py")]
    cited = {rule for path in files for rule in re.findall(r"\b(?:D[1-9]\d?|PR-\d\d)\b", path.read_text())}
    assert "D5" in cited and cited <= known
