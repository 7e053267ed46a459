"""A batch's logits are worked on in parts: no step makes another tensor of their size, which may be gigabytes."""

import pytest
import torch
from support.errors import refused
from support.target_outputs import check_finite, in_parts_of, stored_fields
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from niels_gpt.eagle3.forward import draft_distribution
from niels_gpt.eagle3.target import Eagle3TargetBatch, HFEagle3TargetModel

ROWS, WIDTH, VOCAB, HIDDEN = 4, 64, 1000, 4
LENGTHS = [64, 40, 21, 1]
PART = 4 * VOCAB
"""Four slots, of the 256 that the batch has."""


class NewTensors(TorchDispatchMode):
    """Notes the bytes of each tensor that is made meanwhile and is larger than a part in float32."""

    def __init__(self):
        super().__init__()
        self.large = []
        self.seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        trees = ((args, kwargs), made)
        used, new = ([leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)] for tree in trees)
        given = {leaf.untyped_storage().data_ptr() for leaf in used}
        for tensor in new:
            storage = tensor.untyped_storage()
            self.seen += 1
            if storage.data_ptr() not in given and storage.nbytes() > 4 * PART:
                self.large.append(storage.nbytes())
        return made


@pytest.fixture(autouse=True)
def small_parts():
    with in_parts_of(PART):
        yield


def batch_of():
    chance = torch.Generator().manual_seed(0)
    return Eagle3TargetBatch(
        aux_hidden_states=torch.randn(ROWS, WIDTH, 3 * HIDDEN, generator=chance),
        logits=torch.randn(ROWS, WIDTH, VOCAB, generator=chance),
        input_ids=torch.randint(VOCAB, (ROWS, WIDTH), generator=chance),
        attention_mask=(torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]).long(),
        loss_mask=torch.randint(2, (ROWS, WIDTH), generator=chance),
    )


@pytest.mark.parametrize("draft", [VOCAB, 900])
def test_only_a_dense_field_or_distribution_itself_is_large(draft):
    batch, ids, known = batch_of(), torch.arange(draft), torch.arange(VOCAB) < draft
    for topk in (8, 0):
        with NewTensors() as made:
            fields, _ = stored_fields(batch, LENGTHS, ids, known, topk=topk, dtype=torch.bfloat16)
        assert made.seen > 100 and made.large == ([] if topk else [fields["target_probs"].nbytes])
    assert made.large == [ROWS * WIDTH * draft * 2]
    with NewTensors() as made:
        probs, _ = draft_distribution(batch.logits, batch.loss_mask, ids, known)
    assert made.large == [probs.nbytes]


def test_a_number_that_is_not_finite_is_looked_for_in_parts():
    batch = batch_of()
    batch.logits[1, 30:, 5] = torch.nan
    found = ("sample 'b', slot 30, logits: nan", "9 such places in 1 of 4 samples")
    with NewTensors() as made, refused("E708", *found, kind=RuntimeError):
        check_finite(batch, list("abcd"), LENGTHS, [1, 2, 3])
    assert made.seen > 100 and made.large == []


class Given(nn.Module):
    """A model that returns logits which were made before."""

    def __init__(self, logits):
        super().__init__()
        self.config = type("Config", (), {"num_hidden_layers": 3})()
        self.layers = nn.ModuleList(nn.Identity() for _ in range(3))
        self.logits = logits

    def forward(self, input_ids, attention_mask):
        for layer in self.layers:
            layer(input_ids[..., None].float())
        return self.logits


@pytest.mark.parametrize("rows", [1, ROWS])
def test_logits_are_shifted_where_they_are(rows):
    logits = batch_of().logits[:rows].clone()
    expected = torch.cat((logits[:, 1:], torch.zeros(rows, 1, VOCAB)), dim=1)
    ids = torch.ones(rows, WIDTH, dtype=torch.int64)
    model = HFEagle3TargetModel(Given(logits), [0, 1, 2])
    with NewTensors() as made:
        batch = model.generate_batch(ids, ids, ids)
    assert made.large == [] and batch.logits is logits
    assert torch.equal(batch.logits, expected)
