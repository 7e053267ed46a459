"""Targets, producers and drafts: nemo-automodel's code and ours make the same batches, files and gradients.

Where its wheels are is said in test_eagle3_peer.py.
"""

import json
from functools import partial

import pytest
import torch
from support.commands import niels_gpt
from support.peer_automodel import TARGET, PeerError
from support.peer_caches import H3, NO_PEERS, PEERS, K, S, V, assert_same, files_of, read_ours

from niels_gpt.chat import open_tokenizer
from niels_gpt.eagle3.target import (
    HFEagle3TargetModel,
    default_eagle3_aux_layer_ids,
    dspark_features,
    load_target,
    parse_aux_layers,
)

pytestmark = [
    pytest.mark.skipif(PEERS is None, reason=NO_PEERS),
    pytest.mark.usefixtures("one_thread"),  # as in the peer's process: another number changes the last bits of sums
]


@pytest.fixture(autouse=True)
def quiet():
    """Let transformers log errors only, as long as a test of this file runs."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(level)


def tiny_target(kind, number=torch.float32, layers=8):
    """Return a causal language model of random weights, the same at every call."""
    import transformers

    sizes = {"vocab_size": V, "hidden_size": H3 // 3, "num_hidden_layers": layers, "num_attention_heads": 2}
    sizes["max_position_embeddings"] = 2 * S
    if kind != "GPT2":
        sizes |= {"intermediate_size": 12, "num_key_value_heads": 1, "head_dim": 4}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        name = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
        model = getattr(transformers, name)(config)
    # Far from the start of a training, where all logits are nearly equal.
    for parameter in model.parameters():
        parameter.data.mul_(8)
    return model.to(number).eval()


def raw_batch(lengths, width, seed=0):
    """Return unshifted ids, attention and loss masks of rows of some lengths, padded on the right with id 0."""
    generator = torch.Generator().manual_seed(seed)
    attention = (torch.arange(width)[None] < torch.tensor(lengths)[:, None]).long()
    return {
        "input_ids": torch.randint(1, V, attention.shape, generator=generator) * attention,
        "attention_mask": attention,
        "loss_mask": torch.randint(2, attention.shape, generator=generator) * attention,
    }


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3", "Mistral", "GPT2"])
@pytest.mark.parametrize("layers", [None, [5, 0, 2]])
def test_both_make_the_same_batch_of_a_target(new, old, kind, layers):
    model = tiny_target(kind, torch.bfloat16 if layers else torch.float32)
    raw = raw_batch([S, 5, 1, 9], S)
    ours = HFEagle3TargetModel(model, aux_layer_ids=layers)
    made = vars(ours.generate_batch(**raw))
    assert made["logits"].std() > 0.1 and made["aux_hidden_states"].shape == (4, S, H3)
    for peer in (old, new):
        assert_same([ours.aux_layer_ids, made], list(peer.call("", "generate", model, layers, **raw)))


@pytest.mark.parametrize(
    ("count", "layers", "words"),
    [
        (6, None, ["too shallow", "num_hidden_layers=6", "aux_layer_ids"]),
        (8, [1, 2], ["exactly 3", "[1, 2]"]),
        (8, [1, 2, 2], ["distinct", "[1, 2, 2]"]),
        (8, [1, 2, 8], ["out of bounds", "8 layers"]),
        (8, [-1, 2, 3], ["out of bounds", "-1"]),
    ],
)
def test_layers_that_cannot_be_captured_give_the_peers_error(new, old, count, layers, words):
    model = tiny_target("Llama", layers=count)
    with pytest.raises(ValueError) as ours:
        HFEagle3TargetModel(model, aux_layer_ids=layers)
    texts = [str(ours.value)]
    for peer in (old, new):
        with pytest.raises(PeerError) as theirs:
            peer.call("", "generate", model, layers, **raw_batch([S], S))
        assert theirs.value.classes[0] == "ValueError"
        texts.append(theirs.value.text)
    for text in texts:
        assert [word for word in words if word not in text] == []


@pytest.mark.parametrize("count", range(1, 40))
def test_the_default_layers_are_the_peers(new, count):
    def layers(choose):
        try:
            return list(choose(count))
        except (ValueError, PeerError) as error:
            return "too shallow" if "too shallow" in str(error) else str(error)

    theirs = partial(new.call, TARGET, "default_eagle3_aux_layer_ids")
    assert layers(default_eagle3_aux_layer_ids) == layers(theirs)


@pytest.mark.parametrize("features", range(1, 8))
def test_the_layers_of_dsparks_features_are_the_peers(new, features):
    theirs = partial(new.call, "components.speculative.dspark.registry", "build_target_layer_ids")
    for count in range(2 + features, 40):
        expected = theirs(count, features)
        if len(expected) == features:  # so few layers that two features round to one have no rule of ours
            assert dspark_features(count, features) == expected
            assert parse_aux_layers(f"dspark:{features}", count) == expected[:-1]


LENGTH, DRAFT, BATCH = 24, 90, 4  # samples of at most 24 tokens; 90 tokens that the draft knows; 4 rows a forward


class Made:
    """A cache of ours made from rows of given lengths, and the same rows padded as the peer's loader gives them."""

    def __init__(self, folder, target, lengths, **options):
        self.folder, self.target, self.rows_path = folder, target, folder.with_suffix(".jsonl")
        vocab_size = json.loads((target / "config.json").read_bytes())["vocab_size"]
        generator = torch.Generator().manual_seed(5)
        ids = torch.randint(4, vocab_size, (len(lengths), LENGTH), generator=generator)
        mask = torch.randint(2, ids.shape, generator=generator)
        mask[:, 1] = 1  # a row without any would be left out
        fields = {"input_ids": ids, "loss_mask": mask}
        rows = ({name: of[row, :length].tolist() for name, of in fields.items()} for row, length in enumerate(lengths))
        self.rows_path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        what = {"target_model": target, "input_data": self.rows_path, "output_dir": folder, "source_root": "sample"}
        sizes = {"seq_length": LENGTH, "draft_vocab_size": DRAFT, "batch_size": BATCH, "threads": 1}
        self.options = {"dtype": "bf16", "target_probs_topk": 0, **options}
        words = [f"--{name.replace('_', '-')}={value}" for name, value in {**what, **sizes, **options}.items()]
        done = niels_gpt("eagle3", "precompute", *words, "--device", "cpu")
        assert done.status == 0, done.err
        tokenizer = open_tokenizer(str(target))
        names = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id")
        self.specials = dict(zip(names, tokenizer.special_token_ids, strict=True))
        present = torch.arange(LENGTH)[None] < torch.tensor(lengths)[:, None]
        self.rows = {
            "input_ids": torch.where(present, ids, tokenizer.pad_id),
            "loss_mask": mask * present,
            "attention_mask": present.long(),
        }

    def by_the_peer(self, peer, folder, *more):
        """Let the peer's producer make the cache of the same rows, with the same options, in another folder."""
        argv = [
            *("--target-model", str(self.target), "--input-data", str(self.rows_path)),
            *("--output-dir", str(folder), "--device", "cpu", "--seq-length", str(LENGTH), "--shuffle-seed", "0"),
            *("--draft-vocab-size", str(DRAFT), "--batch-size", str(BATCH), "--dtype", self.options["dtype"]),
            *("--shard-size", str(self.options["shard_size"]), *more),
        ]
        if peer.version != "0.5.0":
            argv += ["--target-probs-topk", str(self.options["target_probs_topk"]), "--mask-generation-prompt"]
        assert peer.call("", "precompute", argv, str(self.target), self.rows, self.specials) == 0
        return folder


