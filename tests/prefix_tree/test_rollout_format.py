"""The bytes of a rollout cache as docs/formats.md has them, which samples are dropped, and what the reader returns."""

import json
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from support.byte_tokenizer import ByteTokenizer
from support.small_builds import rollout_groups, rollouts, whole_version

from niels_gpt.prefix_tree.edges import LossEdges
from niels_gpt.prefix_tree.forest import PrefixForest
from niels_gpt.prefix_tree.rollouts.build import build_rollouts
from niels_gpt.prefix_tree.rollouts.reader import RolloutDataset
from niels_gpt.prefix_tree.rollouts.records import Rollout, RolloutGroup
from niels_gpt.storage.errors import CacheError

TINY = [RolloutGroup("g", [Rollout([5, 6, 7, 8], 2, reward=1.0), Rollout([5, 6, 7], 2, reward=0.0)])]


def build(path, groups, **changed):
    return build_rollouts(groups, path, **{"vocab_size": 30, "seed": 0, **changed})


def is_good(rollout):
    return max(rollout.ids) < 30 and len(rollout.logprobs) == len(rollout.ids) - 3


def test_the_example_of_the_specification_has_its_bytes(tmp_path):
    meta = build(tmp_path / "c", TINY, vocab_size=10)
    folder = (tmp_path / "c").resolve()
    assert (folder / "train_tokens.bin").read_bytes() == bytes([5, 0, 6, 0, 7, 0, 8, 0])
    assert (folder / "train_loss.bin").read_bytes() == b"\x4c"
    assert np.fromfile(folder / "train_reward.bin", "<f4").tolist() == [1, 0]
    assert np.load(folder / "index/train_groups.npy").tolist() == [0, 2, 3, 0, 0, 0, 0, 4, 10]
    assert np.load(folder / "index/train_samples.npy").tolist() == [4, 2, 2, 1, 0, 3, 2, 1, 0, 3]
    assert (folder / "index/train_ids.txt").read_bytes() == b"g\n"
    assert (meta["tokens_after"]["train"], meta["totals"]["train_tokens"], meta["pairs"]["train"]) == (4, 7, 16)
    assert whole_version(tmp_path / "c") == meta["content_sha256"]
    with pytest.raises(CacheError, match=r"split val is empty: .* --rollouts-val-frac"):
        RolloutDataset(tmp_path / "c", "val")


def test_numpy_alone_reads_every_sample(tmp_path):
    """Independent of the reader: by the words of docs/formats.md."""
    rollouts(tmp_path / "c")
    folder, found = (tmp_path / "c").resolve(), {}
    for split in ("train", "val"):
        tokens = np.fromfile(folder / f"{split}_tokens.bin", "<u2")
        bits = np.unpackbits(np.fromfile(folder / f"{split}_loss.bin", "u1"), bitorder="little")
        logprobs = np.fromfile(folder / f"{split}_logprobs.bin", "<f4")
        advantages = np.fromfile(folder / f"{split}_advantage.bin", "<f4")
        rows = np.load(folder / f"index/{split}_samples.npy").reshape(-1, 5).tolist()
        names = (folder / f"index/{split}_ids.txt").read_bytes()
        for first, count, prefix, token, byte, score, line, *_ in np.load(folder / f"index/{split}_groups.npy").reshape(
            -1, 9
        ):
            shared, token, bit, samples = tokens[token : token + prefix], token + prefix, 8 * byte, []
            for number in range(first, first + count):
                length, prompt, targets, *_ = rows[number]
                ids = [*shared, *tokens[token : token + length - prefix]]
                mask = bits[bit : bit + length].tolist()
                assert sum(mask[1:]) == targets
                samples.append((ids, prompt, mask, logprobs[score : score + length - prompt], advantages[number]))
                token, bit, score = token + length - prefix, bit + length, score + length - prompt
            name = names[line : names.index(b"\n", line)].decode("unicode_escape")
            found[name] = samples
    good = {group.id: [each for each in group.samples if is_good(each)] for group in rollout_groups(0)}
    good = {name: samples for name, samples in good.items() if samples}
    assert 30 < len(good) < 40 and set(found) == set(good)
    for name, samples in found.items():
        given = good[name]
        assert [(s[0], s[1]) for s in samples] == [(each.ids, 3) for each in given]
        assert all(s[2] == [0] * 3 + [1] * (len(s[0]) - 3) for s in samples)
        for (*_, logprobs, advantage), each in zip(samples, given, strict=True):
            np.testing.assert_array_equal(logprobs, np.float32(each.logprobs))
            assert advantage == np.float32(each.advantage)


