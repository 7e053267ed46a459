"""Streams in Lightning's Trainer: the position is in its checkpoints, for any number of devices and workers."""

from pathlib import Path

import pytest

pytest.importorskip("lightning")

from lightning.pytorch import Callback, LightningDataModule, Trainer
from support import lightning_run, trainer_runs
from support.documents import lines_to_copy
from support.lightning_run import QUIET, Tiny
from support.mixed_caches import build_three, open_mixture

from niels_gpt.sampling import EpochStream, MixtureStream, iter_eval
from niels_gpt.storage.errors import StateError, StreamUseError
from niels_gpt.trainers.lightning import StreamDataModule

# Of Lightning: a class of torch that it uses, a feature that is refused here, and a first run of a page.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.isinstance.treespec:FutureWarning",
    "ignore:You are using the `datal",
    "ignore:Checkpoint directory",
    "ignore:.fit.ckpt_path",
)


@pytest.fixture(scope="module")
def caches(tmp_path_factory):
    return build_three(tmp_path_factory.mktemp("caches"))


@pytest.mark.slow
def test_killed_run_goes_on_with_other_ranks_and_workers(caches, tmp_path):
    """2 ranks and 1 worker each, then 1 rank and 2 workers, then 2 ranks without workers; gradients accumulate."""

    def run(name, workers, **others):
        trainer_runs.run(lightning_run.__file__, tmp_path / name, caches, workers, **others)

    (tmp_path / "whole").mkdir()
    lightning_run.main(tmp_path / "whole", caches, 0)
    run("killed", 1, ranks=2, kill_at=trainer_runs.KILLED_AT)
    run("killed", 2, kill_at=29)
    run("killed", 0, ranks=2)
    whole, killed = (trainer_runs.steps(tmp_path / name) for name in ("whole", "killed"))
    assert list(killed) == list(whole) == list(range(1, trainer_runs.STEPS + 1))
    assert [rows for rows, _ in killed.values()] == [rows for rows, _ in whole.values()]
    assert [loss for _, loss in killed.values()] == pytest.approx([loss for _, loss in whole.values()], abs=1e-6)


def fit(data, on_batch=lambda *_: None, *, model=Tiny, ckpt_path=None, **trainer):
    """Train quietly in this process; return the Trainer."""
    made = Trainer(**{**QUIET, "enable_checkpointing": False, **trainer})
    made.fit(model(on_batch), datamodule=data, ckpt_path=ckpt_path)
    return made


def opener(caches, **others):
    """Return what opens a mixture of plain windows, of three epochs where nothing else is given."""

    def opened(rank, world_size):
        arguments = {"when_exhausted": 3, "G": 4, "rank": rank, "world_size": world_size, **others}
        return open_mixture(caches, ["plain"], [1], **arguments)

    return opened


def validation(caches):
    """Return what gives the batches of a validation."""
    return lambda rank, world_size: iter_eval(
        caches / "pretrain" / "plain" / "train", B=2, T=12, rank=rank, world_size=world_size
    )


def rows_of(opened):
    return [batch.x.tolist() for batch in opened(0, 1)]


def test_epochs_of_lightning_are_parts_of_the_stream(caches, tmp_path):
    """Three parts, then as many batches again from the checkpoint of the second."""
    opened, seen = opener(caches), []
    wanted = rows_of(opened)
    part = len(wanted) // 3
    data = StreamDataModule(opened)
    trainer = fit(data, lambda _, batch, __: seen.append(batch.x.tolist()), max_epochs=2, limit_train_batches=part)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    fit(
        StreamDataModule(opened, num_workers=1),
        lambda _, batch, __: seen.append(batch.x.tolist()),
        ckpt_path=tmp_path / "two.ckpt",
        max_epochs=3,
        limit_train_batches=part,
    )
    assert seen == wanted[: 3 * part]


def test_whole_stream_is_one_epoch(caches):
    opened, seen = opener(caches), []
    wanted = rows_of(opened)
    fit(StreamDataModule(opened), lambda _, batch, __: seen.append(batch.x.tolist()), max_epochs=1)
    assert seen == wanted
    with pytest.raises(StreamUseError):
        fit(StreamDataModule(opened), max_epochs=2)


class Failed(Exception):
    pass


