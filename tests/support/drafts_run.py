"""The drafts of speculators, SpecForge and NeMo Automodel: each one's own loss and gradient, for states of any source.

As a script, started by `Tool(folder, __file__)`: it serves the functions below with the package in `folder` on the
path. A draft has two layers and weights by a seed. Samples are read by the package's own reader from a folder, or are
given as they come from a running target: a list of dicts of input_ids, loss_mask [L], blocks [L, n, H], and pre and
post, the last hidden state before and after the final norm [L, H]. Nothing of niels_gpt is imported there.
"""

import sys
from pathlib import Path

from support.peer_exchange import MAX_LEN, STEPS, serve, specforge_samples, speculators_shift

BLOCK, ANCHORS, MASK_ID = 4, 16, 3


def _layer_config(target):
    """Return the config of a draft's two layers for a target's folder."""
    from transformers import AutoConfig, Qwen3Config

    own = AutoConfig.from_pretrained(target)
    return Qwen3Config(
        hidden_size=own.hidden_size,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=own.vocab_size,
        max_position_embeddings=512,
    )


def _learnt(loss, model):
    """Return the loss, and the gradient of each weight that has one."""
    loss.backward()
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return float(loss.detach()), found


# --- speculators ------------------------------------------------------------------------------------------------------


def speculators(kind, target, source, layers):
    """Return loss and gradient of a draft of speculators. source: an export, or samples of a running target."""
    import torch
    from loguru import logger

    logger.remove()
    from speculators.train.data import ArrowDataset, CollateFn

    if isinstance(source, str):
        data = ArrowDataset(MAX_LEN, source, on_missing="raise")
        items = [data[index] for index in range(len(data))]
    else:
        items = [_row_of_speculators(each, layers) for each in source]
    torch.manual_seed(0)
    model, call = _speculators_model(kind, target, layers)
    shift = speculators_shift(kind)
    hidden = model.config.transformer_layer_config.hidden_size
    torch.manual_seed(1)  # of the anchors
    losses = []
    for item in items:
        length = len(item["input_ids"]) - (kind in ("eagle3", "peagle"))  # no padding: eager attention makes NaN of it
        collate = CollateFn(length, hidden, len(layers), dtype=torch.float32, preprocess=shift)
        batch = {name: each for name, each in collate([item]).items() if name != "error_records"}
        losses.append(model(**batch, **call)[1])
    return _learnt(torch.stack(losses).mean(), model)


def _row_of_speculators(sample, layers):
    import torch

    length = len(sample["input_ids"])
    return {
        "hidden_states": sample["blocks"][:, layers].flatten(1),
        "input_ids": sample["input_ids"],
        "verifier_last_hidden_states": sample["pre"],
        "loss_mask": sample["loss_mask"],
        "lengths": torch.tensor([length]),
        "position_ids": torch.arange(length),
    }


def _speculators_model(kind, target, layers):
    """Return a draft, and the arguments of its forward that say how it is trained."""
    import torch
    from speculators.losses import resolve_loss_config

    given = {"loss_config": resolve_loss_config("kl_div", "eager")}
    if kind == "mtp":
        return _mtp_of_speculators(target), {}
    from speculators.models.dflash.core import DFlashDraftModel
    from speculators.models.dspark.core import DSparkDraftModel
    from speculators.models.eagle3.core import Eagle3DraftModel
    from speculators.models.peagle.core import PEagleDraftModel

    made = {"dflash": DFlashDraftModel, "dspark": DSparkDraftModel}
    made = {"eagle3": Eagle3DraftModel, "peagle": PEagleDraftModel, **made}[kind]
    config = _layer_config(target)
    model = made.from_training_args(
        config,
        draft_attn_impl="eager",
        draft_vocab_size=config.vocab_size,
        target_layer_ids=[layer + 1 for layer in layers],
        verifier_name_or_path=str(target),
        mask_token_id=MASK_ID,
        block_size=BLOCK,
        markov_rank=8,
        norm_before_residual=True,
        ttt_steps=STEPS,
    )
    if kind == "dspark":
        given["tv_loss_fn"] = resolve_loss_config("tv", "eager")["tv"][0]
    if kind in ("dflash", "dspark"):
        given["max_anchors"] = ANCHORS
    assert all(bool(torch.isfinite(each).all()) for each in model.parameters())
    return model, given


