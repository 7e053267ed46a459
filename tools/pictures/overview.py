"""overview.svg: from data to a training step. The numbers are those of the sample's caches."""

from pathlib import Path

import torch

from niels_gpt.cache import PretrainTokenStreamDataset, SFTExampleDataset, read_meta
from niels_gpt.prefix_tree.forest import PrefixForest
from niels_gpt.sampling import Batch, PackedStream
from tools.pictures.sample import sample_caches
from tools.pictures.svg import BLUE, GREEN, INK, LINE, MUTED, ORANGE, PALE, Picture

COLUMNS = (16, 201, 381, 594)  # left edges
WIDTHS = (161, 156, 189, 190)
PACKED = 256  # tokens of the packed row
HEADS = ("You have", "niels_gpt makes", "On disk", "In the training loop")


def draw(target: Path) -> None:
    """Write overview.svg into the folder `target`."""
    with sample_caches("pretrain/fineweb_edu", "sft/oasst1") as caches:
        web = caches / "pretrain" / "fineweb_edu"
        shard = (web / "train" / "shard_00000.bin").read_bytes()[:8]
        meta = read_meta(str(web / "meta.json"))
        x, y = PretrainTokenStreamDataset(web / "train", T=5, device="cpu").get_batch(
            B=1, generator=torch.Generator().manual_seed(0)
        )
        sft = SFTExampleDataset.open(caches / "sft" / "oasst1", "val", T=64)
        masked = sft.get_batch(B=1, generator=torch.Generator().manual_seed(0))[2][0]
        rows = PackedStream(caches / "sft" / "oasst1", split="train", T=PACKED, global_batch_size=1, seed=0)
        packed = next(iter(rows))
    picture = Picture(800, 574, "From data to a training step: token caches, EAGLE-3 target caches, folded rollouts.")
    for left, width, words in zip(COLUMNS, WIDTHS, HEADS, strict=True):
        picture.text(left + width / 2, 30, words, size=13, fill=MUTED, anchor="middle", bold=True)
    token_lane(picture, shard, meta, x[0].tolist(), y[0].tolist(), masked.tolist())
    packed_row(picture, packed)
    eagle_lane(picture)
    folding_lane(picture)
    picture.path("M16 524H784", stroke=LINE)
    care = "Same input, same bytes. Killed builds resume. verify names every damage. Each cache is a Dagster asset."
    picture.text(400, 550, care, size=12.5, fill=MUTED, anchor="middle")
    picture.write(target / "overview.svg")


def card(picture: Picture, column: int, top: float, height: float, colour: str, title: str, lines: list[str]) -> None:
    """Draw one box of a lane with its title and its words."""
    left, width = COLUMNS[column], WIDTHS[column]
    picture.box(left, top, width, height, fill=PALE[colour], stroke=colour)
    picture.text(left + 12, top + 22, title, size=13.5, bold=True, fill=colour)
    picture.lines(left + 12, top + 42, lines, size=12)


def arrows(picture: Picture, y: float, colour: str, columns: tuple[int, ...] = (0, 1, 2)) -> None:
    """Draw the arrows between neighbours of a lane."""
    for column in columns:
        picture.arrow(COLUMNS[column] + WIDTHS[column] + 3, y, COLUMNS[column + 1] - 3, y, stroke=colour)


def cells(picture: Picture, left: float, top: float, words: list[str], colour: str, *, width: float = 31) -> None:
    """Draw a row of small cells; an empty word is a grey one."""
    for number, word in enumerate(words):
        fill = "#ffffff" if word else PALE[MUTED]
        picture.box(left + number * width, top, width - 2, 18, fill=fill, stroke=colour if word else LINE, radius=2)
        picture.text(left + number * width + width / 2 - 1, top + 13, word, size=10, anchor="middle", mono=True)


