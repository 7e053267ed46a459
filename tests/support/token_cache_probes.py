"""What meets an attacked folder of token caches: every reader and every command; and how the folder is built.

The table of attacks is cache/test_attacks.py.
"""

import json

import torch

from niels_gpt.cache import PretrainTokenStreamDataset, SFTExampleDataset
from niels_gpt.commands import cache as cli
from niels_gpt.commands import prefix_tree
from niels_gpt.data.exclude import read_exclusion
from niels_gpt.prefix_tree.rollouts.reader import RolloutDataset
from niels_gpt.prefix_tree.rollouts.stream import RolloutStream
from niels_gpt.sampling import EpochStream, iter_eval
from niels_gpt.tokenizer import load_tokenizer
from support.attacks import Probe

# --- what is attacked -------------------------------------------------------------------------------------------------

IMPORTS = ("sentencepiece", "niels_gpt.commands.build", "niels_gpt.commands.report", "niels_gpt.kinds.diff")
PRETRAIN, SFT, ROLLOUTS, MODEL = "pretrain/notes", "sft/chats", "rollouts/steps", "tokenizer/spm.model"
TEXTS = [f"Page {page}. The heron walks to the river and finds {page * 3} apples." for page in range(12)]


def build(root):
    """Make tokenizer/, pretrain/notes, sft/chats and rollouts/steps of three versions, and what they are built from."""
    (root / "raw").mkdir(parents=True)
    for number, text in enumerate(TEXTS):
        (root / "raw" / f"{number}.txt").write_text(text)
    chats = [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]} for text in TEXTS]
    (root / "raw" / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    groups = [{"prompt_ids": [1, n], "completions": [[2, n], [2, 3]], "rewards": [0, 1]} for n in range(12)]
    (root / "raw" / "steps.jsonl").write_text("".join(json.dumps(group) + "\n" for group in groups))
    (root / "raw" / "left_out.list").write_text("a document\n")
    for seed in ("1", "2", "3"):
        assert cli.main([*_build(root), "--seed", seed]) == 0


def _build(root):
    own = ["--pretrain", f"notes={root}/raw/*.txt", "--sft", f"chats={root}/raw/chats.jsonl"]
    flags = ["--vocab-size", "300", "--shard-bytes", "600", "--threads", "1"]
    own += ["--rollouts", f"steps={root}/raw/steps.jsonl"]
    return [
        "build",
        "notes",
        "chats",
        "steps",
        *own,
        *flags,
        "--source-root",
        str(root / "raw"),
        "--cache-dir",
        str(root),
    ]


# --- what meets it ----------------------------------------------------------------------------------------------------


def each(kind, call):
    """Let a reader or a command meet every cache of a kind; the error says how many it refuses, and why the last."""

    def meet(root):
        caches, statuses, errors = sorted(root.glob(f"{kind}/[!.]*")), [0], []
        for cache in caches:
            try:
                found = call(cache)
                statuses.append(found if type(found) is int else 0)
            except (ValueError, FileNotFoundError) as error:
                assert len(str(error)) > 20, error
                errors.append(error)
        if errors:
            raise ValueError(f"{len(errors)} of {len(caches)}: {errors[-1]}")
        return max(statuses)

    return meet


def command(name, *arguments):
    def call(path):
        return cli.main([name, str(path), *arguments])

    return call


def diff(cache):
    versions = sorted((cache.parent / ".versions" / cache.name).glob("[0-9a-f]*"))
    return cli.main(["diff", str(cache), str(next((path for path in versions if path != cache.resolve()), cache))])


def export(name):
    def call(root):
        return cli.main(["export", str(root / PRETRAIN), str(root.parent / f"for {name}"), "--to", name])

    return call


def tree(verb):
    def call(root):
        return max(prefix_tree.main([verb, str(path)]) for path in root.glob("raw/steps.*"))

    return call


def generator():
    return torch.Generator().manual_seed(0)


def pretrain(io):
    def read(cache):
        PretrainTokenStreamDataset(cache / "train", T=8, device="cpu", io=io).get_batch(B=64, generator=generator())

    return read


def sft(io):
    def read(cache):
        files = [cache / f"train_{name}" for name in ("tokens.bin", "idx.npy")]
        SFTExampleDataset(*files, T=64, device="cpu", eot_id=6, io=io).get_batch(B=64, generator=generator())

    return read


PROBES = {
    "list": Probe(command("list")),
    "verify": Probe(command("verify")),
    "verify --deep": Probe(command("verify", "--deep")),
    **{f"stats {kind}": Probe(each(kind, command("stats"))) for kind in ("pretrain", "sft", "rollouts")},
    **{f"show {kind}": Probe(each(kind, command("show", "--at", "1"))) for kind in ("pretrain", "sft", "rollouts")},
    **{
        f"locate {kind}": Probe(each(kind, command("locate", "train", "20")))
        for kind in ("pretrain", "sft", "rollouts")
    },
    **{f"diff {kind}": Probe(each(kind, diff)) for kind in ("pretrain", "sft", "rollouts")},
    **{f"reader pretrain, {io}": Probe(each("pretrain", pretrain(io))) for io in ("mmap", "pread")},
    **{f"reader sft, {io}": Probe(each("sft", sft(io))) for io in ("mmap", "pread")},
    "reader rollouts": Probe(each("rollouts", lambda cache: [*RolloutDataset(cache)])),
    "reader rollouts, stream": Probe(
        each("rollouts", lambda cache: [*RolloutStream(cache, 64, seed=0, epochs=1)]),
    ),
    "reader epoch": Probe(
        each("pretrain", lambda cache: list(EpochStream(cache / "train", T=8, global_batch_size=8, seed=0, epochs=1)))
    ),
    "reader evaluation": Probe(each("pretrain", lambda cache: list(iter_eval(cache / "train", B=8, T=8)))),
    "reader tokenizer": Probe(lambda root: load_tokenizer(root / "tokenizer").encode("a text")),
    "reader exclusion": Probe(lambda root: read_exclusion(root / "raw" / "left_out.list")),
    **{f"tree {verb}": Probe(tree(verb)) for verb in ("stats", "show")},
    **{f"export {name}": Probe(export(name), writes=True) for name in ("megatron", "datatrove", "nanogpt")},
    "gc --dry-run": Probe(command("gc", "--dry-run")),
    "gc": Probe(command("gc"), writes=True),
    "build": Probe(lambda root: cli.main(_build(root)), writes=True),
}
