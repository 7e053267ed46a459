"""dagster*.png: pages of Dagster over caches of the sample, as the browser test saw them."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "dagster.png": "asset.png",
    "dagster_metadata.png": "figures.png",
    "dagster_catalog.png": "catalog.png",
    "dagster_lineage.png": "lineage.png",
    "dagster_component.png": "component.png",
    "dagster_stale.png": "sft_stale.png",
    "dagster_failed.png": "failed.png",
    "dagster_automation.png": "automation.png",
}
"""The pictures, and the screenshot of a window that each is made of."""
TALL = {"dagster_automation.png": 400}
"""Pixels from the top of a screenshot that has nothing below them."""
WIDTH = 1200
"""Pixels of a picture."""


def draw(target: Path) -> None:
    """Run tests/pipelines/test_ui.py and write its screenshots, smaller, each with a palette of 256 colours."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "browser", "tests/pipelines/test_ui.py"]
        environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        subprocess.run([*command, f"--basetemp={folder}/ui"], cwd=ROOT, env=environment, check=True)
        for name, screenshot in PAGES.items():
            (found,) = Path(folder, "ui").glob(f"test*0/{screenshot}")
            _small(found, TALL.get(name)).save(target / name, "png", optimize=True)


def _small(screenshot: Path, height: int | None) -> Image.Image:
    """Return a screenshot for a document. height: of what is kept, in its pixels; None: all."""
    picture = Image.open(screenshot).convert("RGB")
    picture = picture.crop((0, 0, picture.width, height or picture.height))
    size = (WIDTH, picture.height * WIDTH // picture.width)
    picture = picture.resize(size, Image.Resampling.LANCZOS)
    return picture.quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)  # light grounds stay
