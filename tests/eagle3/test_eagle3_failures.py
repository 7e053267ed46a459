"""What goes wrong on the way: numbers that are not finite, dead workers, a full disk; finished shards stay."""

import copy
import errno
import multiprocessing
import os
import shutil
import signal
import subprocess
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import eagle3_runs as small
from support.commands import niels_gpt
from support.eagle3_runs import disk, has_shard, never, patched, run, samples_of, times, whole_tree
from support.errors import refused
from support.processes import open_in
from torch import nn

from niels_gpt.eagle3.target import load_target

Tree = dict[str, bytes]
CPU = torch.device("cpu")


def broken(device):
    """The target, which gives no numbers for token 13 from its block 3 on."""
    model = copy.deepcopy(small.load(CPU))

    def spoil(module, given, output):
        (ids,) = seen
        return output.masked_fill((ids == 13).unsqueeze(-1), float("nan"))

    seen = []
    model.model.embed_tokens.register_forward_pre_hook(lambda module, given: seen.__setitem__(slice(None), [given[0]]))
    model.model.layers[3].register_forward_hook(spoil)
    return model


@pytest.mark.parametrize("workers", [1, 2])
def test_a_number_that_is_not_finite_stops_the_run_by_sample_and_layer(tmp_path, workers):
    rows = [small.Row(f"chat {number}", [13 if number == 9 else 1, 2, 3], [1, 1, 1]) for number in range(12)]
    with refused("E708", "'chat 9', slot 0, block 3: nan", kind=RuntimeError):
        run(tmp_path / "c", samples=rows, load=broken, workers=workers, start="fork")
    assert not (tmp_path / "c" / "meta.json").exists() and not list((tmp_path / "c").rglob("*.tmp"))
    if workers == 1:  # of two, the other one may have been stopped before
        assert [has_shard(tmp_path / "c", shard) for shard in range(3)] == [True, True, False]
    run(tmp_path / "c", samples=rows, resume=True)
    run(tmp_path / "d", samples=rows)
    assert whole_tree(tmp_path / "c") == whole_tree(tmp_path / "d")


def large(device):
    model = small.load(CPU).__class__(small.load(CPU).config).eval()
    with torch.no_grad():
        model.model.layers[3].mlp.down_proj.weight.mul_(1e9)
    return model


def test_a_hidden_state_that_fp16_cannot_hold_stops_the_run(tmp_path):
    with refused("E708", "block 3: ", "torch.float16", kind=RuntimeError):
        run(tmp_path / "c", given=small.plan(samples_of(), dtype="fp16"), load=large)
    run(tmp_path / "d", given=small.plan(samples_of(), dtype="bf16"), load=large)


def test_a_cache_that_is_mended_is_not_called_finished_meanwhile(cache):
    for shard in range(3):
        (cache / f"shard-{shard:06d}.safetensors").unlink()
    with refused("E708", kind=RuntimeError):
        run(cache, load=broken, resume=True)
    assert not (cache / "meta.json").exists()


def dies(device):
    os.kill(os.getpid(), signal.SIGKILL)


class Unpicklable(ValueError):
    """An error that cannot be sent from one process to another."""

    def __init__(self, a, b):
        super().__init__(f"{a} of {b}")


def fails(device):
    raise Unpicklable(1, 2)


class Gone(multiprocessing.context.ForkProcess):
    """A worker that is not the first one, which has tried the target, and dies at once."""

    def __init__(self, *, target, args, **_):
        self.is_first = args[2] == 0
        super().__init__(target=target if self.is_first else gone, args=args, daemon=True)

    def start(self):
        super().start()
        if not self.is_first:
            self.join()


def gone(*args):
    """Ask for a shard and be gone before it is given."""
    *_, parent = args
    parent.send(("next",))
    parent.close()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_dies_before_its_answer_is_told_too(cache, monkeypatch):
    for shard in (0, 1):
        (cache / f"shard-{shard:06d}.safetensors").unlink()
    monkeypatch.setattr(multiprocessing.get_context("fork"), "Process", Gone)
    with refused("E506", "SIGKILL", kind=RuntimeError):
        run(cache, workers=2, start="fork", resume=True)