def _mtp_of_speculators(target):
    """Return a draft for MTP with the target's embeddings and lm_head; the target has no MTP weights to begin with."""
    import torch
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.mtp.config import MTPSpeculatorConfig
    from speculators.models.mtp.core import MTPDraftModel
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    config = MTPSpeculatorConfig(
        transformer_layer_config=_layer_config(target),
        speculators_config=SpeculatorsConfig(
            algorithm="mtp",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=VerifierConfig.from_pretrained(str(target)),
        ),
    )
    model = MTPDraftModel(config)
    model.load_verifier_weights()
    assert all(bool(torch.isfinite(each).all()) for each in model.parameters())
    return model


# --- SpecForge --------------------------------------------------------------------------------------------------------


def specforge(kind, target, source, layers):
    """Return loss and gradient of a draft of SpecForge. source: an export, or samples of a running target."""
    import torch

    torch._dynamo.config.disable = True  # it compiles at import, which would take a minute
    from specforge.algorithms.common import dflash_family_data as data
    from specforge.algorithms.common import dflash_family_model as models
    from specforge.modeling.draft.dflash import DFlashDraftModel
    from specforge.modeling.draft.dspark import DSparkDraftModel
    from transformers import AutoModelForCausalLM

    if not isinstance(source, str):
        source = [_file_of_specforge(each, layers) for each in source]
    if kind == "eagle3":
        return _eagle3_of_specforge(target, source)
    is_dspark = kind == "dspark"
    collate = (data.build_dspark_collator if is_dspark else data.build_collator)()
    batches = [collate([each]) for each in specforge_samples(kind, source)]
    config = _layer_config(target)
    config._attn_implementation = "sdpa"
    config.block_size, config.num_target_layers = BLOCK, 8
    config.dflash_config = {"target_layer_ids": layers, "mask_token_id": MASK_ID}
    own = AutoModelForCausalLM.from_pretrained(target)
    torch.manual_seed(0)
    draft = (DSparkDraftModel if is_dspark else DFlashDraftModel)(config)
    made = models.OnlineDSparkModel if is_dspark else models.OnlineDFlashModel
    model = made(
        draft,
        own.lm_head.requires_grad_(False),
        own.model.embed_tokens.requires_grad_(False),
        mask_token_id=MASK_ID,
        block_size=BLOCK,
        attention_backend="sdpa",
        num_anchors=ANCHORS,
    )
    torch.manual_seed(1)
    wide = [{name: each.float() if each.is_floating_point() else each for name, each in b.items()} for b in batches]
    return _learnt(torch.stack([model(**batch)[0] for batch in wide]).mean(), model)


def _file_of_specforge(sample, layers):
    """Return what its files of any kind hold."""
    aux, last = sample["blocks"][:, layers].flatten(1)[None], sample["post"][None]
    states = {"hidden_states": aux, "target_last_hidden_states": last, "aux_hidden_state": aux, "hidden_state": last}
    return {"input_ids": sample["input_ids"], "loss_mask": sample["loss_mask"], **states}


def _eagle3_of_specforge(target, source):
    """Return loss and gradient of its EAGLE-3 draft, which has one layer."""
    from types import SimpleNamespace

    import torch

    # Its Triton kernel needs a GPU, and Triton is not here: the loss is the package's own reference for the kernel.
    language = SimpleNamespace(constexpr=int)
    absent = {"triton": SimpleNamespace(jit=lambda kernel: kernel, language=language), "triton.language": language}
    sys.modules.update(absent)
    from specforge.algorithms.eagle3 import model as made
    from specforge.core.loss import _compute_loss
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
    from specforge.modeling.target.target_head import TargetHead
    from transformers import AutoModelForCausalLM, LlamaConfig

    for name in absent:
        del sys.modules[name]
    made.LogSoftmaxLoss = SimpleNamespace(apply=_compute_loss)
    own, given = AutoModelForCausalLM.from_pretrained(target), _layer_config(target).to_dict()
    for name in ("model_type", "architectures", "layer_types"):
        given.pop(name)
    config = LlamaConfig(**given, draft_vocab_size=given["vocab_size"])
    torch.manual_seed(0)
    draft = LlamaForCausalLMEagle3(config, attention_backend="sdpa")
    draft.t2d.fill_(True)
    model, losses = made.OnlineEagle3Model(draft, length=STEPS, attention_backend="sdpa"), []
    for sample in specforge_samples("eagle3", source):
        ids, last, mask = TargetHead.preprocess(None, sample["input_ids"], sample["target"], sample["loss_mask"])
        given = {"input_ids": ids, "loss_mask": mask, "attention_mask": sample["attention_mask"]}
        given |= {"target": own.lm_head(last.float()), "hidden_states": sample["hidden_state"].float()}
        losses.append(sum(model(**given)[0]))
    return _learnt(torch.stack(losses).mean(), model)