@pytest.mark.parametrize(
    ("version", "options"),
    [
        ("0.5.0", {"format": "1", "dtype": "fp32"}),
        ("0.5.0", {"format": "1", "dtype": "bf16"}),
        ("0.7.0", {"format": "2", "dtype": "fp16"}),
        ("0.7.0", {"target_probs_topk": K, "dtype": "bf16"}),
    ],
    ids=["1-fp32", "1-bf16", "2-fp16", "2-topk-bf16"],
)
def test_both_producers_write_the_same_files(version, options, old, new, model, tmp_path):
    """All samples as long as a row, so that there is no padding, and the batches are the same."""
    made = Made(tmp_path / "ours", model, [LENGTH] * 10, shard_size=BATCH, **options)
    theirs = files_of(made.by_the_peer(old if version == old.version else new, tmp_path / "theirs"))
    ours = files_of(made.folder)
    assert list(ours) == list(theirs) and len(ours) == 5
    for name, content in theirs.items():
        assert ours[name] == content, name


def test_both_producers_make_the_same_rows_of_samples_of_many_lengths(old, model, tmp_path):
    """The longest sample of a batch fills its row, so the batches are the same; what ours adds is zeros in the padding.

    The slot of a sample's last token is followed by none: there the peer has what its target says of the padding.
    """
    lengths = [LENGTH, 17, 9, 3, LENGTH, LENGTH, 2, 2]
    made = Made(tmp_path / "ours", model, lengths, shard_size=BATCH, dtype="fp32")
    theirs = old.call("", "read", str(made.by_the_peer(old, tmp_path / "theirs")))["items"]
    for length, item, other in zip(lengths, read_ours(made.folder), theirs, strict=True):
        for name in ("input_ids", "attention_mask", "loss_mask", "position_mask"):
            assert_same(item[name], other[name], name)
        assert_same(item["aux_hidden_states"][:length], other["aux_hidden_states"][:length])
        assert_same(item["target_probs"][: length - 1], other["target_probs"][: length - 1])
        assert not item["aux_hidden_states"][length:].any() and not item["target_probs"][length:].any()
        assert_same(item["target_probs"][length - 1], torch.softmax(torch.zeros(DRAFT), 0))


def test_the_peer_goes_on_with_a_cache_of_ours(new, model, tmp_path):
    made = Made(tmp_path / "c", model, [LENGTH] * 10, shard_size=BATCH, format="2")
    before = files_of(made.folder)
    with pytest.raises(PeerError, match=r"mismatched fields: \['shuffle_seed'\]"):
        made.by_the_peer(new, made.folder, "--resume", "--shuffle-seed", "7")
    (made.folder / "shard-000002.safetensors").unlink()
    made.by_the_peer(new, made.folder, "--resume")
    assert files_of(made.folder) == before


@pytest.mark.parametrize("version", [1, 2])
def test_a_draft_learns_the_same_from_our_cache_as_from_the_live_target(old, new, model, tmp_path, version):
    """The peer's draft and trainer, three steps deep: the loss and every gradient, bit for bit."""
    lengths = [LENGTH, 17, 9, 3]
    made = Made(tmp_path / "c", model, lengths, shard_size=BATCH, dtype="fp32", format=str(version))
    live = load_target(str(model), revision=None, dtype=torch.float32, attention="sdpa", device="cpu")
    found = (old if version == 1 else new).call("", "train", str(made.folder), live, made.rows, [0, 1, 2, 3])
    cached, live = found["cached"], found["live"]
    assert cached["valid"] > 10 and 1 < cached["loss"] < 20
    assert len(cached["gradients"]) >= 12 and all(gradient.any() for gradient in cached["gradients"].values())
    assert_same(cached, live)