def test_checkpoint_of_an_error_has_the_batches_trained_before(caches, tmp_path):
    """The error comes in the middle of a batch, which is trained on after the restart."""
    opened, seen = opener(caches), []
    wanted = rows_of(opened)

    def on_batch(number, batch, loss):
        if len(seen) == 5:
            seen.append(None)
            raise Failed
        seen.append(batch.x.tolist())

    class Saver(Callback):
        def on_exception(self, trainer, pl_module, exception):
            trainer.save_checkpoint(tmp_path / "error.ckpt")

    with pytest.raises(Failed):
        fit(StreamDataModule(opened), on_batch, max_epochs=1, callbacks=[Saver()])
    fit(StreamDataModule(opened), on_batch, max_epochs=1, ckpt_path=tmp_path / "error.ckpt")
    assert seen[:5] + seen[6:] == wanted


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("hook", "trained"),
    [("on_train_batch_start", 3), ("on_train_batch_end", 4), ("on_validation_start", 4), ("on_validation_end", 4)],
)
def test_checkpoint_of_any_hook(caches, tmp_path, hook, trained, workers):
    """Also between a batch that was fetched and its training, and around a validation in mid-epoch."""
    opened, path, seen = opener(caches), tmp_path / "hook.ckpt", []
    wanted = rows_of(opened)

    class Validated(Tiny):
        def validation_step(self, batch, batch_idx):
            pass

    def saved(trainer, *_):
        if len(seen) == trained and not path.exists():
            trainer.save_checkpoint(path)
            trainer.should_stop = True

    def on_batch(number, batch, loss):
        seen.append(batch.x.tolist())

    saver = Callback()
    setattr(saver, hook, saved)
    how = {"model": Validated, "max_steps": 8, "val_check_interval": 4, "num_sanity_val_steps": 0}
    data = [StreamDataModule(opened, open_validation=validation(caches), num_workers=workers) for _ in range(2)]
    fit(data[0], on_batch, callbacks=[saver], **how)
    del seen[trained:]
    fit(data[1], on_batch, ckpt_path=path, **how)
    assert seen == wanted[:8]


def test_fit_after_an_error_trains_on_the_batch_of_the_error(caches):
    """By the same data module, and another Trainer."""
    opened, seen = opener(caches), []
    data = StreamDataModule(opened)

    def on_batch(number, batch, loss):
        if len(seen) == 5 and number == 6:
            raise Failed
        seen.append(batch.x.tolist())

    with pytest.raises(Failed):
        fit(data, on_batch, max_epochs=1)
    fit(data, on_batch, max_epochs=1)
    assert seen == rows_of(opened)


def test_batch_that_ends_an_epoch_untrained_begins_the_next(caches):
    opened, seen = opener(caches), []

    class Skips(Tiny):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 3 else None

    fit(
        StreamDataModule(opened),
        lambda _, batch, __: seen.append(batch.x.tolist()),
        model=Skips,
        max_epochs=2,
        limit_train_batches=5,
    )
    assert seen == rows_of(opened)[:6]


def test_last_batches_are_stepped_on_though_lightning_expected_more(caches, tmp_path):
    """An epoch ends before its limit, and after a checkpoint of smaller batches: gradients of 4 batches accumulate."""
    stepped, seen = [], []

    class Steps(Tiny):
        def on_before_optimizer_step(self, optimizer):
            stepped.append(self.trainer.fit_loop.epoch_loop.total_batch_idx + 1)

    def on_batch(number, batch, loss):
        seen.append(batch.x.tolist())

    opened, how = opener(caches), {"model": Steps, "accumulate_grad_batches": 4}
    fit(StreamDataModule(opened), on_batch, max_epochs=3, limit_train_batches=4, **how)
    assert seen == rows_of(opened) and len(seen) == 10
    assert stepped == [4, 8, 10]
    data = StreamDataModule(opened)
    fit(data, max_steps=1, **how)
    stepped.clear()
    fit(data, max_epochs=1, **how)
    assert stepped == [4, 6]


