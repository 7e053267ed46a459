"""A padded batch, folded and put back, is the batch that was not folded."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.documents import lines_to_copy
from support.float64_models import float64_llama
from support.padded_batches import PROMPT, RESPONSE, gradient, unfolded, verl_batch
from support.prefix_trees import prefixes

from niels_gpt.prefix_tree.edges import at_predictions, edge_logprobs, sample_logprobs
from niels_gpt.prefix_tree.forest import PrefixForest
from niels_gpt.prefix_tree.heads import body_forward
from niels_gpt.prefix_tree.padded import PaddedRollouts
from niels_gpt.storage.errors import TreeError, TreeTypeError

pytestmark = pytest.mark.usefixtures("one_thread")
MASKS = ("input_ids", "attention_mask", "response_mask")


def masks_of(batch):
    return [batch[name] for name in MASKS]


def scores(model, batch, temperature=1.0):
    """Return log-probs and entropies [B, R], and the hidden states that predict [B, R, D], of a folded batch."""
    hidden, head = body_forward(model, batch.forest, backend="prefix_tree")
    both = edge_logprobs(hidden, batch.edges, head, temperature=temperature, entropies=True)
    found = [*(sample_logprobs(each, batch.edges) for each in both), at_predictions(hidden, batch.edges)]
    return [batch.unfold(each) for each in found]


@st.composite
def batches(draw):
    """Return ids, the two masks, uid: rows of three ids, padded anywhere, targets anywhere but at the first token."""
    rows, columns = draw(st.integers(1, 8)), draw(st.integers(1, 9))

    def drawn(values, *shape):
        count = rows * columns if shape else rows
        return torch.tensor(draw(st.lists(values, min_size=count, max_size=count))).view(rows, *shape)

    ids, wanted = drawn(st.integers(0, 2), columns), drawn(st.booleans(), columns)
    first, column = drawn(st.integers(0, columns - 1)), torch.arange(columns)
    end = torch.tensor([draw(st.integers(begin + 1, columns)) for begin in first.tolist()])
    seen = (column >= first[:, None]) & (column < end[:, None])
    targets = (wanted & seen & (column > first[:, None]))[:, -draw(st.integers(1, columns)) :]
    uid = draw(st.none() | st.lists(st.integers(0, 2), min_size=rows, max_size=rows))
    return ids, seen, targets, uid


@given(batches())
def test_rows_columns_and_groups_are_those_of_the_batch(drawn):
    ids, seen, targets, uid = drawn
    batch = PaddedRollouts.from_padded(ids, seen, targets, uid=uid)
    samples = [row[kept].tolist() for row, kept in zip(ids, seen, strict=True)]
    assert batch.forest.samples() == samples
    groups = [0] * len(ids) if uid is None else uid
    distinct = [prefixes([s for s, g in zip(samples, groups, strict=True) if g == group]) for group in set(groups)]
    assert batch.forest.num_tokens == sum(map(len, distinct))
    if uid is None:
        assert torch.equal(batch.forest.input_ids, PrefixForest.from_sequences(samples).input_ids)
    length, width = ids.shape[1], targets.shape[1]
    for values in (torch.rand(ids.shape), torch.rand(targets.shape)):
        folded = batch.fold(values)
        assert torch.equal(folded, values[:, -width:][targets])
        assert torch.equal(batch.unfold(folded, fill=-1), values[:, -width:].masked_fill(~targets, -1))
        whole = batch.unfold(folded, whole=True)
        assert whole.shape == ids.shape and torch.equal(whole[:, length - width :], batch.unfold(folded))
        assert not whole[:, : length - width].any()
    assert torch.equal(batch.fold(torch.arange(len(ids))), targets.nonzero()[:, 0])
    # The tokens that the edges predict, put back, are the batch's.
    assert torch.equal(batch.unfold(sample_logprobs(batch.edges.target, batch.edges)), ids[:, -width:] * targets)
    assert batch.edges.unpredictable == 0


@pytest.mark.parametrize("uid", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_log_probs_entropies_values_and_gradients_are_those_of_the_padded_batch(seed, uid):
    model, data = float64_llama(), verl_batch(seed)
    batch = PaddedRollouts.from_padded(*masks_of(data), uid=data["uid"] if uid else None)
    assert batch.forest.num_tokens < 0.7 * int(data["attention_mask"].sum())
    wanted, found = unfolded(model, data, 0.9), scores(model, batch, 0.9)
    mask = data["response_mask"].double()
    for theirs, mine in zip(wanted, found, strict=True):
        theirs = theirs * (mask if theirs.ndim == 2 else mask[..., None])
        assert mine.shape == theirs.shape and float((mine - theirs).detach().abs().max()) < 1e-12
        weights = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(seed), dtype=theirs.dtype)
        one, other = gradient((theirs * weights).sum(), model), gradient((mine * weights).sum(), model)
        assert float((one - other).norm() / one.norm()) < 1e-12


def test_float32_agrees_to_rounding_and_columns_reach_their_tokens():
    data = verl_batch(3, dtype=torch.float32)
    model = float64_llama().float()
    batch = PaddedRollouts.from_padded(
        *masks_of(data), columns={"old": data["old_log_probs"], "advantages": data["advantages"][:, 0]}
    )
    assert {name: each.dtype for name, each in batch.columns.items()} == dict.fromkeys(batch.columns, torch.float32)
    mask = data["response_mask"].bool()
    assert torch.equal(batch.columns["old"], data["old_log_probs"][mask])
    assert torch.equal(batch.columns["advantages"], data["advantages"][mask])
    logp, entropy, _ = scores(model, batch)
    wanted = unfolded(model, data)
    torch.testing.assert_close(logp, wanted[0] * mask, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, wanted[1] * mask, rtol=1e-5, atol=1e-5)


def test_a_batch_of_nemo_rl_is_padded_on_the_right_and_gives_lengths():
    data = verl_batch(1)
    lengths = data["attention_mask"].sum(1)
    order = (1 - data["attention_mask"]).argsort(dim=1, stable=True)  # tokens first, padding behind them
    whole = torch.cat([torch.zeros(12, PROMPT, dtype=torch.long), data["response_mask"]], 1)
    ids, token_mask = data["input_ids"].gather(1, order), whole.gather(1, order)
    logprobs = torch.cat([torch.zeros(12, PROMPT), data["old_log_probs"]], 1).gather(1, order)
    batch = PaddedRollouts.from_padded(ids, lengths, token_mask)
    other = PaddedRollouts.from_padded(*masks_of(data))
    assert torch.equal(batch.forest.input_ids, other.forest.input_ids)
    assert torch.equal(batch.fold(logprobs), other.fold(data["old_log_probs"]))
    assert torch.equal(batch.unfold(batch.fold(logprobs)), logprobs * token_mask)
    assert bool((batch.forest.completion_starts == -1).all()), "where responses begin is not known"
    assert torch.equal(other.forest.completion_starts, data["attention_mask"][:, :PROMPT].sum(1))


def test_groups_keep_the_order_of_rows_and_share_nothing():
    data = verl_batch(2, groups=2)
    mixed = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
    data = {name: each[mixed.numpy()] if isinstance(each, np.ndarray) else each[mixed] for name, each in data.items()}
    data["input_ids"][1::2] = data["input_ids"][::2]  # the groups are equal in content
    data["attention_mask"][1::2], data["response_mask"][1::2] = data["attention_mask"][::2], data["response_mask"][::2]
    shared = PrefixForest.from_padded(*masks_of(data))
    for uid in (data["uid"], data["uid"].tolist(), torch.tensor([0, 1] * 4), list(torch.tensor([0, 1] * 4))):
        apart = PrefixForest.from_padded(*masks_of(data), uid=uid)
        assert apart.samples() == shared.samples() and apart.num_tokens == 2 * shared.num_tokens


def test_a_single_row_and_rows_without_a_target_fold():
    one = PaddedRollouts.from_padded(torch.tensor([[0, 5, 6]]), torch.tensor([[0, 1, 1]]), torch.tensor([[1]]))
    assert one.forest.samples() == [[5, 6]] and one.unfold(torch.tensor([2.0])).tolist() == [[2.0]]
    data = verl_batch()
    nothing = PaddedRollouts.from_padded(*masks_of(data)[:2], torch.zeros(12, RESPONSE))
    empty = torch.zeros(0, requires_grad=True)
    assert nothing.edges.num_edges == 0 and nothing.fold(data["advantages"]).shape == (0,)
    nothing.unfold(empty).sum().backward()
    assert empty.grad is not None and nothing.unfold(empty).shape == (12, RESPONSE)


def test_a_batch_that_was_made_in_inference_mode_trains():
    data, model = verl_batch(), float64_llama()
    with torch.inference_mode():
        batch = PaddedRollouts.from_padded(*masks_of(data), columns={"advantages": data["advantages"]})
    assert gradient(scores(model, batch)[0].sum(), model).any()


def test_the_code_of_the_page_runs():
    code = lines_to_copy("PaddedRollouts")
    data, model = verl_batch(), float64_llama()
    names = {"data": data, "model": model, "total": data["response_mask"].sum()}
    exec(code, names)
    assert gradient(names["loss"], model).any() and names["metrics"]["tokens"] == names["total"]
    wanted = unfolded(model, data)[0] * data["response_mask"]
    torch.testing.assert_close(names["log_probs"], wanted, rtol=1e-12, atol=1e-12)


def test_arrays_and_lists_of_any_layout_and_type_are_taken():
    data = verl_batch()
    wanted = PaddedRollouts.from_padded(*masks_of(data), columns={"old": data["old_log_probs"]})
    reversed_twice = [np.flip(np.ascontiguousarray(np.flip(data[name].numpy(), 1)), 1) for name in MASKS]
    old = np.asfortranarray(data["old_log_probs"].numpy())
    for array in (*reversed_twice, old):
        array.setflags(write=False)
    lists = [data[name].tolist() for name in MASKS]
    halves = [data["input_ids"].int(), data["attention_mask"].bfloat16(), data["response_mask"].t().bfloat16().t()]
    for masks, column in (
        (reversed_twice, old),
        (lists, old.tolist()),
        (halves, data["old_log_probs"].t().clone().t()),
    ):
        found = PaddedRollouts.from_padded(*masks, columns={"old": column})
        assert torch.equal(found.forest.input_ids, wanted.forest.input_ids)
        assert torch.equal(found.columns["old"], wanted.columns["old"]) and found.shape == wanted.shape
        assert torch.equal(found.places, wanted.places)


IDS = torch.tensor([[0, 5, 6, 7], [4, 5, 6, 0]])
SEEN = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]])
TARGETS = torch.tensor([[1, 1], [1, 0]])


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"input_ids": IDS[0]}, TreeError),
        ({"input_ids": IDS[:0]}, TreeError),
        ({"input_ids": IDS.float()}, TreeTypeError),
        ({"input_ids": IDS - 9}, TreeError),
        ({"attention_mask": SEEN[:1]}, TreeError),
        ({"attention_mask": SEEN[:, 1:]}, TreeError),
        ({"attention_mask": SEEN * 2}, TreeError),
        ({"attention_mask": torch.tensor([[0, 1, 0, 1], [1, 1, 1, 0]])}, TreeError),
        ({"attention_mask": torch.tensor([[0, 0, 0, 0], [1, 1, 1, 0]])}, TreeError),
        ({"attention_mask": torch.tensor([3, 3, 3])}, TreeError),
        ({"attention_mask": torch.tensor([0, 3])}, TreeError),
        ({"attention_mask": torch.tensor([4, 5])}, TreeError),
        ({"response_mask": torch.ones(2, 5)}, TreeError),
        ({"response_mask": torch.ones(2, 0)}, TreeError),
        ({"response_mask": TARGETS[0]}, TreeError),
        ({"response_mask": TARGETS - 1}, TreeError),
        ({"response_mask": torch.tensor([[1, 1], [1, 1]])}, TreeError),  # padding
        ({"response_mask": torch.tensor([[0, 1, 0, 0], [0, 0, 0, 0]])}, TreeError),  # the first token of its row
        ({"input_ids": [[1, 2], [3]]}, TreeTypeError),
        ({"attention_mask": [[1, 1], [1]]}, TreeTypeError),
        ({"response_mask": None}, TreeError),
        ({"uid": ["a"]}, TreeError),
        ({"uid": 5}, TreeTypeError),
        ({"uid": torch.tensor([[1], [2]])}, TreeTypeError),
        ({"columns": {"old": torch.zeros(2, 3)}}, TreeError),
        ({"columns": {"old": torch.zeros(3)}}, TreeError),
        ({"columns": {"old": None}}, TreeTypeError),
        ({"columns": {"old": [[1.0], [1.0, 2.0]]}}, TreeTypeError),
    ],
)
def test_what_does_not_fit_is_refused(changed, error):
    arguments = {"input_ids": IDS, "attention_mask": SEEN, "response_mask": TARGETS}
    batch = PaddedRollouts.from_padded(**arguments)
    with pytest.raises(TreeError):
        batch.unfold(torch.zeros(4))
    with pytest.raises(error) as raised:
        PaddedRollouts.from_padded(**{**arguments, **changed})
    assert raised.value.code == "E801"
