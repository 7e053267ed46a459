"""python -m niels_gpt.prefix_tree: what is printed, what is refused, and the exit statuses."""

import gzip
import io
import itertools
import json
import re
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from niels_gpt.commands import prefix_tree as cli
from niels_gpt.commands.prefix_tree import main
from niels_gpt.prefix_tree import savings as constants
from niels_gpt.prefix_tree.forest import ModelShape
from niels_gpt.prefix_tree.savings import count as savings
from niels_gpt.prefix_tree.savings.count import SHAPE_7B, count_savings, forests
from niels_gpt.prefix_tree.savings.rollouts import Rollouts, read_rollouts

# On paper. 1 2 | 10 11 | 20 21 22: 4 + 5 = 9 tokens become 7. Each token sees what stands above it and itself, so
# 10 + 15 = 25 pairs become 3 + (3 + 4) + (3 + 4 + 5) = 22; a dense mask has 7 * 7 = 49.
APART = {"prompt_ids": [1, 2], "completions": [[10, 11], [20, 21, 22]], "rewards": [0.5, 1], "id": "a"}
# 5 7 | 8: a duplicate, and a prefix of both. 3 + 3 + 2 = 8 tokens become 3, 6 + 6 + 3 = 15 pairs 6, of 9.
ALIKE = {"prompt_ids": [5], "completions": [[7, 8], [7, 8], [7]], "id": "b"}
NOTHING = {"prompt_ids": [], "completions": [[1, 2], [3]]}  # shares nothing, and has no first token to lose
TINY = ["--parameters", "10", "--layers", "1", "--d-model", "1"]


def file_of(path: Path, rows: Sequence[Any]) -> str:
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return str(path)


@pytest.fixture
def two(tmp_path: Path) -> str:
    return file_of(tmp_path / "two.jsonl", [APART, ALIKE])


