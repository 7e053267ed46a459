"""The documents say what is true: commands, links, settings, keys."""

import re
import shlex

import pytest
from support import ROOT
from support.commands import FACES, every_command, parse

from niels_gpt.cache.meta import read_meta
from niels_gpt.recipes.plan import recipes
from niels_gpt.settings import Settings

DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_to_a_file(document):
    for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text(encoding="utf-8")):
        assert (document.parent / target).exists(), target


@pytest.mark.parametrize("document", ["README.md"])
def test_every_command_of_a_document_parses(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    commands = re.findall(r"^(?:    |\$ )python -m niels_gpt\.(\S+) ?(.*?)(?:  +#.*)?$", text, flags=re.MULTILINE)
    found = [(f"niels_gpt.{module}", words) for module, words in commands if f"niels_gpt.{module}" in FACES]
    found += [("", line) for line in re.findall(r"^(?:    |\$ )niels-gpt (.*?)(?:  +#.*)?$", text, re.MULTILINE)]
    assert found
    for module, words in found:
        parse(*shlex.split(words), module=module)


def test_every_flag_named_in_a_document_exists():
    known = {flag for command in every_command().values() for param in command.params for flag in param.opts}
    known |= {flag for command in every_command().values() for param in command.params for flag in param.secondary_opts}
    known |= {"--help", "--version"}
    known |= {"--no-append-eot"}  # the changelog names it as removed
    of_pip = {"--constraint", "--find-links", "--no-deps", "--python"}
    of_servers = {"--hidden-states-path", "--target-layer-ids", "--tensor-parallel-size", "--speculative_config"}
    of_servers |= {"--kv_transfer_config", "--no-enable-chunked-prefill", "--preprocessed-data", "--include-last-layer"}
    of_servers |= {
        "--nproc_per_node",
        "--strategy",
        "--target-model-path",
        "--data-path",
        "--output-path",
        "--max-length",
    }
    of_servers |= {"--model-path", "--speculative-config", "--speculative-algorithm", "--speculative-draft-model-path"}
    of_servers |= {"--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens"}
    of_servers |= {"--tp-size", "--enable-aux-hidden-states", "--aux-hidden-states-layers"}
    scripts = [path for folder in ("benchmarks", "examples", "tools") for path in (ROOT / folder).glob("*.py")]
    written = "".join(path.read_text(encoding="utf-8") for path in scripts)
    for document in DOCUMENTS:
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]*[a-z0-9](?![\w-])", document.read_text(encoding="utf-8")):
            if flag not in of_pip | of_servers | {
                "--nthreads",
                "--memory-limit",
                "--fix",
                "--select",
                "--config-json",
                "--config-settings",
                "--dataloader",
                "--assets",
                "--json",
                "--noprompt",
                "--prefix",
                "--port",
                "--generation-config",
                "--model-path",
                "--sampling-defaults",
                "--enable-auto-tool-choice",
                "--tool-call-parser",
            }:  # of other tools
                assert flag.replace("_", "-") in known or flag in written, f"{document.name}: {flag}"


def test_every_make_target_named_in_a_document_exists():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for document in DOCUMENTS:
        for target in re.findall(r"(?:`|^    |^\$ )make ([a-z]+)", document.read_text(encoding="utf-8"), re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{document.name}: make {target}"


def test_formats_md_names_every_key_of_every_meta_json(tmp_path, tiny_model_path):
    formats = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")
    settings = Settings(source_root="sample", cache_dir=str(tmp_path), tokenizer=str(tiny_model_path))
    for key, recipe in recipes(settings).items():
        path = recipe(settings).path
        for name in read_meta(str(path / "meta.json")):
            plain = re.sub(r"^(train|val)_(tokens|examples)$", "train_tokens", name)
            plain = re.sub(r"^val_(groups|samples)$", r"train_\1", plain)
            assert f"`{plain}`" in formats, f"{key}: {name}"


def test_every_rule_that_the_code_cites_stands_in_the_table_of_decisions():
    table = (ROOT / "docs" / "decisions" / "README.md").read_text()
    known = set(re.findall(r"^\| (D\d+|PR-\d+) \|", table, re.MULTILINE))
    files = [path for folder in ("niels_gpt", "pipelines", "tools") for path in (ROOT / folder).rglob("*.py")]
    cited = {rule for path in files for rule in re.findall(r"\b(?:D[1-9]\d?|PR-\d\d)\b", path.read_text())}
    assert "D5" in cited and cited <= known


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "docs/architecture.md"])
def test_every_file_and_folder_that_a_map_names_is_there(document):
    named = re.findall(r"`((?:[a-z_0-9]+/)+[a-z_0-9]*(?:\.py|\.txt)?)`", (ROOT / document).read_text(encoding="utf-8"))
    roots = [ROOT, ROOT / "niels_gpt"]  # a map of the package may leave out its name
    assert named
    assert [name for name in named if not any((root / name).exists() for root in roots)] == []