# --- NeMo Automodel ---------------------------------------------------------------------------------------------------


def automodel_items(target, samples, layers, dtype, multiple=1, is_cut=True):
    """Return the items that Automodel's producer makes of samples, each run by itself.

    multiple: of the slots that it is padded to, as rounding depends on them. is_cut: without the slots of padding.
    """
    import torch
    from nemo_automodel.components.datasets.llm.dspark_cache import DTYPE_MAP, compute_batch_cache
    from nemo_automodel.components.speculative.dspark.target import HFDSparkTargetModel
    from transformers import AutoModelForCausalLM

    wrapped, made = HFDSparkTargetModel(AutoModelForCausalLM.from_pretrained(target), layers), []
    for sample in samples:
        length = len(sample["input_ids"])
        more = 0, -length % multiple
        ids, loss = (torch.nn.functional.pad(sample[name], more)[None] for name in ("input_ids", "loss_mask"))
        real = torch.nn.functional.pad(torch.ones_like(sample["input_ids"]), more)[None]
        batch = wrapped.generate_batch(ids, real, loss)
        tensors = compute_batch_cache(batch, DTYPE_MAP[dtype])
        made.append({name: each[0, : length if is_cut else None] for name, each in tensors.items()})
    return made


def automodel_drafts():
    """Return the name of Automodel's DSpark draft for each architecture of a target."""
    from nemo_automodel.components.speculative.dspark.registry import DSPARK_DRAFT_REGISTRY

    return {name: each.draft_cls.__name__ for name, each in DSPARK_DRAFT_REGISTRY.items()}


def automodel_read(folder):
    """Return the items of Automodel's dataset, the batches of its loader, its manifest and the target's weights."""
    from nemo_automodel.components.datasets.llm import dspark_cache as cache

    data = cache.CachedDSparkDataset(folder)
    batches = cache.build_cached_dspark_dataloader(cache_dir=folder, batch_size=4, shuffle=False)
    weights = [each.weight for each in cache.read_target_weight_modules(folder)]
    return [data[index] for index in range(len(data))], list(batches), data.manifest, weights


def automodel_accepts(target, recipe, compute_dtype="float32"):
    """Let the checks of Automodel's trainer compare a cache with its recipe_args, as its setup does.

    compute_dtype: float32 on a CPU, bfloat16 on a GPU. Raises: ValueError.
    """
    import torch
    from nemo_automodel.components.datasets.llm import dspark_cache as cache
    from nemo_automodel.components.datasets.llm.offline_cache import ensure_supervision_options_match
    from nemo_automodel.recipes.llm.train_dspark import _validate_cached_dspark_manifest
    from transformers import AutoConfig

    folder, layers = recipe["cached_target_path"], recipe["target_layer_ids"]
    config, manifest = AutoConfig.from_pretrained(target), cache.read_manifest(folder)
    named = {"target_model": str(target), "target_model_type": config.model_type, "seq_length": recipe["seq_length"]}
    named["compute_dtype"] = getattr(torch, compute_dtype)
    _validate_cached_dspark_manifest(folder, manifest, config, layers, **named)
    options = {name: recipe[name] for name in ("mask_reasoning_content", "mask_generation_prompt")}
    ensure_supervision_options_match(manifest, options, cache_name="DSpark", cache_dir=folder, producer_name="p")