def error_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must fail; returns the one line that it says, and checks that it prints nothing else."""
    assert main(arguments) == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and said.err.startswith("error[E")
    return said.err.partition("]: ")[2].rstrip("\n")


def found_in(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["stats", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_stats_prints_the_numbers_that_two_groups_have_on_paper(two: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = found_in([two, *TINY], capsys)
    for counts, values in {
        "lines groups forests samples shared_samples": [2, 2, 2, 5, 2],
        "max_depth max_levels max_branching": [5, 2, 2],
        "tokens_before tokens_after pairs_before pairs_after": [17, 10, 40, 28],
        "flops_before flops_after": [1500, 936],  # 3 * (2 * 10 * tokens + 4 * 1 * 1 * pairs)
        "token_factor pair_factor tree_token_ratio": [1.7, 40 / 28, 10 / 17],
        "flop_factor computed_pairs": [1500 / 936, 28],
        "first_tokens completion_tokens": [5, 10],
        "median_token_factor": [(9 / 7 + 8 / 3) / 2],
    }.items():
        assert [found[name] for name in counts.split()] == pytest.approx(values, rel=1e-15)
    assert found["model_shape"] == {"parameters": 10, "layers": 1, "d_model": 1, "head_parameters": 0}
    assert found["best"] == {"token_factor": 8 / 3, "where": f"{two}:2"}
    assert found["worst"] == {"token_factor": 9 / 7, "where": f"{two}:1"}
    assert found["longest_row"] == {"tokens": 7, "where": f"{two}:1"}
    assert found["flop_factor_of_any_model"] == {"least": 40 / 28, "most": 1.7}
    dense = found_in([two, *TINY, "--attention", "dense"], capsys)
    assert (dense["attention"], dense["computed_pairs"], dense["longest_row"]["mask_bytes"]) == ("dense", 58, 49)
    assert dense["flop_factor"] == pytest.approx(1500 / (3 * (200 + 4 * 58)))
    assert dense["flop_factor_of_any_model"] == {"least": 40 / 58, "most": 1.7}


def test_the_table_has_every_figure_of_the_json(two: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = found_in([two], capsys)
    assert main(["stats", two]) == 0
    table, words = capsys.readouterr().out.split("\n\n")
    said = dict(re.split(r"\s{2,}", line) for line in table.splitlines())
    nested = [len(value) for value in found.values() if isinstance(value, dict)]
    assert len(said) == len(found) - len(nested) + sum(nested)
    assert (said["tokens before"], said["token factor"], said["best token factor"]) == ("17", "1.7", "2.667")
    assert (said["model shape parameters"], said["longest row where"]) == ("7,000,000,000", f"{two}:1")
    assert float(said["flops before"].replace(",", "")) == found["flops_before"]
    assert words.startswith("Folding saves 41.2% of the training FLOPs")


@pytest.mark.parametrize(
    ("prompt", "completion", "factors", "said"),
    [
        (1024, 256, "3.33 2.27 3.29", "Folding saves 69."),
        (4096, 512, "4.50 3.24 4.36", "Folding saves 77."),
        (512, 1024, "1.41 1.11 1.40", "Folding saves 28."),
        (512, 512, "1.78 1.28 1.76", "Folding saves 43."),
        (256, 1024, "1.21 1.04 1.21", "Folding saves little: 17."),  # less than a quarter
    ],
)
def test_known_shapes_have_their_known_factors(prompt: int, completion: int, factors: str, said: str) -> None:
    row = group_row(prompt, completion, 8)
    shape = ModelShape(parameters=6_500_000_000, layers=32, d_model=4096)  # of a 7B, without embeddings
    found = count_savings(forests(lines_of(row)), shape)
    assert "{token_factor:.2f} {pair_factor:.2f} {flop_factor:.2f}".format(**found.as_json()) == factors
    assert found.interpretation().startswith(said)


def group_row(prompt: int, completion: int, samples: int) -> bytes:
    ids = itertools.count()
    drawn = [list(itertools.islice(ids, length)) for length in [prompt, *[completion] * samples]]
    return json.dumps({"prompt_ids": drawn[0], "completions": drawn[1:]}).encode()


@pytest.mark.parametrize(
    ("layers", "attention", "said"),
    [
        (32, "dense", "Folding saves"),
        (4, "prefix_tree", "Folding saves"),
        (4, "dense", "Folding does not pay: a step "),
    ],
)
def test_what_does_not_pay_is_said(layers: int, attention: str, said: str) -> None:
    # A prompt of 1,024 tokens with 8 completions of 1,024: on a Llama of 4 layers and width 128 a step with a dense
    # mask takes more than twice as long as the unfolded one; on one of 7 billion parameters attention hardly counts.
    shape = SHAPE_7B if layers == 32 else ModelShape(parameters=800_000, layers=4, d_model=128)
    found = count_savings(forests(lines_of(group_row(1024, 1024, 8))), shape, attention)
    assert found.interpretation().startswith(said)
    assert ("0.20 to 1.78" in found.interpretation()) == (attention == "dense")
    least, most = found.flop_factor_of_any_model
    assert least < found.flop_factor < most


def test_the_shape_of_a_model_is_read_from_its_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra `eagle3` brings it")
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, intermediate_size=48, vocab_size=97, head_dim=16)
    config.save_pretrained(tmp_path)
    path = file_of(tmp_path / "two.jsonl", [APART, ALIKE])
    attention, mlp, head = 32 * 64 * 2 + 32 * 32 * 2, 3 * 32 * 48, 32 * 97
    expected = {"parameters": 3 * (attention + mlp), "layers": 3, "d_model": 64, "head_parameters": head}
    found = found_in([path, "--model", str(tmp_path)], capsys)
    assert found["model_shape"] == expected
    # Rows with a loss: 2 + 3 become the last of the prompt, 10, 20 and 21; 2 + 2 + 1 become 5 and 7.
    assert (found["head_rows_before"], found["head_rows_after"]) == (10, 6)
    body = expected["parameters"]
    assert found["flops_after"] == 3 * (2 * (10 * body + 6 * head) + 4 * 3 * 64 * 28)
    assert found["flop_factor_of_any_model"] == {"least": 40 / 28, "most": 1.7}
    tied = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=97)
    tied.save_pretrained(tmp_path)  # its positions are an embedding too, and its head is that of ids
    found = found_in([path, "--model", str(tmp_path)], capsys)["model_shape"]
    assert (found["parameters"], found["head_parameters"]) == (12 * 32 * 32, head)
    halves = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "q_lora_rank": 8, "kv_lora_rank": 8}
    latent = transformers.DeepseekV3Config(**sizes | halves, first_k_dense_replace=3, vocab_size=97)
    latent.save_pretrained(tmp_path)
    assert found_in([path, "--model", str(tmp_path)], capsys)["model_shape"]["d_model"] == 4 * (8 + 4 + 6) / 2
    config.save_pretrained(tmp_path)
    found = found_in([path, "--model", str(tmp_path), "--layers", "5"], capsys)["model_shape"]
    assert found == {**expected, "layers": 5}
    experts = transformers.MixtralConfig(**sizes, intermediate_size=48, vocab_size=97, num_local_experts=8)
    experts.save_pretrained(tmp_path)
    attention, router = 32 * 32 * 2 + 32 * 16 * 2, 32 * 8
    found = found_in([path, "--model", str(tmp_path)], capsys)["model_shape"]
    assert found["parameters"] == 3 * (attention + router + 2 * mlp), "2 of 8 experts for each token"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (None, "no such file, expected the config"),
        ({"model_type": "llama", "num_hidden_layers": 2000}, "2000 layers"),
        ({"model_type": "llama", "num_hidden_layers": 3 * 10**7}, "num_hidden_layers is 3e+07; expected 10,000"),
        ({"model_type": "llama", "num_labels": 3 * 10**6}, "num_labels is 3e+06; expected 10,000 at most"),
        ({"model_type": "llava", "text_config": {"n_layer": 3 * 10**6}}, "n_layer is 3e+06; expected 10,000 at most"),
        ({"model_type": "qwen2_5_vl"}, "language model of a qwen2_5_vl cannot be built without its other parts"),
        ({"model_type": "llama", "hidden_size": 2**40}, "hidden_size is 1.1e+12; expected"),
        ({"model_type": "no\u001bsuch"}, "no causal language model can be built"),
        ({"model_type": "own", "auto_map": {"AutoConfig": "code.Own"}}, "Give --parameters, --layers and --d-model"),
    ],
)
def test_a_config_that_is_no_model_is_refused(
    config: Any, said: str, two: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", reason="the extra `eagle3` brings it")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    error = error_of(["stats", two, "--model", str(folder)], capsys)
    assert said in error and "\x1b" not in error and not (tmp_path / "ran").exists()


def lines_of(content: bytes) -> list[Rollouts]:
    """Return the lines of a content as if it came from the standard input."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        return list(read_rollouts(["-"]))


