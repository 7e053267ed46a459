"""The assets eagle3/draft_vocab and eagle3/targets. Their settings decide their upstream assets."""

from niels_gpt.recipes.eagle3.request import KEY, SMALL_TARGET, VOCAB_KEY
from pipelines.deployment import Deployment, HomeAssets
from pipelines.steps import cache_asset


def assets_of(deployment: Deployment) -> HomeAssets:
    """Return both assets."""
    chosen = deployment.settings
    vocab = (
        f"Vocabulary of an EAGLE-3 draft: the target's ids that carry loss most often in {chosen.eagle3_source}. The "
        "target's weights are not needed. eagle3/targets uses it; a new size rebuilds this asset, and of a native "
        "eagle3/targets only the manifest."
    )
    targets = (
        f"EAGLE-3 cache: outputs of the target {chosen.eagle3_target or SMALL_TARGET} over {chosen.eagle3_source}, to "
        "train a draft without the target. For each token it has the hidden states of some layers and the distribution "
        "of the next token; in the native form, the last hidden state instead. The chats are encoded with the target's "
        "own tokenizer and template. Needs the extra eagle3."
    )
    texts = {VOCAB_KEY: vocab, KEY: targets}
    return HomeAssets([cache_asset(deployment, key, "eagle3", text) for key, text in texts.items()])
