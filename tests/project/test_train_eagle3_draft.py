"""The example of a draft: its slots in training are those at inference; speculation gives the target's own output."""

import importlib
import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file
from support import ROOT
from support.documents import Page
from support.draft_example import imported, small_run
from support.real_text import sample_rows, tokenized

from niels_gpt.chat import open_tokenizer
from niels_gpt.eagle3.cache import build_cached_eagle3_dataloader, read_manifest, read_target_embeddings
from niels_gpt.eagle3.target import HFEagle3TargetModel, load_target

pytest.importorskip("transformers", reason="running a target needs the extra eagle3")
pytest.importorskip("matplotlib", reason="the extra `plot` brings it")
pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS, STEPS = [1, 3, 4], 3


@pytest.fixture(scope="module")
def example():
    yield from imported("train_eagle3_draft")


@pytest.fixture(scope="module")
def parts():
    yield from imported("eagle3_draft")


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_tokenizer):
    return small_run(tmp_path_factory.mktemp("run"), tiny_tokenizer)


@pytest.fixture(scope="module")
def target(run):
    return load_target(str(run / "target"), revision=None, dtype=torch.float32, attention="sdpa", device="cpu")


@pytest.fixture
def draft(parts, run, target):
    torch.manual_seed(0)
    selected = torch.tensor(read_manifest(run / "cache")["selected_token_ids"])
    return parts.Draft(parts.draft_config(target.config), read_target_embeddings(run / "cache"), selected)


def first_batch(run, size=4):
    return next(iter(build_cached_eagle3_dataloader(run / "cache", size, shuffle=False)))


def test_each_step_of_training_is_a_proposal_at_inference(parts, run, draft):
    """One slot at a time: the slots up to p with the target's states, then one slot for each token behind it."""
    batch = first_batch(run)
    sums, positions = torch.zeros(STEPS), torch.zeros(STEPS)
    with torch.no_grad():
        found = parts.ttt_losses(draft, batch, STEPS)
        for row in ({name: part[index] for name, part in batch.items()} for index in range(4)):
            length = int(row["attention_mask"].sum())
            for slot in range(length):
                seen = torch.ones(slot + 1, slot + 1, dtype=torch.bool).tril()
                hidden = draft.fc(row["aux_hidden_states"][: slot + 1])[None]
                hidden, past = draft(row["input_ids"][None, : slot + 1], hidden, torch.arange(slot + 1), None, seen)
                for step in range(min(STEPS, length - slot)):
                    if step:
                        ids = row["input_ids"][None, slot + step, None]
                        hidden, past = draft(ids, hidden[:, -1:], torch.tensor([slot + step]), past, None)
                    logprobs = draft.logits(hidden[0, -1]).log_softmax(-1)
                    if bool(row["position_mask"][slot + step]):
                        sums[step] -= row["target_probs"][slot + step] @ logprobs
                        positions[step] += 1
    assert positions.min() > 20
    assert torch.allclose(found, sums / positions, rtol=1e-5)


def test_a_slot_of_the_cache_is_the_same_slot_at_inference(parts, run, target, draft):
    """After tokens 0 .. p+1 the draft proposes token p+2 from slot p, also where its keys came in two parts."""
    samples, batch = [*sample_rows(run / "cache")], first_batch(run)
    seen = torch.ones(48, 48, dtype=torch.bool).tril()
    with torch.no_grad():
        hidden, _ = draft(batch["input_ids"], draft.fc(batch["aux_hidden_states"]), torch.arange(48), None, seen)
        expected = draft.logits(hidden).argmax(-1)
        for index in range(4):
            ids = torch.tensor(samples[index][1]).long()
            for slot in (0, 3, len(ids) - 2):
                aux, _ = parts.run_target(target, ids[: slot + 1], parts.DynamicCache(), LAYERS)
                after = ids[1 : slot + 2]
                (whole,), _ = draft.propose(aux, after, None, 1)
                if slot:
                    _, past = draft.propose(aux[:slot], after[:slot], None, 2)  # the chain leaves no keys behind
                    (in_parts,), _ = draft.propose(aux[slot:], after[slot:], past, 1)
                    assert in_parts == whole
                assert whole - draft.d2t[expected[index, slot]] == expected[index, slot]


