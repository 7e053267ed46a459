"""The assets eagle3/draft_vocab and eagle3/targets, whose settings decide what lies upstream of them."""

from niels_gpt.recipes.eagle3.request import KEY, SMALL_TARGET, VOCAB_KEY
from pipelines.deployment import Deployment, HomeAssets
from pipelines.steps import cache_asset


def assets_of(deployment: Deployment) -> HomeAssets:
    """Return both assets."""
    chosen = deployment.settings
    vocab = (
        f"The tokens that an EAGLE-3 draft knows: the target's ids that {chosen.eagle3_source} supervises most often, "
        "counted without the target's weights. eagle3/targets takes them from here; another size builds this again, "
        "and of a native eagle3/targets the manifest alone."
    )
    targets = (
        f"EAGLE-3 cache of {chosen.eagle3_source} by the target {chosen.eagle3_target or SMALL_TARGET}: for each token "
        "hidden states of some layers, and the distribution of what comes next (in the native form, the hidden state "
        "that it follows from), for a draft to be trained without the target. Made from the chats themselves by the "
        "target's own tokenizer and template; needs the extra eagle3."
    )
    texts = {VOCAB_KEY: vocab, KEY: targets}
    return HomeAssets([cache_asset(deployment, key, "eagle3", text) for key, text in texts.items()])
