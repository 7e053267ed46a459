"""Write tests/not_quick.txt, what `make quick` leaves out, from the durations of a run of the suite.

    PYTEST_ADDOPTS="--durations=0 --durations-min=0" make test > LOG
    python tools/not_quick.py LOG [--seconds 0.04]

A test is left out if one of its cases takes longer, and a file where few cases are left: its imports would take longer
than they do. A test that the log does not know is quick until the list is made anew.
"""

import argparse
import re
from collections import Counter, defaultdict
from pathlib import Path

LIST = Path(__file__).resolve().parent.parent / "tests" / "not_quick.txt"
FEWEST = 10
"""Quick cases of a file that is worth its imports."""


def left_out(log: str, seconds: float) -> list[str]:
    """Return the arguments for pytest, one a line, that leave out what takes longer."""
    cases: Counter[str] = Counter()
    for took, case in re.findall(r"^([0-9.]+)s (?:setup|call|teardown) +(\S.*)$", log, re.MULTILINE):
        cases[case] += float(took)
    tests: defaultdict[str, list[float]] = defaultdict(list)
    for case, took in cases.items():
        tests[case.partition("[")[0]].append(took)
    quick: Counter[str] = Counter()
    for test, found in tests.items():
        quick[test.partition("::")[0]] += len(found) if max(found) < seconds else 0
    ignored = {file for file, number in quick.items() if number < FEWEST}
    slow = {test for test, found in tests.items() if max(found) >= seconds and test.partition("::")[0] not in ignored}
    return [*(f"--ignore={file}" for file in sorted(ignored)), *(f"--deselect={test}" for test in sorted(slow))]


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("log", type=Path)
    parser.add_argument("--seconds", type=float, default=0.04, help="what a case of a quick test takes at most")
    arguments = parser.parse_args()
    lines = left_out(arguments.log.read_text(encoding="utf-8"), arguments.seconds)
    LIST.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