@pytest.mark.parametrize("accumulated", [1, 3])
def test_another_batch_size_serves_the_rest(caches, tmp_path, accumulated):
    """Lightning counts batches, so the module tells it how many of the new size are left."""
    opened, rows, stepped = opener(caches), [], []
    wanted = [row for batch in rows_of(opened) for row in batch]

    class Steps(Tiny):
        def on_before_optimizer_step(self, optimizer):
            stepped.append(len(rows))

    class Saver(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 2:
                trainer.save_checkpoint(tmp_path / "3.ckpt")
                raise Failed

    def on_batch(number, batch, loss):
        rows.extend(batch.x.tolist())

    how = {"max_epochs": 1, "accumulate_grad_batches": accumulated, "model": Steps}
    with pytest.raises(Failed):
        fit(StreamDataModule(opened), on_batch, callbacks=[Saver()], **how)
    fit(StreamDataModule(opener(caches, G=8)), on_batch, ckpt_path=tmp_path / "3.ckpt", **how)
    assert rows == wanted
    assert stepped == ([4, 8, 12, 20, 28, 36, 39] if accumulated == 1 else [12, 36, 39])


def test_checkpoint_of_other_data_is_refused(caches, tmp_path):
    fit(StreamDataModule(opener(caches)), max_steps=2).save_checkpoint(tmp_path / "2.ckpt")
    with pytest.raises(StateError):
        fit(StreamDataModule(opener(caches, seed=9)), max_steps=4, ckpt_path=tmp_path / "2.ckpt")


@pytest.mark.filterwarnings("ignore:.*the mixture changes at sample")
def test_run_goes_on_with_another_length_of_rows_where_that_is_said(caches, tmp_path):
    """In two epochs of Lightning: each opens the changed stream again."""
    data, seen = StreamDataModule(opener(caches)), []
    fit(data, max_steps=2).save_checkpoint(tmp_path / "2.ckpt")

    def shorter(rank, world_size):
        stream = EpochStream(caches / "pretrain" / "plain" / "train", T=6, global_batch_size=4, seed=0)
        return MixtureStream([stream], [1.0], seed=1, block_size=9, when_exhausted=3)

    expected = shorter(0, 1)
    expected.load_state_dict(data.state_dict()["stream"], changed=True)
    how = {"ckpt_path": tmp_path / "2.ckpt", "max_epochs": 3, "limit_train_batches": 10}
    with pytest.raises(StateError):
        fit(StreamDataModule(shorter), **how)
    fit(StreamDataModule(shorter, changed=True), lambda _, batch, __: seen.append(batch.x.tolist()), **how)
    wanted = [batch.x.tolist() for batch in expected]
    assert len(seen) > 15 and seen == wanted[: len(seen)]


def test_checkpoint_without_a_position_is_refused(caches, tmp_path):
    """Of another data module; but one of a model before its first batch begins at the start."""

    class Other(LightningDataModule):
        def train_dataloader(self):
            return opener(caches)(0, 1)

    fit(Other(), max_steps=2).save_checkpoint(tmp_path / "2.ckpt")
    with pytest.raises(StateError):
        fit(StreamDataModule(opener(caches)), max_steps=4, ckpt_path=tmp_path / "2.ckpt")
    fit(StreamDataModule(opener(caches)), max_steps=0).save_checkpoint(tmp_path / "0.ckpt")
    assert fit(StreamDataModule(opener(caches)), max_steps=1, ckpt_path=tmp_path / "0.ckpt").global_step == 1


def test_validation_of_each_rank(caches):
    """The function is called for each validation."""
    calls, sizes = [], []
    of_rank = validation(caches)

    class Validated(Tiny):
        def validation_step(self, batch, batch_idx):
            sizes.append(int((batch[1] != -100).sum()))

    def opened(rank, world_size):
        calls.append((rank, world_size))
        return of_rank(rank, world_size)

    data = StreamDataModule(opener(caches), open_validation=opened)
    fit(data, model=Validated, max_steps=4, val_check_interval=2, num_sanity_val_steps=0)
    assert calls == [(0, 1)] * 2
    assert sum(sizes) == 2 * 181


@pytest.mark.filterwarnings("ignore:You have overridden")  # it would leave out the model's
def test_hook_of_the_model_is_called_too(caches):
    seen = []

    class Hooked(Tiny):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            seen.append(batch.state["consumed_samples"])
            return batch

    fit(StreamDataModule(opener(caches)), model=Hooked, max_steps=3)
    assert seen == [4, 8, 12]


def test_wrong_uses_are_refused(caches):
    class OfIterator(Tiny):
        def training_step(self, dataloader_iter):
            raise AssertionError

    with pytest.raises(StreamUseError):
        fit(StreamDataModule(opener(caches)), model=OfIterator, max_steps=1)
    with pytest.raises(StreamUseError):
        fit(StreamDataModule(opener(caches, rank=1, world_size=2, drop_last=True)), max_steps=1)
    with pytest.raises(StreamUseError):
        StreamDataModule(opener(caches)).train_dataloader()
    with pytest.raises(StreamUseError):
        fit(StreamDataModule(opener(caches)), max_steps=1, overfit_batches=1)
    for changes_batches in ({"batch_size": 2}, {"collate_fn": list}, {"in_order": False}):
        with pytest.raises(StreamUseError):
            StreamDataModule(opener(caches), **changes_batches)


def test_the_lines_of_the_page_run(caches, tmp_path, monkeypatch):
    """Twice, on one CPU, with a small cache at the page's place: an error stops the first run, the second continues."""
    code = lines_to_copy("StreamDataModule").replace('devices="auto"', f"devices=1, **{QUIET}").replace("1_000", "3")
    monkeypatch.chdir(tmp_path)
    Path("cache").mkdir()
    Path("cache/wiki").symlink_to(caches / "pretrain" / "plain")
    numbers = []

    def on_batch(number, batch, loss):
        numbers.append(number)
        if len(numbers) == 8:
            raise Failed

    with pytest.raises(Failed):
        exec(code, {"model": Tiny(on_batch)})
    exec(code, {"model": Tiny(on_batch)})
    assert numbers == [*range(1, 9), *range(7, numbers[-1] + 1)]
    assert numbers[-1] > 9
