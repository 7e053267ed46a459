"""The table of kinds: every operation on a real cache of each kind, and a kind of somebody else's package."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import niels_gpt
from support.disk import meta_bytes

from niels_gpt.kinds.kind import OURS, Cache, kind_named
from niels_gpt.recipes.exchange.outputs import lines_of, publish
from niels_gpt.settings import Settings
from niels_gpt.storage.locks import OPEN, unless_held
from tools import kinds_page

ROOT = Path(__file__).resolve().parents[2]
CACHES = {
    "tokenizer": "tokenizer",
    "pretrain": "pretrain/roam",
    "sft": "sft/oasst1",
    "rollouts": "trees/oasst1",
    "draft_vocab": "eagle3/draft_vocab",
    "eagle3": "eagle3/targets",
}
"""A cache of each kind, by its key."""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with a cache of each kind, of the bundled sample."""
    folder = tmp_path_factory.mktemp("kinds")
    names = ["roam", "oasst1", "trees/oasst1", "eagle3/draft_vocab", "eagle3/targets"]
    done = niels_gpt("build", *names, "--source-root", "sample", "--cache-dir", folder / "cache")
    assert done.status == 0, done.err
    return folder / "cache" / "sample"


def test_the_page_is_made_of_the_table():
    assert kinds_page.table() in kinds_page.PAGE.read_text(), "run python tools/kinds_page.py"
    assert CACHES.keys() == OURS.keys()


@pytest.mark.parametrize("operation", [*kinds_page.OF_ALL, *kinds_page.BY_METHOD, "diff"])
@pytest.mark.parametrize("name", CACHES)
def test_each_cell_of_the_page_is_so(root, tmp_path, name, operation):
    kind, cache = kind_named(name), root / CACHES[name]
    bucket = f"file://{tmp_path}/bucket"
    if operation in ("pull", "stage"):
        assert niels_gpt("push", cache, bucket).status == 0
    if operation == "published":
        line = f'[published.it]\ncache = "{CACHES[name]}"\nurl = "{bucket}"\n'
        (tmp_path / "sources.toml").write_text(line)
        (line,) = lines_of(Settings(sources_file=str(tmp_path / "sources.toml"))).values()
        content = json.loads((cache / "meta.json").read_bytes())["content_sha256"]
        assert publish(cache, line, content, tmp_path / "note.json", None).files > 1
        assert (tmp_path / "bucket" / "meta.json").is_file()
        return
    command = {
        "list": ["list", root],
        "gc": ["gc", root, "--dry-run"],
        "verify": ["verify", cache, "--deep"],
        "card": ["card", cache],
        "push": ["push", cache, bucket],
        "pull": ["pull", bucket, tmp_path / "pulled"],
        "stage": ["stage", bucket, tmp_path / "staged"],
        "stats": ["stats", cache],
        "stats --plot": ["stats", cache, "--plot", tmp_path / "plot.png"],
        "show": ["show", cache],
        "locate": ["locate", cache, "train", "7"],
        "export": ["export", cache, tmp_path / "out", "--to", "hf"],
        "diff": ["diff", cache, cache],
    }[operation]
    done = niels_gpt(*command)
    cell = kinds_page.cell(kind, operation)
    if cell == "no":
        assert done.status == 1 and "error[E208]" in done.err and kind.name in done.err
        why = kind.why_not[kinds_page.BY_METHOD[operation]]
        assert why.split(":")[0][:40] in done.err, done.err
        return
    assert done.status == 0, done.err
    if operation == "list":
        assert CACHES[name] in done.out
    if operation == "diff":
        assert done.out.startswith("equal") and ("documents were not compared" in done.out) == (cell == "settings")
    if operation == "stats --plot":
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", CACHES)
def test_gc_leaves_the_version_of_a_cache_that_is_open(root, name):
    cache = Cache.open(root / CACHES[name])
    with unless_held(cache.folder) as why:
        assert why == OPEN
    folder = cache.folder
    del cache
    with unless_held(folder) as why:
        assert why == ""


# --- a kind of another package ----------------------------------------------------------------------------------------


@pytest.fixture
def installed(tmp_path):
    """Install the kind of docs/kinds.md, from one file; returns an environment for commands."""
    code = (ROOT / "docs" / "kinds.md").read_text().split("```python\n")[1].split("```")[0]
    site = tmp_path / "site"
    about = site / "my_package-1.0.dist-info"
    about.mkdir(parents=True)
    (site / "my_photos.py").write_text(code)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[niels_gpt.kinds]\nphotos = my_photos:PHOTOS\n")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), os.environ["PYTHONPATH"], str(ROOT)])}


def sha256_of(content):
    return hashlib.sha256(content).hexdigest()


