"""The one list of kinds of caches: how a small good one is made, read, judged and looked at, as a user does it."""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any

from niels_gpt.cache import PretrainTokenStreamDataset, SFTExampleDataset
from niels_gpt.sampling import iter_eval
from niels_gpt.storage.codes import code_of
from niels_gpt.tokenizer import load_tokenizer
from support.commands import Done, niels_gpt
from support.power_loss import Tree, put, tree_of

Call = Callable[[Path], Done]
"""What a cache is met by: takes its public folder."""
TEXTS = [f"Page {page}. The heron walks to the river and finds {page * 3} apples." for page in range(12)]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
    "{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}\n{% endfor %}"
)


SHARES = ("--own-val-frac", "0.2", "--rollouts-val-frac", "0.2")


@dataclass(frozen=True)
class Kind:
    """A kind of cache."""

    place: str
    """Its public folder, below the folder of the caches."""
    make: Callable[[], Tree]
    """Returns what a folder of caches holds with a good one in it, and what it needs beside it."""
    read: Callable[[Path], Iterator[Any]]
    """Opens it as a user does, and yields all that it holds."""
    again: Call
    """Builds it again, with the settings that it was built with."""
    looks: tuple[str, ...] = ("stats", "show", "diff")
    """Commands that take the cache."""
    export: str = ""
    """The tool whose files `export` writes."""
    not_read: tuple[str, ...] = ()
    """Beginnings of the names of files that `read` leaves alone."""

    @property
    def is_eagle3(self):
        """Whether it is a cache of a target's outputs."""
        return self.place.startswith("eagle3/") and self.place != "eagle3/draft_vocab"


def fresh(kind, folder):
    """Return the public folder of a good cache, of which a test may do what it likes. folder: does not exist yet."""
    put(KINDS[kind].make(), folder)
    return folder / KINDS[kind].place


def files_of(cache):
    """Return the names of the files of a cache that hold something, its meta.json among them."""
    version = cache.resolve()
    every = (path for path in version.rglob("*") if path.is_file() and path.stat().st_size)
    return sorted(path.relative_to(version).as_posix() for path in every)


def judged(cache, *, deep=False):
    """Return what `niels-gpt verify` says of a cache: "FILE: PROBLEM" each."""
    done = niels_gpt("verify", cache, "--json", *(["--deep"] if deep else []))
    found = [damage for damages in done.json.values() for damage in damages]
    assert bool(found) == bool(done.status), done
    return [f"{damage['file']}: {damage['problem']}".removeprefix(": ") for damage in found]


def calls(kind):
    """Return what meets a cache of a kind and changes nothing, by name."""
    about = KINDS[kind]
    command = ("eagle3",) if about.is_eagle3 else ()
    found = {
        "read": functools.partial(_read, about.read),
        "verify": lambda cache: niels_gpt("verify", cache),
        "verify --deep": lambda cache: niels_gpt("verify", cache, "--deep"),
        "list": lambda cache: niels_gpt("list", above(cache, kind)),
        "gc --dry-run": lambda cache: niels_gpt("gc", above(cache, kind), "--dry-run"),
    }
    for look in about.looks:
        name, *more = look.split()
        if name == "diff":
            more = [str(_other(kind))]
        found[look] = lambda cache, name=name, more=more: niels_gpt(*command, name, cache, *more)
    return found


def writers(kind):
    """Return what meets a cache of a kind and may write, beside it or in the folder of the caches."""
    about = KINDS[kind]
    found = {
        "gc": lambda cache: niels_gpt("gc", above(cache, kind)),
        "again": about.again,
    }
    if about.export and about.is_eagle3:
        found["export"] = lambda cache: niels_gpt("eagle3", "export", cache, _beside(), "--to", about.export)
    elif about.export:
        found["export"] = lambda cache: niels_gpt("export", cache, _beside(), "--to", about.export)
    if not about.is_eagle3:
        found["push"] = lambda cache: niels_gpt("push", cache, _beside())
    return found


def above(cache, kind):
    """Return the folder of the caches, by a cache's public folder."""
    return cache.parents[KINDS[kind].place.count("/")]


