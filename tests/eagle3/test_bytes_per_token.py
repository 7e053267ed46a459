"""`bytes_per_token` is one number: of meta.json, the estimate, the command, `stats`, Dagster and the page's formula."""

import json
import re
from functools import partial

import pytest
from support import eagle3_runs as small
from support.commands import niels_gpt
from support.eagle3_runs import ALL, EAGLE3, FP8, MTP, NATIVE, REPLY, TOPK, estimated, planned

from niels_gpt.recipes.records import Outcome

eagle3 = partial(niels_gpt, module=EAGLE3)


def formula(form, shards, k):
    """The bytes without headers, by docs/eagle3.md. shards: (N, T, A, R) of each. k: layers, or kept probabilities."""
    h, d, s = small.HIDDEN, 12, small.LENGTH
    if form in ("native", "fp8"):
        states = (lambda a, r: 2 * a * k * h + r * (2 * h + 8)) if form == "native" else None
        states = states or (lambda a, r: a * k * (h + 4) + r * (4 * h + 8))  # its last hidden states are float32 here
        return sum(4 * t + -(-t // 8) + states(a, r) + 24 * (n + 1) for n, t, a, r in shards)
    return sum(n for n, *_ in shards) * s * (6 * h + (6 * k if k else 2 * d) + 25)


@pytest.mark.parametrize(
    ("form", "changed", "k"),
    [
        ("native", NATIVE, 3),
        ("native", REPLY, 3),
        ("native", MTP, 0),
        ("fp8", FP8, 4),
        ("fp8", ALL, 4),
        ("version 1", {}, 0),
        ("version 2", TOPK, 4),
    ],
    ids=["native", "reply", "no block", "fp8", "all", "version 1", "version 2"],
)
def test_it_is_one_number_everywhere(tmp_path, form, changed, k):
    from pipelines.metadata import materialize_result

    folder, given = tmp_path / "c", small.plan(small.samples_of(), **changed)
    before = estimated(folder, given)
    meta = small.run(folder, given=given).meta
    number = json.loads((folder / "meta.json").read_bytes())["bytes_per_token"]
    assert number == before.bytes_per_token == eagle3("stats", folder, "--json").json["bytes_per_token"]
    assert re.search(rf"^bytes a token +{number:,.1f}\b", eagle3("stats", folder).out, re.MULTILINE)
    if "targets" in changed:
        rule, kinds = changed["targets"], ", ".join(changed["enough_for"])
        assert f" of the tokens), {rule}: enough for {kinds} bytes " in " ".join(eagle3("stats", folder).out.split())
    outcome = Outcome("eagle3/targets", folder, meta, False, 1.0, None, "f" * 64)
    assert materialize_result(outcome).metadata["bytes_per_token"].value == number

    plan, headers, shards = planned(given), 0, []
    counts = plan.counts if plan.is_native else [[0, 0, 0]] * 10
    for shard, path in enumerate(sorted(folder.glob("shard-*"))):
        headers += 8 + int.from_bytes(path.read_bytes()[:8], "little")
        rows = range(plan.firsts[shard], plan.firsts[shard + 1])
        shards.append((len(rows), *(sum(int(counts[row][part]) for row in rows) for part in range(3))))
    assert number * meta["totals"]["tokens"] == pytest.approx(headers + formula(form, shards, k), rel=1e-12)


def test_parts_add_up(tmp_path):
    small.run(tmp_path / "c", given=small.plan(small.samples_of(), **FP8))
    found = eagle3("stats", tmp_path / "c", "--json").json
    assert sum(found["bytes_per_token_by_part"].values()) == pytest.approx(found["bytes_per_token"])
    small.run(tmp_path / "d")
    found = eagle3("stats", tmp_path / "d", "--json").json
    slots = 10 * small.LENGTH * found["slot_bytes"]
    assert 0 < found["shard_bytes"] - slots < 3 * 2048, "the headers"
