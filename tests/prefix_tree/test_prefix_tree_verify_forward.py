"""verify_fold names what is wrong with a forward: leaks, blindness, noise, gradients, precision."""

import math
import random
from collections.abc import Callable

import pytest
import torch
from support.causal_models import tiny_model
from support.errors import refused
from support.float64_models import float64_llama
from support.prefix_trees import advice, grown
from support.small_transformer import GROUP, SEQUENCES, VOCAB, Transformer, causal, group
from torch import Tensor

from niels_gpt.prefix_tree.attention import hf_forward, use_segments
from niels_gpt.prefix_tree.edges import LossEdges
from niels_gpt.prefix_tree.fold import prefix_tree_collate_fn
from niels_gpt.prefix_tree.forest import PrefixForest
from niels_gpt.prefix_tree.verify import verify_fold

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model():
    return Transformer()


def test_a_dropped_mask_leaks(model):
    report = verify_fold(lambda ids, at, mask: model(ids, at, causal(ids.shape[1])), group(), parameters=model)
    assert report.findings == ["leaks", "log-probs", "gradients"]
    assert report.leak > 1e-3 and report.leak_where is not None
    changed, moved = report.leak_where
    assert changed in (2, 3) and moved in (4, 5, 6)  # from the first completion into the second
    assert f"(row {moved}, by a change of row {changed})" in str(report)
    assert str(report).splitlines()[-1] == advice("leaks")


def test_one_probe_finds_a_dropped_mask_whatever_the_seed_and_a_future_that_is_seen(model):
    for seed in range(10):
        report = verify_fold(lambda ids, at, mask: model(ids, at, causal(ids.shape[1])), group(), probes=1, seed=seed)
        assert report.probes == 1 and report.leak > 0
    report = verify_fold(lambda ids, at, mask: model(ids, at, mask | mask.mT), PrefixForest.from_sequences([[1, 2, 3]]))
    assert report.leak > 0 and report.leak_where is not None and report.leak_where[1] < report.leak_where[0]


