"""The harness of the attack tables sees what a probe must not do; see support/attacks.py."""

import os
import time

import pytest
from support.attacks import Attack, Probe

IMPORTS = ()
ATTACKS = {"a link": Attack(lambda root, outside: (root / "link").symlink_to(outside / "bait"))}


def build(root):
    root.mkdir()
    (root / "bait").write_bytes(b"12345678")


def fails(root):
    raise TypeError("not a documented error")


def says_little(root):
    raise ValueError("bad")


FAULTS = {
    "opens": (lambda root: (root / "link").read_bytes(), "opened what is outside"),
    "lists": (lambda root: os.listdir(root.parent / "outside"), "opened what is outside"),
    "writes": (lambda root: (root / "more").write_bytes(b"1"), "changed the folder"),
    "fails": (fails, "TypeError"),
    "says little": (says_little, "half a message"),
    "prints": (lambda root: print("\x1b[2J"), "control characters"),
    "allocates": (lambda root: len(bytes(2 << 30)), "MemoryError"),
    "ends": (lambda root: os._exit(0), "no answer"),
}
PROBES = {name: Probe(call) for name, (call, _) in FAULTS.items()} | {
    "is good": Probe(lambda root: (root / "bait").read_bytes()),
    "sleeps": Probe(lambda root: time.sleep(0.01)),
}


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="reads /proc")
def test_each_fault_of_a_probe_is_seen_and_no_other(attack_server):
    outcomes = attack_server.outcomes_of("test_attack_harness", "a link")
    faults = {outcome.probe: "; ".join(outcome.faults) for outcome in outcomes}
    assert faults.keys() == PROBES.keys() and not faults["is good"] and not faults["sleeps"]
    for name, (_, expected) in FAULTS.items():
        assert expected in faults[name], name