def test_unrelated_rows_are_counted_as_the_row_they_become(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"ids": [10 * number, 1, 2]} for number in range(40)]  # 40 trees of 3 tokens, side by side
    path = file_of(tmp_path / "rows.jsonl", rows)
    found = found_in([path, *TINY], capsys)
    forest = next(forests(read_rollouts([path]))).forest
    assert len(forest.input_ids) == 120
    assert found["longest_row"] == {"tokens": 120, "where": f"{path}:1"} and found["flop_factor"] == 1
    pairs = 40 * 6
    dense = found_in([path, *TINY, "--attention", "dense"], capsys)
    assert dense["longest_row"]["mask_bytes"] == 120 * 120
    assert dense["flop_factor"] == pytest.approx((20 * 120 + 4 * pairs) / (20 * 120 + 4 * 120 * 120))
    assert found_in([path, "--rows", "10"], capsys)["longest_row"]["tokens"] == 30


def test_the_median_is_no_mean_and_an_empty_prompt_shares_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = file_of(tmp_path / "three.jsonl", [ALIKE, NOTHING, APART])  # 8/3, 1, 9/7: the mean is 1.65
    assert found_in([path], capsys)["median_token_factor"] == 9 / 7
    found = found_in([file_of(tmp_path / "r.jsonl", [NOTHING]), *TINY], capsys)
    assert (found["tokens_before"], found["tokens_after"], found["first_tokens"]) == (3, 3, 0)
    assert found["longest_row"]["tokens"] == 3  # two trees, but one forest, which nothing splits
    # 3 + 1 pairs, but a dense mask has 3 * 3
    dense = found_in([str(tmp_path / "r.jsonl"), *TINY, "--attention", "dense"], capsys)
    assert dense["flop_factor"] == pytest.approx((20 * 3 + 4 * 4) / (20 * 3 + 4 * 9))


