"""python -m niels_gpt.prefix_tree: what is printed, what is refused, and the exit statuses."""

import gzip
import io
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from PIL import Image
from support.commands import niels_gpt
from support.data_files import lines, write, write_parquet

# On paper. 1 2 | 10 11 | 20 21 22: 4 + 5 = 9 tokens become 7. Each token sees what stands above it and itself, so
# 10 + 15 = 25 pairs become 3 + (3 + 4) + (3 + 4 + 5) = 22; a dense mask has 7 * 7 = 49.
APART = {"prompt_ids": [1, 2], "completions": [[10, 11], [20, 21, 22]], "rewards": [0.5, 1], "id": "a"}
# 5 7 | 8: a duplicate, and a prefix of both. 3 + 3 + 2 = 8 tokens become 3, 6 + 6 + 3 = 15 pairs 6, of 9.
ALIKE = {"prompt_ids": [5], "completions": [[7, 8], [7, 8], [7]], "id": "b"}
NOTHING = {"prompt_ids": [], "completions": [[1, 2], [3]]}  # shares nothing, and has no first token to lose
TINY = ["--parameters", "10", "--layers", "1", "--d-model", "1"]


def file_of(path, rows):
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return str(path)


@pytest.fixture
def two(tmp_path):
    return file_of(tmp_path / "two.jsonl", [APART, ALIKE])


def tree(*argv):
    return niels_gpt(*argv, module="niels_gpt.prefix_tree.__main__")


def error_of(*argv):
    """Run a command that must fail; returns the one line that it says, and checks that it prints nothing else."""
    done = tree(*argv)
    assert done.status == 1 and done.out == ""
    assert done.err.count("\n") == 1 and done.err.startswith("error[E")
    return done.err.partition("]: ")[2].rstrip("\n")


def printed(*argv):
    done = tree(*argv)
    assert done.status == 0, done.err
    return done.out


def found_in(*argv):
    found = json.loads(printed("stats", *argv, "--json"))
    return found


def test_stats_prints_the_numbers_that_two_groups_have_on_paper(two):
    found = found_in(two, *TINY)
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
    dense = found_in(two, *TINY, "--attention", "dense")
    assert (dense["attention"], dense["computed_pairs"], dense["longest_row"]["mask_bytes"]) == ("dense", 58, 49)
    assert dense["flop_factor"] == pytest.approx(1500 / (3 * (200 + 4 * 58)))
    assert dense["flop_factor_of_any_model"] == {"least": 40 / 58, "most": 1.7}


def test_the_table_has_every_figure_of_the_json(two):
    found = found_in(two)
    table, words = printed("stats", two).split("\n\n")
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
def test_known_shapes_have_their_known_factors(tmp_path, prompt, completion, factors, said):
    (tmp_path / "row.jsonl").write_bytes(group_row(prompt, completion, 8))
    of_7b = ["--parameters", "6500000000", "--layers", "32", "--d-model", "4096"]  # without embeddings
    found = found_in(tmp_path / "row.jsonl", *of_7b)
    assert "{token_factor:.2f} {pair_factor:.2f} {flop_factor:.2f}".format(**found) == factors
    assert printed("stats", tmp_path / "row.jsonl", *of_7b).split("\n\n")[1].startswith(said)


def group_row(prompt, completion, samples):
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
def test_what_does_not_pay_is_said(tmp_path, layers, attention, said):
    # A prompt of 1,024 tokens with 8 completions of 1,024: on a Llama of 4 layers and width 128 a step with a dense
    # mask takes more than twice as long as the unfolded one; on one of 7 billion parameters attention hardly counts.
    small = ["--parameters", "800000", "--layers", "4", "--d-model", "128"]
    arguments = [tmp_path / "row.jsonl", *([] if layers == 32 else small), "--attention", attention]
    (tmp_path / "row.jsonl").write_bytes(group_row(1024, 1024, 8))
    words = printed("stats", *arguments).split("\n\n")[1]
    assert words.startswith(said) and ("0.20 to 1.78" in words) == (attention == "dense")
    found = found_in(*arguments)
    any_model = found["flop_factor_of_any_model"]
    assert any_model["least"] < found["flop_factor"] < any_model["most"]


