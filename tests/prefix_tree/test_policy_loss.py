"""Losses on folded rows equal TRL's trainer's on the padded batch, and micro-batches add up."""

import importlib
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from support import ROOT
from support.float64_models import VOCAB, float64_llama
from support.padded_batches import PROMPT, gradient, unfolded, verl_batch

from niels_gpt.prefix_tree.bins import pack
from niels_gpt.prefix_tree.edges import LossEdges, at_predictions, edge_logprobs, sample_logprobs
from niels_gpt.prefix_tree.forest import PrefixForest
from niels_gpt.prefix_tree.heads import body_forward
from niels_gpt.prefix_tree.padded import PaddedRollouts
from niels_gpt.prefix_tree.policy import PolicyLoss, value_loss
from niels_gpt.storage.errors import TreeError

pytestmark = pytest.mark.usefixtures("one_thread")
COLUMNS = {"old_logprobs": "old_log_probs", "ref_logprobs": "ref_log_prob", "advantages": "advantages"}


@pytest.fixture(scope="module")
def llama():
    return float64_llama()


@pytest.fixture(scope="module")
def data(llama):
    """A batch whose old log-probs are near the model's: of both signs of advantages, some ratios are clipped."""
    batch = verl_batch()
    with torch.no_grad():
        logp = unfolded(llama, batch, 0.9)[0]
    return batch | {name: logp + batch[name] + 4.6 for name in ("old_log_probs", "ref_log_prob")}


def folded(model, data, rows=slice(None), columns=COLUMNS):
    """Return the batch of some rows folded, with columns, and its log-probs, entropies and hidden states."""
    part = {name: each[rows] for name, each in data.items()}
    batch = PaddedRollouts.from_padded(
        *(part[name] for name in ("input_ids", "attention_mask", "response_mask")),
        uid=part["uid"],
        columns={name: part[key] for name, key in columns.items()},
    )
    hidden, head = body_forward(model, batch.forest, backend="prefix_tree")
    both = edge_logprobs(hidden, batch.edges, head, temperature=0.9, entropies=True)
    return batch, *(sample_logprobs(each, batch.edges) for each in both), hidden


def assert_same(mine, theirs, model, tolerance=1e-12):
    """Compare two losses, and their gradients by their length."""
    torch.testing.assert_close(mine, theirs.to(mine), rtol=tolerance, atol=tolerance)
    one, other = gradient(mine, model), gradient(theirs, model)
    assert float(other.norm()) > 0 and float((one - other).norm() / other.norm()) < tolerance


# --- TRL ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trainer(llama, tmp_path_factory):
    trl = pytest.importorskip("trl", reason="the extra `rl` brings it")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "examples")
        example = importlib.import_module("folded_grpo")
        patch.delitem(sys.modules, "folded_grpo")
    config = trl.GRPOConfig(
        str(tmp_path_factory.mktemp("grpo")),
        per_device_train_batch_size=12,
        num_generations=4,
        temperature=0.9,
        bf16=False,
        use_cpu=True,
        report_to="none",
    )

    class Exact(trl.GRPOTrainer):
        """Takes log-probs of float64, unless told otherwise; TRL's own are of float32 whatever the model is."""

        exact = True

        def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, *arguments, **options):
            if not self.exact:
                return super()._get_per_token_logps_and_entropies(
                    model, input_ids, attention_mask, *arguments, **options
                )
            batch = {"input_ids": input_ids, "attention_mask": attention_mask}
            return *unfolded(model, batch, self.temperature)[:2], None

    made = Exact(
        model=llama,
        args=config,
        reward_funcs=example.share_of_low_ids,
        train_dataset=example.prompts_of(4, 8),
        processing_class=example.tokenizer_of(VOCAB),
    )
    made.current_gradient_accumulation_steps = 1
    made.model.train()  # there is no dropout
    yield made
    llama.eval()


def of_trl(trainer, data, items):
    """Return the loss of TRL's GRPOTrainer."""
    seen = data["attention_mask"]
    inputs = {
        "prompt_ids": data["input_ids"][:, :PROMPT],
        "prompt_mask": seen[:, :PROMPT],
        "completion_ids": data["input_ids"][:, PROMPT:],
        "completion_mask": seen[:, PROMPT:],
        "tool_mask": data["response_mask"],
        "advantages": data["advantages"],
        "old_per_token_logps": data["old_log_probs"],
        "ref_per_token_logps": data["ref_log_prob"],
        "num_items_in_batch": torch.tensor(items),
    }
    return trainer._compute_loss(trainer.model, inputs)


