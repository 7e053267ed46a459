"""python -m niels_gpt.eagle3.precompute: what it prints, refuses and makes, with a small target and a few chats."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from support.commands import niels_gpt
from support.disk import canonical_json
from support.eagle3_damage import flip_bit
from support.eagle3_runs import disk, patched, whole_tree

from niels_gpt.display import bar
from niels_gpt.eagle3.cache import CachedEagle3Dataset, read_manifest, verify
from niels_gpt.eagle3.vocab import save_token_mapping

TOLD = ("target: ", "tokenizing: ", "hint: ")
FLAGS = """
--target-model --revision --input-data --source-root --output-dir --seq-length --draft-vocab-size --draft-vocab-from
--target-probs-topk --batch-size --max-batch-tokens --shard-size --dtype --format --aux-layers --workers --lock
--partitions --partition
--aux-dtype --shard-bytes --resume --dry-run --device --compute-dtype --chat-template --show --attention --threads
--limit --document-start --device-map --for --targets --max-memory --quantization --load-dtype --tensor-parallel
"""
KEYS = """
format_version target_model target_vocab_size draft_vocab_size seq_length dtype num_samples shard_size aux_hidden_dim
aux_layer_ids selected_token_ids
"""
LEAST = {"--seq-length": 2, "--target-probs-topk": 0, "--show": 0} | dict.fromkeys(
    ["--batch-size", "--max-batch-tokens", "--shard-size", "--draft-vocab-size", "--workers", "--threads", "--limit"], 1
)
LEAST["--tensor-parallel"] = 1
AT_ONCE = ["--dry-run", "--resume", "--show=0"]
LATER = {"split": None, "shuffle_seed": 0, "mask_reasoning_content": False, "mask_generation_prompt": True}


Run = Callable[..., tuple[int, str, str]]


def without_progress(errors):
    """Return what else stands there: on a slow machine there are lines of progress, on a small one a hint."""
    return "".join(line for line in errors.splitlines(True) if not line.startswith(TOLD))


# --- what is made -----------------------------------------------------------------------------------------------------


def test_a_run_makes_a_cache_and_says_what_it_is(tmp_path, run, model, chats):
    status, out, errors = run()
    assert status == 0 and without_progress(errors) == ""
    cache = tmp_path / "c"
    meta, manifest = json.loads((cache / "meta.json").read_bytes()), read_manifest(str(cache))
    assert sorted(manifest) == sorted(KEYS.split()) and manifest["target_model"] == str(model)
    assert (manifest["format_version"], manifest["num_samples"], manifest["aux_layer_ids"]) == (1, 10, [1, 3, 4])
    assert manifest["selected_token_ids"] == list(range(manifest["target_vocab_size"]))
    assert meta["dropped"]["no_supervised"] == 1 and "left out: " in out and "no_supervised 1" in out
    assert f"{cache}: made 3 shards" in out and f"{meta['totals']['tokens']:,} tokens" in out
    share = meta["totals"]["positions"] / meta["totals"]["supervised_tokens"]
    assert f"{meta['disk_bytes']:,} bytes" in out and f"{share:.1%} of these" in out
    assert len(CachedEagle3Dataset(str(cache))) == 10 and verify(str(cache)) == []
    assert meta["draft_mass"] == 1 and meta["kept_mass"] is None


def test_top_k_and_version_2_have_all_of_their_keys(tmp_path, run, chats, made, made_2):
    assert read_manifest(str(made_2))["target_probs_topk"] == 0, "version 2 may be dense"
    assert run("--output-dir", str(tmp_path / "d"), "--target-probs-topk", "500")[0] == 0
    assert whole_tree(tmp_path / "d") == whole_tree(made), "a top k of all is dense, of version 1"
    for shard in made.glob("shard-*"):
        assert (made_2 / shard.name).read_bytes() == shard.read_bytes()
    assert run("--target-probs-topk", "5", "--draft-vocab-size", "60", "--dtype", "fp16")[0] == 0
    manifest = read_manifest(str(tmp_path / "c"))
    assert sorted(manifest) == sorted([*KEYS.split(), *LATER, "target_probs_topk", "input_data"])
    given = {"format_version": 2, "dtype": "fp16", "draft_vocab_size": 60, "target_probs_topk": 5}
    assert manifest == {**manifest, **given, **LATER, "input_data": str(chats)}
    meta = json.loads((tmp_path / "c" / "meta.json").read_bytes())
    assert 0 < meta["kept_mass"] < 1 and 0 < meta["draft_mass"] < 1


def test_json_is_the_sizes_of_a_dry_run_and_what_was_made(run):
    status, out, _ = run("--dry-run", "--json")
    sizes = json.loads(out)
    assert status == 0 and sizes["fits"] is True and sizes["samples"] == 10
    assert json.loads(run("--json")[1])["shards"] == sizes["shards"] == 3


def test_rows_of_ids_and_masks_are_taken_as_they_are(tmp_path, run):
    rows = [{"id": f"row {number}", "input_ids": [5, 6, 7 + number], "loss_mask": [0, 1, 1]} for number in range(3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run("--input-data", str(tmp_path / "rows.jsonl"))[0] == 0
    item = CachedEagle3Dataset(str(tmp_path / "c"))[2]
    assert item["input_ids"][:2].tolist() == [6, 9] and item["loss_mask"].tolist() == [1, 1, *[0] * 38]


@pytest.mark.slow
def test_the_real_command_makes_the_same_bytes(tmp_path, made, arguments):
    shutil.copytree(made, tmp_path / "c")
    for shard in (0, 2):
        (tmp_path / "c" / f"shard-{shard:06d}.safetensors").unlink()
    program = [sys.executable, "-m", "niels_gpt.eagle3.precompute"]
    more = ["--resume", "--workers", "2", "--show", "1"]
    done = subprocess.run([*program, *arguments(*more)], capture_output=True, text=True, check=False)
    assert (done.returncode, without_progress(done.stderr)) == (0, "")
    assert "[[The heron walks to the mill.<|eot|>]]" in done.stdout and "made 2 shards" in done.stdout
    assert whole_tree(tmp_path / "c") == whole_tree(made)


# --- before the target is loaded --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_weights")
def test_a_dry_run_says_what_it_would_write(tmp_path, run, tiny_tokenizer):
    status, out, _ = run("--dry-run", "--show", "2", "--draft-vocab-size", "64")
    assert status == 0 and list(tmp_path.iterdir()) == [] and out.count("[[") == 2
    texts = ["10 samples, ", "% supervised", "mean length", "3 shards, ", " batches", "format version 1, bf16"]
    texts += [f"draft vocabulary 64 of {tiny_tokenizer.vocab_size},", ": fits\n", "free "]
    texts += [" bytes a token, ", " a slot; "]
    assert [text for text in texts if text not in out] == []


@pytest.mark.usefixtures("no_weights")
def test_a_run_that_does_not_fit_is_refused_within_seconds(tmp_path, run):
    large = ["--output-dir", str(tmp_path / "small" / "c"), "--seq-length", "1000", "--shard-size", "1"]
    samples = [{"input_ids": [5] * 1000, "loss_mask": [1] * 1000} for _ in range(5)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    large += ["--dtype", "fp32", "--input-data", str(tmp_path / "rows.jsonl")]
    with disk(tmp_path / "small", "5m") as place:
        status, out, _ = run(*large, "--dry-run")
        assert status == 1 and "free 5,242,880: does not fit" in out
        status, out, errors = run(*large)
        assert status == 1 and "but only 5,242,880 are free there. Make room, name another --output-dir" in errors
        assert list(place.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        *(([flag, str(least - 1)], f"{flag} is {least - 1}, expected {least}") for flag, least in LEAST.items()),
        (["--dtype", "int8"], "'--dtype': 'int8' is not one of"),
        (["--compute-dtype", "int8"], "'--compute-dtype': 'int8' is not one of"),
        (["--revision", "abc"], "--revision abc: "),
        (["--device", "tpu"], "'--device': 'tpu' is not one of"),
        (["--format-version", "1", "--target-probs-topk", "4"], "--format 1 stores every probability"),
        (["--format", "native", "--target-probs-topk", "4"], "--target-probs-topk is 4, and it applies to --format 1"),
        (["--format", "native", "--shard-size", "256"], "--shard-size is 256, and it applies to --format 1 and 2 only"),
        (["--format-version=2", "--aux-dtype", "fp8"], "--aux-dtype is fp8, and it applies to --format native only"),
        (["--shard-bytes", "9"], "--shard-bytes is 9, and it applies to --format native only, not to 1"),
        *((["--part", part], f"--part is '{part}', expected i/N") for part in ("0/2", "3/2", "1", "1/", "a/2")),
        (["--partitions", "2"], "--partitions 2: no partition is named. Pass --partition I, 0 to 1"),
        (["--partition", "1"], "--partition 1: the number of partitions is missing. Pass --partitions N"),
        (["--partitions", "2", "--partition", "2"], "--partition 2: expected 0 to 1, below --partitions"),
        (["--partitions", "0", "--partition", "0"], "--partitions is 0, expected 1"),
        (["--partitions", "2", "--partition", "-1"], "--partition is -1, expected 0"),
        (["--partitions", "2", "--partition", "0", "--part", "1/2"], "--part 1/2 is the earlier name of --partitions"),
        (["--chat-template", "nowhere.jinja"], "nowhere.jinja"),
    ],
)
def test_bad_values_are_usage_errors_that_name_the_flag(arguments, flags, text):
    done = niels_gpt("eagle3", "precompute", *arguments(*flags))
    assert done.status == 2 and text in done.err


@pytest.mark.usefixtures("not_tokenized")
@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--seq-length", "2049"], "--seq-length is 2049, and .* has 2048 positions"),
        (["--aux-layers", "1,1,2"], "--aux-layers 1,1,2: .*distinct"),
        (["--aux-layers", "1,2,8"], "--aux-layers 1,2,8: .*out of bounds"),
        (["--aux-layers", "dflash:4"], "--aux-layers dflash:4: .*4 ids, expected exactly 3"),
        (["--target-model", "./nowhere"], "nowhere"),
        (["--input-data", "nowhere.jsonl"], "--input-data nowhere.jsonl"),
        (["--draft-vocab-from", "nowhere.pt"], "nowhere.pt"),
        *((["--output-dir", "/proc/cache", flag], "cannot create a file there: '/proc'") for flag in AT_ONCE),
        *[(["--device", "cuda"], "--device cuda: torch finds no usable GPU")] * (not torch.cuda.is_available()),
    ],
)
def test_what_is_not_there_or_does_not_fit_the_target_fails_before_anything_is_made(tmp_path, run, flags, text):
    status, out, errors = run(*flags)
    assert (status, out) == (1, "") and errors.startswith("error[E")
    assert re.search(text, errors), errors
    assert not (tmp_path / "c").exists()


@pytest.mark.usefixtures("not_tokenized")
@pytest.mark.parametrize("flag", AT_ONCE)
@pytest.mark.parametrize(("file", "folder"), [("c", "c"), ("c", "c/d/e"), ("c/sidecar", "c"), ("c", "c/../c/d")])
def test_a_file_or_a_link_to_nowhere_where_a_folder_is_needed_is_named_at_once(tmp_path, run, flag, file, folder):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    for make in (lambda path: path.symlink_to(tmp_path / "gone"), lambda path: path.write_text("mine")):
        (tmp_path / file).unlink(missing_ok=True)
        make(tmp_path / file)
        status, out, errors = run(flag, "--output-dir", str(tmp_path / folder))
        assert (status, out) == (1, "") and f"{tmp_path / file}: " in errors
    assert (tmp_path / file).read_text() == "mine" and "blocks --output-dir" in errors


# --- resuming ---------------------------------------------------------------------------------------------------------


def test_the_same_run_is_refused_without_resume_and_up_to_date_with_it(tmp_path, run, made):
    shutil.copytree(made, tmp_path / "c")
    before = whole_tree(tmp_path / "c")
    status, _, errors = run()
    assert status == 1 and errors.startswith(f"error[E704]: {tmp_path / 'c'}: already has shards. Pass --resume")
    out = run("--resume")[1]
    assert f"{tmp_path / 'c'}: up to date" in out and "3 of them finished" in out
    assert whole_tree(tmp_path / "c") == before


FIELDS_OF = {
    "--dtype fp32 --seq-length 41 --shard-size 5": "manifest.dtype manifest.seq_length manifest.shard_size",
    "--threads 2 --attention eager --compute-dtype bf16": "run.threads run.attention run.compute_dtype",
    "--limit 9 --aux-layers 1,2,3": "source.limit manifest.aux_layer_ids",
    "--batch-size 3 --max-batch-tokens 99": "batches.batch_size batches.max_batch_tokens",
    "--format-version 2": "manifest.format_version manifest.target_probs_topk",
    "--draft-vocab-size 9": "manifest.draft_vocab_size manifest.selected_token_ids",
    "--target-probs-topk 3": "manifest.format_version manifest.target_probs_topk",
    "--target-model other/target --input-data other/chats.jsonl": "target.weights_sha256 source.fingerprint",
}


@pytest.mark.usefixtures("not_tokenized")
@pytest.mark.parametrize("flags", FIELDS_OF)
def test_another_run_is_refused_before_the_input_is_tokenized(tmp_path, made, model, chats, run, flags):
    flip_bit(shutil.copytree(model, tmp_path / "other" / "target") / "model.safetensors", -1)
    (tmp_path / "other" / "chats.jsonl").write_bytes(chats.read_bytes() + b" \n")
    before = whole_tree(made)
    status, _, errors = run("--output-dir", str(made), "--resume", *flags.split())
    assert status == 1 and "does not match the current run configuration (mismatched fields: [" in errors
    assert [field for field in FIELDS_OF[flags].split() if repr(field) not in errors] == []
    assert whole_tree(made) == before


@pytest.mark.usefixtures("no_weights")
def test_a_change_that_only_the_samples_show_is_refused_too(tmp_path, run, made):
    folder = shutil.copytree(made, tmp_path / "c")
    record = json.loads((folder / "sidecar" / "plan.json").read_bytes())
    (folder / "meta.json").unlink()
    for receipt in folder.glob("sidecar/shard-*.json"):
        receipt.unlink()
    record["samples"]["sha256"] = "0" * 64
    (folder / "sidecar" / "plan.json").write_bytes(canonical_json(record))
    status, _, errors = run("--resume")
    assert status == 1 and "(mismatched fields: ['samples.sha256'])" in errors


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("version", ["1", "2"])
def test_files_and_folders_keep_their_recorded_names_however_they_are_spelled(
    tmp_path, run, made, made_2, model, chats, version
):
    folder = {"1": made, "2": made_2}[version]
    before = whole_tree(folder)
    for target_model, input_data in (
        (os.path.relpath(model), os.path.relpath(chats)),
        (f"{model}/", f"./{os.path.relpath(chats)}"),
        (str(shutil.copytree(model, tmp_path / "moved")), str(shutil.copy(chats, tmp_path / chats.name))),
    ):
        named = ["--output-dir", str(folder), "--target-model", target_model, "--input-data", input_data]
        status, out, errors = run(*named, "--format-version", version, "--resume")
        assert status == 0 and f"{folder}: up to date" in out, errors
    assert whole_tree(folder) == before


def test_the_dtype_that_the_target_calculates_in_is_recorded_and_kept(tmp_path, run, made):
    run("--compute-dtype", "bf16")
    assert json.loads((tmp_path / "c" / "sidecar" / "plan.json").read_bytes())["run"]["compute_dtype"] == "bf16"
    name = "shard-000000.safetensors"
    assert (tmp_path / "c" / name).read_bytes() != (made / name).read_bytes()
    assert "up to date" in run("--resume")[1]


def test_a_finished_shard_and_the_threads_of_the_first_run_stay(tmp_path, run, arguments):
    run("--threads", "3")
    whole = whole_tree(tmp_path / "c")
    (tmp_path / "c" / "shard-000001.safetensors").unlink()
    given = arguments("--resume", "--dry-run")
    place = given.index("--threads")
    del given[place : place + 2]
    found = niels_gpt("eagle3", "precompute", *given)
    assert found.status == 0, found.err  # another number of threads is another plan, and refused
    status, out, _ = run("--threads", "3", "--resume", "--workers", "2")
    assert status == 0 and "made 1 shards" in out
    assert whole_tree(tmp_path / "c") == whole


# --- the draft's vocabulary -------------------------------------------------------------------------------------------


def test_a_draft_vocabulary_comes_from_a_file_or_from_another_cache_and_is_kept_by_a_resumed_run(
    tmp_path, run, tiny_tokenizer
):
    ids = [9, 3, 200, 5, 100, *range(101, 200), *range(201, tiny_tokenizer.vocab_size)]
    save_token_mapping(tmp_path / "vocab.pt", ids, tiny_tokenizer.vocab_size)
    assert run("--draft-vocab-from", str(tmp_path / "vocab.pt"))[0] == 0
    assert read_manifest(str(tmp_path / "c"))["selected_token_ids"] == ids
    other = ["--output-dir", str(tmp_path / "d"), "--draft-vocab-from", str(tmp_path / "c")]
    assert run(*other, "--draft-vocab-size", "6")[0] == 1
    assert run(*other)[0] == 0
    assert whole_tree(tmp_path / "d") == whole_tree(tmp_path / "c")
    status, out, _ = run("--draft-vocab-size", str(len(ids)), "--resume")
    assert status == 0 and "up to date" in out
    status, _, errors = run("--draft-vocab-size", "6", "--resume")
    assert status == 1 and "'manifest.draft_vocab_size', 'manifest.selected_token_ids'" in errors


def test_the_most_frequent_targets_are_chosen(tmp_path, run, tiny_tokenizer):
    row = {"input_ids": [50, 50, 50, 60, 70, 70], "loss_mask": [0, 0, 0, 1, 1, 1]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    size = tiny_tokenizer.vocab_size - 1  # or the target's own choice is not among so few tokens
    assert run("--input-data", str(tmp_path / "rows.jsonl"), "--draft-vocab-size", str(size))[0] == 0
    selected = read_manifest(str(tmp_path / "c"))["selected_token_ids"]
    assert selected[1:4] == [70, 60, 0]  # the end-of-turn token comes first


# --- the command itself -----------------------------------------------------------------------------------------------


def test_every_flag_has_a_text_and_none_is_missing():
    shown = niels_gpt("eagle3", "precompute", "--help").out
    options = re.findall(r"^\W*(--[a-z-]+)( <.*?>)? +(\S.*(?:\n {12,}(?!--)\S.*)*)", shown, re.MULTILINE)
    assert {flag for flag, *_ in options} >= {*FLAGS.split(), "--json", "--strict"}
    assert {flag for flag, *_ in options} <= {*FLAGS.split(), "--json", "--strict", "--help"}
    for flag, value, text in options:
        assert not value or re.search(r"\[[^]]+\]|default", text), flag
    program = (
        "import sys, niels_gpt.eagle3.precompute as command\n"
        "command.main(['--help'])\n"
        "print({'torch', 'transformers', 'datasets', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("set()\n") and "--max-batch-tokens" in done.stdout, "it loads no heavy library"


def test_an_interrupted_run_says_how_to_go_on(run):
    def interrupt(*_):
        raise KeyboardInterrupt

    with patched(forward=interrupt):
        status, _, errors = run()
    assert status == 130 and "finished shards stay" in errors and "--resume" in errors


def test_progress_is_a_line_now_and_then_and_a_bar_on_a_terminal(run, monkeypatch):
    monkeypatch.setattr(bar, "LINE_EVERY_S", 0.0)
    lines = [line for line in run()[2].splitlines() if line.startswith("target: ")]
    assert lines and ", 100%, " in lines[-1] and " tok/s, " in lines[-1] and lines[-1].endswith(" MB/s, 0 s left")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    status, _, errors = run("--resume", "--output-dir", "bar")
    assert status == 0 and "target:" in errors and "tok/s" in errors


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("workers", "threads", "said"),
    [
        ("3", "2", "hint: 3 processes of 2 threads each share 4 cores"),
        ("9", "4", "name --threads 1 for a new cache"),
        ("2", "3", "name --threads 2 for a new cache"),
        ("2", "2", ""),
        ("9", "1", ""),
        ("1", "8", ""),
    ],
)
def test_workers_that_wait_for_each_others_threads_get_a_hint(run, monkeypatch, workers, threads, said):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    _, _, errors = run("--dry-run", "--workers", workers, "--threads", threads)
    assert said in errors and ("hint" in errors) == bool(said)