def _beside():
    """Return a folder that does not exist, not among the caches."""
    return Path(tempfile.mkdtemp(dir=_session())) / "out"


@functools.cache
def _session():
    """Return a folder in memory until this process ends; it has what the caches are built from."""
    # The run's own folder, which conftest.py removes: workers of pytest-xdist end without their atexit.
    folder = Path(tempfile.mkdtemp(prefix="kinds-", dir=os.environ.get("PYTEST_DEBUG_TEMPROOT")))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    raw = folder / "raw"
    raw.mkdir()
    for number, text in enumerate(TEXTS):
        (raw / f"{number}.txt").write_text(text)
    chats = [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]} for text in TEXTS]
    (raw / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    groups = [{"prompt_ids": [1, n], "completions": [_completion(2, n), _completion(2, 3)]} for n in range(12)]
    (raw / "steps.jsonl").write_text("".join(json.dumps(group) + "\n" for group in groups))
    (raw / "marks.jinja").write_text(TEMPLATE)
    return folder


def _completion(*ids):
    return {"ids": ids, "logprobs": [-0.5] * len(ids), "advantage": 0.5, "reward": 1.0}


@functools.cache
def _other(kind):
    """Return a good cache of a kind that nobody changes."""
    return fresh(kind, _session() / f"other {kind}")


# --- how they are made ------------------------------------------------------------------------------------------------


def _built(key):
    """Return what builds one of the caches that the command `build` makes, in the folder that a cache lies in."""

    def build(cache):
        name, raw = key.partition("/")[2], _session() / "raw"
        given = {
            "notes": ["--pretrain", f"notes={raw}/*.txt"],
            "chats": ["--sft", f"chats={raw}/chats.jsonl"],
            "marked": ["--sft", f"marked={raw}/chats.jsonl", "--chat-template", f"{raw}/marks.jinja"],
            "steps": ["--rollouts", f"steps={raw}/steps.jsonl"],
            "draft_vocab": ["--eagle3-source", f"{raw}/chats.jsonl", "--eagle3-target", f"{raw}/target"],
        }
        words = [*given[name], "--eagle3-seq-length", "64", "--eagle3-draft-vocab-size", "40", "--eagle3-device", "cpu"]
        kind = "bpe" if name == "marked" else "sentencepiece"
        words += ["--tokenizer-kind", kind, "--vocab-size", "300", "--shard-bytes", "600", "--threads", "1"]
        folder = cache.parent if cache.name == "tokenizer" else cache.parents[key.count("/")]
        what = key if name == "draft_vocab" else name
        return niels_gpt("build", what, *words, "--source-root", raw, "--cache-dir", folder, *SHARES)

    return build


@functools.cache
def _target():
    """Write the target whose draft has a vocabulary, with the tokenizer of another cache."""
    from niels_gpt.eagle3.target import write_small_target

    put(_tree("sft/marked"), _session() / "for a target")
    write_small_target(_session() / "raw" / "target", load_tokenizer(_session() / "for a target" / "tokenizer"))


@functools.cache
def _tree(key):
    if key == "eagle3/draft_vocab":
        _target()
    folder = _session() / f"made {key.replace('/', ' ')}"
    done = _built(key)(folder / key)
    assert done.status == 0, done
    return tree_of(folder)


@functools.cache
def _eagle3_tree(form):
    folder = _session() / f"made {form}"
    assert _eagle3_again(form)(folder / "eagle3" / form).status == 0
    return tree_of(folder)


def _eagle3_again(form):
    def build(cache):
        from support import eagle3_runs

        samples, changed = eagle3_runs.samples_of(), getattr(eagle3_runs, form.upper(), {})
        given = eagle3_runs.plan(samples, **changed)
        run = functools.partial(eagle3_runs.run, cache, samples=samples, given=given, resume=cache.exists())
        return _done(lambda: [run()], errors=(OSError,))

    return build


# --- how they are read ------------------------------------------------------------------------------------------------


def _read(read, cache):
    def digest():
        found = hashlib.sha256()
        for value in read(cache):
            _feed(found, value)
        return [found.hexdigest()]

    return _done(digest)


def _feed(digest, value):
    """Add every byte of a value, of its tensors and arrays too: their text has the first and last numbers alone."""
    if isinstance(value, dict | list | tuple):
        for each in value.items() if isinstance(value, dict) else value:
            _feed(digest, each)
    elif is_dataclass(value):
        _feed(digest, vars(value))
    elif hasattr(value, "untyped_storage"):
        import torch

        _feed(digest, (value.dtype, *value.shape, value.reshape(-1).view(torch.uint8).numpy().tobytes()))
    else:
        digest.update(value if isinstance(value, bytes) else repr(getattr(value, "tolist", lambda: value)()).encode())


def _done(call, *, errors=(FileNotFoundError,)):
    """Call what is no command, and return what a command would have done with its errors. errors: beside ValueError,
    which CacheError is."""
    try:
        return Done(0, "".join(map(str, call())), "")
    except (ValueError, *errors) as error:
        return Done(1, "", f"error[{code_of(error)}]: {error}")


def _pretrain(cache):
    import torch

    for split in ("train", "val"):
        for io in ("mmap", "pread"):
            data = PretrainTokenStreamDataset(cache / split, T=8, device="cpu", io=io)
            yield data.get_batch(B=64, generator=torch.Generator().manual_seed(0))
        yield from iter_eval(cache / split, B=8, T=8)


def _sft(cache):
    for split in ("train", "val"):
        files = [cache / f"{split}_{name}" for name in ("tokens.bin", "idx.npy")]
        for io in ("mmap", "pread"):
            data = SFTExampleDataset(*files, T=64, device="cpu", eot_id=6, io=io)
            yield from (data.example(number) for number in range(len(data)))


def _rollouts(cache):
    from niels_gpt.prefix_tree.rollouts.reader import RolloutDataset

    for split in ("train", "val"):
        data = RolloutDataset(cache, split)
        for number in range(len(data)):
            yield data.group(number), data.forest(number).stats()


def _eagle3(cache):
    from niels_gpt.eagle3.cache import CachedEagle3Dataset
    from niels_gpt.eagle3.native import NativeEagle3Dataset

    data = NativeEagle3Dataset(cache) if cache.name in ("native", "fp8") else CachedEagle3Dataset(cache)
    yield from (data[number] for number in range(len(data)))


def _tokenizer(cache):
    yield load_tokenizer(cache).encode(TEXTS[0])


def _draft_vocab(cache):
    from niels_gpt.eagle3.vocab import load_token_mapping

    yield load_token_mapping(cache, target_vocab_size=295, draft_vocab_size=None)


# --- the list ---------------------------------------------------------------------------------------------------------


def _token_cache(key, read, **more):
    looks = ("stats", "show", "locate train 20", "diff")
    return Kind(key, functools.partial(_tree, key), read, _built(key), **{"looks": looks, **more})


def _of_eagle3(form, export=""):
    return Kind(
        f"eagle3/{form}",
        functools.partial(_eagle3_tree, form),
        _eagle3,
        _eagle3_again(form),
        looks=("stats", "inspect", "inspect --sample 5"),
        export=export,
        not_read=("meta.json", "sidecar/", "target_"),
    )


KINDS = {
    "pretrain": _token_cache("pretrain/notes", _pretrain, export="megatron", not_read=("index/",)),
    "sft": _token_cache("sft/chats", _sft, export="hf", not_read=("index/",)),
    "sft with bits": _token_cache("sft/marked", _sft, export="hf", not_read=("index/",)),
    "rollouts": _token_cache("rollouts/steps", _rollouts, not_read=("index/crc32.bin",)),
    "dense": _of_eagle3("dense"),
    "topk": _of_eagle3("topk"),
    "native": _of_eagle3("native", "specforge"),
    "fp8": _of_eagle3("fp8"),
    "tokenizer": Kind(
        "tokenizer",
        functools.partial(_tree, "sft/chats"),
        _tokenizer,
        _built("sft/chats"),
        looks=("diff",),
        not_read=("meta.json",),
    ),
    "draft vocabulary": _token_cache(
        "eagle3/draft_vocab",
        _draft_vocab,
        looks=("stats", "show"),
        # Read as a file of the user's is: it may be a link, end as it likes, and needs no description.
        not_read=("draft_vocab.json", "meta.json"),
    ),
}
