"""The speed in the progress of `eagle3 precompute`."""

from types import SimpleNamespace

from niels_gpt.commands.eagle3 import precompute


def test_the_speed_counts_neither_what_was_there_nor_the_loading_of_the_target(monkeypatch, capsys):
    now = 0.0
    monkeypatch.setattr(precompute, "time", SimpleNamespace(monotonic=lambda: now))
    tell = precompute._Lines("target", "tok")
    for now, done, size in ((20.0, 500, 0), (1000.0, 600, 5_000_000), (1020.0, 800, 45_000_000)):  # noqa: B007
        tell(size, done, 1000)
    assert capsys.readouterr().err.splitlines() == [
        "target: 500 tok, 50%",
        "target: 600 tok, 60%",
        "target: 800 tok, 80%, 10 tok/s, 2.0 MB/s, 20 s left",
    ]
