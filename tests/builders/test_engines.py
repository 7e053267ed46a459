"""The bytes of a cache are the same whatever engine encodes, in how many threads or processes, in what batches."""

import json
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context

import pytest
from support.made_tokenizers import any_tokenizer, sample_texts
from support.power_loss import tree_of

from niels_gpt.cache.build_pretrain import build_pretrain
from niels_gpt.documents import DocumentBatch
from niels_gpt.tokenizer import load_tokenizer

pytest.importorskip("gigatoken", reason="needs the extra fast")

ODD = ("", "a<|endoftext|>b <|eot_id|> <|im_start|>", "\u212b e\u0301", "\u088f's", "nul \0", "  \n\n ", "x" * 50_000)
TEXTS = [part for text in sample_texts() for part in (text, *text.split("\n"))] + list(ODD)


def built(path, tokenizer, *, batch=0, **arguments):
    """Build a cache and return its files. batch: documents in a DocumentBatch; 0: rows."""
    documents = ((None, text, str(number)) for number, text in enumerate(TEXTS))
    if batch:
        documents = (
            DocumentBatch(
                [text.encode() for text in TEXTS[at : at + batch]],
                [str(number) for number in range(at, min(at + batch, len(TEXTS)))],
            )
            for at in range(0, len(TEXTS), batch)
        )
    build_pretrain(
        documents,
        path,
        tokenizer=tokenizer,
        max_train_tokens=10**7,
        max_val_tokens=10**6,
        shard_bytes=40_000,
        seed=0,
        shuffle_buffer=50,
        **{"document_end": "none", **arguments},
    )
    return {name: content for name, content in tree_of(path.resolve()).items() if "journal" not in name}


@pytest.mark.parametrize(
    "name", ["gpt2", "small qwen2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2", "gemma"))]
)
def test_a_cache_does_not_depend_on_engine_threads_and_batches(name, tmp_path):
    tokenizer = load_tokenizer(any_tokenizer(name), sentinels="optional")
    reference = built(tmp_path / "reference", tokenizer, engine="reference", num_threads=0)
    assert json.loads(reference["meta.json"])["compared"]["pieces"] > 50, "whatever engine encodes"
    assert sum(name.endswith(".bin") for name in map(str, reference)) > 2
    for number, (threads, batch) in enumerate([(0, 0), (1, 7), (2, 64)]):
        path = tmp_path / f"fast{number}"
        assert built(path, tokenizer, engine="gigatoken", num_threads=threads, batch=batch) == reference, (
            threads,
            batch,
        )


@pytest.mark.parametrize(
    "kind", ["threads", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("spawn", "fork"))]
)
def test_an_executor_of_processes_gives_the_same_bytes(kind, tmp_path):
    tokenizer = load_tokenizer(any_tokenizer("small qwen2"), sentinels="optional")
    pool = ThreadPoolExecutor(2) if kind == "threads" else ProcessPoolExecutor(2, get_context(kind))
    with pool:
        there = built(tmp_path / "there", tokenizer, engine="gigatoken", executor=pool)
    assert there == built(tmp_path / "here", tokenizer, engine="reference")


@pytest.mark.slow
def test_special_tokens_as_text_are_the_same_with_both_engines(tmp_path):
    tokenizer = load_tokenizer(any_tokenizer("qwen2"), sentinels="optional")
    trees = [built(tmp_path / each, tokenizer, engine=each, on_special="text") for each in ("gigatoken", "reference")]
    assert trees[0] == trees[1]


def test_a_build_without_a_shuffle_imports_nothing_that_takes_longer_than_it(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": sample_texts()}), tmp_path / "a.parquet")
    program = f"""
import sys
from niels_gpt.recipes.plan import recipes
from niels_gpt.settings import Settings
settings = Settings(cache_dir={str(tmp_path / "c")!r}, tokenizer={str(any_tokenizer("small qwen2"))!r},
                    engine="gigatoken", pretrain="a={tmp_path}/a.parquet")
assert recipes(settings)["pretrain/a"](settings).engine == "gigatoken"
print(*sorted({{"awkward", "datasets", "pandas", "torch", "transformers"}} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