def test_the_reader_gives_back_what_was_built(tmp_path):
    rollouts(tmp_path / "c", val_frac=0)
    data = RolloutDataset(tmp_path / "c")
    copy = pickle.loads(pickle.dumps(data))
    given = {group.id: group for group in rollout_groups(0)}
    for number in range(len(data)):
        group, again = data.group(number), copy.group(number)
        samples = [each for each in given[group.id].samples if is_good(each)]
        for mine, theirs, copied in zip(group.samples, samples, again.samples, strict=True):
            assert mine.ids.tolist() == theirs.ids == copied.ids.tolist()
            np.testing.assert_array_equal(mine.logprobs, np.float32(theirs.logprobs))
            assert (mine.prompt_length, mine.reward) == (3, theirs.reward)
        forest = data.forest(number)
        expected = PrefixForest.from_sequences(
            [each.ids for each in samples],
            loss_mask=[each.loss_mask for each in group.samples],
            prompt_lengths=[3] * len(samples),
        )
        for name in ("input_ids", "loss_mask", "completion_starts", "subtree_end"):
            assert torch.equal(getattr(forest, name), getattr(expected, name))
        stats = forest.stats()
        assert data.groups[number, -2:].tolist() == [stats.tokens_after, stats.pairs_after]
        edges = LossEdges.from_forest(forest)
        fields = {name: edges.field(data.field(name, number), per=per) for name, per in data.fields.items()}
        assert torch.equal(
            fields["logprobs"], edges.field([np.float32(each.logprobs) for each in samples], per="completion")
        )
        assert not any(values.isnan().any() for values in fields.values())
    assert data.locate(int(data.groups[3, 0]) + 1 if data.groups[3, 1] > 1 else int(data.groups[3, 0]))[0] == 3


DROPPED = {
    "empty_sample": Rollout([]),
    "empty_completion": Rollout([1, 2], 2),
    "ids_outside_vocabulary": Rollout([1, 30]),
    "mismatched_lengths": Rollout([1, 2], loss_mask=[1]),
    "not_finite": Rollout([1, 2], reward=float("nan")),
    "malformed reward": Rollout([1, 2], reward="1.5"),
    "malformed prompt": Rollout([1, 2, 3], 1.5),
    "target_without_score": Rollout([1, 2, 3], 1, [1, 1, 1], logprobs=[-1.0, -1.0]),
    "malformed": Rollout([1.5, 2]),
}


@pytest.mark.parametrize("reason", DROPPED)
def test_a_sample_of_a_bad_form_is_dropped_and_counted(tmp_path, reason):
    good = Rollout([1, 2, 3])
    meta = build(tmp_path / "c", [RolloutGroup("a", [good, DROPPED[reason]]), RolloutGroup("b", [DROPPED[reason]])])
    assert meta["dropped"] == {reason.split()[0]: 2, "groups_without_sample": 1}
    assert (meta["samples_read"], meta["totals"]["train_samples"], meta["groups_read"]) == (3, 1, 2)


def test_tensors_of_every_float_type_are_taken_and_a_generator_of_samples_refused(tmp_path):
    scores = torch.tensor([-1.0, -2.5], dtype=torch.bfloat16, requires_grad=True)
    build(tmp_path / "c", [RolloutGroup("a", [Rollout(torch.tensor([1, 2]), 0, torch.tensor([True, False]), scores)])])
    assert RolloutDataset(tmp_path / "c").group(0).samples[0].logprobs.tolist() == [-1.0, -2.5]
    with pytest.raises(CacheError, match="does not record which tokenizer"):
        RolloutDataset(tmp_path / "c", tokenizer_sha256="0" * 64)
    with pytest.raises(ValueError, match="samples are a generator, expected a list"):
        RolloutGroup("a", (Rollout([number]) for number in range(3)))


def test_samples_of_different_fields_are_refused(tmp_path):
    groups = [RolloutGroup("a\x1b[2J", [Rollout([1, 2], reward=1.0), Rollout([1, 2])])]
    with pytest.raises(ValueError, match=r"sample 1 of group 'a\\x1b\[2J' has the fields \(\); expected \(reward\)"):
        build(tmp_path / "c", groups)


def test_ids_without_a_vocabulary_have_32_bits_and_a_tokenizer_gives_one(tmp_path):
    wide = build(tmp_path / "wide", [RolloutGroup("a", [Rollout([1, 2**31 - 1])])], vocab_size=None)
    assert (wide["token_dtype"], wide["vocab_size"], wide["tokenizer_sha256"]) == ("uint32-le", None, None)
    assert RolloutDataset(tmp_path / "wide").group(0).samples[0].ids.tolist() == [1, 2**31 - 1]
    tokenizer = ByteTokenizer()
    named = build(tmp_path / "named", TINY, vocab_size=None, tokenizer=tokenizer)
    assert named["vocab_size"] == tokenizer.vocab_size and named["special_token_ids"] == tokenizer.special_token_ids()


def test_reading_a_description_loads_no_torch(tmp_path):
    build(tmp_path / "c", TINY)
    code = (
        "import sys; from niels_gpt.cache.meta import reader_meta; from pathlib import Path\n"
        "import niels_gpt.prefix_tree.rollouts.records, niels_gpt.prefix_tree.rollouts.records\n"
        "print(reader_meta(Path(sys.argv[1]).resolve(), 'rollouts')['kind'], 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "c"], capture_output=True, text=True, check=True)
    assert done.stdout == "rollouts False\n"
    assert json.loads((tmp_path / "c" / "meta.json").read_text())["kind"] == "rollouts"
