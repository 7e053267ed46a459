"""Tiny models for a loopback hub. Each test has its own id, because the libraries keep what they have downloaded."""

import itertools
import time
from types import SimpleNamespace

import pytest
from support import chat_tokenizers as kinds
from support.tiny_hub_models import write_model

IDS = (f"somebody/model-{number}" for number in itertools.count())


@pytest.fixture
def no_waiting(monkeypatch):
    """Skip the waits of the hub's client."""
    quick = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})
    for module in ("huggingface_hub.utils._http", "huggingface_hub.file_download"):
        monkeypatch.setattr(f"{module}.time", quick)


@pytest.fixture
def model_id():
    """An id that nothing is known of yet."""
    return next(IDS)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A Llama and its tokenizer, as save_pretrained writes them."""
    return write_model(tmp_path_factory.mktemp("first"), seed=1)


@pytest.fixture(scope="module")
def second(tmp_path_factory):
    """Another one: other weights, and another chat template."""
    return write_model(tmp_path_factory.mktemp("second"), seed=2, template=kinds.LLAMA_3)