def test_cache_and_live_target_give_the_same_loss_and_gradients(example, parts, run, target, draft):
    rows = list(tokenized(run / "chats.jsonl", str(run / "target"), seq_length=48))
    selected = torch.tensor(read_manifest(run / "cache")["selected_token_ids"])
    live = example.live_batch(HFEagle3TargetModel(target, LAYERS), selected, rows[:4])
    learnt = []
    for batch in (live, first_batch(run)):
        draft.zero_grad()
        losses = parts.ttt_losses(draft, batch, STEPS)
        losses.sum().backward()
        learnt.append(
            (losses, {name: each.grad.clone() for name, each in draft.named_parameters() if each.requires_grad})
        )
    (of_live, live_gradients), (of_cache, gradients) = learnt
    assert torch.allclose(of_live, of_cache, rtol=1e-5)
    for name, gradient in gradients.items():
        assert (gradient - live_gradients[name]).norm() <= 1e-5 * gradient.norm(), name


class Oracle:
    """A draft that knows the target's reply, or is always wrong."""

    def __init__(self, reply, right):
        self.reply, self.right = reply, right

    def propose(self, aux, ids, known, chain):
        known = 1 if known is None else known + len(ids)  # of the reply; at first its first token
        proposals = torch.tensor((self.reply + [0] * chain)[known : known + chain])
        return proposals if self.right else (proposals == 0).long(), known


def test_what_is_accepted_and_counted_by_hand(parts, target, monkeypatch):
    prompt = torch.tensor([5, 17, 60, 33])
    reply = parts.greedy(target, prompt, 15)
    alone = target.generate(prompt[None], attention_mask=torch.ones(1, 4), max_new_tokens=15, do_sample=False)
    assert alone[0, 4:].tolist() == reply
    found, passes = parts.speculate(target, Oracle(reply, right=True), prompt, 12, LAYERS, 3)
    assert (found, passes) == (reply[:12], [(3, 4)] * 3)  # 1 token by the prompt, then 4 a pass: 1 more than asked for
    found, passes = parts.speculate(target, Oracle(reply, right=False), prompt, 12, LAYERS, 3)
    assert (found, passes) == (reply[:12], [(0, 1)] * 11)
    assert reply.index(reply[10]) == 10
    monkeypatch.setattr(target.config, "eos_token_id", [388, reply[10]])
    assert parts.greedy(target, prompt, 12) == reply[:11]
    found, passes = parts.speculate(target, Oracle(reply, right=True), prompt, 12, LAYERS, 3)
    assert (found, passes) == (reply[:11], [(3, 4), (3, 4), (2, 2)])  # what follows the end does not count


def test_shares_of_acceptance_by_hand(example, monkeypatch):
    passes = [(3, 4), (0, 1), (2, 3), (2, 2)]  # the last one's reply ends with its second proposal
    monkeypatch.setattr(example, "speculate", lambda *_: ([7], passes))
    options = example.parse(["target", "cache", "chats", "--chain", "3"])
    options.layers = LAYERS
    found = example.evaluate(None, None, [torch.tensor([1])], [[7]], options)
    assert found == {"acceptance_length": 10 / 4, "acceptance": [3 / 4, 3 / 3, 1 / 2], "passes": 4}
    with pytest.raises(AssertionError, match=r"speculation gives \[7\], the target alone \[8\]"):
        example.evaluate(None, None, [torch.tensor([1])], [[8]], options)


@pytest.mark.slow
def test_a_run_from_the_cache_from_the_live_target_and_untrained(example, run, tmp_path, capsys):
    numbers = {}
    for name, more in (("cache", ""), ("native", ""), ("live", f"--online {run}/chats.jsonl"), ("untrained", "")):
        more += " --draft untrained" if name == "untrained" else f" --beside {tmp_path}/cache.json" if numbers else ""
        data = f"{run}/target {run}/{'native' if name == 'native' else 'cache'} {run}/held_out.jsonl"
        example.main(f"{data} --batch-size 4 --new-tokens 8 --out {tmp_path}/{name}.png {more}".split())
        numbers[name] = json.loads((tmp_path / f"{name}.json").read_text())
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert f"acceptance length {numbers[name][0]['acceptance_length']:.3f}" in capsys.readouterr().out
    losses = {name: torch.tensor(runs[0]["losses"]) for name, runs in numbers.items()}
    assert losses["cache"].shape == (6, 3) and losses["untrained"].numel() == 0
    for name in ("live", "native"):
        assert torch.allclose(losses["cache"], losses[name], rtol=1e-4), name
    assert bool((losses["cache"][-1] < losses["cache"][0]).all())


