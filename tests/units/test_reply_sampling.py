"""How a token of a reply is drawn from logits, on paper."""

import torch

from niels_gpt.eagle3.speaker import _sampled


def test_a_token_is_the_first_whose_cumulative_probability_exceeds_the_uniform_number():
    probs = torch.tensor([0.1, 0.4, 0.2, 0.3])
    uniform = torch.tensor([0.0, 0.0999, 0.1001, 0.4999, 0.5001, 0.6999, 0.7001, 0.9999], dtype=torch.float64)
    logits = probs.log().expand(8, 4)
    assert _sampled(logits, 1.0, uniform).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    # top_p 0.6 keeps 0.4 and 0.3, ids 1 and 3, whose border is at 4/7 = 0.571.
    assert _sampled(logits, 0.6, uniform).tolist() == [1, 1, 1, 1, 1, 3, 3, 3]
    assert _sampled(logits, 0.4, uniform).tolist() == [1] * 8