def token_lane(picture: Picture, shard: bytes, meta: dict, x: list[int], y: list[int], masked: list[int]) -> None:
    """Draw text and chats becoming token files and batches."""
    top = 46
    lines = ["a hub dataset,", "a mirror of it,", "or your own files:", "text, Markdown, JSON,", "parquet, compressed"]
    card(picture, 0, top, 236, BLUE, "Text and chats", lines)
    picture.lines(COLUMNS[0] + 12, top + 146, ["text: pretrain/NAME", "chats: sft/NAME"], size=11, mono=True)
    lines = ["any tokenizer:", "trained on your text,", "a tokenizer.json,", "or a name on the hub", ""]
    lines += ["any chat template,", "with tools", "", "train or val by a", "hash of the text"]
    card(picture, 1, top, 236, BLUE, "Tokens", lines)
    card(picture, 2, top, 236, BLUE, "Token cache", ["shard_00000.bin", "", "", "meta.json"])
    left = COLUMNS[2] + 12
    cells(picture, left, top + 52, [f"{byte:02x}" for byte in shard[:6]], BLUE, width=24)
    picture.text(left + 148, top + 65, "...", size=12)
    facts = [
        f"vocab_size: {meta['vocab_size']:,}",
        f"train_tokens: {meta['train_tokens']:,}",
        f"sha256: {meta['content_sha256'][:12]}",
        "seed, source, licence, ...",
    ]
    picture.lines(left, top + 112, facts, size=10.5, mono=True, step=15)
    others = ["as files of Megatron, OLMo,", "nanoGPT, datatrove, litdata,", "datasets; in a bucket"]
    picture.lines(left, top + 188, others, size=11.5, step=16)
    left = COLUMNS[3] + 12
    card(picture, 3, top, 236, BLUE, "Batches", [])
    for number, (name, row) in enumerate((("x", x), ("y", y))):
        picture.text(left, top + 49 + number * 22, name, size=12, mono=True)
        cells(picture, left + 13, top + 36 + number * 22, [str(token) for token in row], BLUE)
    start = next(place for place, target in enumerate(masked) if target >= 0) - 2
    picture.text(left, top + 101, "chats: loss on replies only", size=11, fill=MUTED)
    row = ["" if target < 0 else str(target) for target in masked[start : start + 5]]
    picture.text(left, top + 122, "y", size=12, mono=True)
    cells(picture, left + 13, top + 109, row, BLUE)
    picture.lines(left, top + 200, ["each sample once an epoch,", "any ranks, resumable"], size=11.5, step=15)
    arrows(picture, top + 118, BLUE)


def packed_row(picture: Picture, batch: Batch) -> None:
    """Draw the examples that share one row of a packed stream, to scale; the padding at its end is grey."""
    assert batch.cu_seqlens is not None and batch.piece_ids is not None
    left, top, scale = COLUMNS[3] + 12, 46 + 152, 166 / PACKED
    picture.text(left, top, "packed: whole chats in one row", size=11, fill=MUTED)
    borders = batch.cu_seqlens.tolist()
    for start, end, piece in zip(borders[:-1], borders[1:], batch.piece_ids.tolist(), strict=True):
        words, width = f"chat {piece}" if piece >= 0 else "", (end - start) * scale
        picture.box(
            left + start * scale,
            top + 7,
            width - 1,
            18,
            fill=PALE[BLUE] if words else PALE[MUTED],
            stroke=BLUE if words else LINE,
            radius=2,
        )
        if width > 36:
            picture.text(left + start * scale + width / 2, top + 20, words, size=10, anchor="middle", mono=True)


def eagle_lane(picture: Picture) -> None:
    """Draw chats and a target model becoming the supervision of a draft."""
    top = 300
    card(picture, 0, top, 98, ORANGE, "Chats and target", ["any chat template,", "a frozen model of", "transformers"])
    card(
        picture,
        1,
        top,
        98,
        ORANGE,
        "Forward passes",
        ["made once: the hidden", "states that a draft", "learns from"],
    )
    card(
        picture,
        2,
        top,
        98,
        ORANGE,
        "EAGLE-3 target cache",
        ["native: hidden states,", "or probabilities in the", "format of NeMo Automodel"],
    )
    card(
        picture,
        3,
        top,
        98,
        ORANGE,
        "Draft training",
        ["the target is not loaded;", "also in SpecForge and", "speculators"],
    )
    arrows(picture, top + 49, ORANGE)


def folding_lane(picture: Picture) -> None:
    """Draw rollouts becoming one row of a prefix forest, with the mask of a real forest."""
    top = 416
    card(picture, 0, top, 90, GREEN, "Rollouts", ["many completions of", "one prompt, turns,", "message trees"])
    card(picture, 1, top, 90, GREEN, "PrefixForest", ["shared prefixes once,", "with mask, positions", "and loss"])
    left = COLUMNS[2]
    card(picture, 2, top, 90, GREEN, "", [])
    forest = PrefixForest.from_rollout_group([1, 2, 3, 4], [[10, 11, 12], [20, 21], [20, 22, 23]])
    side, total = 6.4, len(forest.input_ids)
    for query in range(total):
        for key in range(total):
            seen = key <= query < int(forest.subtree_end[key])
            fill = GREEN if seen else PALE[MUTED]
            picture.box(
                left + 12 + key * side, top + 10 + query * side, side - 1, side - 1, fill=fill, stroke="none", radius=1
            )
    lengths = forest.sample_offsets.tolist()
    picture.lines(
        left + 82,
        top + 22,
        ["rollouts/NAME:", "groups, folded:", f"{lengths[-1]} tokens", f"become {total}"],
        size=12,
        fill=INK,
    )
    card(
        picture,
        3,
        top,
        90,
        GREEN,
        "One step",
        ["the loss and gradients of", "the samples run alone,", "with fewer tokens"],
    )
    arrows(picture, top + 45, GREEN)
