"""The reference implementation of EAGLE-3 caches, nemo-automodel: a process of its own that calls what it is asked to.

As a module: `Peer(folder)` starts this file as a script with the unpacked wheel in `folder` on the path. As that
script: requests come pickled on stdin, answers go pickled to stdout. Nothing of niels_gpt is imported there.

The wheel's package `_transformers` needs torchao and a dozen other libraries; the producer takes two loaders from it
and nothing else. So a module with these two names stands in its place; every other line that runs is the peer's own.
"""

import pickle
import subprocess
import sys
from dataclasses import asdict, is_dataclass

CACHE = "components.datasets.llm.eagle3_cache"
VOCAB = "components.datasets.llm.eagle3"
CORE = "components.speculative.eagle.core"
TARGET = "components.speculative.eagle.target"
PRECOMPUTE = "components.speculative.precompute_eagle3"


class PeerError(Exception):
    """What the peer raised: the names of the classes of the exception, first its own, and its text."""

    def __init__(self, classes, text):
        super().__init__(f"{classes[0]}: {text}")
        self.classes, self.text = classes, text


class Peer:
    """One version of the peer, running. `peer.call(module, name, ...)` calls one of its functions."""

    def __init__(self, folder):
        self.version = folder.name
        command = [sys.executable, __file__, str(folder)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def call(self, module, name, /, *args, **kwargs):
        """Return what the function `name` of a module of the peer returns, or of this file where `module` is ""."""
        assert self._process.stdin is not None and self._process.stdout is not None
        pickle.dump((module, name, args, kwargs), self._process.stdin)
        self._process.stdin.flush()
        good, answer = pickle.load(self._process.stdout)
        if not good:
            raise PeerError(*answer)
        return answer

    def close(self):
        """End the process."""
        self._process.communicate()


def read(cache_dir):
    """Return the manifest, every item and the embeddings of a cache, as the peer reads them."""
    module = peer_module(CACHE)
    dataset = module.CachedEagle3Dataset(cache_dir)
    items = [{name: tensor.clone() for name, tensor in dataset[index].items()} for index in range(len(dataset))]
    return {
        "manifest": module.read_manifest(cache_dir),
        "items": items,
        "embeddings": module.read_target_embeddings(cache_dir).clone(),
    }


def item(cache_dir, index):
    """Return one item of a cache."""
    return dict(peer_module(CACHE).CachedEagle3Dataset(cache_dir)[index])


def token_file(path, length, bos):
    """Return a file of tokens as NanogptDataset reads it: ids, their type, its index, and its first pass of samples."""
    module = peer_module("components.datasets.llm.nanogpt_dataset")
    tokens, index = module.load_bin_shard(path), module._load_bos_index(path)
    data = module.NanogptDataset([path], length, bos_token=bos, align_to_bos=bos is not None)
    rows = [row["input_ids"] for row in data._process_file_tokens(path, False, 0, None)]  # __iter__ never ends
    types = {"ids": tokens.tolist(), "dtype": str(tokens.dtype), "rows": rows}
    return {**types, "index": None if index is None else index.tolist()}


def constants(names):
    """Return what the peer's cache module has under some names."""
    return {name: getattr(peer_module(CACHE), name) for name in names}


def batches(cache_dir, seed, **kwargs):
    """Return the batches of the peer's dataloader over a cache, torch's random numbers seeded."""
    import torch

    torch.manual_seed(seed)
    return list(peer_module(CACHE).build_cached_eagle3_dataloader(cache_dir=cache_dir, **kwargs))


def target(model, aux_layer_ids):
    """Return the peer's wrapper of a transformers model, and the wrapper's layers."""
    wrapper = peer_module(TARGET).HFEagle3TargetModel(model, aux_layer_ids=aux_layer_ids)
    return wrapper, wrapper.aux_layer_ids


def generate(model, aux_layer_ids, **batch):
    """Return the layers that the peer captures of a model, and the five tensors of its generate_batch."""
    wrapper, layers = target(model, aux_layer_ids)
    made = wrapper.generate_batch(**batch)
    names = ("aux_hidden_states", "logits", "input_ids", "attention_mask", "loss_mask")
    return layers, {name: getattr(made, name) for name in names}


def precompute(argv, folder, rows, specials):
    """Run the peer's producer on a model in a folder and on given rows: `rows` maps a field to an [n, S] tensor."""
    from types import SimpleNamespace

    import transformers
    from torch.utils.data import DataLoader

    def loader(*, batch_size, **_):
        dataset = [{name: tensor[row] for name, tensor in rows.items()} for row in range(len(rows["input_ids"]))]
        return DataLoader(dataset, batch_size=batch_size)

    def model(_, *, trust_remote_code, torch_dtype):
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch_dtype)

    module = peer_module(PRECOMPUTE)
    module.build_eagle3_dataloader = loader
    module.NeMoAutoModelForCausalLM = SimpleNamespace(from_pretrained=model)
    module.NeMoAutoTokenizer = SimpleNamespace(from_pretrained=lambda *_, **__: SimpleNamespace(**specials))
    return int(module.main(argv))


