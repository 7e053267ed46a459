"""What a rerun may continue: the same plan, or a folder whose receipts name it; all else is refused, unchanged."""

import hashlib
import json
import os
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
from support import eagle3_runs as small
from support.eagle3_runs import cache_lock, never, patched, run, samples_of, times, whole_tree
from support.errors import refused

from niels_gpt.eagle3.cache import convert, verify


def untouched(cache, code, *found, **how):
    """Assert that a run is refused, and that it changed nothing, the time of a file included; returns the error."""
    before = whole_tree(cache), times(cache)
    with refused(code, *found) as caught:
        run(cache, load=never, **how)
    assert (whole_tree(cache), times(cache)) == before
    return caught.value


def leave_unfinished(cache):
    (cache / "meta.json").unlink()
    (cache / "shard-000001.safetensors").unlink()


CHANGES = {
    "manifest.aux_layer_ids": {"aux_layer_ids": [1, 2, 3]},
    "manifest.dtype": {"dtype": "fp32"},
    "manifest.target_model": {"target_model": "other"},
    "target.config_sha256": {"target": {"config_sha256": "d" * 64}},
    "tokenizer.sha256": {"tokenizer": {"sha256": "b" * 64}},
    "source.limit": {"source": {"limit": 10}},
    "run.threads": {"run": {"threads": 2}},
    "run.torch": {"run": {"torch": "1.0"}},
    "dropped.empty": {"dropped": {"empty": 3}},
}


@pytest.mark.parametrize("unfinished", [True, False])
@pytest.mark.parametrize("field", CHANGES)
def test_another_plan_is_refused_by_its_fields(cache, field, unfinished):
    if unfinished:
        leave_unfinished(cache)
        (cache / "target_embeddings.safetensors").write_bytes(b"what is there")
    given = small.plan(samples_of(), **CHANGES[field])
    error = untouched(cache, "E703", cache, given=given, resume=True)
    assert f"(mismatched fields: ['{field}'])" in error.found and "original settings" in error.remedy


def test_all_fields_that_differ_are_named_in_order_and_six_of_their_values(cache):
    plan = small.plan(samples_of(), dtype="fp32", run={"threads": 2}, batch_size=1)
    error = untouched(cache, "E703", cache, given=plan, resume=True)
    fields = ["batches.batch_size", "batches.sha256", "manifest.dtype", "run.threads"]
    values = "batches.batch_size: 3, now 1; manifest.dtype: 'bf16', now 'fp32'; run.threads: 1, now 2"
    assert error.found.endswith(f"(mismatched fields: {fields}): {values}")  # what follows from these is left out
    samples = samples_of(9)
    run_of = {"threads": 2, "torch": "1", "device": "cuda"}
    how = {"source": {"limit": 9}, "batch_size": 2, "run": run_of}
    plan = small.plan(samples, seq_length=32, dtype="fp32", **how)
    error = untouched(cache, "E703", cache, given=plan, resume=True)
    assert error.found.count(", now ") == 6 and error.found.endswith("run.torch: None, now '1'; and 1 more")
    plan = small.plan(samples, source={"limit": 9}, dropped={"empty": 1})
    error = untouched(cache, "E703", "'samples.count'", samples=samples, given=plan, resume=True)
    assert error.found.endswith("): source.limit: None, now 9")


def test_another_chat_template_is_named_with_its_file(cache, tmp_path):
    given = small.plan(samples_of(), tokenizer={"template_sha256": "b" * 64})
    error = untouched(cache, "E703", given=given, resume=True)
    assert f"the chat template (tokenizer.template_sha256): None, now {'b' * 12} of --chat-template" in error.found
    files = {"chat_template.jinja": "one", "tokenizer_config.json": json.dumps({"chat_template": "two"})}
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    of = [hashlib.sha256(text.encode()).hexdigest() for text in ("one", "two")]
    named = {"target": {"name": str(tmp_path)}}
    run(tmp_path / "d", given=small.plan(samples_of(), tokenizer={"template_sha256": of[0]}, **named))
    other = small.plan(samples_of(), tokenizer={"template_sha256": of[1]}, **named)
    with refused("E703", *(f"{sha256[:12]} of {tmp_path / name}" for sha256, name in zip(of, files, strict=True))):
        run(tmp_path / "d", given=other, resume=True)


@pytest.mark.parametrize(
    ("part", "key", "of"),
    [
        ("target", "weights_sha256", "the weights of small"),
        ("target", "config_sha256", "config.json of small"),
        ("tokenizer", "sha256", "the tokenizer of small"),
        ("source", "fingerprint", "the input rows"),
    ],
)
def test_a_sum_that_differs_is_named_with_its_file(cache, part, key, of):
    error = untouched(cache, "E703", given=small.plan(samples_of(), **{part: {key: "b" * 64}}), resume=True)
    assert f"{of} ({part}.{key}): " in error.found and "b" * 12 in error.found
    many = small.plan(samples_of(), tokenizer={"document_start": {"id": 1, "token": "x" * 90}})
    error = untouched(cache, "E703", given=many, resume=True)
    assert error.found.endswith(" ...") and len(error.found) < 320