def offline(device):
    raise ConnectionError("the hub cannot be reached")


@pytest.mark.parametrize(
    ("load", "error", "code", "text"),
    [
        (dies, RuntimeError, "E506", "SIGKILL"),
        (fails, RuntimeError, "E506", "Unpicklable: 1 of 2"),
        (offline, ConnectionError, "E601", "the hub cannot be reached"),
    ],
)
def test_a_worker_that_fails_stops_the_run_and_leaves_no_process(tmp_path, whole, load, error, code, text):
    with refused(code, text, kind=error):
        run(tmp_path / "c", load=load, workers=2, start="fork")
    assert multiprocessing.active_children() == []
    run(tmp_path / "c", resume=True)
    assert whole_tree(tmp_path / "c") == whole


def test_an_error_of_the_writer_stops_the_run_and_what_is_done_stays(tmp_path, whole):
    calls = []

    def full(write, *given):
        calls.append(given)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device", "shard-000001.safetensors")
        write(*given)

    small.load(CPU)
    found = ("1 of 3 shards", "--resume", "shard-000001")
    with patched(write=full), refused("E501", *found, kind=OSError) as caught:
        run(tmp_path / "c")
    assert isinstance(caught.value, OSError) and caught.value.errno == errno.ENOSPC
    assert not list((tmp_path / "c").rglob("*.tmp"))
    assert len(calls) == 3 and open_in(tmp_path) == []
    assert run(tmp_path / "c", resume=True).shards == 2
    assert whole_tree(tmp_path / "c") == whole


def test_an_interrupted_run_goes_on(tmp_path, whole):
    def interrupt(size, done, total):
        assert total is not None
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "c", progress=interrupt)
    assert not list((tmp_path / "c").rglob("*.tmp")) and not (tmp_path / "c" / "meta.json").exists()
    run(tmp_path / "c", resume=True)
    assert whole_tree(tmp_path / "c") == whole


def does_not_load(device):
    raise ValueError("its weights are not there")


class Broken(nn.Module):
    """A block that does not run."""

    def forward(self, *given, **named):
        raise NotImplementedError("sdpa cannot run this")


def does_not_run(device):
    model = copy.deepcopy(small.load(device))
    model.model.layers[2] = Broken()
    return model


def has_fewer_tokens(device):
    model = copy.deepcopy(small.load(device))
    model.lm_head = nn.Linear(small.HIDDEN, small.VOCAB - 1, bias=False)
    return model.requires_grad_(False)


FAILING = {
    "load": (does_not_load, ["E102", "its weights are not there"]),
    "run": (does_not_run, ["E705", "sdpa cannot run this", "--attention eager"]),
    "sizes": (has_fewer_tokens, ["E705", "39 logits a token, expected 48 and 40"]),
}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("fault", FAILING)
def test_a_failing_target_leaves_no_folder(tmp_path, fault, workers):
    load, found = FAILING[fault]
    with refused(*found):
        run(tmp_path / "c", load=load, workers=workers, start="fork")
    assert list(tmp_path.iterdir()) == []


def test_a_failing_target_leaves_a_folder_as_it_was_for_one_that_runs(tmp_path):
    run(tmp_path / "c")
    (tmp_path / "c" / "shard-000001.safetensors").unlink()
    before = times(tmp_path / "c")
    with refused("E705", "--attention eager"):
        run(tmp_path / "c", load=does_not_run, resume=True)
    assert times(tmp_path / "c") == before
    assert run(tmp_path / "c", resume=True).shards == 1


