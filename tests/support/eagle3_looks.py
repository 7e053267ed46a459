"""What is asked of a finished EAGLE-3 cache: its checks, the target once more, its figures and rows."""


def verdicts(cache, **how):
    """The verdict of each check by its name. how: names, follow_links and progress."""
    from niels_gpt.eagle3.inspect.verify import verify

    return verify(cache, **how)


def problems_of(cache, **how):
    """The problems of all checks."""
    return [problem for verdict in verdicts(cache, **how).values() for problem in verdict.problems]


def run_again(cache, facts, load, run, **how):
    """The verdict on samples that go through a target again. facts, run: as in a plan. how: k, seed, follow_links."""
    from niels_gpt.eagle3.inspect.recompute import Target, recomputed

    return recomputed(cache, Target(facts, load, run), **how)


def summary(cache):
    """What `inspect` prints of a cache, as rows."""
    from niels_gpt.eagle3.inspect import show

    return show.summary(cache)


def sample_heading(cache, number):
    """The line above the slots of a sample."""
    from niels_gpt.eagle3.inspect import show

    return show.sample_heading(cache, number)


def slot_rows(cache, number, **how):
    """The slots of a sample as `inspect --sample` prints them. how: begin and slots."""
    from niels_gpt.eagle3.inspect import show

    return show.slot_rows(cache, number, **how)


def stats_of(cache):
    """The figures of a cache."""
    from niels_gpt.eagle3.inspect.stats import stats

    return stats(cache)


def check_names():
    """The names of all checks, the second run of the target last."""
    from niels_gpt.eagle3.inspect.checks import CHECKS, RECOMPUTED

    assert list(CHECKS)[-1] == RECOMPUTED
    return list(CHECKS)
