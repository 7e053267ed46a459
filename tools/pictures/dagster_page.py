"""dagster.png and dagster_group.png: Dagster's pages of the sample's caches, as the browser test saw them."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
PAGES = {"asset.png": ("dagster.png", 955), "group.png": ("dagster_group.png", 1130)}
"""Screenshots of tests/pipelines/test_ui.py, 1,500 pixels wide: their names here, and the pixels kept from the top."""


def draw(target: Path) -> None:
    """Run the browser test and write its screenshots, smaller, with a palette of 256 colours."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "browser", "tests/pipelines/test_ui.py"]
        environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        subprocess.run([*command, f"--basetemp={folder}/ui"], cwd=ROOT, env=environment, check=True)
        for name, (published, height) in PAGES.items():
            (found,) = Path(folder, "ui").glob(f"test*0/{name}")
            picture = Image.open(found).convert("RGB").crop((0, 0, 1500, height))
            picture = picture.resize((1200, height * 4 // 5), Image.Resampling.LANCZOS)
            picture = picture.quantize(256, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
            picture.save(target / published, "png", optimize=True)
