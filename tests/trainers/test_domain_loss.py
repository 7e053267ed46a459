"""The example of losses by source and by document: its sums, token by token, and what it prints."""

import importlib

import pytest
import torch
from support import ROOT
from support.mixed_caches import build_three, open_mixture

from niels_gpt.sampling import Batch


@pytest.fixture(scope="module")
def example():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "examples")
        yield importlib.import_module("domain_loss")


@pytest.fixture(scope="module")
def caches(tmp_path_factory):
    return build_three(tmp_path_factory.mktemp("caches"))


def test_sums_are_those_of_the_tokens(example, caches):
    stream = open_mixture(caches, ["chats", "packed"], [1, 2], G=6)
    for batch, _ in zip(stream, range(20), strict=False):
        losses = torch.rand(batch.x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        of_sources, of_documents = [[0.0, 0], [0.0, 0]], {}
        bounds = batch.cu_seqlens.tolist()
        for begin, end, document in zip(bounds, bounds[1:], batch.documents.tolist(), strict=False):
            for place in range(begin, end):
                row, column = divmod(place, batch.x.shape[1])
                if batch.y[row, column] != -100:
                    source = int(batch.source[row])
                    for sums in (of_sources[source], of_documents.setdefault((source, document), [0.0, 0])):
                        sums[0] += float(losses[row, column])
                        sums[1] += 1
        assert example.by_source(losses, batch, 2).T.flatten().tolist() == pytest.approx(
            [*of_sources[0], *of_sources[1]]
        )
        found = {}
        for key, total, count in example.by_document(losses, batch):
            before = found.get(key, (0.0, 0))
            found[key] = before[0] + total, before[1] + count
        found = {key: each for key, each in found.items() if each[1]}
        assert found.keys() == of_documents.keys()
        assert all(found[key] == pytest.approx(of_documents[key]) for key in found)


def test_targets_are_counted_exactly_where_losses_are_bfloat16(example):
    batch = Batch(torch.zeros(1, 301, dtype=torch.int64), torch.zeros(1, 301, dtype=torch.int64), {}, torch.tensor([1]))
    assert example.by_source(torch.ones(1, 301, dtype=torch.bfloat16), batch, 2).tolist() == [[0, 301], [0, 301]]


def test_example_prints_each_source(example, caches, capsys):
    folders = [str(caches / "pretrain" / "packed"), str(caches / "sft" / "chats")]
    example.main(folders, 40)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["step 20", "step 40", *folders]
    assert all(folder in line for folder in folders for line in lines[:2])
