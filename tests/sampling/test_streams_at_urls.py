"""Streams and readers of caches at a URL serve what the same caches here serve, and have the same states."""

import json
import pickle
import shutil
from itertools import islice

import pytest
import torch
from support import TESTS
from support.byte_tokenizer import ByteTokenizer
from support.small_builds import pretrain, rollout_groups, rollouts, sft, templated
from support.streams import EXPECTED_WARNINGS, hashed, joined
from support.trainer_runs import KILLED_AT, run, steps
from torch.utils.data import DataLoader

from niels_gpt.cache import PretrainTokenStreamDataset, SFTExampleDataset
from niels_gpt.exchange.transfer.push import push
from niels_gpt.prefix_tree.rollouts.reader import RolloutDataset
from niels_gpt.prefix_tree.rollouts.stream import RolloutStream
from niels_gpt.sampling import EpochStream, MixtureStream, PackedStream, SFTStream, iter_eval, prefetch
from niels_gpt.sampling.random_access import RandomAccess
from niels_gpt.storage.codes import CodedWarning
from niels_gpt.storage.mounted import MOUNTED

pytestmark = [
    *EXPECTED_WARNINGS,
    pytest.mark.filterwarnings("ignore:This DataLoader will create .* worker processes"),
]
MIB = 1 << 20