@pytest.mark.parametrize(
    ("weight", "where"),
    [
        ("model.layers.3.mlp.down_proj.weight", "block 3: nan"),
        ("model.embed_tokens.weight", "block 1: nan"),
        ("lm_head.weight", "logits: nan"),
    ],
)
@pytest.mark.parametrize("form", ["1", "native"])
def test_a_weight_that_is_not_finite_is_named_before_anything_is_written(tmp_path, model, chats, form, weight, where):
    broken = shutil.copytree(model, tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    weights[weight][:, 5] = float("nan")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    what = ["--target-model", broken, "--input-data", chats, "--seq-length", 40, "--device", "cpu", "--threads", 1]
    for more in ([], ["--workers", 2]):
        done = niels_gpt(
            "eagle3", "precompute", *what, "--format", form, "--output-dir", tmp_path / "c", *more, "--json"
        )
        message = done.json["error"]["message"]
        assert done.status == 3 and done.json["error"]["code"] == "E708", done.err
        assert "sample '" in message and where in message and f"broken: {weight}" in message
        assert "--format" not in message and not (tmp_path / "c").exists()


def test_an_attention_that_a_model_does_not_have_is_named_with_the_flag(tmp_path):
    import transformers

    bloom = transformers.BloomConfig(hidden_size=8, n_layer=8, n_head=2, vocab_size=40)
    transformers.BloomForCausalLM(bloom).save_pretrained(tmp_path)
    how = {"revision": None, "dtype": torch.float32, "device": "cpu"}
    with refused("E705", "'sdpa'", "--attention eager"):
        load_target(str(tmp_path), attention="sdpa", **how)
    load_target(str(tmp_path), attention="eager", **how)


@pytest.mark.parametrize(
    ("size", "taken"),
    [
        pytest.param("1m", 0, marks=pytest.mark.slow, id="on the way"),
        pytest.param("128k", 108 << 10, id="from the beginning"),
    ],
)
def test_a_disk_that_is_full_is_told_and_the_run_goes_on_with_room(tmp_path, size, taken):
    samples = samples_of(300)
    given = small.plan(samples, dtype="fp32", shard_size=10)  # 6 kB a sample
    somebody_else_fills_it = patched(room=lambda *_: None)
    with disk(tmp_path / "small", size) as place, somebody_else_fills_it:
        (place / "mine").write_bytes(bytes(taken))
        with refused("E501", "" if taken else " of 30 shards", kind=OSError) as caught:
            run(place / "c", samples=samples, given=given)
        assert isinstance(caught.value, OSError) and caught.value.errno == errno.ENOSPC
        assert not list(place.rglob("*.tmp"))
        assert (0 < sum(has_shard(place / "c", shard) for shard in range(30)) < 30) == (not taken)
        (place / "mine").unlink()
        subprocess.run(["mount", "-o", "remount,size=100m", str(place)], check=True)
        assert 0 < run(place / "c", samples=samples, given=given, resume=True).shards < 30 + bool(taken)
        run(tmp_path / "d", samples=samples, given=given)
        assert whole_tree(place / "c") == whole_tree(tmp_path / "d")


@pytest.mark.parametrize(
    ("form", "less"),
    [
        ({}, "--format native, --draft-vocab-size"),
        (small.NATIVE, "--aux-dtype fp8"),
        (small.NATIVE | {"dtype": "fp16", "aux_dtype": "fp16"}, None),  # fp16 has no states in fp8
        (small.FP8, None),
        (small.MTP, None),
    ],
    ids=["dense", "native", "fp16", "fp8", "no block"],
)
def test_a_run_without_room_names_only_what_makes_its_form_smaller(tmp_path, monkeypatch, form, less):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    with refused("E501", "0 are free") as caught:
        run(tmp_path / "c", given=small.plan(samples_of(), **form), load=never)
    flags = ", ".join(["--limit", "--seq-length", *([less] if less else [])])
    assert str(caught).endswith(f"or ask for less: {flags}")


def test_a_finished_cache_is_up_to_date_on_a_full_disk(cache, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    assert run(cache, resume=True, load=never).shards == 0
    (cache / "meta.json").unlink()
    (cache / "shard-000001.safetensors").unlink()
    with refused("E501", "0 are free"):
        run(cache, resume=True, load=never)