OPTIONS = {
    "plain": {},
    "clip high": {"clip_high": 0.28},
    "two-sided, KL": {"ratio_max": 1.4, "kl_coef": 0.04},
    "unbiased KL": {"kl_coef": 0.1, "kl_times_ratio": True},
    "sequence ratio": {"sequence_ratio": True, "clip_low": 0.03, "clip_high": 0.04, "kl_coef": 0.1},
}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # TRL's and transformers' own
@pytest.mark.parametrize("kind", ["grpo", "dapo", "dr_grpo", "bnpo"])
@pytest.mark.parametrize("name", OPTIONS)
def test_loss_gradient_and_metrics_are_those_of_trl(trainer, data, kind, name):
    llama, options = trainer.model, OPTIONS[name]
    policy = PolicyLoss("dapo" if kind == "bnpo" else kind, **options)
    trainer.loss_type, trainer.beta, trainer.max_completion_length = kind, policy.kl_coef, 20
    trainer.epsilon_low, trainer.epsilon_high, trainer.args.delta = policy.clip_low, policy.clip_high, policy.ratio_max
    trainer.args.use_bias_correction_kl = policy.kl_times_ratio
    trainer.importance_sampling_level = "sequence" if policy.sequence_ratio else "token"
    theirs = of_trl(trainer, data, 100)
    batch, logp, entropy, _ = folded(llama, data)
    normalizer = {"grpo": None, "bnpo": None, "dapo": 100, "dr_grpo": 12 * 20}[kind]
    mine, metrics = policy(logp, batch.edges, **batch.columns, entropies=entropy, normalizer=normalizer)
    assert_same(mine, theirs, llama)
    shown = {"clip_low": "clip_ratio/low_mean", "clip_high": "clip_ratio/high_mean", "kl": "kl", "entropy": "entropy"}
    if policy.sequence_ratio:  # TRL's share is of samples then
        shown = {"entropy": "entropy", "kl": "kl"}
    logged = trainer._metrics["train"]
    for key in shown if policy.kl_coef else shown.keys() - {"kl"}:
        assert float(metrics[key]) == pytest.approx(logged[shown[key]][-1], rel=1e-6)
        assert not metrics[key].requires_grad
    assert float(metrics["tokens"]) == int(data["response_mask"].sum())
    assert metrics["clip_low"] > 0 and metrics["clip_high"] > 0


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("exact", [True, False])
def test_an_entropy_bonus_and_the_policys_own_log_probs_are_those_of_trl(trainer, data, monkeypatch, exact):
    named = {"loss_type": "bnpo", "beta": 0.0, "importance_sampling_level": "token", "exact": exact}
    for name, value in {**named, "_entropy_bonus_enabled": True, "entropy_coef": 0.01}.items():
        monkeypatch.setattr(trainer, name, value)
    monkeypatch.setattr(trainer.args, "delta", None)
    theirs = of_trl(trainer, data | {"old_log_probs": None}, 100)
    batch, logp, entropy, _ = folded(trainer.model, data)
    columns = batch.columns | {"old_logprobs": None, "ref_logprobs": None}
    mine, metrics = PolicyLoss("dapo", entropy_coef=0.01)(logp, batch.edges, **columns, entropies=entropy)
    assert_same(mine, theirs, trainer.model, 1e-12 if exact else 1e-6)
    assert metrics["clip_low"] == metrics["clip_high"] == 0 and "kl" not in metrics


# --- normalizers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "options"), [(k, o) for k in ("grpo", "dapo", "dr_grpo") for o in OPTIONS.values()])
def test_the_losses_of_micro_batches_add_up(llama, data, kind, options):
    policy = PolicyLoss(kind, entropy_coef=0.01, **options)
    normalizer = {"grpo": 12, "dapo": int(data["response_mask"].sum()), "dr_grpo": 12 * 20}[kind]
    masks = (data[name] for name in ("input_ids", "attention_mask", "response_mask"))
    bins = pack([PrefixForest.from_padded(*masks, uid=data["uid"])], max_tokens=25)
    budgeted = [each.samples.numpy() for each in bins]
    assert len(bins) > 2 and sorted(np.concatenate(budgeted)) == list(range(12))
    wholes = [slice(None)], [slice(0, 3), slice(3, 12)], budgeted  # a group in two micro-batches; rows of few tokens
    losses, shares = [], []
    for micro_batches in wholes:
        found, sums = [], Counter()
        for rows in micro_batches:
            batch, logp, entropy, _ = folded(llama, data, rows)
            loss, metrics = policy(logp, batch.edges, **batch.columns, entropies=entropy, normalizer=normalizer)
            found.append(loss)
            sums.update({name: value * metrics["tokens"] for name, value in metrics.items() if name != "tokens"})
        losses.append(sum(found))
        shares.append(sums)
    for loss, share in zip(losses[1:], shares[1:], strict=True):
        assert_same(loss, losses[0], llama)
        for name, whole in shares[0].items():
            torch.testing.assert_close(share[name], whole)


