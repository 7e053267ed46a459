"""The example of training: what it learns, what its control shows, and that a stop does not show in the losses.
With real text: NIELS_GPT_TEST_DATA=MIRROR pytest -m real_text tests/project/test_train_tiny_gpt.py
"""

import argparse
import importlib
import itertools
import json
import math
import os
import shutil
import statistics
import sys
from pathlib import Path

import pytest
import torch
from support import LONG, ROOT, byte_tokenizer
from support.errors import refused
from support.tiny_texts import TINY_TEXTS

from niels_gpt.cache import build_pretrain_cache, build_sft_cache
from niels_gpt.recipes.plan import recipes
from niels_gpt.settings import Settings

pytest.importorskip("matplotlib", reason="the extra `plot` brings it")
pytestmark = pytest.mark.usefixtures("one_thread")

EXAMPLE = ROOT / "examples" / "train_tiny_gpt.py"
SMALL = "--dim 32 --T 16 --global-batch-size 4 --pretrain-steps 12 --sft-steps 8"
CONTROL = "--permute-tokens --dim 32 --T 4 --global-batch-size 64 --lr 1e-2 --pretrain-steps 200"
NEVER_STOPPED = "--stop-at --world-sizes 1"


@pytest.fixture(scope="module")
def example():
    """The example as a module that processes it starts can import, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLE.parent)
        yield importlib.import_module(EXAMPLE.stem)
        patch.delitem(sys.modules, EXAMPLE.stem)


def build_small(root, tokenizer, texts=TINY_TEXTS):
    """Build two pretrain caches and two of chats."""
    sizes = {"max_train_tokens": 100_000, "max_val_tokens": 200, "shard_bytes": 1000}
    for name, part in (("birds", texts[:40]), ("beasts", texts[40:])):
        folder = root / "pretrain" / name
        build_pretrain_cache(part, folder, tokenizer=tokenizer, seed=0, shuffle_buffer=None, **sizes)
        chats = [
            [{"role": "user", "content": f"Page {number}?"}, {"role": "assistant", "content": text[:40]}]
            for number, text in enumerate(part)
        ]
        build_sft_cache(chats, root / "sft" / name, tokenizer=tokenizer, val_frac=0.3, seed=0)
    return root


@pytest.fixture(scope="module")
def caches(tmp_path_factory, tiny_tokenizer):
    """Small caches that no test changes."""
    return build_small(tmp_path_factory.mktemp("small"), tiny_tokenizer)


def flags(caches, out, *more, names=("beasts", "birds")):
    """Return a command line; more: flags, separated by spaces."""
    folders = [str(caches / "pretrain" / name) for name in names]
    given = ["--pretrain", *folders, "--weights", "2", "1", "--sft", str(caches / "sft" / "birds"), "--out", str(out)]
    return [*given, *" ".join(more).split()]


def trained(example, caches, out, *more):
    """Run the example; return its numbers."""
    return numbers_of(example, flags(caches, out, *more))


def numbers_of(example, arguments):
    example.main(arguments)
    out = Path(arguments[arguments.index("--out") + 1])
    found = json.loads(out.with_suffix(".json").read_text())
    return found


@pytest.fixture(scope="module")
def straight(example, caches, tmp_path_factory):
    """A run of one process that was never stopped: 12 steps of pretraining, 8 with chats."""
    out = tmp_path_factory.mktemp("straight") / "loss.png"
    return trained(example, caches, out, SMALL, NEVER_STOPPED)


def let_it_see_what_comes_next(monkeypatch):
    attention = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda q, k, v, *_causal: attention(q, k, v)
    )


def end(losses):
    return statistics.fmean(losses[-len(losses) // 10 :])


@pytest.mark.filterwarnings("ignore:This DataLoader will create .* worker processes")  # on a machine of one core
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_stop_does_not_show_in_the_losses(example, caches, straight, tmp_path, workers):
    more = f"--stop-at 5 6 15 --world-sizes 1 --workers {workers}"
    stopped = trained(example, caches, tmp_path / "loss.png", SMALL, more)
    assert stopped["jobs"] == [[5, 1], [6, 1], [15, 1], [20, 1]]
    assert len(stopped["losses"]) == 20 and stopped["losses"] == straight["losses"]
    assert stopped["evaluations"][-1] == straight["evaluations"][-1]


@pytest.mark.slow
def test_a_change_of_world_size_at_a_stop_does_not_show_either(example, caches, straight, tmp_path):
    stopped = trained(example, caches, tmp_path / "loss.png", SMALL, "--stop-at 5 15 --world-sizes 1 2 1")
    assert stopped["jobs"] == [[5, 1], [15, 2], [20, 1]]  # the second stage begins in the job of two processes
    assert stopped["losses"] == pytest.approx(straight["losses"], rel=0, abs=1e-9)


def test_another_seed_gives_other_losses(example, caches, straight, tmp_path):
    more = (SMALL, NEVER_STOPPED, "--pretrain-steps 2 --sft-steps 0")
    runs = [trained(example, caches, tmp_path / "loss.png", *more, f"--seed {seed}") for seed in (0, 1)]
    one, other = (run["losses"] for run in runs)
    assert one == straight["losses"][:2] and one[0] != other[0] and one[1] != other[1]


def test_the_picture_the_numbers_and_the_last_lines(example, caches, tmp_path, capsys):
    found = trained(example, caches, tmp_path / "loss.png", SMALL, "--world-sizes 1")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert found["jobs"] == [[6, 1], [20, 1]]  # by default it is stopped in the middle of pretraining
    assert [each["step"] for each in found["evaluations"]] == [0, 6, 12, 20]
    assert all(each["bits_per_byte"].keys() == {"beasts", "birds"} for each in found["evaluations"])
    assert [source["split"] for source in found["stream"]["sources"]] == ["train"] * 3
    assert found["stream"]["consumed_samples"] == 20 * 4
    *text, chats = found["stream"]["positions"]
    assert sum(text) == 12 * 4 + 8 * 3 and chats == 8  # of weights 2, 1 and, from step 12 on, 1
    untrained = math.log(400)
    assert found["losses"][0] == pytest.approx(untrained, abs=0.1)
    first = found["evaluations"][0]
    assert first["nats_per_token"] == pytest.approx(untrained, abs=0.1)
    assert capsys.readouterr().out.splitlines() == [
        *itertools.chain.from_iterable(
            (
                f"val at step {each['step']}: {each['nats_per_token']:.3f} nats per token; bits per byte: "
                f"beasts {each['bits_per_byte']['beasts']:.3f}, birds {each['bits_per_byte']['birds']:.3f}",
                f"    chats: {each['chats']['packed']:.3f} nats per token, in {each['chats']['packed_rows']} packed "
                f"rows and in {each['chats']['padded_rows']} padded ones",
            )
            for each in found["evaluations"]
        ),
        f"unigram entropy of pretrain: {found['unigram_entropy']:.3f} nats per token",
        f"plot: {tmp_path / 'loss.png'}",
    ]


def test_the_picture_shows_both_stages_the_stops_val_and_the_unigram_entropy(example, straight, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_, **__: drawn.append(figure))
    example.plot({**straight, "jobs": [[5, 1], [20, 2]]}, tmp_path / "loss.png")
    (axes,) = drawn[0].axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "loss, nats per token")
    lines = {line.get_label(): line for line in axes.lines if not line.get_label().startswith("_")}
    assert list(lines["pretrain"].get_ydata()) == straight["losses"][:12]
    assert list(lines["text and chats"].get_xdata()) == list(range(12, 20))
    assert list(lines["val of pretrain"].get_xdata()) == [0, 12, 20]
    chats = [each["chats"]["packed"] for each in straight["evaluations"]]
    assert list(lines["val of chats, the replies"].get_ydata()) == chats
    assert set(lines["unigram entropy of pretrain"].get_ydata()) == {straight["unigram_entropy"]}
    marks = {text.get_text().strip(): text.xy[0] for text in axes.texts}
    assert marks == {"stopped: world size 1, then 2": 5, "the chats join": 12}


@pytest.mark.slow
def test_permuted_tokens_end_at_the_unigram_entropy(example, caches, tmp_path):
    found = trained(example, caches, tmp_path / "loss.png", CONTROL, NEVER_STOPPED)
    assert len(found["losses"]) == 200 and not any(each["chats"] for each in found["evaluations"])
    assert end(found["losses"]) == pytest.approx(found["unigram_entropy"], abs=0.1)


def test_the_control_finds_a_network_that_sees_what_comes_next(example, caches, tmp_path, monkeypatch):
    let_it_see_what_comes_next(monkeypatch)
    # Of seeds 0 to 3 the last three find it in 200 steps, with losses of 1.3 to 1.8 after an entropy of 3.9.
    found = trained(example, caches, tmp_path / "loss.png", CONTROL, NEVER_STOPPED, "--seed 1")
    assert end(found["losses"]) < found["unigram_entropy"] - 0.5


def test_a_permutation_moves_all_tokens_of_a_batch_and_makes_no_new_ones(example):
    rows = torch.arange(4 * 9).view(4, 9)
    generator = torch.Generator().manual_seed(0)
    x, y = example.permuted(rows[:, :-1], rows[:, 1:], generator)
    assert torch.equal(x[:, 1:], y[:, :-1])
    block = torch.cat([x, y[:, -1:]], dim=1)
    assert sorted(block.flatten().tolist()) == list(range(36))
    assert not any(set(block[row].tolist()) == set(rows[row].tolist()) for row in range(4))  # rows are mixed
    next_x, _ = example.permuted(rows[:, :-1], rows[:, 1:], generator)
    assert not torch.equal(next_x, x)
    with pytest.raises(RuntimeError, match="not one sequence"):
        example.permuted(rows, rows, generator)  # y is not x one token later


def test_the_control_is_the_same_on_every_rank(example, caches, tmp_path):
    parts = {}
    for world_size in (1, 2):
        options, saved = started(example, caches, tmp_path / "loss.png", SMALL, "--permute-tokens")
        for rank in range(world_size):
            generator = torch.Generator().manual_seed(0)
            parts[world_size, rank] = next(example.batches(options, dict(saved), generator, rank, world_size))
    for part in range(2):
        assert torch.equal(torch.cat([parts[2, rank][part] for rank in range(2)]), parts[1, 0][part])


def started(example, caches, out, *more):
    """Return the options and the checkpoint of step 0."""
    options = example.parse(flags(caches, out, *more))
    example.begin(options)
    return options, torch.load(out.with_suffix(".pt"), weights_only=True)


def test_chats_have_the_same_loss_in_packed_and_in_padded_rows(straight):
    for each in straight["evaluations"]:
        assert each["chats"]["packed"] == pytest.approx(each["chats"]["padded"], rel=0, abs=1e-9)
    assert straight["evaluations"][-1]["chats"]["packed_rows"] < straight["evaluations"][-1]["chats"]["padded_rows"]


def test_without_the_mask_packed_rows_have_another_loss(example, caches, tmp_path, monkeypatch):
    options, _ = started(example, caches, tmp_path / "loss.png", SMALL)
    model = example.TinyGPT(options)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(20)  # so that attention looks somewhere
    monkeypatch.setattr(example, "block_causal_mask", lambda *_, **__: None)  # the model then takes the causal one
    with torch.no_grad():
        found = example.loss_of_chats(model, options)
    assert abs(found["packed"] - found["padded"]) > 1e-3


def test_the_unigram_entropy_of_a_mixture_by_hand(example, tmp_path):
    for name, text in (("a", "aaaaaaaa"), ("b", "bbbbbbbb")):
        byte_tokenizer.build(tmp_path / name, [text])
    for weight, expected in ((1, math.log(2)), (3, math.log(4) - 0.75 * math.log(3))):
        options = argparse.Namespace(vocab_size=300, pretrain=[tmp_path / "a", tmp_path / "b"], weights=[1, weight])
        assert example.unigram_entropy(options) == pytest.approx(expected, abs=1e-12)


def test_a_cache_that_was_built_anew_between_two_jobs_is_refused(example, tiny_tokenizer, tmp_path):
    root = build_small(tmp_path / "cache", tiny_tokenizer)
    options, _ = started(example, root, tmp_path / "loss.png", SMALL)
    example.job(0, options, 6, 1)
    shutil.copy(tmp_path / "loss.pt", tmp_path / "later.pt")
    example.job(0, argparse.Namespace(**{**vars(options), "out": tmp_path / "later.png"}), 15, 1)
    build_small(root, tiny_tokenizer, TINY_TEXTS[::-1])
    with refused("E108", "sources[0]"):
        example.job(0, options, 12, 1)
    options.out = tmp_path / "later.png"
    with refused("E108", "sources[0]"):
        example.job(0, options, 20, 1)


@pytest.mark.parametrize(
    ("more", "error", "said"),
    [
        ("--world-sizes 3", ValueError, "global_batch_size=4: expected a multiple of world_size=3"),
        ("--weights 1", ValueError, "2 weights for 3 streams"),
        ("--pretrain fish", FileNotFoundError, "fish"),
        ("--sft fish", FileNotFoundError, "fish"),
        ("--T 5000", ValueError, "T + 1 = 5001"),
        *((f"--stop-at {stops}", SystemExit, "steps between the first and the last") for stops in ("20", "6 5", "0")),
    ],
)
def test_what_cannot_be_trained_is_said_before_the_first_step(
    example,
    caches,
    tmp_path,
    capsys,
    more,
    error,
    said,
):
    with pytest.raises(error) as raised:
        example.main(flags(caches, tmp_path / "loss.png", SMALL, more))
    assert said in str(raised.value) + capsys.readouterr().err and list(tmp_path.iterdir()) == []


def test_without_matplotlib_the_extra_is_named_before_anything_is_done(example, caches, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match=r"needs matplotlib: pip install 'niels-gpt\[plot\]'"):
        example.main(flags(caches, tmp_path / "loss.png", SMALL))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.real_text
@pytest.mark.skipif(
    "NIELS_GPT_TEST_DATA" not in os.environ, reason="NIELS_GPT_TEST_DATA names no mirror of real text (README)"
)
def test_real_text_is_learned_and_permuted_real_text_is_not(example, tmp_path, monkeypatch):
    settings = Settings(
        source_root=os.environ["NIELS_GPT_TEST_DATA"],
        cache_dir=str(tmp_path / "cache"),
        vocab_size=1000,
        tokenizer_max_bytes=2_000_000,
        fineweb_edu_train_tokens=1_000_000,
        fineweb_edu_val_tokens=20_000,
        roam_val_frac=0.003,
        sft_val_frac=0.01,
    )
    for key in ("pretrain/fineweb_edu", "pretrain/roam", "sft/dolly15k"):
        recipes(settings)[key](settings)
    more = "--T 32 --global-batch-size 16 --lr 5e-3 --pretrain-steps 600 --sft-steps 40"
    root, out = Path(settings.cache_dir), tmp_path / "loss.png"

    def run(*last):
        given = flags(root, out, more, *last, "--weights 0.9 0.1 --sft", names=("fineweb_edu", "roam"))
        return numbers_of(example, [*given, str(root / "sft" / "dolly15k")])

    straight = run(NEVER_STOPPED)
    entropy, begin = straight["unigram_entropy"], straight["pretrain_steps"]
    assert end(straight["losses"][:begin]) < entropy - 0.5
    before, after = straight["evaluations"][0], straight["evaluations"][1]
    assert after["nats_per_token"] < entropy - 0.4
    assert all(after["bits_per_byte"][name] < 0.8 * bits for name, bits in before["bits_per_byte"].items())
    chats = [each["chats"] for each in straight["evaluations"]]
    assert chats[-1]["packed"] < chats[1]["packed"] - 0.02
    assert all(each["packed"] == pytest.approx(each["padded"], rel=0, abs=1e-9) for each in chats)

    if LONG:  # in other tests small caches show the stop, the control and the leak
        stopped = run("--stop-at 500 620 --world-sizes 1 2 1")
        assert stopped["losses"][:200] == straight["losses"][:200]
        assert stopped["losses"] == pytest.approx(straight["losses"], rel=0, abs=1e-9)

        # a leak is found the sooner, the shorter the rows are
        control = "--permute-tokens --T 8 --global-batch-size 64"
        permuted = run(NEVER_STOPPED, control)
        assert permuted["unigram_entropy"] == entropy
        assert end(permuted["losses"]) == pytest.approx(entropy, abs=0.1)

        let_it_see_what_comes_next(monkeypatch)
        leaking = run(NEVER_STOPPED, control)
        assert end(leaking["losses"]) < entropy - 0.5