def test_the_last_block_is_refused_as_an_auxiliary_layer(example, run, tmp_path):
    cache = shutil.copytree(run / "cache", tmp_path / "cache")
    manifest = json.loads((cache / "manifest.json").read_text())
    (cache / "manifest.json").write_text(json.dumps({**manifest, "aux_layer_ids": [1, 3, 7]}))
    with pytest.raises(SystemExit, match="the last block"):
        example.main([str(run / "target"), str(cache), str(run / "chats.jsonl"), "--out", str(tmp_path / "x.png")])


SMALLER = {
    "--source-root MIRROR --longest 200": "--source-root sample",
    "--hidden 96 --epochs 4": "--hidden 32 --epochs 1",
    "--held-out 60": "--held-out 5",
    "--limit 900": "--limit 12",
    "--max-new-tokens 48": "--max-new-tokens 16",
    "--draft-vocab-size 256": "--draft-vocab-size 200",
    "--seeds 0 1 2 --new-tokens 48": "--seeds 0 --new-tokens 12",
    "head -n 900": "head -n 12",
}
"""Of the page's options, those that make it take an hour."""


@pytest.mark.slow
def test_the_commands_of_the_page_run_from_a_target_to_a_draft_on_the_disk(parts, tmp_path):
    text = (ROOT / "docs" / "eagle3_draft.md").read_text(encoding="utf-8")
    for before, after in SMALLER.items():
        assert before in text
        text = text.replace(before, after)
    text = re.sub(r"^<!-- not run: takes [^\n]+-->\n", "", text, flags=re.MULTILINE)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    page = Page(text, tmp_path, timeout_s=1800)  # 15 commands, each of which imports torch, on a busy machine
    page.run()  # an AssertionError where a command fails
    trained = text.count("$ python examples/train_eagle3_draft.py")
    lengths = [float(found) for found in re.findall(r"^seed 0: acceptance length (\S+),", page.rewritten, re.MULTILINE)]
    assert len(lengths) == trained == 7 and all(1 <= length <= 5 for length in lengths)
    assert re.search(r"^[\d,]+ chats of [\d,]+ tokens; held out: \d\.\d{3} nats a token$", page.rewritten, re.MULTILINE)
    numbers = sorted(path.stem for path in (tmp_path / "run").glob("*.json"))
    assert numbers == ["live", "native_bf16", "native_fp8", "off_policy", "top_2", "untrained", "version_1"]
    saved = load_file(tmp_path / "run" / "draft" / "specforge" / "model.safetensors")
    config = parts.draft_config(parts.PretrainedConfig.from_pretrained(tmp_path / "run" / "target"))
    read = parts.Draft(config, saved["embed_tokens.weight"], saved["d2t"] + torch.arange(200))
    read.load_state_dict(saved)  # strict: the names of the example are SpecForge's


@pytest.mark.slow  # transformers and a tokenizer's training
def test_the_small_target_learns_its_chats_and_none_that_are_held_out(parts, tmp_path):
    small = importlib.import_module("small_target")
    sizes = "--held-out 5 --vocab-size 600 --hidden 32 --epochs 1 --source-root sample"
    small.main([str(tmp_path / "run"), *sizes.split()])
    files = {name: (tmp_path / "run" / f"{name}.jsonl").read_text().splitlines() for name in ("train", "held_out")}
    questions = {name: {json.loads(line)["messages"][0]["content"] for line in lines} for name, lines in files.items()}
    assert len(questions["held_out"]) == 5 and len(questions["train"]) == len(files["train"]) > 20
    assert not questions["train"] & questions["held_out"]
    folder = str(tmp_path / "run" / "target")
    target = load_target(folder, revision=None, dtype=torch.float32, attention="sdpa", device="cpu")
    row = next(tokenized(tmp_path / "run" / "held_out.jsonl", folder, seq_length=160))
    assert target.config.eos_token_id == row.input_ids[-1]  # so that a reply ends where a chat does
    assert target.config.vocab_size == open_tokenizer(folder).vocab_size