def test_weights_scale_the_clipped_term_alone(llama, data):
    batch, logp, *_ = folded(llama, data)
    zeros, policy = torch.zeros_like(logp), PolicyLoss("dapo", kl_coef=0.5)
    loss, metrics = policy(logp, batch.edges, **batch.columns, weights=zeros)
    torch.testing.assert_close(loss, 0.5 * metrics["kl"])
    whole = policy(logp, batch.edges, **batch.columns)[0]
    torch.testing.assert_close(policy(logp, batch.edges, **batch.columns, weights=zeros + 1)[0], whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_of_half_a_float_are_counted_and_summed_in_float32(dtype):
    """As of a critic in bfloat16: it has no 3,999, and float16 no sum above 65,504."""
    ids = torch.arange(4000)[None] % 97
    batch = PaddedRollouts.from_padded(ids, torch.ones_like(ids), torch.ones(1, 3999))
    zeros, half = torch.zeros(3999), torch.full((3999,), 2.0, dtype=dtype, requires_grad=True)
    columns = {"old_values": zeros + 2, "returns": zeros - 8}
    critic, counts = value_loss(half, batch.edges, **columns, loss_type="dapo")
    assert critic.dtype == torch.float32 and critic == 50 and counts["tokens"] == 3999 and counts["value"] == 2
    policy = PolicyLoss("dapo", clip_high=40.0)
    columns = {"old_logprobs": zeros + 2, "advantages": zeros - 50}
    loss, counts = policy(half, batch.edges, **columns, normalizer=torch.tensor(3999.0, dtype=torch.float64))
    assert loss.dtype == torch.float32 and loss == 50 and counts["tokens"] == 3999
    loss.backward()
    assert half.grad.dtype == dtype and half.grad.any()


def test_samples_without_a_token_have_a_loss_of_zero_and_need_a_normalizer():
    edges = LossEdges.from_forest(PrefixForest.from_sequences([[1, 2], [3]], loss_mask=[[0, 0], [0]]))
    empty = torch.zeros(0, requires_grad=True)
    for kind in ("grpo", "dapo", "dr_grpo"):
        columns = {"old_logprobs": empty.detach(), "advantages": empty.detach()}
        loss, metrics = PolicyLoss(kind)(empty, edges, **columns, normalizer=3)
        loss.backward()
        assert loss == 0 and empty.grad is not None and metrics["tokens"] == metrics["clip_low"] == 0
        with pytest.raises(TreeError):
            PolicyLoss(kind)(empty, edges, **columns)


def test_what_does_not_fit_is_refused(llama, data):
    batch, logp, *_ = folded(llama, data)
    for wrong in (
        {"loss_type": "ppo"},
        {"loss_type": "dapo", "ratio_max": 1.1},
    ):
        with pytest.raises(TreeError):
            PolicyLoss(**wrong)
    given = batch.columns
    for policy, changed in [
        (PolicyLoss("dr_grpo"), {}),
        (PolicyLoss("dapo", kl_coef=0.1), {"ref_logprobs": None}),
        (PolicyLoss("dapo", entropy_coef=0.1), {}),
        (PolicyLoss("dapo"), {"advantages": torch.zeros(12)}),
        (PolicyLoss("dapo"), {"old_logprobs": data["old_log_probs"]}),
        (PolicyLoss("dapo"), {"weights": torch.ones(1)}),
    ]:
        with pytest.raises(TreeError) as raised:
            policy(logp, batch.edges, **given | changed)
        assert raised.value.code == "E801"
    with pytest.raises(TreeError):
        PolicyLoss("dapo")(logp[:-1], batch.edges, **given)
    with pytest.raises(TreeError):
        value_loss(logp, batch.edges, old_values=logp, returns=logp, loss_type="mean")


# --- a critic -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [0.2, None])
def test_a_critic_on_folded_rows_is_that_of_the_padded_batch(llama, data, clip):
    torch.manual_seed(0)
    critic = torch.nn.ModuleDict({"body": llama, "head": torch.nn.Linear(32, 1, dtype=torch.float64)})
    values = critic["head"](unfolded(llama, data)[2])[..., 0]
    mask = data["response_mask"].bool()
    errors = (values - data["returns"]).square()
    if clip is not None:
        clipped = torch.clamp(values, data["values"] - clip, data["values"] + clip)
        larger = (clipped - data["returns"]).square()
        share = (larger > errors)[mask].double().mean()
        errors = torch.maximum(errors, larger)
    theirs = 0.5 * errors[mask].mean()

    columns = {"old_values": "values", "returns": "returns"}
    batch, _, _, hidden = folded(llama, data, columns=columns)
    mine = at_predictions(critic["head"](hidden)[..., 0], batch.edges)
    loss, metrics = value_loss(mine, batch.edges, **batch.columns, loss_type="dapo", clip=clip)
    assert_same(loss, theirs, critic)
    torch.testing.assert_close(batch.unfold(mine), values * mask, rtol=1e-12, atol=1e-12)
    assert float(metrics["value"]) == pytest.approx(float(values[mask].detach().mean()))
    if clip is not None:
        assert float(metrics["clip_share"]) == pytest.approx(float(share)) and share > 0
