"""What the sources of a mirror of real text hold, and target caches of its chats."""

from collections import Counter

from niels_gpt.chat import open_tokenizer
from niels_gpt.data.files.rows import iter_rows
from niels_gpt.data.sources import SOURCES
from niels_gpt.recipes import sources
from niels_gpt.recipes.resolve import resolve_source
from niels_gpt.settings import Settings


def files_of(settings, name):
    """The files of a source."""
    return list(resolve_source(settings, name).files)


def rows_of(settings, name):
    """How many rows the files of a source have."""
    return sum(1 for _ in iter_rows(resolve_source(settings, name).files))


def texts_of(settings, name):
    """The documents of a pretrain source, as a build reads them."""
    for _, text, _ in sources.document_rows(settings, resolve_source(settings, name), None, Counter()):
        yield text


def chats_of(settings, name):
    """The chats of an sft source with their source ids, as a build reads them."""
    return list(sources.chats(settings, resolve_source(settings, name), None, Counter()))


def training_texts(settings, names=SOURCES):
    """The texts that a tokenizer is trained on, of each of these sources that is there."""
    for name in names:
        source = resolve_source(settings, name)
        if not source.stub:
            yield sources.training_texts(settings, source, None)


def target_cache(settings, folder, **options):
    """Build an EAGLE-3 target cache of a source in a folder; returns its manifest."""
    from niels_gpt.recipes.eagle3.options import Options
    from niels_gpt.recipes.eagle3.prepare import carry_out, prepare
    from niels_gpt.recipes.eagle3.request import resolve

    return carry_out(prepare(resolve(Options(**options), settings)), folder).meta


def tokenized(chats, target, seq_length):
    """The rows of a file of chats, tokenized for a target."""
    from niels_gpt.recipes.eagle3.input import input_rows

    tokenizer = open_tokenizer(str(target))
    return input_rows(Settings(), str(chats), tokenizer, seq_length=seq_length, counters=Counter())


def sample_rows(cache):
    """The source id, ids and mask of each sample of a target cache."""
    from niels_gpt.eagle3.format.samples import Samples

    samples = Samples.open(cache / "sidecar")
    for index, name in enumerate(samples.source_ids):
        yield name, *samples.row(index)
