"""dagster.png: Dagster's page of a cache of the sample, as the browser test saw it."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
KEPT = 955  # pixels from the top of the screenshot, which is 1,500 wide: below them are paths of a temporary folder


def draw(target: Path) -> None:
    """Run tests/pipelines/test_ui.py and write its screenshot of an asset, smaller, with a palette of 256 colours."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "browser", "tests/pipelines/test_ui.py"]
        environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        subprocess.run([*command, f"--basetemp={folder}/ui"], cwd=ROOT, env=environment, check=True)
        (found,) = Path(folder, "ui").glob("test*0/asset.png")
        picture = Image.open(found).convert("RGB").crop((0, 0, 1500, KEPT))
    picture = picture.resize((1200, KEPT * 4 // 5), Image.Resampling.LANCZOS)
    picture = picture.quantize(256, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    picture.save(target / "dagster.png", "png", optimize=True)