def automodel_write(folder, target, items, layers, seq_length, shard_size):
    """Write a cache by Automodel's own functions, its items padded with id 0."""
    import torch
    from nemo_automodel.components.datasets.llm import dspark_cache as cache
    from torch.nn.functional import pad
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target)
    described = cache.build_cache_manifest(
        target_model=str(target),
        target_model_type=model.config.model_type,
        target_text_config=model.config,
        seq_length=seq_length,
        dtype="fp32",
        num_samples=len(items),
        shard_size=shard_size,
        target_layer_ids=layers,
        train_data_path="chats",
        train_split=None,
        shuffle_seed=0,
        mask_reasoning_content=False,
        chat_template_sha256="0" * 64,
    )
    cache.write_target_weights(folder, model.get_input_embeddings(), model.get_output_embeddings(), torch.float32)
    cache.write_manifest(folder, {**described, "complete": False})
    whole = [
        {name: pad(each, (0, 0) * (each.dim() - 1) + (0, seq_length - len(each))) for name, each in item.items()}
        for item in items
    ]
    for shard, begin in enumerate(range(0, len(whole), shard_size)):
        part = whole[begin : begin + shard_size]
        cache.write_shard(folder, shard, {name: torch.stack([each[name] for each in part]) for name in part[0]})
    cache.write_manifest(folder, {**described, "complete": True})


def automodel_produce(target, samples, *argv):
    """Run Automodel's command precompute_dspark on a CPU, over samples in the place of chats; return its status.

    argv: beside --target-model and --input-data.
    """
    from types import SimpleNamespace

    import torch
    from nemo_automodel.components.speculative import precompute_dspark as command
    from transformers import AutoModelForCausalLM

    def loader(*, seq_length, batch_size, **_):
        rows = []
        for sample in samples:
            row = {name: sample[name] for name in ("input_ids", "loss_mask")}
            row["attention_mask"] = torch.ones_like(sample["input_ids"])
            more = 0, seq_length - len(sample["input_ids"])
            rows.append({name: torch.nn.functional.pad(each, more) for name, each in row.items()})
        return torch.utils.data.DataLoader(rows, batch_size=batch_size)

    def model(name, *, torch_dtype, **_):
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch_dtype)

    command.build_eagle3_dataloader = loader
    command.NeMoAutoModelForCausalLM = SimpleNamespace(from_pretrained=model)  # Automodel's own needs a GPU
    command.NeMoAutoTokenizer = SimpleNamespace(
        from_pretrained=lambda *_, **__: SimpleNamespace(chat_template="{}", apply_chat_template=print)
    )
    return command.main(["--target-model", target, "--input-data", "chats", "--device", "cpu", *argv])


def automodel(kind, target, source, layers):
    """Return loss and gradient of Automodel's DSpark draft. source: a cache, or items of its own producer."""
    import torch
    from nemo_automodel.components.speculative.dspark.core import DSparkTrainerModule
    from nemo_automodel.components.speculative.dspark.draft_qwen3 import Qwen3DSparkModel
    from transformers import AutoModelForCausalLM

    assert kind == "dspark"
    items = automodel_read(source)[0] if isinstance(source, str) else source
    config, own = _layer_config(target), AutoModelForCausalLM.from_pretrained(target)
    config._attn_implementation = "sdpa"
    more = {"num_target_layers": own.config.num_hidden_layers, "block_size": BLOCK, "num_anchors": ANCHORS}
    more |= {"mask_token_id": MASK_ID, "target_layer_ids": layers, "enable_confidence_head": True}
    more |= {"confidence_head_with_markov": True, "markov_rank": 8, "markov_head_type": "vanilla"}
    for name, value in more.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    draft = Qwen3DSparkModel(config)
    draft.initialize_embeddings_and_head(embed_tokens=own.model.embed_tokens, lm_head=own.lm_head)
    model = DSparkTrainerModule(draft)
    torch.manual_seed(1)
    losses = []
    for item in items:
        learnt = item["loss_mask"].nonzero()
        end = int(learnt[-1]) + 1  # nothing later is read, and anchors are drawn from as many candidates
        losses.append(
            model(
                **{
                    name: each[:end].float()[None] if each.is_floating_point() else each[:end][None]
                    for name, each in item.items()
                }
            ).loss
        )
    return _learnt(torch.stack(losses).mean(), model)


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    if "0.7.0" in sys.argv[1]:  # Automodel imports torchao, which transformers then takes wherever it is
        sys.path.append(str(Path(sys.argv[1]).parent / "torchao-0.18.0"))
    serve(globals())