def test_the_shape_of_a_model_is_read_from_its_config(tmp_path):
    transformers = pytest.importorskip("transformers", reason="the extra `eagle3` brings it")
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, intermediate_size=48, vocab_size=97, head_dim=16)
    config.save_pretrained(tmp_path)
    path = file_of(tmp_path / "two.jsonl", [APART, ALIKE])
    attention, mlp, head = 32 * 64 * 2 + 32 * 32 * 2, 3 * 32 * 48, 32 * 97
    expected = {"parameters": 3 * (attention + mlp), "layers": 3, "d_model": 64, "head_parameters": head}
    found = found_in(path, "--model", str(tmp_path))
    assert found["model_shape"] == expected
    # Rows with a loss: 2 + 3 become the last of the prompt, 10, 20 and 21; 2 + 2 + 1 become 5 and 7.
    assert (found["head_rows_before"], found["head_rows_after"]) == (10, 6)
    body = expected["parameters"]
    assert found["flops_after"] == 3 * (2 * (10 * body + 6 * head) + 4 * 3 * 64 * 28)
    assert found["flop_factor_of_any_model"] == {"least": 40 / 28, "most": 1.7}
    tied = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=97)
    tied.save_pretrained(tmp_path)  # its positions are an embedding too, and its head is that of ids
    found = found_in(path, "--model", str(tmp_path))["model_shape"]
    assert (found["parameters"], found["head_parameters"]) == (12 * 32 * 32, head)
    halves = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "q_lora_rank": 8, "kv_lora_rank": 8}
    latent = transformers.DeepseekV3Config(**sizes | halves, first_k_dense_replace=3, vocab_size=97)
    latent.save_pretrained(tmp_path)
    assert found_in(path, "--model", str(tmp_path))["model_shape"]["d_model"] == 4 * (8 + 4 + 6) / 2
    config.save_pretrained(tmp_path)
    found = found_in(path, "--model", str(tmp_path), "--layers", "5")["model_shape"]
    assert found == {**expected, "layers": 5}
    experts = transformers.MixtralConfig(**sizes, intermediate_size=48, vocab_size=97, num_local_experts=8)
    experts.save_pretrained(tmp_path)
    attention, router = 32 * 32 * 2 + 32 * 16 * 2, 32 * 8
    found = found_in(path, "--model", str(tmp_path))["model_shape"]
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
def test_a_config_that_is_no_model_is_refused(config, said, two, tmp_path):
    pytest.importorskip("transformers", reason="the extra `eagle3` brings it")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    error = error_of("stats", two, "--model", str(folder))
    assert said in error and "\x1b" not in error and not (tmp_path / "ran").exists()


def test_unrelated_rows_are_counted_as_the_row_they_become(tmp_path):
    rows = [{"ids": [10 * number, 1, 2]} for number in range(40)]  # 40 trees of 3 tokens, side by side
    path = file_of(tmp_path / "rows.jsonl", rows)
    found = found_in(path, *TINY)
    assert found["tokens_after"] == 120 and found["forests"] == 1
    assert found["longest_row"] == {"tokens": 120, "where": f"{path}:1"} and found["flop_factor"] == 1
    pairs = 40 * 6
    dense = found_in(path, *TINY, "--attention", "dense")
    assert dense["longest_row"]["mask_bytes"] == 120 * 120
    assert dense["flop_factor"] == pytest.approx((20 * 120 + 4 * pairs) / (20 * 120 + 4 * 120 * 120))
    assert found_in(path, "--rows", "10")["longest_row"]["tokens"] == 30


def test_the_median_is_no_mean_and_an_empty_prompt_shares_none(tmp_path):
    path = file_of(tmp_path / "three.jsonl", [ALIKE, NOTHING, APART])  # 8/3, 1, 9/7: the mean is 1.65
    assert found_in(path)["median_token_factor"] == 9 / 7
    found = found_in(file_of(tmp_path / "r.jsonl", [NOTHING]), *TINY)
    assert (found["tokens_before"], found["tokens_after"], found["first_tokens"]) == (3, 3, 0)
    assert found["longest_row"]["tokens"] == 3  # two trees, but one forest, which nothing splits
    # 3 + 1 pairs, but a dense mask has 3 * 3
    dense = found_in(str(tmp_path / "r.jsonl"), *TINY, "--attention", "dense")
    assert dense["flop_factor"] == pytest.approx((20 * 3 + 4 * 4) / (20 * 3 + 4 * 9))