def test_other_samples_are_refused(cache):
    rows = small.rows()
    rows[3] = small.Row(rows[3].id, rows[3].input_ids, [1 - bit for bit in rows[3].loss_mask])
    error = untouched(cache, "E703", "samples.sha256", samples=rows, resume=True)
    assert "samples.supervised_tokens" in error.found and "ids_sha256" not in error.found


def test_a_manifest_that_was_changed_since_is_refused(cache):
    convert(cache, 2)
    error = untouched(cache, "E703", "version 2", resume=True)
    assert "['manifest.format_version', 'manifest.target_probs_topk']" in error.found
    assert error.remedy.endswith(f"niels-gpt eagle3 convert {cache} --format 1")
    convert(cache, 1)
    path = cache / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b"bf16", b"fp16"))
    untouched(cache, "E703", "manifest.dtype: 'fp16', now 'bf16'", resume=True)


def test_a_folder_that_holds_a_cache_is_refused_without_resume(cache):
    untouched(cache, "E704", "shards", "--resume")
    for shard in cache.glob("shard-*"):
        shard.unlink()
    untouched(cache, "E704", "plan", "--resume")
    shutil.rmtree(cache / "sidecar")
    untouched(cache, "E704", "manifest", "--resume")


def test_a_cache_that_is_not_of_this_plan_or_of_another_tool_is_not_continued(cache):
    more = shutil.copy(cache / "shard-000001.safetensors", cache / "shard-000003.safetensors")
    untouched(cache, "E704", "shard-000003.safetensors", "3 shards", resume=True)
    Path(more).unlink()
    (cache / "meta.json").unlink()
    shutil.rmtree(cache / "sidecar")
    untouched(cache, "E703", "sidecar/plan.json", "another tool", resume=True)
    (cache / "manifest.json").unlink()
    untouched(cache, "E703", "manifest", resume=True)
    shutil.rmtree(cache)
    cache.write_bytes(b"x")
    with refused("E704", cache):
        run(cache, load=never)
    assert cache.read_bytes() == b"x"
    cache.unlink()
    (cache / "sidecar").mkdir(parents=True)
    (cache / "sidecar" / "plan.json").write_bytes(b"{")
    untouched(cache, "E703", "sidecar/plan.json is damaged", resume=True)
    untouched(cache, "E704", "plan", "--resume")


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("name", ["meta.json", "train.bin", "meta.json/keep", "sidecar/notes.txt", "sidecar"])
def test_a_folder_with_anything_of_others_is_refused(tmp_path, name, resume):
    path = tmp_path / "c" / name
    path.parent.mkdir(parents=True)
    path.write_text('{"kind": "sft"}')
    untouched(tmp_path / "c", "E704", f"(such as {name.removesuffix('/keep')})", resume=resume)
    if "/" not in name:
        (tmp_path / "c" / "x").touch()
        untouched(tmp_path / "c", "E704", "2 files", resume=resume)


def test_the_meta_json_of_another_cache_is_never_removed(cache, tmp_path):
    meta = cache / "meta.json"
    meta.write_text('{"kind": "sft"}')
    untouched(cache, "E704", "meta.json", "'sft'", "'eagle3'", resume=True)
    meta.unlink()
    meta.mkdir()
    untouched(cache, "E704", "meta.json", resume=True)
    meta.rmdir()
    meta.symlink_to(tmp_path / "elsewhere")
    untouched(cache, "E205", "meta.json", resume=True)


def test_a_folder_in_which_somebody_works_is_refused(cache):
    (cache / "meta.json").unlink()
    with cache_lock(cache):
        untouched(cache, "E503", cache, f"pid {os.getpid()}", "user", "host", resume=True)
    run(cache, resume=True)


@pytest.mark.parametrize("resume", [True, False])
def test_a_run_that_was_overtaken_sees_it(tmp_path, resume):
    late = []

    @contextmanager
    def lock(real, *given, **how):
        if not late:
            late.append(True)
            run(tmp_path / "c")
        with real(*given, **how):
            yield

    with patched(lock=lock):
        if resume:
            assert run(tmp_path / "c", resume=True).shards == 0
        else:
            with refused("E704", "shards", "--resume"):
                run(tmp_path / "c")
    assert verify(str(tmp_path / "c")) == []


LOSSES = {
    "lost": lambda path: path.unlink(),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "empty": lambda path: path.write_bytes(b""),
    "changed": lambda path: path.write_bytes(path.read_bytes().replace(b'"threads": 1', b'"threads": 7')),
}


@pytest.mark.parametrize("unfinished", [True, False])
@pytest.mark.parametrize("how", LOSSES)
def test_a_plan_that_is_lost_or_damaged_is_written_again_where_the_shards_are_of_it(cache, whole, how, unfinished):
    if unfinished:
        leave_unfinished(cache)
    LOSSES[how](cache / "sidecar" / "plan.json")
    if how == "changed":
        changed = small.plan(samples_of(), run={"threads": 7})
        found = ("plan.json", "damaged (its shards name another plan)", "original settings")
        untouched(cache, "E703", *found, given=changed, resume=True)
    else:
        given = small.plan(samples_of(), dtype="fp32")
        error = untouched(cache, "E703", "another plan", given=given, resume=True)
        assert "original settings" in error.remedy
        assert ("plan.json is missing" if how == "lost" else "plan.json is damaged") in error.found
    made = run(cache, resume=True, load=small.load if unfinished else never).shards
    assert whole_tree(cache) == whole and made == unfinished
