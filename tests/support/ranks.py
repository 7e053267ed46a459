"""Two gloo processes that make steps by each way of spreading a model over ranks, for tests of their gradients."""

import copy
import json
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from niels_gpt.prefix_tree.architectures import unwrapped
from niels_gpt.prefix_tree.attention import AttentionRouteError, guard, model_inputs
from niels_gpt.prefix_tree.edges import LossEdges, folded_cross_entropy
from niels_gpt.prefix_tree.forest import PrefixForest
from niels_gpt.prefix_tree.heads import Body, body_forward, logits_head
from niels_gpt.prefix_tree.segments import use_segments
from support.causal_models import SAMPLES, tiny_model

WORLD = 2
PARTS = [SAMPLES[:3], SAMPLES[3:]]
"""The samples of each rank: different numbers of samples, loss rows and chunks."""
TOTAL = sum(len(sample) - 1 for sample in SAMPLES)

Step = Callable[[Any, PrefixForest], Body]


def unfolded(model):
    """Return the gradients of the mean over all tokens of all samples, run one by one in one process."""
    for sample in SAMPLES:
        ids = torch.tensor([sample])
        logp = model(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        (-logp.gather(1, ids[0, 1:, None]).sum() / TOTAL).backward()
    return gradients(model)


def gradients(model):
    """Return the gradients by the names that parameters have in a model without DistributedDataParallel."""
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    whole = {name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in found.items()}
    return {name.replace("_orig_mod.", "").removeprefix("module."): each for name, each in whole.items()}


def largest_error(found, wanted):
    """Return the largest relative error of a parameter's gradient."""
    assert set(found) == set(wanted)
    return max(float((found[name] - each).norm() / each.norm()) for name, each in wanted.items())


by_segments = partial(body_forward, backend="prefix_tree")  # these rows are so short that "auto" takes a mask


def past_the_wrapper(model, forest):
    """Call the body inside a wrapper: gradients are those of the rank alone."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return Body(inner.model(**model_inputs(forest, model, backend="prefix_tree")).last_hidden_state[0], inner.lm_head)


def guarded(model, forest, step=by_segments):
    """Make a step under the guard."""
    with guard(forest, model):
        return step(model, forest)


def evaluated_first(model, forest):
    """Call the body inside where nothing is to be reduced, which the guard allows, and then make a step."""
    with guard(forest, model):
        with torch.no_grad():
            past_the_wrapper(model, forest)
        with model.no_sync():
            past_the_wrapper(model, forest)
        return by_segments(model, forest)


def adapted(model):
    """Return a model with adapters, one of them of the head; their two factors are not zero."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    targets = ["q_proj", "v_proj", "down_proj", "lm_head"]
    return get_peft_model(model, LoraConfig(r=2, target_modules=targets, init_lora_weights=False))


def _sharded(model, *, layers=True, head=False, **options):
    options["mesh"] = init_device_mesh("cpu", (WORLD,))
    for part in [*(model.model.layers if layers else []), *([model.lm_head] if head else [])]:
        fully_shard(part, **options)
    return fully_shard(model, **options)


def _evaluated(model):
    """Leave the weights of the root gathered, as an evaluation does: then a call of its body raises no error."""
    with torch.no_grad():
        model(input_ids=torch.tensor([[1, 2]]))
    return model


HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
DDP = DistributedDataParallel
CASES = {
    "ddp": (DDP, guarded),
    "ddp, unused": (partial(DDP, find_unused_parameters=True), by_segments),
    "ddp, static": (partial(DDP, static_graph=True), by_segments),
    "ddp, adapters": (lambda model: DDP(adapted(model)), guarded),
    "ddp, evaluated": (DDP, evaluated_first),
    "ddp, past": (DDP, past_the_wrapper),
    "ddp, past, guarded": (DDP, partial(guarded, step=past_the_wrapper)),
    "fsdp": (_sharded, guarded),
    "fsdp, root only": (partial(_sharded, layers=False), by_segments),
    "fsdp, head": (partial(_sharded, head=True), guarded),
    "fsdp, resharded": (partial(_sharded, reshard_after_forward=True), by_segments),
    "fsdp, half": (partial(_sharded, head=True, mp_policy=HALF), by_segments),
    "fsdp, adapters": (lambda model: fully_shard(adapted(model), mesh=init_device_mesh("cpu", (WORLD,))), guarded),
    "fsdp, past": (lambda model: _evaluated(_sharded(model, layers=False)), past_the_wrapper),
    "fsdp, past, guarded": (
        lambda model: _evaluated(_sharded(model, layers=False)),
        partial(guarded, step=past_the_wrapper),
    ),
    "fsdp, logits_head": (
        partial(_sharded, head=True),
        lambda model, forest: Body(torch.zeros(0), logits_head(model)),
    ),
}


def _outcome(model, step, rank, wanted):
    """Return the error of the gradients after the second of two equal steps, or why a step was refused."""
    forest = PrefixForest.from_sequences(PARTS[rank])
    edges = LossEdges.from_forest(forest)
    for _ in range(2):
        model.zero_grad()
        try:
            hidden, head = step(model, forest)
        except AttentionRouteError as refused:
            return str(refused)
        # Gradients are averaged over ranks, and this is the whole sum after it.
        folded_cross_entropy(hidden, edges, head, normalizer=TOTAL / WORLD, chunk=4).backward()
    implementation = unwrapped(model).config._attn_implementation
    assert implementation == "prefix_tree", use_segments(model)
    return largest_error(gradients(model), wanted)


def run(rank, folder):
    """Run the cases in one of WORLD processes, and write the outcomes of each to outcomes-RANK.json."""
    warnings.simplefilter("ignore")
    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", store, timedelta(seconds=60), rank=rank, world_size=WORLD)
    model = tiny_model("llama", tie_word_embeddings=False)
    plain, with_adapters = unfolded(copy.deepcopy(model)), unfolded(adapted(copy.deepcopy(model)))
    outcomes = {}
    for name, (spread, step) in CASES.items():
        wanted = with_adapters if "adapters" in name else plain
        outcomes[name] = _outcome(spread(copy.deepcopy(model)), step, rank, wanted)
    Path(folder, f"outcomes-{rank}.json").write_text(json.dumps(outcomes))
    distributed.destroy_process_group()


if __name__ == "__main__":  # started as a process of its own, whose imports the ranks share
    torch.set_num_threads(1)
    multiprocessing.start_processes(run, (sys.argv[1],), nprocs=WORLD, start_method="fork")
