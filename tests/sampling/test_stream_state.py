"""The state of an EpochStream: a few scalars that every batch carries, from which any split of the work resumes."""

import json
import re
import zlib
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.number_caches import firsts, number_cache, numbered, run_epochs

from niels_gpt.cache import CacheError
from niels_gpt.sampling import EpochStream
from niels_gpt.sampling.permutation import ROUNDS, random_keys

KEYS = {"stream", "seed", "key_check", "epoch", "consumed_samples", "T", "random_offset"}
KEYS |= {"split", "tokens", "content_sha256", "tokenizer_sha256"}
pytestmark = [
    pytest.mark.filterwarnings("ignore:the last batch has"),
    pytest.mark.filterwarnings("ignore:.*random_offset moves none"),
]


@pytest.fixture
def ten(tmp_path):
    """Ten windows of T = 4."""
    return numbered(tmp_path, [26, 17])


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A real cache of 100 train and 50 val tokens, with a content sha256 and a tokenizer sha256."""
    return number_cache(tmp_path_factory.mktemp("cache") / "pretrain" / "numbers", val=50)


def stream(folder, **changed):
    return EpochStream(str(folder), **{"T": 4, "global_batch_size": 4, "seed": 0, **changed})


def state_after(folder, steps, **changed):
    one = stream(folder, **changed)
    list(islice(one, steps))
    return one.state_dict()


def test_a_state_says_where_in_which_cache(cache):
    """32 windows of T = 3; batches of 10: after four of them, eight samples into the second epoch."""
    meta = json.loads((cache.parent / "meta.json").read_text())
    state = state_after(cache, 4, T=3, global_batch_size=10, seed=5)
    assert json.loads(json.dumps(state)) == state and len(json.dumps(state)) < 650
    assert re.fullmatch("[0-9a-f]{8}", state.pop("checksum"))
    key_check = f"{zlib.crc32(random_keys(5, ROUNDS).tobytes()):08x}"
    data = {"split": "train", "tokens": 100, "content_sha256": meta["content_sha256"], "tokenizer_sha256": "ab" * 32}
    place = {"epoch": 1, "consumed_samples": 40, "T": 3, "random_offset": False}
    assert state == {"stream": 1, "seed": 5, "key_check": key_check, **place, **data}


def test_a_folder_of_another_tool_has_no_sha256_and_is_known_by_its_tokens(ten, tmp_path):
    state = state_after(ten, 0)
    assert set(state) == {*KEYS, "checksum"} and (state["epoch"], state["consumed_samples"]) == (0, 0)
    assert (state["content_sha256"], state["tokenizer_sha256"], state["tokens"]) == (None, None, 43)
    message = refused(stream(numbered(tmp_path / "other", [26, 18])), state_after(ten, 3), CacheError)
    assert "43" in message and "44" in message


def test_the_end_of_a_run_of_epochs_is_a_state_too(ten):
    states = [batch.state for batch in run_epochs(ten, G=4, world=2, epochs=1)]
    assert [state["consumed_samples"] for state in states] == [4, 8, 10]
    assert run_epochs(ten, G=4, epochs=1, state=states[-1]) == []
    assert firsts(run_epochs(ten, G=4, epochs=2, state=states[-1])) == firsts(run_epochs(ten, G=4, epochs=2))[10:]


def test_a_run_may_get_more_or_fewer_epochs_when_it_goes_on(ten):
    state = run_epochs(ten, 5, G=4)[-1].state  # 20 of 10 samples an epoch
    assert run_epochs(ten, G=4, epochs=2, state=state) == []
    assert len(firsts(run_epochs(ten, G=4, epochs=3, state=state))) == 10
    message = refused(stream(ten, epochs=1), state)
    assert "consumed_samples is 20, but this stream ends after 10" in message


def test_a_copy_of_the_cache_elsewhere_goes_on(cache, tmp_path):
    elsewhere = number_cache(tmp_path / "pretrain" / "the_same", val=50)
    state = state_after(cache, 3)
    one = stream(elsewhere)
    one.load_state_dict(state)
    assert one.state_dict() == state


def refused(one, state, error=ValueError, **flags):
    before = one.state_dict()
    with pytest.raises(error) as caught:
        one.load_state_dict(state, **flags)
    assert isinstance(caught.value, ValueError)
    assert one.state_dict() == before, "a refused state moved the stream"
    return str(caught.value)


def test_other_content_is_refused_by_name(cache, tmp_path):
    other = number_cache(tmp_path / "pretrain" / "others", start=20, val=50)
    state = state_after(cache, 3)
    message = refused(stream(other), state, CacheError)
    shas = [json.loads((folder.parent / "meta.json").read_text())["content_sha256"] for folder in (cache, other)]
    assert all(sha[:12] in message for sha in shas), message
    assert "allow_other_content" in message


@pytest.mark.parametrize("allow_other_content", [False, True])
def test_another_tokenizer_is_always_refused(cache, tmp_path, allow_other_content):
    other = number_cache(tmp_path / "pretrain" / "others", tokenizer="cd" * 32, val=50)
    state = state_after(cache, 3)
    message = refused(stream(other), state, CacheError, allow_other_content=allow_other_content)
    assert "abab" in message and "cdcd" in message and "tokenizer" in message


def test_another_split_is_refused(cache):
    message = refused(stream(cache.parent / "val"), state_after(cache, 1))
    assert "train" in message and "val" in message


@pytest.mark.parametrize("allow_other_content", [False, True])
def test_a_state_without_one_of_its_keys_is_refused(cache, allow_other_content):
    state = state_after(cache, 3)
    for key in KEYS:
        part = {name: value for name, value in state.items() if name != key}
        assert key in refused(stream(cache), part, allow_other_content=allow_other_content)


WRONG = {
    "stream": [None, 0, 2, "1", 1.0, True, [1], -1],
    "seed": [None, "0", 0.0, False, [0], float("nan")],
    "epoch": [None, "0", 0.0, True, -1, [0], float("inf"), 2**64, 10**40],
    "consumed_samples": [None, "12", 12.0, 12.5, True, -1, -(2**63), [12], {}, float("nan"), 2**63, 2**64, 10**40],
    "T": [None, "4", 4.0, True, 0, -4, [4], 2**64],
    "random_offset": [None, 0, "False", 0.0, []],
    "split": [None, 0, "", ["train"], b"train"],
    "tokens": [None, "100", 100.0, True, -100, [100], 2**64],
    "content_sha256": [0, "", "abc", ["x"], b"x", 2**300],
    "tokenizer_sha256": [0, "", "abc", ["x"], b"x"],
}


@pytest.mark.parametrize("key", WRONG)
def test_a_value_of_the_wrong_kind_is_refused(cache, key):
    """True is not 1 and 12.0 is not 12; allow_other_content lets no wrong count in either."""
    state, one = state_after(cache, 3), stream(cache)
    for value in WRONG[key]:
        message = refused(one, {**state, key: value})
        assert key in message and len(message) < 1000
        if key in ("epoch", "consumed_samples", "tokens"):
            refused(one, {**state, key: value}, allow_other_content=True)


def test_a_state_that_denies_itself_is_refused(ten):
    message = refused(stream(ten), {**state_after(ten, 3), "epoch": 7})  # 12 samples of 10 an epoch are in epoch 1
    assert re.search(r"\b7\b", message) and re.search(r"\b1\b", message)
    # As by a torch that draws other numbers from the same seed: nobody would see that the order is another.
    assert "key_check is 'ffffffff'" in refused(stream(ten), {**state_after(ten, 2), "key_check": "ffffffff"})
    stream(ten).load_state_dict({**state_after(ten, 3), "step": 3, "note": object()})  # keys that others add


def test_an_edited_state_is_refused_unless_its_checksum_is_removed(cache, tmp_path):
    """32 and 33 samples are both in epoch 1 of 24: nothing but the checksum tells that somebody changed one of them."""
    state = state_after(cache, 8)
    edited = {**state, "consumed_samples": 33}
    assert "checksum" in refused(stream(cache), edited) and "edited" in refused(stream(cache), edited)
    for checksum in (None, "", "0" * 8, 0, ["x"]):
        refused(stream(cache), {**state, "checksum": checksum})
    del edited["checksum"]  # as earlier releases wrote it, or to skip what spoils a run
    one = stream(cache)
    one.load_state_dict(edited)
    assert one.state_dict()["consumed_samples"] == 33
    # The checksum is of the content that the state is of, where that is let be another.
    other = number_cache(tmp_path / "pretrain" / "others", start=20, val=50)
    stream(other).load_state_dict(state, allow_other_content=True)
    refused(stream(other), {**state, "content_sha256": "0" * 64}, allow_other_content=True)


@settings(derandomize=True, max_examples=60)
@given(
    state=st.dictionaries(
        st.sampled_from(sorted(KEYS)),
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers()),
    )
)
def test_garbage_is_a_value_error_and_nothing_else(cache, state):
    one = stream(cache)
    refused(one, {**one.state_dict(), **state, "consumed_samples": -1})
    refused(one, {**state, "stream": 1.5})


def test_the_last_sample_that_a_count_can_hold_is_no_overflow(ten):
    """Far beyond any run, 2^62 samples are still a position; or they are refused, but never an OverflowError."""
    one = stream(ten)
    state = {key: value for key, value in one.state_dict().items() if key != "checksum"}
    try:
        one.load_state_dict({**state, "consumed_samples": 2**62, "epoch": 2**62 // 10})
    except ValueError:
        return
    (batch,) = islice(one, 1)
    assert batch.state["consumed_samples"] == 2**62 + 4 and set(batch.x[:, 0].tolist()) <= set(
        firsts(run_epochs(ten, 5))
    )
