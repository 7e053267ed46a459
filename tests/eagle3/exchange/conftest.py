"""A small target, chats with its states, and both tools' folders of them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.exchange_files import HIDDEN, LAYERS, VOCAB, chats, in_bf16, write_specforge, write_speculators

pytest.importorskip("transformers", reason="running a target needs the extra eagle3")

Import = Callable[..., Any]


@pytest.fixture(scope="session")
def model():
    from support.exchange_files import small_model

    return small_model()


@pytest.fixture(scope="session")
def given(model):
    """Ten chats, with states of float32."""
    return chats(model)


@pytest.fixture(scope="session")
def folders(given, tmp_path_factory):
    """The folder of each tool, with states of bf16; nothing may change them."""
    folder, stored = tmp_path_factory.mktemp("foreign"), [in_bf16(chat) for chat in given]
    return {
        "specforge": write_specforge(folder / "specforge", stored),
        "speculators": write_speculators(folder / "speculators", stored),
    }


@pytest.fixture(scope="session")
def importing(model):
    """`import_cache` with the target. stated: layers, and where the last hidden state was taken."""
    from niels_gpt.eagle3.exchange.move import Target, import_cache
    from niels_gpt.eagle3.exchange.proof import Convention, capture_of
    from niels_gpt.eagle3.head import TargetHead

    target = Target("small", TargetHead.of_model(model), HIDDEN, VOCAB, [1, 2])
    capture = capture_of(model, LAYERS, torch.device("cpu"))

    def run(tool, source, out, **how):
        if "stated" in how:
            how["stated"] = Convention(*how["stated"])
        else:
            how["capture"] = capture
        return import_cache(tool, source, out, target, **{"samples": 4, "draft_vocab_size": 300, **how})

    return run