def test_probes_spread_over_nodes_and_follow_the_seed(model):
    completions = [[10 * branch + step for step in range(5)] for branch in range(1, 9)]
    forest = PrefixForest.from_rollout_group([1, 2, 3], completions)

    def probed(seed, forest=forest):
        rows = []

        def forward(ids, at, mask):
            if ids.shape[1] == 43 and not torch.equal(ids, forest.input_ids[None]):
                rows.append(int((ids[0] != forest.input_ids).nonzero()))
            used.update(ids.unique().tolist())
            return model(ids, at, mask)

        used.clear()
        assert verify_fold(forward, forest, probes=7, seed=seed).ok
        return rows

    used = set()

    nodes = [(row - 3) // 5 for row in probed(0)]
    assert sorted(nodes) == list(range(7))  # not in the prompt, which all see, nor in the last branch
    assert all((row - 3) % 5 < 4 for row in probed(0))  # and not the last of a branch, which nobody sees
    assert probed(0) == probed(0) != probed(1)
    last = VOCAB - 1  # ids of the batch are used, and the next one where there is no other
    assert probed(0, group()) == [] and used == {1, 2, 10, 11, 20, 21, 22}
    assert probed(0, PrefixForest.from_sequences([[last, last]])) == [] and used == {last, 0}


def test_a_leak_of_rounding_is_said_and_is_no_finding(model):
    with torch.no_grad():
        largest = float(model(group().input_ids[None], group().position_ids[None], causal(7)).abs().max())

    def leaking(by):
        def forward(ids, at, mask):
            changed = ids.shape[1] == 7 and not torch.equal(ids[0], group().input_ids)
            return model(ids, at, mask) + changed * by

        return forward

    ulp = largest * torch.finfo(torch.float64).eps
    report = verify_fold(leaking(2 * ulp), group())
    assert report.ok and 0 < report.leak <= report.rounding
    assert "which is rounding, as of experts that get more or fewer tokens." in str(report)
    report = verify_fold(leaking(100 * ulp), group())
    assert report.findings == ["leaks"] and "which is rounding" not in str(report)
    assert "which is rounding" not in str(verify_fold(model, group()))
    experts = hf_forward(tiny_model("deepseek_v3"))  # whose matrices change their size
    report = verify_fold(experts, PrefixForest.from_sequences(grown(random.Random(1))), seed=1)
    assert report.ok and report.leak < 1e-5, report


def test_a_forward_that_writes_into_its_arguments_changes_no_batch(model):
    def forward(ids, at, mask):
        kept = [given.clone() for given in (ids, at, mask)]
        for given in (ids, at, mask):
            given.fill_(0)
        return model(*kept)

    batch = prefix_tree_collate_fn([{"prompt_ids": GROUP[0], "completions": GROUP[1]}])
    forest = group()
    assert verify_fold(forward, forest, parameters=model, samples=SEQUENCES).ok
    assert verify_fold(forward, batch, edges=LossEdges.from_forest(forest), samples=SEQUENCES).ok
    assert forest.input_ids.tolist() == [1, 2, 10, 11, 20, 21, 22] == batch["input_ids"][0].tolist()
    assert forest.position_ids.tolist() == [0, 1, 2, 3, 2, 3, 4] == batch["position_ids"][0].tolist()


def test_what_is_not_seen_is_no_leak_but_blind_or_a_difference(model):
    alone = torch.eye(7, dtype=torch.bool)[None, None]
    report = verify_fold(lambda ids, at, mask: model(ids, at, alone if ids.shape[1] == 7 else mask), group())
    assert report.leak == 0 and report.blind_probes == 5  # all but 11 and 22, behind which nobody is
    assert report.findings == ["blind probes", "log-probs"]
    report = verify_fold(lambda ids, at, mask: model(torch.zeros_like(ids), at, mask), group())
    assert report.blind_probes == report.probes == 7 and report.findings == ["blind probes"]

    def without_prompt(ids, at, mask):
        mask = mask.clone()
        if ids.shape[1] == 7:
            mask[:, :, 2:, :2] = False
        return model(ids, at, mask)

    report = verify_fold(without_prompt, group())
    assert report.leak == 0 and report.findings[-1] == "log-probs"
    assert report.logprob_where in {(0, 3), (1, 3), (1, 4)}  # tokens that a row of a branch predicts


def test_dropout_is_said_first_and_nothing_is_compared_with_it():
    report = verify_fold(Transformer(dropout=0.5), group())
    assert report.findings == ["determinism"] and report.noise > 0
    assert report.logprob_error is None and report.gradient_error is None and report.probes == 0
    assert "-       log-probs: not compared: the forward is not deterministic." in str(report)
    assert str(report).splitlines()[-1] == advice("determinism")


def test_rows_that_are_not_finite_are_a_finding(model):
    def forward(ids, at, mask):
        mask = mask.clone()
        mask[:, :, 7:] = False  # padding that sees nothing is NaN, and 0 * NaN in the next layer too, for all rows
        return model(ids, at, mask)

    report = verify_fold(forward, group().padded(8))
    assert report.findings == ["finite logits"] and report.nonfinite_rows == 8
    assert verify_fold(forward, group()).ok
    one = verify_fold(lambda *g: model(*g) * (math.nan if g[0].shape[1] == 5 else 1), group(), parameters=model)
    assert one.findings == ["log-probs", "gradients"]  # a sample that is not finite alone
    assert one.logprob_error == one.gradient_error == math.inf
    assert one.logprob_where is not None and one.logprob_where[0] == 1


def test_other_forms_of_a_right_forward_are_right(model):
    unused = torch.ones(3, dtype=torch.float64, requires_grad=True)
    shift = torch.zeros((), dtype=torch.float64, requires_grad=True)  # moves all logits alike: its gradient is rounding
    grown_forest = PrefixForest.from_sequences(grown(random.Random(5)))
    left_out = torch.tensor([90])
    assert verify_fold(lambda *given: model(*given)[0], group(), parameters=model).ok  # no batch dimension
    assert verify_fold(lambda *g: model(*g).index_fill(-1, left_out, -math.inf), group(), parameters=model).ok
    assert verify_fold(model, group(), parameters=[*model.parameters(), unused]).ok
    assert verify_fold(lambda *g: model(*g) + shift, grown_forest, parameters=[*model.parameters(), shift]).ok
    report = verify_fold(lambda *given: model(*given).bfloat16(), group(), parameters=model)
    assert report.ok and (report.dtype, report.tolerance) == (torch.bfloat16, 5e-2), report
    own = Transformer()
    for parameter in own.parameters():
        parameter.grad = torch.ones_like(parameter)
    own.place.weight.requires_grad_(False)
    assert verify_fold(own, group()).ok
    assert all(torch.equal(parameter.grad, torch.ones_like(parameter)) for parameter in own.parameters())


def test_a_backward_pass_that_differs_is_found_by_gradients_alone(model):
    def forward(ids, at, mask):
        logits = model(ids, at, mask)
        if ids.shape[1] == 7:
            logits = torch.cat([logits[:, :4], logits[:, 4:].detach()], 1)
        return logits

    report = verify_fold(forward, group(), parameters=model.named_parameters())
    assert report.findings == ["gradients"]
    assert report.gradient_error is not None and report.gradient_error > 0.1


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda ids, at, mask: torch.zeros(1, 3, VOCAB), "torch.float32 of shape [1, 3, 97] for 7 ids"),
        (lambda ids, at, mask: torch.zeros(ids.shape[1]), "of shape [7]"),
        (lambda ids, at, mask: torch.zeros(2, ids.shape[1], VOCAB), "of shape [2, 7, 97]"),
        (lambda ids, at, mask: torch.zeros(1, ids.shape[1], VOCAB, dtype=torch.long), "torch.int64"),
        (lambda ids, at, mask: {"logits": 0}, "returned a dict"),
        (lambda ids, at, mask: torch.zeros(1, ids.shape[1], 20), "20 logits a row; the batch has the id 22"),
    ],
)
def test_a_forward_of_another_form_is_an_error(forward, message):
    with refused("E803", message):
        verify_fold(forward, group())


