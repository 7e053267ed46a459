"""Make the pictures of the site and the README from real runs.

    python -m tools.pictures [NAME...]     all, or some: see PICTURES; into docs/images/

All but dagster*.png give the same bytes at every run. Those need the extra `browser` and Debian's chromium.
"""

import sys
from collections.abc import Callable
from pathlib import Path

from tools.pictures import charts, concepts, dagster_page, masks, overview, plan

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
PICTURES: dict[str, Callable[[Path], None]] = {
    "overview": overview.draw,
    "benchmarks": charts.draw,
    "loss_mask": masks.draw_loss,
    "folded_mask": masks.draw_folded,
    "versions": concepts.draw_versions,
    "splits": concepts.draw_splits,
    "resume": concepts.draw_resume,
    "exactly_once": concepts.draw_exactly_once,
    "plan": plan.draw,
    "dagster": dagster_page.draw,
}


def main(names: list[str]) -> int:
    """Draw the named pictures, or all."""
    unknown = sorted(set(names) - set(PICTURES))
    if unknown:
        print(f"no picture {', '.join(unknown)}; expected some of {', '.join(PICTURES)}", file=sys.stderr)
        return 2
    IMAGES.mkdir(exist_ok=True)
    for name in names or PICTURES:
        PICTURES[name](IMAGES)
        print(name)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