def photo_cache(root, content):
    """Commit a version of ROOT/photos/cats that holds one file; returns its public path."""
    public = root / "photos" / "cats"
    record = {"bytes": len(content), "name": "photos.bin", "sha256": sha256_of(content)}
    line = f"{record['sha256']}  photos.bin\n".encode()
    meta = {"built": True, "files": [record], "kind": "photos", "totals": {"photos": len(content)}}
    meta |= {"content_sha256": sha256_of(line), "format_version": 1, "meta_crc32": ""}
    version = root / "photos" / ".versions" / "cats" / meta["content_sha256"][:12]
    version.mkdir(parents=True)
    (version / "photos.bin").write_bytes(content)
    (version / "meta.json").write_bytes(meta_bytes(meta))
    public.unlink(missing_ok=True)
    public.symlink_to(Path(".versions/cats") / version.name)
    return public


def test_a_kind_of_another_package_is_taken_by_every_command(tmp_path, installed):
    root = tmp_path / "cache"
    for content in (b"one", b"four", b"seven!!"):
        cache = photo_cache(root, content)

    def run(*words, status=0):
        command = [sys.executable, "-c", "from niels_gpt.commands import start; exit(start())", *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=installed, cwd=tmp_path)
        assert done.returncode == status, (words, done.stdout, done.stderr)
        return done.stdout + done.stderr

    assert "7 photos" in run("list", root)
    assert f"{cache}: ok" in run("verify", root, "--deep")
    assert "photos" in run("stats", cache) and run("show", cache, "--at", "3").startswith("photo 3 of 7")
    assert "error[E208]" in run("locate", cache, "train", "0", status=1)
    assert "error[E103]" in run("seal", cache, status=2), "it has no seal"
    run("push", cache, f"file://{tmp_path}/bucket")
    run("pull", f"file://{tmp_path}/bucket", tmp_path / "pulled")
    assert (tmp_path / "pulled" / "photos.bin").read_bytes() == b"seven!!"
    assert run("gc", root).count("removed") >= 1
    (cache / "photos.bin").write_bytes(b"SEVEN!!")
    assert "photos.bin" in run("verify", cache, "--deep", status=3)


DAGSTER = """
import sys
import dagster as dg
from niels_gpt.settings import Settings
from pipelines.definitions import niels_definitions
definitions = niels_definitions(settings=Settings(source_root="sample", cache_dir=sys.argv[1]))
job = definitions.resolve_implicit_global_asset_job_def().get_subset(asset_selection={dg.AssetKey(["photos", "cats"])})
with dg.instance_for_test() as instance:
    made = job.execute_in_process(instance=instance).get_asset_materialization_events()
    found = [event.step_materialization_data.materialization.metadata for event in made]
    print([(entry["run/state"].value, entry["dagster/row_count"].value) for entry in found])
"""


def test_a_kind_of_another_package_is_built_and_is_an_asset(tmp_path, installed):
    (tmp_path / "pictures").mkdir()
    for number in range(3):
        (tmp_path / "pictures" / f"{number}.jpg").write_bytes(bytes([255, number]))
    (tmp_path / "sources.toml").write_text('[photos]\ncats = "pictures/*.jpg"\n')

    def run(*words, program="from niels_gpt.commands import start; exit(start())"):
        command = [sys.executable, "-c", program, *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=installed, cwd=tmp_path)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    build = ["build", "cats", "--source-root", "sample", "--cache-dir", tmp_path / "cache", "--json"]
    assert run(*build[:-1], "--dry-run").count("photos/cats") == 1
    (row,) = json.loads(run(*build))["caches"]
    assert (row["key"], row["state"], row["totals"]) == ("photos/cats", "built", {"photos": 3})
    assert json.loads(run(*build))["caches"][0]["state"] == "up to date"
    (tmp_path / "pictures" / "3.jpg").write_bytes(b"\xff3")
    assert run(tmp_path / "cache", program=DAGSTER).endswith("[('built', 4)]\n")
    assert run(tmp_path / "cache", program=DAGSTER).endswith("[('reused: nothing it depends on has changed', 4)]\n")
    assert "4 photos" in run("list", tmp_path / "cache" / "sample")
    (record,) = (tmp_path / "cache" / "sample" / ".runs").glob("photos.cats.jsonl")
    assert record.read_text().count("\n") == 2
    (tmp_path / "left_out.txt").write_text("0.jpg\n")
    excluding = [*build, "--exclude", tmp_path / "left_out.txt"]
    assert run(*excluding[:-3], *excluding[-2:], "--dry-run").count("photos/cats") == 1
    found = json.loads(run(*excluding))
    assert found["caches"][0]["state"] == "built", "it is built again: the list may be what its build reads"
    assert found["unmatched_exclude"] == ["0.jpg"]


def test_without_its_package_a_kind_is_named_and_its_version_stays(tmp_path):
    root = tmp_path / "cache"
    for content in (b"one", b"four", b"seven!!"):
        cache = photo_cache(root, content)
    assert "kind is 'photos'" in niels_gpt("verify", cache).out
    done = niels_gpt("stats", cache)
    assert done.status == 1 and "error[E208]" in done.err
    niels_gpt("gc", root)
    assert len(list((root / "photos" / ".versions" / "cats").iterdir())) >= 3