def test_the_curve_falls_from_the_forest_that_gains_most(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plot` brings it")
    from niels_gpt.prefix_tree.savings import plot

    figures: list[Any] = []
    monkeypatch.setattr(plot, "png", lambda figure, *_: figures.append(figure) or b"")
    content = "\n".join(map(json.dumps, [APART, ALIKE, NOTHING])).encode()
    plot.plot(count_savings(forests(lines_of(content))), "x")
    tokens, flops, _ = figures[0].axes[0].lines
    assert tokens.get_ydata().tolist() == [8 / 3, 9 / 7, 1]
    assert flops.get_ydata().tolist() == sorted(flops.get_ydata(), reverse=True)
    assert tokens.get_xdata().tolist() == pytest.approx([100 / 6, 50, 500 / 6])


def test_rows_of_whole_sequences_are_folded_in_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"ids": [1, 2, number]} for number in range(6)]
    path = file_of(tmp_path / "rows.jsonl", rows)
    for count, after in {"1": 18, "2": 3 * 4, "4": 6 + 4, "0": 8, "1000": 8}.items():
        assert found_in([path, "--rows", count], capsys)["tokens_after"] == after
    found = found_in([path], capsys)
    assert (found["forests"], found["tokens_after"], found["completion_tokens"]) == (1, 8, 0)
    assert found_in([path, path], capsys)["forests"] == 2  # no run crosses the end of a file
    mixed = file_of(tmp_path / "mixed.jsonl", [{"ids": [1, 2]}, APART, {"ids": [1, 2]}, {"ids": [1, 2]}])
    found = found_in([mixed], capsys)
    assert (found["forests"], found["groups"], found["tokens_after"]) == (3, 1, 2 + 7 + 2)


def test_a_group_key_tells_which_lines_belong_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"ids": [1, 2, number], "uid": number // 3} for number in range(6)]
    rows.append({"prompt_ids": [1], "completions": [[2, 9]], "uid": 1})
    path = file_of(tmp_path / "rows.jsonl", rows)
    found = found_in([path, "--rows", "2", "--group-key", "uid"], capsys)
    assert (found["forests"], found["lines"], found["groups"], found["samples"]) == (2, 7, 1, 7)
    assert found["tokens_after"] == (2 + 3) + (2 + 4)
    two = file_of(tmp_path / "two.jsonl", [APART])
    said = error_of(["stats", two, "--group-key", "uid"], capsys)
    assert said.startswith(f"{two}:1: no group key 'uid', but the keys 'prompt_ids', 'completions', 'rewards', 'id'")


def test_packed_files_and_the_standard_input_are_read_too(
    two: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = file_of(tmp_path / "two.jsonl.gz", [APART, ALIKE])
    content = Path(two).read_bytes().replace(b"\n", b"\n\n")  # blank lines are no rows
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    found = found_in([two, packed, "-"], capsys)
    assert (found["lines"], found["tokens_before"], found["tokens_after"]) == (6, 3 * 17, 3 * 10)


def test_files_are_read_line_by_line_and_tell_how_far(tmp_path: Path) -> None:
    path = file_of(tmp_path / "many.jsonl", [APART, ALIKE] * 300)
    told: list[tuple[int, int, int | None]] = []
    folded = forests(read_rollouts([path, path], progress=lambda *progress: told.append(progress)))
    assert next(folded).forest.num_tokens == 7
    size = Path(path).stat().st_size
    assert len(told) == 1 and told[0][1] < size  # one line further than the forest
    assert sum(1 for _ in folded) == 1199
    assert told[-1] == (1200, 2 * size, 2 * size)


def test_plot_draws_a_picture(two: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plot` brings it")
    target = tmp_path / "stats.png"
    assert main(["stats", two, "--plot", str(target)]) == 0
    capsys.readouterr()
    with Image.open(target) as picture:
        assert picture.size == (720, 280) and len(picture.convert("RGB").getcolors(10**6) or []) > 10
    assert "no folder" in error_of(["stats", two, "--plot", str(tmp_path / "none" / "x.png")], capsys)
    assert "the only kind of picture" in error_of(["stats", two, "--plot", "stats.svg"], capsys)


BAD = {
    "{": "not JSON",
    "[1]": "a JSON list",
    '{"prompt": "text", "response": "text"}': "the keys 'prompt', 'response'",
    '{"prompt_ids": [1]}': "the keys 'prompt_ids'",
    '{"prompt_ids": [1], "completions": [[1]], "ids": [1]}': "and not both",
    '{"ids": []}': "ids is []",
    '{"ids": "1 2"}': "ids is '1 2'",
    '{"ids": [1, 2.0]}': "ids[1] is 2.0",
    '{"ids": [1, true]}': "ids[1] is True",
    '{"ids": [1, -100]}': "ids[1] is -100",
    '{"ids": [9223372036854775808]}': "ids[0] is 9223372036854775808",
    '{"prompt_ids": [null], "completions": [[1]]}': "prompt_ids[0] is None",
    '{"prompt_ids": [1], "completions": []}': "completions is []",
    '{"prompt_ids": [1], "completions": [1]}': "completions[0] is 1",
    '{"prompt_ids": [1], "completions": [[1], []]}': "completions[1] is []",
    '{"prompt_ids": [1], "completions": [[1], [2, "3"]]}': "completions[1][1] is '3'",
    "[" * 100_000: "not JSON",
}


@pytest.mark.parametrize("line", BAD, ids=BAD.values())
def test_the_first_bad_line_is_named_as_an_error(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(APART) + "\n\n" + line + "\n" + json.dumps(ALIKE) + "\n", encoding="utf-8")
    said = error_of(["stats", str(path)], capsys)
    assert said.startswith(f"{path}:3: ") and BAD[line] in said and "Expected" in said
    assert len(said) < 400 + len(str(path))


def test_empty_damaged_or_absent_files_are_errors(two: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty, cut, wrong, plain = (tmp_path / name for name in ("empty.jsonl", "cut.gz", "wrong.gz", "plain.gz"))
    empty.write_bytes(b"\n")
    good = gzip.compress(Path(two).read_bytes())
    cut.write_bytes(good[:-12])
    wrong.write_bytes(good[:10] + b"\xff" + good[11:])
    plain.write_bytes(Path(two).read_bytes())
    assert error_of(["stats", two, str(empty)], capsys).startswith(f"{empty}: holds no line. Expected")
    for path in (cut, wrong, plain):
        assert error_of(["stats", str(path)], capsys).startswith(f"{path}: damaged gzip file")
    assert str(tmp_path / "none") in error_of(["stats", str(tmp_path / "none")], capsys)


@pytest.mark.parametrize("flag", ["--rows=-1", "--parameters=0", "--layers=1.5", "--d-model=x", "--parameters=1e308"])
def test_numbers_that_cannot_be_are_wrong_usage(two: str, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stats", two, flag]) == 2
    assert flag.split("=")[0] in capsys.readouterr().err


def test_the_largest_numbers_are_counted_with_and_the_defaults_are_those_of_the_library(
    two: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [word for flag in ("--parameters", "--layers", "--d-model", "--rows") for word in (flag, "1e15")]
    assert found_in([two, *flags], capsys)["flop_factor"] == pytest.approx(40 / 28)  # the pairs decide

    def defaults(module: Any) -> tuple[int, ModelShape]:
        found = module.stats.make_context("stats", ["x.jsonl"]).params
        sizes = {name: found[name] for name in ("parameters", "layers", "d_model")}
        return found["rows"], module._shape(None, sizes)

    assert defaults(cli) == (savings.ROWS, savings.SHAPE_7B) == (1000, ModelShape(7 * 10**9, 32, 4096))
    monkeypatch.setattr(constants, "ROWS", 7)  # the commands have no literal of their own
    monkeypatch.setattr(constants, "MODEL_7B", {"parameters": 1, "layers": 2, "d_model": 3})
    assert defaults(SimpleNamespace(**runpy.run_path(str(cli.__file__)))) == (7, ModelShape(1, 2, 3))


def test_interrupted_is_130(two: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(savings, "count_savings", interrupted)
    assert main(["stats", two]) == 130
    assert capsys.readouterr().err == "\ninterrupted\n"


def test_show_prints_the_tree_of_a_line_or_run(two: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", two]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{two}:1: 2 samples, 3 nodes, 9 tokens before, 7 after",
        "rows 0:2, 2 tokens, 2 samples: 1 2",
        "  rows 2:4, 2 tokens, 1 sample, ends sample 0: 10 11",
        "  rows 4:7, 3 tokens, 1 sample, ends sample 1: 20 21 22",
    ]
    assert main(["show", two, "--line", "2"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "rows 0:2, 2 tokens, 3 samples, ends sample 2: 5 7",
        "  rows 2:3, 1 token, 2 samples, ends samples 0, 1: 8",
    ]
    assert error_of(["show", two, "--line", "3"], capsys).startswith(f"{two}: has no rollouts on line 3")
    path = file_of(tmp_path / "rows.jsonl", [{"ids": [1, 2, number]} for number in range(6)])
    assert main(["show", path, "--line", "3", "--rows", "2"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{path}:3 to 4: 2 samples, 3 nodes, 6 tokens before, 4 after",
        "rows 0:2, 2 tokens, 2 samples: 1 2",
        "  rows 2:3, 1 token, 1 sample, ends sample 0: 2",
        "  rows 3:4, 1 token, 1 sample, ends sample 1: 3",
    ]


def test_show_cuts_long_nodes_and_the_indent_of_deep_trees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chain = [{"ids": list(range(100, 120 + length))} for length in range(600)]  # each is a prefix of the next
    path = file_of(tmp_path / "chain.jsonl", chain)
    assert main(["show", path, "--rows", "0", "--nodes", "5000"]) == 0
    lines = capsys.readouterr().out.splitlines()
    first = "100 101 102 103 104 105 106 107 ... 116 117 118 119"
    assert lines[1] == f"rows 0:20, 20 tokens, 600 samples, ends sample 0: {first}"
    assert len(lines) == 601 and max(map(len, lines[1:])) < 200
    assert lines[-1].strip() == "(level 599) rows 618:619, 1 token, 1 sample, ends sample 599: 718"
    assert main(["show", path, "--rows", "0", "--nodes", "2"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "and 598 more nodes: see all with --nodes 600"
    assert main(["show", path, "--rows", "0", "--nodes", "599"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "and 1 more node: see all with --nodes 600"


def test_show_gives_the_text_of_ids(tmp_path: Path, tiny_model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from niels_gpt.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(tiny_model_path)
    prompt = "The heron walks to the river."
    row = {
        "prompt_ids": tokenizer.encode(prompt),
        "completions": [tokenizer.encode(text) for text in (" Why? It was windy.", "\n" + 9 * "The otter is quiet. ")],
    }
    path = file_of(tmp_path / "text.jsonl", [row])
    folder = str(tiny_model_path.parent)
    assert main(["show", path, "--tokenizer", folder]) == 0
    root, short, long = capsys.readouterr().out.splitlines()[1:]
    assert root.endswith(f": {prompt!r}") and short.endswith(": ' Why? It was windy.'")
    assert long.endswith(r": '\nThe otter is quiet. The otter' ... 'is quiet. The otter is quiet. '")
    wrong = file_of(tmp_path / "wrong.jsonl", [{"ids": [1, 10**6]}])
    assert "but the rollouts hold 1000000" in error_of(["show", wrong, "--tokenizer", folder], capsys)


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    path = file_of(tmp_path / "wide.jsonl", [{"ids": [1, number]} for number in range(2000)])
    command = [sys.executable, "-m", "niels_gpt.prefix_tree", "show", path, "--rows", "0", "--nodes", "2000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith(f"{path}:1 to 2000: 2,000 samples")
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0
