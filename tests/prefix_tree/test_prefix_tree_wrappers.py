"""body_forward through the wrappers that spread a model over ranks, and through adapters."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers", reason="models to test with need the extra eagle3")
if importlib.util.find_spec("peft") is None:
    pytest.skip("adapters to test with need peft", allow_module_level=True)
if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

from support import ranks
from support.causal_models import FOREST, tiny_model
from support.errors import refused
from torch import nn

from niels_gpt.prefix_tree.attention import AttentionRouteError, guard, model_inputs
from niels_gpt.prefix_tree.heads import body_forward

FOLDED_RIGHT = [name for name in ranks.CASES if not {"past", "half", "logits_head"} & set(name.split(", "))]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """The outcome of each case on each rank; all cases share two processes, whose start takes most of the time."""
    folder = tmp_path_factory.mktemp("ranks")
    paths = os.pathsep.join([str(Path(ranks.__file__).parents[1]), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, ranks.__file__, str(folder)], env=environment, check=True, timeout=120)
    return [json.loads(Path(folder, f"outcomes-{rank}.json").read_text()) for rank in range(ranks.WORLD)]


@pytest.mark.slow
@pytest.mark.parametrize("name", FOLDED_RIGHT)
def test_gradients_over_ranks_are_those_of_one_process_with_all_samples(outcomes, name):
    assert all(found[name] < 1e-6 for found in outcomes), [found[name] for found in outcomes]


@pytest.mark.slow
def test_half_precision_of_a_policy_reaches_the_head(outcomes):
    assert all(found["fsdp, half"] < 0.05 for found in outcomes)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp, past", "fsdp, past"])
def test_a_call_past_the_wrapper_reduces_nothing_and_the_guard_refuses_it(outcomes, name):
    for found in outcomes:
        assert found[name] > 0.1  # no error, and wrong
        assert "LlamaModel was called, and not" in found[f"{name}, guarded"]
        assert "body_forward(model, forest)" in found[f"{name}, guarded"]


@pytest.mark.slow
def test_a_head_that_gathers_weights_for_each_chunk_is_refused(outcomes):
    assert all("fully_shard was applied to the output embeddings" in found["fsdp, logits_head"] for found in outcomes)


def head_rows(model):
    """Return a list that gets the number of rows of each call of a model's head."""
    seen = []
    model.get_output_embeddings().register_forward_hook(lambda module, args, out: seen.append(out[..., 0].numel()))
    return seen


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "cohere", "gpt2"])
def test_the_head_runs_on_one_row_and_gives_the_logits_of_the_model(model_type):
    model = tiny_model(model_type, "eager")
    wanted = model(**model_inputs(FOREST, model)).logits[0]
    rows = head_rows(model)
    hidden, head = body_forward(model, FOREST, output_hidden_states=True)
    assert hidden.shape == (len(FOREST.input_ids), 32) and hidden.requires_grad
    assert rows[0] == 1 and max(rows) == 1
    assert float((head(hidden) - wanted).detach().abs().max()) < 1e-5


@pytest.mark.parametrize("backend", ["prefix_tree", "dense"])
def test_a_model_without_logits_to_keep_computes_the_logits_of_one_row_too(backend):
    model = tiny_model("llama")
    of_all = type(model)

    class Older(of_all):
        def forward(self, input_ids, attention_mask=None, position_ids=None, **more):
            assert "logits_to_keep" not in more
            return of_all.forward(self, input_ids, attention_mask, position_ids, **more)

    wanted = model(**model_inputs(FOREST, model, backend=backend)).logits[0]
    model.__class__ = Older
    rows = head_rows(model)
    hidden, head = body_forward(model, FOREST, backend=backend)
    assert max(rows) == 1
    assert float((head(hidden) - wanted).detach().abs().max()) < 1e-6
    with refused("E802", "(tuple)", "body_forward", kind=AttentionRouteError):
        body_forward(model, FOREST, backend=backend, return_dict=False)
    assert not model.lm_head._forward_pre_hooks and not model.model._forward_hooks


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own imports
def test_hooks_of_the_user_run_in_wrappers_too_and_graphs_are_of_this_forward():
    model = tiny_model("llama")
    wanted = model(**model_inputs(FOREST, model, backend="dense")).logits[0]
    ran = []
    for module in (model, model.model, model.lm_head):
        module.register_forward_hook(lambda module, args, output: ran.append(module))
    compiled = torch.compile(model, backend="eager")
    compiled(**model_inputs(FOREST, compiled, backend="dense"))  # a graph of another call is there
    for wrapped in (model, nn.DataParallel(model), compiled, compiled):
        ran.clear()
        with guard(FOREST, wrapped):
            hidden, head = body_forward(wrapped, FOREST, backend="dense")
        assert {*ran} == {model, model.model, model.lm_head}
        # DataParallel has moved the model to a GPU where there is one, whose sums are other ones.
        found, limit = head(hidden).detach(), 1e-5 if hidden.is_cuda else 1e-6
        assert float((found.cpu() - wanted.detach()).abs().max()) < limit


def test_hidden_states_that_do_not_come_out_are_refused():
    model = tiny_model("llama")
    of_all = type(model)

    class Silent(of_all):
        def forward(self, input_ids, attention_mask=None, position_ids=None, **more):
            return SimpleNamespace(logits=of_all.forward(self, input_ids, attention_mask, position_ids, **more).logits)

    model.__class__ = Silent
    with refused("E802", "Silent", "(SimpleNamespace)", kind=AttentionRouteError):
        body_forward(model, FOREST)
    assert not model.model._forward_hooks