def test_parameters_are_found_or_asked_for(model):
    class Wrapper:
        def __init__(self):
            self.model = model

        def __call__(self, ids, at, mask):
            return model(ids, at, mask)

    def partly_detached(ids, at, mask):
        logits = model(ids, at, mask)
        return logits.detach() if ids.shape[1] == 5 else logits

    def compared(forward, parameters=None):
        return verify_fold(forward, group(), parameters=parameters)

    for report in (
        compared(Wrapper()),
        compared(model.forward),
        compared(lambda *given: model(*given), model),
        compared(lambda *given: model(*given), model.parameters()),
    ):
        assert report.gradient_error is not None and report.ok
    without = compared(lambda *given: model(*given))
    assert without.gradient_error is None and without.ok
    assert str(without).splitlines()[0].endswith("tolerance 1e-10: ok, but not compared: samples, gradients")
    assert str(without).endswith("\nNothing to do for what was compared.")
    assert "-       gradients: not compared: the logits depend on no known parameter; pass parameters=." in str(without)
    assert torch.no_grad()(compared)(model).gradient_error is not None  # also inside another's no_grad
    partly = compared(partly_detached, model)
    assert partly.findings == ["gradients"]
    frozen = compared(torch.no_grad()(model.__call__), model)
    assert frozen.gradient_error is None and frozen.ok


def test_a_small_parameter_is_measured_by_its_own_gradient(model):
    bias = torch.zeros(VOCAB, dtype=torch.float64, requires_grad=True)

    def forward(ids, at, mask):
        of_fold = ids.shape[1] == 7
        return model(ids, at, mask) + 0.1 * (bias.detach() if of_fold else bias)

    named = [*model.named_parameters(), ("bias", bias)]
    report = verify_fold(forward, group(), parameters=named, tolerance=0.1)
    assert report.gradient_error is not None and 0.01 < report.gradient_error < 0.05  # the bias is small
    assert report.worst_parameter == ("bias", 1.0) and report.findings == ["gradients"]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float16, 1e-2), (torch.bfloat16, 5e-2)])
def test_other_precisions_have_a_tolerance_that_rounding_keeps_and_errors_do(dtype, tolerance):
    model = Transformer().to(dtype)

    def off(by):
        def forward(ids, at, mask):
            logits = model(ids, at, mask).float()  # as some models end
            scale = torch.zeros(VOCAB).index_fill(0, torch.tensor([10, 11, 20, 21, 22]), by)
            return logits + scale * (ids.shape[1] == 7)

        return forward

    for forward in (model, off(0)):
        report = verify_fold(forward, group(), parameters=model)
        assert report.ok and (report.dtype, report.tolerance) == (dtype, tolerance), report
    frozen = verify_fold(off(0), group(), parameters=Transformer().to(dtype).requires_grad_(False))
    assert frozen.tolerance == tolerance  # what is not trained rounds too
    wrong = verify_fold(off(4 * tolerance), group(), parameters=model)
    assert "log-probs" in wrong.findings and "half precision" in advice("log-probs").lower()


def test_a_llama_is_right_on_its_routes_and_wrong_with_the_mask_of_another():
    llama = float64_llama(num_hidden_layers=1)
    forest = PrefixForest.from_sequences(grown(random.Random(2), samples=8, levels=3)).padded(8)
    for route in ("under a mask", "by segments"):
        report = verify_fold(hf_forward(llama), forest, parameters=llama)
        assert report.ok and report.logprob_error is not None and report.logprob_error < 1e-13
        assert report.route == route and f"; torch.float64, tolerance 1e-10, {route}: ok" in str(report)
        assert not use_segments(llama)

    assert verify_fold(hf_forward(llama), forest).gradient_error is not None  # its parameters are known
    with refused("E803", "LlamaForCausalLM", "hf_forward(model)"):
        verify_fold(llama, forest)

    llama.set_attn_implementation("eager")
    assert verify_fold(hf_forward(llama), forest, parameters=llama, tolerance=1e-6).ok  # its softmax is float32
    names = ("input_ids", "position_ids", "attention_mask")
    added = verify_fold(lambda *g: llama(**dict(zip(names, g, strict=True)), use_cache=False).logits, forest)
    assert added.findings[0] == "leaks"  # a boolean mask is added to the scores as 0 and 1