class Wide(ByteTokenizer):
    vocab_size = 70_000


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """Caches of two or three MiB each, so that their files have several pieces."""
    root = tmp_path_factory.mktemp("here")
    texts = [(None, f"{number}:" + chr(97 + number % 26) * (137 * number % 9000), None) for number in range(260)]
    for name, tokenizer in (("text", ByteTokenizer()), ("wide", Wide())):
        whole = {"max_train_tokens": None, "max_val_tokens": None, "partial": True, "val_frac": 0.1}
        whole |= {"shard_bytes": 5 * MIB // 4, "tokenizer": tokenizer, "shuffle_buffer": None}
        pretrain(root / name, items=texts, **whole)
    messages = [
        [
            {"role": "user", "content": "q" * (number % 40 + 1)},
            {"role": "assistant", "content": chr(97 + number % 26) * (31 * number % 1700 + 1)},
        ]
        for number in range(900)
    ]
    chats = [(f"chat {number}", each) for number, each in enumerate(messages)]
    sft(root / "chats", items=chats)
    templated(root / "bits", items=chats)
    rollouts(root / "rollouts", items=rollout_groups(0, 3000), val_frac=0)
    return root


@pytest.fixture(scope="module")
def bucket(here, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bucket")
    for cache in here.iterdir():
        if not cache.name.startswith("."):
            push(cache, f"file://{folder}/{cache.name}")
    return f"file://{folder}"


@pytest.fixture
def there(bucket, tmp_path):
    """The caches at the URL, with a folder of their own for what is fetched; nothing of them stays in the process."""
    before = dict(MOUNTED)
    yield At(bucket, local=tmp_path / "fetched", max_bytes="16 MiB")
    for folder in MOUNTED.keys() - before.keys():
        del MOUNTED[folder]


class At:
    """Where the caches are opened."""

    def __init__(self, root, **opening):
        self.root, self.opening = root, opening

    def __call__(self, stream, name, *arguments, **how):
        return stream(f"{self.root}/{name}", *arguments, **how, **self.opening)

    def pieces(self):
        """How many pieces of large files were fetched."""
        return len([path for path in self.opening["local"].rglob(".pieces/*") if path.suffix != ".half"])


def of_rollouts(at, *, global_batch_size, **how):
    return at(RolloutStream, "rollouts", 60, **how)


def mixed(sources, weights=(2, 1), **how):
    own = {"when_exhausted": how.pop("epochs"), "seed": how["seed"], "block_size": 64}
    return MixtureStream([source(**how) for source in sources], list(weights), **own)


CASES = {
    "windows": lambda at, here, **how: at(EpochStream, "text/train", T=700, **how),
    "offset windows": lambda at, here, **how: at(EpochStream, "text", split="val", T=99, random_offset=True, **how),
    "windows of shards": lambda at, here, **how: at(
        EpochStream, "text", split="train", T=500, order="shards", open_shards=1, **how
    ),
    "wide windows": lambda at, here, **how: at(EpochStream, "wide/train", T=700, **how),
    "documents": lambda at, here, **how: at(EpochStream, "text/train", T=700, documents=True, **how),
    "chats": lambda at, here, **how: at(SFTStream, "chats", T=300, **how),
    "chats in windows": lambda at, here, **how: at(SFTStream, "chats/train", T=300, over_length="split", **how),
    "chats of shards": lambda at, here, **how: at(SFTStream, "chats", T=300, order="shards", **how),
    "chats with bits": lambda at, here, **how: at(SFTStream, "bits", T=300, over_length="split", **how),
    "packed": lambda at, here, **how: at(PackedStream, "text/train", T=800, **how),
    "packed chats": lambda at, here, **how: at(PackedStream, "chats", T=800, **how),
    "packed chats with bits": lambda at, here, **how: at(PackedStream, "bits", T=800, **how),
    "mixture": lambda at, here, **how: mixed(
        [lambda **of: CASES["windows"](at, here, **of), lambda **of: at(EpochStream, "text/val", T=700, **of)], **how
    ),
    "mixture with one that is here": lambda at, here, **how: mixed(
        [lambda **of: CASES["windows"](at, here, **of), lambda **of: here(EpochStream, "text/val", T=700, **of)], **how
    ),
    "mixture of kinds": lambda at, here, **how: mixed(
        [
            lambda **of: at(SFTStream, "chats", T=700, **of),
            lambda **of: at(PackedStream, "text/train", T=700, **of),
            lambda **of: here(EpochStream, "text/train", T=700, documents=True, **of),
        ],
        [1, 1, 1],
        **how,
    ),
    "rollouts": lambda at, here, **how: of_rollouts(at, **how),
}


def opened(kind, at, here, **how):
    return CASES[kind](at, At(here), global_batch_size=6, seed=1, epochs=2, **how)


def ranks_of(kind, at, here, count, world, state=None):
    ranks = []
    for rank in range(world):
        stream = opened(kind, at, here, rank=rank, world_size=world)
        if state is not None:
            stream.load_state_dict(json.loads(json.dumps(state)))
        ranks.append(list(islice(stream, count)))
    return ranks


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("kind", CASES)
def test_batches_and_states_are_those_of_the_same_cache_here(here, there, kind, world):
    mine, theirs = (ranks_of(kind, at, here, 4, world) for at in (At(here), there))
    for one, other in zip(mine, theirs, strict=True):
        assert [hashed([batch]) for batch in one] == [hashed([batch]) for batch in other]
        assert [batch.state for batch in one] == [batch.state for batch in other]


@pytest.mark.parametrize("kind", CASES)
def test_a_state_goes_from_one_place_to_the_other_with_another_number_of_ranks(here, there, kind):
    whole = [row for rows, _ in joined(ranks_of(kind, At(here), here, 12, 1)) for row in rows]
    found, state = [], None
    for at, world in ((there, 2), (At(here), 1), (there, 3)):
        steps = joined(ranks_of(kind, at, here, 2, world, state))
        found, state = found + [row for rows, _ in steps for row in rows], steps[-1][1]
    assert found == whole[: len(found)] and "fetched" not in json.dumps(state) and "file" not in json.dumps(state)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["windows", "chats with bits", "packed chats", "mixture of kinds", "rollouts"])
def test_workers_and_prefetch_serve_the_same(here, there, kind):
    expected = [hashed([batch]) for batch in islice(opened(kind, At(here), here), 5)]
    loader = iter(DataLoader(opened(kind, there, here), batch_size=None, num_workers=2))
    assert [hashed([batch]) for batch in islice(loader, 5)] == expected
    del loader
    with prefetch(opened(kind, there, here), 2, "cpu") as batches:
        assert [hashed([batch]) for batch in islice(batches, 5)] == expected


def test_evaluation_is_the_same_on_each_rank(here, there):
    for rank in range(3):
        how = {"B": 3, "T": 1000, "rank": rank, "world_size": 3}
        mine, theirs = (list(at(iter_eval, "text/val", **how)) for at in (At(here), there))
        assert len(mine) == len(theirs)
        assert all(
            torch.equal(*pair) for one, other in zip(mine, theirs, strict=True) for pair in zip(one, other, strict=True)
        )


def test_random_rows_and_rows_by_number_are_the_same(here, there):
    for name, dataset in (
        ("text/train", lambda at, name: at(PretrainTokenStreamDataset, name, T=700)),
        ("chats", lambda at, name: at(SFTExampleDataset.open, name, "train", T=300)),
        ("bits", lambda at, name: at(SFTExampleDataset.open, name, "val", T=300)),
    ):
        pairs = [
            [dataset(at, name).get_batch(B=9, generator=torch.Generator().manual_seed(3)) for _ in range(2)]
            for at in (At(here), there)
        ]
        assert all(
            torch.equal(*each) for one, other in zip(*pairs, strict=True) for each in zip(one, other, strict=True)
        )
        assert dataset(there, name)[7].ids.tolist() == dataset(At(here), name)[7].ids.tolist()
    for kind in ("windows", "packed chats", "mixture"):
        mine, theirs = (RandomAccess(opened(kind, at, here)) for at in (At(here), there))
        for number in (5, 0, 1, 2, 3, 4, len(mine) - 1):
            assert hashed([mine[number]]) == hashed([theirs[number]])


def test_groups_of_rollouts_are_the_same(here, there):
    mine, theirs = (at(RolloutDataset, "rollouts") for at in (At(here), there))
    assert mine.fingerprint() == theirs.fingerprint()
    for group in (0, 17, len(mine) - 1):
        one, other = mine.group(group), theirs.group(group)
        assert one.id == other.id and repr(one.samples) == repr(other.samples)
        assert torch.equal(mine.forest(group).input_ids, theirs.forest(group).input_ids)
    assert [group.id for group in islice(theirs, 40)] == [group.id for group in islice(mine, 40)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["windows", "packed chats", "mixture with one that is here"])
def test_adapters_of_trainers_take_such_a_stream_as_any_other(here, there, tmp_path, kind):
    """Their workers get a pickled copy, which has the URL and not the process's folder."""
    transformers = pytest.importorskip("transformers")
    adapter = pytest.importorskip("niels_gpt.trainers.transformers", exc_type=ImportError)
    how = {"max_steps": 3, "per_device_train_batch_size": 6, "train_sampling_strategy": "sequential", "use_cpu": True}
    settings = transformers.TrainingArguments(str(tmp_path / "run"), report_to=[], **how)
    mine, theirs = (adapter.as_rows(opened(kind, at, here), settings)[0] for at in (At(here), there))
    theirs = pickle.loads(pickle.dumps(theirs))
    for index in range(18):
        one, other = mine[index], theirs[index]
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["windows", "packed chats", "mixture with one that is here"])
def test_grain_takes_such_a_stream_as_any_other(here, there, kind):
    pytest.importorskip("grain")
    from niels_gpt.trainers.grain import StreamDataset, StreamSource

    mine, theirs = (StreamSource(opened(kind, at, here)) for at in (At(here), there))
    theirs = pickle.loads(pickle.dumps(theirs))
    for number in range(9):
        assert mine[number]["input_ids"].tolist() == theirs[number]["input_ids"].tolist()
    mine, theirs = (iter(StreamDataset(opened(kind, at, here))) for at in (At(here), there))
    for _ in range(2):
        assert next(mine)["labels"].tolist() == next(theirs)["labels"].tolist()
    assert mine.get_state() == theirs.get_state()