def train(cache_dir, model, raw, rows):
    """Return loss and gradients of the peer's trainer on rows of a cache, and on the live target that made them.

    `raw` is the batch of those rows as the target took it, unshifted. The draft's weights come from a fixed seed.
    """
    import torch
    from transformers import LlamaConfig

    module, manifest = peer_module(CACHE), peer_module(CACHE).read_manifest(cache_dir)
    config = LlamaConfig(
        vocab_size=manifest["target_vocab_size"],
        hidden_size=manifest["aux_hidden_dim"] // 3,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        draft_vocab_size=manifest["draft_vocab_size"],
        torch_dtype="float32",
    )
    ids = torch.tensor(manifest["selected_token_ids"])
    mask = torch.zeros(manifest["target_vocab_size"], dtype=torch.bool)
    mask[ids] = True
    torch.manual_seed(0)
    draft = peer_module("components.speculative.eagle.draft_llama").LlamaEagle3DraftModel(config)
    draft.model.embed_tokens.weight.data.copy_(module.read_target_embeddings(cache_dir))
    trainer = peer_module(CORE).Eagle3TrainerModule(
        draft, selected_token_ids=ids, selected_token_mask=mask, ttt_steps=3
    )
    live, _ = target(model, manifest["aux_layer_ids"])
    dataset = module.CachedEagle3Dataset(cache_dir)
    ways = {
        "cached": module._collate_cached([dataset[row] for row in rows]),
        "live": live.generate_batch(**raw).to_trainer_inputs(),
    }
    found = {}
    for way, inputs in ways.items():
        trainer.zero_grad(set_to_none=True)
        metrics = trainer(**inputs)
        metrics.loss.backward()
        gradients = {name: p.grad.clone() for name, p in draft.named_parameters() if p.grad is not None}
        found[way] = {"loss": metrics.loss.detach(), "valid": metrics.valid_tokens, "gradients": gradients}
    return found


def set_up(cache_dir, vocab_size, hidden_size, **recipe_args):
    """Set the peer's trainer up on a cache, for a target of these sizes; return its samples and draft vocabulary."""
    from types import SimpleNamespace

    class Arguments(dict):
        __getattr__ = dict.__getitem__

    trainer = object.__new__(peer_module("recipes.llm.train_eagle3").TrainEagle3Recipe)
    trainer.cached_target_path, trainer.dist_env = cache_dir, SimpleNamespace(world_size=1, is_main=False)
    target = SimpleNamespace(vocab_size=vocab_size, hidden_size=hidden_size)
    ids, _ = trainer._setup_cached_target(Arguments(micro_batch_size=1, **recipe_args), target)
    return len(trainer.train_dataloader.dataset), ids.tolist()


def plain(value):
    """Return a value without the classes of either side."""
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def answer(owners, name, args, kwargs):
    """Return ("ok", value) or ("raised", class of Python, text) of a function or constant of the first that has it."""
    found = next(getattr(owner, name) for owner in owners if hasattr(owner, name))
    try:
        return ("ok", plain(found(*args, **kwargs)) if callable(found) else found)
    except Exception as error:
        kind = next(kind for kind in type(error).__mro__ if kind.__module__ == "builtins")
        return ("raised", kind.__name__, str(error))


def fold_answers(calls):
    """Return the peer's answers to what is asked of its fold of a shared prefix and of its masks."""
    names = ("components.datasets.llm.prefix_tree", "components.datasets.llm.mock_prefix_tree")
    masks = peer_module("components.distributed.context_parallel.magi").AttnMaskSpec
    return [answer([*map(peer_module, names), masks], *call) for call in calls]


def peer_module(name):
    """Import a module of the peer by its name below nemo_automodel."""
    import importlib

    return importlib.import_module(f"nemo_automodel.{name}")


def stand_in():
    """Put a module with the names that the producer imports in the place of the package `_transformers`."""
    from types import ModuleType

    package = ModuleType("nemo_automodel._transformers")
    package.__path__ = []
    tokenizers = ModuleType("nemo_automodel._transformers.auto_tokenizer")
    package.NeMoAutoModelForCausalLM = tokenizers.NeMoAutoTokenizer = None
    sys.modules[package.__name__], sys.modules[tokenizers.__name__] = package, tokenizers


def serve():
    """Answer requests until stdin ends; whatever libraries print goes to stderr."""
    import os

    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    import torch

    torch.set_num_threads(1)
    stand_in()
    while True:
        try:
            module, name, args, kwargs = pickle.load(sys.stdin.buffer)
        except EOFError:
            os._exit(0)  # at once: taking torch down in order takes seconds
        try:
            call = getattr(peer_module(module), name) if module else globals()[name]
            told = (True, call(*args, **kwargs))
        except (Exception, SystemExit) as error:  # the latter of its command line
            told = (False, ([cls.__name__ for cls in type(error).__mro__], str(error)))
        pickle.dump(told, answers)
        answers.flush()


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    serve()
