"""python -m niels_gpt.prefix_tree.demo: folded and not folded agree, and what is wrong is found."""

import re
import sys
from functools import partial

import pytest
from PIL import Image
from support.commands import niels_gpt
from support.prefix_trees import demo_group

pytest.importorskip("transformers", reason="the extra `eagle3` brings it")

pytestmark = pytest.mark.usefixtures("one_thread")  # which gives back the threads that the demo sets
demo = partial(niels_gpt, module="niels_gpt.prefix_tree.demo")
SMALL = ["--prompt", "24", "--completion", "10", "--samples", "5"]


@pytest.mark.parametrize("attention", ["prefix_tree", "dense", "eager"])
def test_both_ways_agree_and_the_sizes_are_of_the_group(attention):
    done = demo(*SMALL, "--attention", attention)
    assert done.status == 0
    step, verdict = done.out.split("\n\nverify_fold: ")
    said = dict(re.split(r"\s{2,}|(?<=backward) ", line, maxsplit=1) for line in step.splitlines())
    prompt, completions = demo_group(24, 10, 5, 0)
    lengths = [len(each) for each in completions]
    before = 5 * len(prompt) + sum(lengths)
    after = len(prompt) + sum(lengths) - lengths[1] - 1  # a duplicate, and two that share their first token
    assert said["tokens"] == f"{before} unfolded, {after} folded: {before / after:.2f}x"
    assert said["supervised"].startswith(f"{sum(lengths)} tokens by LossEdges, {sum(lengths) - 5} by one label a row")
    assert ("dense" in said["attention pairs"]) == (attention != "prefix_tree")
    predicted = re.fullmatch(r"predicted for this model and attention: (\S+)x", said["training FLOPs"])
    assert predicted is not None and 1 < float(predicted[1]) < before / after
    assert re.fullmatch(r"\d\.\d{3} s unfolded, \d\.\d{3} s folded: .*x", said["forward+backward"])
    for name in ("log-probs", "gradients"):
        found = re.match(r"differ by (\S+) ", said[name])
        assert found is not None and float(found.group(1)) < 1e-5
    assert f"{before} tokens folded into {after} rows" in verdict and "FAILED" not in verdict


@pytest.mark.parametrize(
    ("flags", "name", "said"),
    [
        (SMALL, "none/mask.png", "no folder"),
        (SMALL, "mask.svg", "the only kind of picture"),
        (["--prompt", "2048"], "mask.png", "tokens is not drawn"),
    ],
)
def test_a_picture_that_cannot_be_drawn_is_refused_before_the_work(flags, name, said, tmp_path):
    pytest.importorskip("matplotlib", reason="the extra `plot` brings it")
    done = demo(*flags, "--plot", tmp_path / name)
    assert done.status == 1
    assert done.out == "" and done.err.startswith("error[E") and said in done.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("module", "flags", "extra"),
    [("matplotlib.figure", ["--plot", "mask.png"], "plot"), ("transformers", [], "eagle3")],
)
def test_without_a_library_it_says_what_to_install(module, flags, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    done = demo(*SMALL, *flags)
    assert done.status == 1 and done.out == ""
    assert done.err.startswith("error[E901]: ") and f"pip install 'niels-gpt[{extra}]'" in done.err


def test_a_picture_of_the_mask_is_drawn(tmp_path):
    pytest.importorskip("matplotlib", reason="the extra `plot` brings it")
    assert demo(*SMALL, "--plot", tmp_path / "mask.png").status == 0
    with Image.open(tmp_path / "mask.png") as picture:
        assert picture.size == (600, 600)


@pytest.mark.parametrize("flags", [["--samples", "3"], ["--prompt", "0"], ["--attention", "flash_attention_2"]])
def test_what_cannot_be_folded_here_is_wrong_usage(flags):
    done = demo(*flags)
    assert done.status == 2 and "Usage: python -m niels_gpt.prefix_tree.demo" in done.err