def test_rows_of_whole_sequences_are_folded_in_runs(tmp_path):
    rows = [{"ids": [1, 2, number]} for number in range(6)]
    path = file_of(tmp_path / "rows.jsonl", rows)
    for count, after in {"1": 18, "2": 3 * 4, "4": 6 + 4, "0": 8, "1000": 8}.items():
        assert found_in(path, "--rows", count)["tokens_after"] == after
    found = found_in(path)
    assert (found["forests"], found["tokens_after"], found["completion_tokens"]) == (1, 8, 0)
    assert found_in(path, path)["forests"] == 2  # no run crosses the end of a file
    mixed = file_of(tmp_path / "mixed.jsonl", [{"ids": [1, 2]}, APART, {"ids": [1, 2]}, {"ids": [1, 2]}])
    found = found_in(mixed)
    assert (found["forests"], found["groups"], found["tokens_after"]) == (3, 1, 2 + 7 + 2)


def test_a_group_key_tells_which_lines_belong_together(tmp_path):
    rows = [{"ids": [1, 2, number], "uid": number // 3} for number in range(6)]
    rows.append({"prompt_ids": [1], "completions": [[2, 9]], "uid": 1})
    path = file_of(tmp_path / "rows.jsonl", rows)
    found = found_in(path, "--rows", "2", "--group-key", "uid")
    assert (found["forests"], found["lines"], found["groups"], found["samples"]) == (2, 7, 1, 7)
    assert found["tokens_after"] == (2 + 3) + (2 + 4)
    two = file_of(tmp_path / "two.jsonl", [APART, {"ids": [1, 2]}])  # a line of completions is a group by itself
    assert error_of("stats", two, "--group-key", "uid").startswith(f"{two}:2: no group key 'uid', but the keys 'ids'")


def test_packed_files_and_the_standard_input_are_read_too(two, tmp_path, monkeypatch):
    packed = file_of(tmp_path / "two.jsonl.gz", [APART, ALIKE])
    content = Path(two).read_bytes().replace(b"\n", b"\n\n")  # blank lines are no rows
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    found = found_in(two, packed, "-")
    assert (found["lines"], found["tokens_before"], found["tokens_after"]) == (6, 3 * 17, 3 * 10)


def test_plot_draws_a_picture(two, tmp_path):
    pytest.importorskip("matplotlib", reason="the extra `plot` brings it")
    target = tmp_path / "stats.png"
    printed("stats", two, "--plot", target)
    with Image.open(target) as picture:
        assert picture.size == (720, 280) and len(picture.convert("RGB").getcolors(10**6) or []) > 10
    assert "no folder" in error_of("stats", two, "--plot", str(tmp_path / "none" / "x.png"))
    assert "the only kind of picture" in error_of("stats", two, "--plot", "stats.svg")


LEFT_OUT = {
    "{": "unreadable_row",
    "[1]": "unreadable_row",
    "[" * 4_000: "unreadable_row",
    '{"ids": [' + "1, " * 2_000 + "1]}": "too_large",
    '{"prompt": "text", "response": "text"}': "missing_field",
    '{"prompt_ids": [1], "completions": [[1]], "ids": [1]}': "malformed",
    '{"ids": [1, 2.0]}': "malformed",
    '{"ids": [1], "prompt_length": 1}': "empty_completion",
}


@pytest.mark.parametrize("line", LEFT_OUT, ids=LEFT_OUT.values())
def test_a_line_that_a_build_leaves_out_is_left_out_counted_and_named(line, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(APART) + "\n\n" + line + "\n" + json.dumps(ALIKE) + "\n", encoding="utf-8")
    done = tree("stats", str(path), "--json", "--max-document-bytes", "4096")
    found = json.loads(done.out)
    assert (found["lines"], found["tokens_before"], found["counters"]) == (2, 17, {LEFT_OUT[line]: 1})
    assert done.err.startswith(f"warning[W305]: {path}, line 3: ") and done.err.count("\n") == 1


def write_rows(path, rows):
    if path.suffix == ".parquet":
        names = {name for row in rows for name in row}
        write_parquet(path, {name: pa.array([row.get(name) for row in rows]) for name in names})
    else:
        write(path, json.dumps(rows, indent=1) if path.suffix == ".json" else lines(*rows))


@pytest.mark.parametrize("name", ["r.jsonl", "r.jsonl.gz", "r.jsonl.zst", "r.json", "r.parquet"])
def test_every_form_of_a_file_and_of_a_row_is_read_as_a_build_reads_it(name, tmp_path):
    whole = [7, 8, 20]
    rows = [
        {"group": "q", "prompt_ids": [7, 8], "completions": [[20], [21, 22]]},
        {"group": "q", "prompt_ids": [7, 8], "completion_ids": [20, 23]},
        *({"ids": [*whole, number], "prompt_length": 2} for number in (30, 31)),
        {"prompt_tokens": [7, 8], "response_tokens": [20], "mask": [0]},
    ]
    write_rows(tmp_path / name, rows)
    found = found_in(tmp_path / name)
    assert [found[key] for key in ("lines", "groups", "forests", "samples")] == [5, 1, 2, 6]
    assert (found["tokens_before"], found["tokens_after"]) == (3 + 4 + 4 + 4 + 4 + 3, (2 + 1 + 2 + 1) + (3 + 1 + 1))
    assert (found["completion_tokens"], found["counters"]) == (1 + 2 + 2 + 2 + 2 + 1, {})


@pytest.mark.parametrize("command", ["stats", "show"])
def test_a_cache_names_the_commands_that_read_it(tmp_path, command):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        file_of(tmp_path / "own.jsonl", [APART])
        assert niels_gpt("build", "own", "--rollouts", "own=own.jsonl").status == 0
        done = tree(command, "cache/rollouts/own")
        assert "error[E208]: cache/rollouts/own: a cache" in done.err
        assert "Run: niels-gpt stats cache/rollouts/own, or niels-gpt show cache/rollouts/own" in done.err
        assert niels_gpt("stats", "cache/rollouts/own").status == 0


def test_empty_damaged_or_absent_files_are_errors(two, tmp_path):
    empty, cut, wrong, plain = (tmp_path / f"{name}.jsonl.gz" for name in ("empty", "cut", "wrong", "plain"))
    good = gzip.compress(Path(two).read_bytes())
    empty.write_bytes(gzip.compress(b"\n"))
    cut.write_bytes(good[:-12])
    wrong.write_bytes(good[:10] + b"\xff" + good[11:])
    plain.write_bytes(Path(two).read_bytes())
    assert error_of("stats", two, str(empty)).startswith(f"{empty}: holds no rollouts. Expected")
    for path in (cut, wrong, plain):
        assert error_of("stats", str(path)).startswith(f"{path}: damaged gzip file")
    assert str(tmp_path / "none.jsonl") in error_of("stats", str(tmp_path / "none.jsonl"))


@pytest.mark.parametrize("flag", ["--rows=-1", "--parameters=0", "--layers=1.5", "--d-model=x", "--parameters=1e308"])
def test_numbers_that_cannot_be_are_wrong_usage(two, flag):
    done = tree("stats", two, flag)
    assert done.status == 2 and flag.split("=")[0] in done.err


def test_the_largest_numbers_are_counted_with(two):
    flags = [word for flag in ("--parameters", "--layers", "--d-model", "--rows") for word in (flag, "1e15")]
    assert found_in(two, *flags)["flop_factor"] == pytest.approx(40 / 28)  # the pairs decide


def test_a_model_of_7_billion_and_runs_of_1000_rows_are_the_defaults(tmp_path):
    path = file_of(tmp_path / "rows.jsonl", [{"ids": [1, 2, number]} for number in range(1001)])
    found = found_in(path)
    assert (found["forests"], found["tokens_after"]) == (2, 1002 + 3)
    assert found["model_shape"] == {"parameters": 7 * 10**9, "layers": 32, "d_model": 4096, "head_parameters": 0}


class Interrupted(io.RawIOBase):
    """A terminal at which Ctrl-C is pressed."""

    def readable(self):
        return True

    def readinto(self, buffer):
        raise KeyboardInterrupt


def test_interrupted_is_130(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(Interrupted())))
    done = tree("stats", "-")
    assert (done.status, done.out, done.err) == (130, "", "\ninterrupted\n")


def test_show_prints_the_tree_of_a_line_or_run(two, tmp_path):
    assert printed("show", two).splitlines() == [
        f"{two}:1: 2 samples, 3 nodes, 9 tokens before, 7 after",
        "rows 0:2, 2 tokens, 2 samples: 1 2",
        "  rows 2:4, 2 tokens, 1 sample, ends sample 0: 10 11",
        "  rows 4:7, 3 tokens, 1 sample, ends sample 1: 20 21 22",
    ]
    assert printed("show", two, "--line", "2").splitlines()[1:] == [
        "rows 0:2, 2 tokens, 3 samples, ends sample 2: 5 7",
        "  rows 2:3, 1 token, 2 samples, ends samples 0, 1: 8",
    ]
    assert error_of("show", two, "--line", "3").startswith(f"{two}: has no rollouts on line 3")
    path = file_of(tmp_path / "rows.jsonl", [{"ids": [1, 2, number]} for number in range(6)])
    assert printed("show", path, "--line", "3", "--rows", "2").splitlines() == [
        f"{path}:3 to 4: 2 samples, 3 nodes, 6 tokens before, 4 after",
        "rows 0:2, 2 tokens, 2 samples: 1 2",
        "  rows 2:3, 1 token, 1 sample, ends sample 0: 2",
        "  rows 3:4, 1 token, 1 sample, ends sample 1: 3",
    ]


def test_show_cuts_long_nodes_and_the_indent_of_deep_trees(tmp_path):
    chain = [{"ids": list(range(100, 120 + length))} for length in range(600)]  # each is a prefix of the next
    path = file_of(tmp_path / "chain.jsonl", chain)
    nodes = printed("show", path, "--rows", "0", "--nodes", "5000").splitlines()
    first = "100 101 102 103 104 105 106 107 ... 116 117 118 119"
    assert nodes[1] == f"rows 0:20, 20 tokens, 600 samples, ends sample 0: {first}"
    assert len(nodes) == 601 and max(map(len, nodes[1:])) < 200
    assert nodes[-1].strip() == "(level 599) rows 618:619, 1 token, 1 sample, ends sample 599: 718"
    assert (
        printed("show", path, "--rows", "0", "--nodes", "2").splitlines()[-1]
        == "and 598 more nodes: see all with --nodes 600"
    )
    assert (
        printed("show", path, "--rows", "0", "--nodes", "599").splitlines()[-1]
        == "and 1 more node: see all with --nodes 600"
    )


def test_show_gives_the_text_of_ids(tmp_path, tiny_model_path):
    from niels_gpt.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(tiny_model_path)
    prompt = "The heron walks to the river."
    row = {
        "prompt_ids": tokenizer.encode(prompt),
        "completions": [tokenizer.encode(text) for text in (" Why? It was windy.", "\n" + 9 * "The otter is quiet. ")],
    }
    path = file_of(tmp_path / "text.jsonl", [row])
    folder = str(tiny_model_path.parent)
    root, short, long = printed("show", path, "--tokenizer", folder).splitlines()[1:]
    assert root.endswith(f": {prompt!r}") and short.endswith(": ' Why? It was windy.'")
    assert long.endswith(r": '\nThe otter is quiet. The otter' ... 'is quiet. The otter is quiet. '")
    wrong = file_of(tmp_path / "wrong.jsonl", [{"ids": [1, 10**6]}])
    assert "but the rollouts hold 1000000" in error_of("show", wrong, "--tokenizer", folder)


@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_error(tmp_path):
    path = file_of(tmp_path / "wide.jsonl", [{"ids": [1, number]} for number in range(2000)])
    command = [sys.executable, "-m", "niels_gpt.prefix_tree", "show", path, "--rows", "0", "--nodes", "2000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith(f"{path}:1 to 2000: 2,000 samples")
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0
