"""The caches that the pictures show: built from the bundled sample, so their bytes are the same on every machine."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from niels_gpt.recipes.plan import RECIPES
from niels_gpt.settings import Settings


@contextmanager
def sample_caches(*keys: str) -> Iterator[Path]:
    """Build caches of the sample in a temporary folder; yields the folder that holds pretrain/, sft/ and tokenizer/."""
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its size, which is meant
        logging.disable(logging.WARNING)
        settings = Settings(source_root="sample", cache_dir=folder)
        for key in keys:
            RECIPES[key](settings)
        logging.disable(logging.NOTSET)
        yield Path(folder) / "sample"