# --- what is fetched --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "pieces"),
    [("windows", 0), ("documents", 0), ("packed", 0), ("rollouts", 0), ("packed chats with bits", 1)],
)
def test_opening_fetches_no_token_where_the_index_says_enough(here, there, kind, pieces):
    """Of chats with loss bits the bits are counted: a sixteenth of the tokens."""
    opened(kind, there, here)
    assert there.pieces() == pieces


def test_opening_chats_fetches_each_piece_of_their_tokens_once(here, there):
    opened("chats", there, here)
    assert there.pieces() == -(-(here / "chats/train_tokens.bin").stat().st_size // MIB)


@pytest.mark.slow
def test_a_folder_that_is_too_small_for_the_order_is_said(there, tmp_path):
    """Five shards of 4 MiB by a folder of 16: the whole split does not fit, and of two open ones both groups do."""
    texts = [(None, f"{number}" + "ab" * 400_000, None) for number in range(13)]
    whole = {"max_train_tokens": None, "max_val_tokens": 0, "val_frac": 0, "shuffle_buffer": None, "partial": True}
    pretrain(tmp_path / "large", items=texts, shard_bytes=4 * MIB, **whole)
    there.root = f"file://{(tmp_path / 'large').resolve().parent}"
    name = (tmp_path / "large").resolve().name
    how = {"T": 100, "global_batch_size": 2, "seed": 0}
    for refused in ({}, {"order": "shards", "open_shards": 3}, {"order": "shards"}):
        with pytest.warns(CodedWarning, match=r"large.* 16 MiB.*max_bytes.*\[W612\]"):
            there(EpochStream, f"{name}/train", **how, **refused)
    there(EpochStream, f"{name}/train", **how, order="shards", open_shards=2)


# --- a killed run -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_run_at_a_bucket_resumes_with_other_ranks_and_workers(here, s3_server, tmp_path, monkeypatch):
    """Two ranks of two workers, killed at step 17; then three ranks of one worker; compared with one rank here."""
    for name in ("text", "chats"):
        push(here / name, f"s3://team/killed/{name}")
    script = TESTS / "support" / "url_run.py"
    run(script, tmp_path / "whole", here, 0)
    folder = tmp_path / "killed"
    run(script, folder, "s3://team/killed", 2, tmp_path / "fetched", ranks=2, kill_at=KILLED_AT)
    shutil.copytree(folder, tmp_path / "seen")
    run(script, folder, "s3://team/killed", 1, tmp_path / "fetched", ranks=3)
    expected, found = steps(tmp_path / "whole"), steps(folder)
    assert found == {step: expected[step] for step in found} and max(found) == max(expected)
    assert max(steps(tmp_path / "seen")) >= KILLED_AT
