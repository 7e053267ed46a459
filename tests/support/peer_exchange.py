"""speculators and specforge, each in a process of its own that reads, shifts and writes samples by the package's code.

As a module: `Tool(folder)` starts this file, or another one that serves its functions, as a script with the installed
package in `folder` on the path. As that script: requests come pickled on stdin, answers go pickled to stdout. Nothing
of niels_gpt is imported there.
"""

import pickle
import subprocess
import sys
from pathlib import Path

MAX_LEN, STEPS = 64, 3


class Tool:
    """One package, running. `tool.call(name, ...)` calls a function of the script there."""

    def __init__(self, folder, script=__file__):
        self._process = subprocess.Popen(
            [sys.executable, script, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def call(self, name, *args, **kwargs):
        """Return what a function returns. Raises: RuntimeError with what it raised."""
        assert self._process.stdin is not None and self._process.stdout is not None
        pickle.dump((name, args, kwargs), self._process.stdin)
        self._process.stdin.flush()
        is_good, answer = pickle.load(self._process.stdout)
        if not is_good:
            raise RuntimeError(answer)
        return answer

    def close(self):
        """End the process."""
        self._process.communicate()


def speculators_shift(kind):
    """Return the shift of samples for a kind of draft, as speculators/train/cli.py has it, or None."""
    from speculators.models.eagle3.data import shift_batch
    from speculators.models.mtp.data import shift_batch_mtp

    return {"eagle3": shift_batch, "peagle": shift_batch, "mtp": shift_batch_mtp}.get(kind)


def speculators_rows(folder, kind="eagle3"):
    """Return every row as speculators' dataset reads it and its trainer of a kind of draft shifts it."""
    from speculators.train.data import ArrowDataset

    dataset = ArrowDataset(MAX_LEN, folder, on_missing="raise")
    shift = speculators_shift(kind) or dict
    return [shift(dataset[index]) for index in range(len(dataset))]


def speculators_refusals(folder):
    """Return what speculators' own check of a row's file finds wrong, of all rows; and what it cannot open."""
    from datasets import load_from_disk
    from safetensors.torch import load_file
    from speculators.data_generation.offline import (
        check_hidden_states,
        find_corrupt_hidden_state_indices,
        get_existing_hidden_state_indices,
    )

    rows, states = load_from_disk(folder), Path(folder) / "hidden_states"
    indices = get_existing_hidden_state_indices(states)
    wrong = [*find_corrupt_hidden_state_indices(states, indices).values()]
    wrong += [f"files {indices}"] if indices != [*range(len(rows))] else []
    for index in indices:
        try:
            check_hidden_states(load_file(states / f"hs_{index}.safetensors"), rows[index]["input_ids"].tolist())
        except ValueError as error:
            wrong.append(str(error))
    return wrong


def speculators_fp8(states):
    """Return states as its fp8 backend stores them: values, as bytes, since pickle has no float8; and scales."""
    import torch
    from hs_connectors.fp8_utils import quantize_tensor_to_fp8

    values, scales = quantize_tensor_to_fp8(states)
    return values.view(torch.uint8), scales


def specforge_samples(kind, source):
    """Return samples for a kind of draft as SpecForge's normalizer gives them.

    source: a folder, for SpecForge's reader; or what its files hold, as a list of dicts.
    """
    from specforge.algorithms.common import dflash_family_data as family
    from specforge.algorithms.eagle3 import data as eagle3
    from specforge.runtime.data_plane.feature_store import LocalFeatureStore

    normalize, build = {
        "eagle3": (eagle3.normalize_offline_sample, eagle3.build_offline_reader),
        "dflash": (family.normalize_offline_sample, family.build_offline_reader),
        "dspark": (family.normalize_dspark_offline_sample, family.build_dspark_offline_reader),
    }[kind]
    if isinstance(source, str):
        named, store = () if kind == "eagle3" else (kind,), LocalFeatureStore()
        reader = build(*named, source, run_id="r", ttt_length=STEPS, max_len=MAX_LEN)
        reader.validate_files = True
        source = [store.get(each)[0] for each in reader]
    return [{name: each.clone() for name, each in normalize(held, MAX_LEN).items()} for held in source]


def specforge_rows(folder):
    """Return every file as SpecForge's reader and normalizer give it and its target head shifts it."""
    from specforge.modeling.target.target_head import TargetHead

    rows = []
    for sample in specforge_samples("eagle3", folder):
        shifted = TargetHead.preprocess(None, sample["input_ids"], sample["target"], sample["loss_mask"])
        ids, target, mask = (each[0].clone() for each in shifted)
        rows.append({"input_ids": ids, "target": target, "loss_mask": mask, "aux": sample["hidden_state"][0].clone()})
    return rows


def specforge_write(folder, samples):
    """Write samples by SpecForge's feature store, the one place of the package that writes such files."""
    from specforge.runtime.data_plane.feature_store import LocalFeatureStore

    store = LocalFeatureStore(dump_dir=folder)
    for index, sample in enumerate(samples):
        store.put(sample, sample_id=f"data_{index:03d}", metadata={})


def speculators_draft(folder, batch, steps):
    """Return the logits of each step of test-time training, [B, S, D], and the config, of the class that it resolves.

    batch: input_ids [B, S] and aux_hidden_states [B, S, K * H]. Its attention takes multiples of 128 slots.
    """
    import torch
    from speculators.model import SpeculatorModel
    from torch.nn.functional import pad

    model, rows = SpeculatorModel.from_pretrained(folder).eval(), []
    for ids, aux in zip(batch["input_ids"], batch["aux_hidden_states"], strict=True):
        found, more = [], -len(ids) % 128
        hook = model.lm_head.register_forward_hook(lambda _module, _inputs, out, to=found: to.append(out[0]))
        documents = pad(torch.zeros_like(ids), (0, more), value=-1)
        with torch.no_grad():
            model(pad(aux, (0, 0, 0, more))[None], pad(ids, (0, more))[None], documents[None], ttt_steps=steps)
        hook.remove()
        rows.append(torch.stack(found)[:, : len(ids)])
    return torch.stack(rows, dim=1), {"class": type(model).__name__, **model.config.to_dict()}


def speculators_saves(folder, again):
    """Load a draft and save it again."""
    from speculators.model import SpeculatorModel

    SpeculatorModel.from_pretrained(folder).save_pretrained(again)


def specforge_draft(folder, batch, steps):
    """Return the same of SpecForge's class, made and filled as its exporter does; padding follows all tokens.

    Its `from_pretrained` is for transformers 5.8.1: with 5.23.0 the tables of its rotary embedding are uninitialized.
    """
    import torch
    from safetensors.torch import load_file

    torch._dynamo.config.disable = True  # it compiles at import, which would take a minute
    from specforge.modeling.auto import AutoDraftModel, AutoDraftModelConfig

    model = AutoDraftModel.from_config(AutoDraftModelConfig.from_file(f"{folder}/config.json")).eval()
    model.load_state_dict(load_file(f"{folder}/model.safetensors"))  # strict: these names, none less, none more
    ids, found, earlier = batch["input_ids"], [], [[], []]
    with torch.no_grad():
        hidden = model.project_hidden_states(batch["aux_hidden_states"])
        mask = model.prepare_decoder_attention_mask(torch.ones_like(ids).bool(), hidden, *ids.shape, 0)
        for _ in range(steps):
            places = torch.arange(ids.shape[1])[None]
            hidden = model.backbone(model.embed_input_ids(ids), hidden, earlier, mask, places)
            found.append(model.compute_logits(hidden))
            ids = torch.nn.functional.pad(ids[:, 1:], (0, 1))
    return torch.stack(found), {"class": type(model).__name__, **model.config.to_dict()}


def serve(functions):
    """Answer requests until stdin ends; whatever libraries print goes to stderr."""
    import os

    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            name, args, kwargs = pickle.load(sys.stdin.buffer)
        except EOFError:
            os._exit(0)  # at once: taking torch down in order takes seconds
        try:
            answer = (True, functions[name](*args, **kwargs))
        except Exception as error:
            answer = (False, f"{type(error).__name__}: {error}")
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    serve(globals())
