"""EAGLE-3 caches read straight from a URL: the same batches, what is fetched, and damage there."""

import hashlib
import json
import multiprocessing
import os
import pickle
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import fsspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.commands import niels_gpt
from support.disk import meta_bytes
from support.eagle3_native import write_native
from support.errors import refused
from support.small_eagle3 import fields_of, manifest_of, write_cache
from torch.utils.data import DataLoader

from niels_gpt.eagle3 import Eagle3Stream
from niels_gpt.eagle3.cache import (
    CachedEagle3Dataset,
    build_cached_eagle3_dataloader,
    read_target_embeddings,
    write_manifest,
    write_target_embeddings,
)
from niels_gpt.eagle3.format.layout import MANIFEST_NAME, layout_like
from niels_gpt.eagle3.format.meta import write_meta
from niels_gpt.eagle3.format.shard_writer import ShardWriter
from niels_gpt.eagle3.format.weights import write_weights
from niels_gpt.eagle3.head import TargetHead
from niels_gpt.eagle3.native import FIELDS, NativeEagle3Dataset, build_native_dataloader
from niels_gpt.sampling import MixtureStream
from niels_gpt.storage.mounted import MOUNTED

pytestmark = pytest.mark.filterwarnings("ignore:the last batch has")
FORMS = ["version 1", "top k", "native", "fp8", "fields", "native as six keys"]
MASKS = [[0, 1] + [0] * number + [1, 0] * (number % 3) for number in range(11)]
MIB = 1 << 20


@pytest.fixture(autouse=True)
def mounts():
    """The mounts that a test makes, which go after it."""
    before = dict(MOUNTED)
    yield lambda: [mount for folder, mount in MOUNTED.items() if folder not in before]
    for folder in MOUNTED.keys() - before.keys():
        del MOUNTED[folder]


def sealed(folder):
    """Write the meta.json of a folder that has all else."""
    write_meta(folder, {"totals": {"tokens": 100, "supervised_tokens": 10, "shards": 3}, "tokenizer_sha256": "ab" * 32})
    return folder


def written(folder, form, seed=0):
    """Write a whole cache of eleven samples in three or four shards."""
    if form in FORMS[:2]:
        write_cache(folder, samples=11, shard_size=3, topk=3 * (form == "top k"), seed=seed)
    else:
        masks, dtype = MASKS[:: -1 if seed else 1], "fp8" if form in ("fp8", "fields") else "bf16"
        targets = {"targets": "all"} if form == "fields" else {}
        write_native(folder, masks, cuts=[4, 7], aux_dtype=dtype, **targets)
        write_weights(folder, {"lm_head": torch.randn(50, 4), "embeddings": torch.randn(50, 4), "norm": torch.ones(4)})
    return sealed(folder)


def opened(form, place, **how):
    if form in ("native", "fp8", "fields"):
        return NativeEagle3Dataset(place, fields=FIELDS if form == "fields" else None, **how)
    return CachedEagle3Dataset(place, **how, **({"target_probs": False} if "six" in form else {}))


def at_memory(folder, name):
    """Copy a cache to memory://. Returns the URL."""
    fsspec.filesystem("memory").put(str(folder), f"/{name}", recursive=True)
    return f"memory://{name}"


@pytest.fixture
def place(tmp_path):
    """Keyword arguments of a cache at a URL."""
    return {"local": tmp_path / "local", "max_bytes": "16 MiB"}


@pytest.fixture(params=FORMS)
def form(request):
    return request.param


def digest(batch):
    found = hashlib.sha256(json.dumps([[name, list(tensor.shape)] for name, tensor in batch.items()]).encode())
    for tensor in batch.values():
        found.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def digests(batches):
    return [digest(batch) for batch in batches]


def stream(dataset, **changed):
    return Eagle3Stream(dataset, **{"global_batch_size": 4, "seed": 3, "epochs": 2, **changed})


def flip(path, at=-1):
    """Change a byte of a file, and leave its size and its time."""
    about, content = path.stat(), bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))


# --- the same batches -------------------------------------------------------------------------------------------------


def test_batches_from_a_url_are_those_of_the_folder(tmp_path, form, place):
    cache = written(tmp_path / "c", form)
    there = opened(form, f"file://{cache}", **place)
    here = opened(form, cache)
    assert there.fingerprint() == here.fingerprint() and len(there) == len(here)
    assert str(cache) in repr(there) and str(tmp_path / "local") not in repr(there)
    assert digests(stream(there)) == digests(stream(here))
    by_shards = [digests(stream(each, order="shards", open_shards=2)) for each in (there, here)]
    assert by_shards[0] == by_shards[1] != digests(stream(here))
    with refused("E101", "order", "windows"):
        stream(there, order="windows")
    if form in FORMS[:2]:
        assert there[-1].keys() == here[-1].keys()
        assert there[-1]["target_probs"].equal(here[-1]["target_probs"])


def test_the_order_by_shards_is_as_documented(tmp_path):
    fields = write_cache(tmp_path / "c", samples=11, shard_size=3)
    numbers = {states.numpy().tobytes(): number for number, states in enumerate(fields["aux_hidden_states"])}
    how = {"global_batch_size": 1, "seed": 5, "epochs": 3, "order": "shards", "open_shards": 3}
    batches = Eagle3Stream(CachedEagle3Dataset(tmp_path / "c"), **how)
    served = [numbers[batch["aux_hidden_states"].numpy().tobytes()] for batch in batches]
    assert served == [
        *[9, 10, 4, 5, 3, 1, 2, 8, 7, 0, 6],
        *[5, 9, 4, 10, 3, 8, 7, 2, 1, 0, 6],
        *[6, 5, 8, 4, 7, 3, 0, 9, 1, 10, 2],
    ]


def test_a_resume_with_other_ranks_and_from_the_folder(tmp_path, form, place):
    cache = written(tmp_path / "c", form)
    here, there = opened(form, cache), opened(form, f"file://{cache}", **place)
    whole = digests(stream(here, order="shards", open_shards=2))
    first, taken = stream(there, order="shards", open_shards=2), []
    for batch in first:
        taken.append(digest(batch))
        if len(taken) == 3:
            break
    state = batch.state
    assert taken == whole[:3]
    for dataset in (there, here):  # a state moves between a URL and a folder
        again = stream(dataset, order="shards", open_shards=2)
        again.load_state_dict(state)
        assert digests(again) == whole[3:]
    parts = [stream(there, order="shards", open_shards=2, rank=rank, world_size=2) for rank in range(2)]
    alone = [stream(here, order="shards", open_shards=2, rank=rank, world_size=2) for rank in range(2)]
    for part, one in zip(parts, alone, strict=True):
        part.load_state_dict(state)
        one.load_state_dict(state)
        assert digests(part) == digests(one)


def test_copies_workers_and_threads_read_it_too(tmp_path, place, mounts):
    cache = at_memory(written(tmp_path / "c", "native"), "copies/native")
    dataset = NativeEagle3Dataset(cache, **place)
    whole = digests(stream(dataset))
    assert digests(stream(pickle.loads(pickle.dumps(dataset)))) == whole
    forked = DataLoader(stream(dataset), batch_size=None, num_workers=2, multiprocessing_context="fork")
    assert digests(forked) == whole
    with ThreadPoolExecutor(4) as threads:
        samples = list(threads.map(dataset.__getitem__, [*range(len(dataset))] * 3))
    assert all(
        one.aux_hidden_states.equal(dataset[number % 11].aux_hidden_states) for number, one in enumerate(samples)
    )


@pytest.mark.slow
def test_a_spawned_process_reads_it(tmp_path, place):
    cache = written(tmp_path / "c", "version 1")
    dataset = CachedEagle3Dataset(f"file://{cache}", **place)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_digests_of, (dataset,)) == digests(stream(CachedEagle3Dataset(cache)))


def _digests_of(dataset):
    return digests(stream(dataset))


@pytest.mark.parametrize("form", ["top k", "fp8"])
def test_loaders_take_a_url(tmp_path, form, place):
    cache = written(tmp_path / "c", form)
    build = build_native_dataloader if form == "fp8" else build_cached_eagle3_dataloader
    url = at_memory(cache, f"loaders/{form[:3]}")
    assert digests(build(url, 4, False, **place)) == digests(build(cache, 4, False))
    some = [torch.utils.data.Subset(opened(form, where, **how), [-1, 3]) for where, how in ((url, place), (cache, {}))]
    both = [DataLoader(each, batch_size=2, collate_fn=build(cache, 2, False).collate_fn) for each in some]
    assert digests(both[0]) == digests(both[1])
    with pytest.raises(IndexError):
        opened(form, url, **place).__getitems__([0, 11])


@pytest.mark.slow
def test_a_mixture_of_caches_at_urls_and_of_a_folder(tmp_path, place):
    caches = [written(tmp_path / name, "native", seed) for seed, name in enumerate("ab")]
    urls = [NativeEagle3Dataset(f"file://{cache}", **place) for cache in caches]
    parts = [[opened("native", cache) for cache in caches], [urls[0], opened("native", caches[1])], urls]
    mixed = [MixtureStream([stream(each, epochs=None) for each in some], [1, 2], seed=0) for some in parts]
    found = [digests(islice(each, 12)) for each in mixed]
    assert found[0] == found[1] == found[2]


def test_embeddings_and_head_come_whole(tmp_path, form, place):
    cache = written(tmp_path / "c", form)
    dataset = opened(form, f"file://{cache}", **place)
    assert read_target_embeddings(dataset.cache_dir).equal(read_target_embeddings(cache))
    if form not in FORMS[:2]:
        batch = next(iter(build_native_dataloader(cache, 4, False)))
        heads = [TargetHead.of_cache(folder) for folder in (dataset.cache_dir, cache)]
        assert heads[0].target_probs(batch).equal(heads[1].target_probs(batch))


def test_a_shard_without_a_receipt_comes_whole(tmp_path, form, place):
    cache = written(tmp_path / "c", form)
    (cache / "sidecar" / "shard-000001.json").unlink()
    dataset = opened(form, f"file://{sealed(cache)}", **place)
    assert digests(stream(dataset)) == digests(stream(opened(form, cache)))
    (whole,) = (tmp_path / "local").glob("c-*/shard-*")
    assert whole.read_bytes() == (cache / "shard-000001.safetensors").read_bytes()
    whole.unlink()  # as an eviction does
    flip(cache / "shard-000001.safetensors")
    with refused("E611", "shard-000001.safetensors"):
        pickle.loads(pickle.dumps(dataset))[5]


def test_a_header_longer_than_the_first_request(tmp_path, place):
    cache = written(tmp_path / "c", "version 1")
    path, receipt = cache / "shard-000000.safetensors", cache / "sidecar" / "shard-000000.json"
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    text = json.dumps({"__metadata__": {"note": "x" * 100_000}} | json.loads(content[8:end])).encode()
    header = len(text).to_bytes(8, "little") + text
    path.write_bytes(header + content[end:])
    about = {"bytes": path.stat().st_size, "header_sha256": hashlib.sha256(header).hexdigest()}
    receipt.write_text(json.dumps(json.loads(receipt.read_bytes()) | about))
    dataset = CachedEagle3Dataset(f"file://{sealed(cache)}", **place)
    assert digests(stream(dataset)) == digests(stream(CachedEagle3Dataset(cache)))


@pytest.mark.slow
def test_starts_longer_than_the_first_request(tmp_path, place):
    write_native(tmp_path / "c", [[0, 1]] * 2800, cuts=[2750])
    write_weights(tmp_path / "c", {"embeddings": torch.ones(50, 4)})
    dataset, here = (
        NativeEagle3Dataset(f"file://{sealed(tmp_path / 'c')}", **place),
        NativeEagle3Dataset(tmp_path / "c"),
    )
    assert (dataset.counts == here.counts).all()
    numbers = [0, 2749, 2750, 2799]
    assert digest_of_samples(dataset, numbers) == digest_of_samples(here, numbers)


def test_local_without_a_url_is_refused(tmp_path, place):
    cache = written(tmp_path / "c", "version 1")
    with refused("E101", "local"):
        CachedEagle3Dataset(cache, **place)
    with refused("E101", "local"):
        CachedEagle3Dataset(f"file://{cache}")


# --- damage -----------------------------------------------------------------------------------------------------------


def test_a_tensor_without_slots_is_refused(tmp_path, place):
    cache = tmp_path / "c"
    write_cache(cache, samples=3, shard_size=3)
    path, receipt = cache / "shard-000000.safetensors", cache / "sidecar/shard-000000.json"
    tensors = load_file(path)
    path.unlink()
    save_file({**tensors, "extra": torch.arange(3)}, path)
    raw = path.read_bytes()
    header = raw[: 8 + int.from_bytes(raw[:8], "little")]
    about = {"bytes": len(raw), "header_sha256": hashlib.sha256(header).hexdigest()}
    receipt.write_text(json.dumps(json.loads(receipt.read_bytes()) | about))
    sealed(cache)
    with refused("E701", "shard-000000"):
        CachedEagle3Dataset(f"file://{cache}", **place)[0]


@pytest.mark.parametrize("form", ["version 1", "native"])
def test_verify_passes_what_its_reader_opens(tmp_path, form, place, mounts):
    cache = written(tmp_path / "c", form)
    assert niels_gpt("verify", f"file://{cache}").status == 0
    write_manifest(cache, json.loads((cache / MANIFEST_NAME).read_bytes()) | {"num_samples": 12})
    sealed(cache)  # its meta.json fits all files
    with refused("E611" if form == "version 1" else "E701"):
        opened(form, f"file://{cache}", **place)
    assert niels_gpt("verify", f"file://{cache}").status == 3


@pytest.mark.parametrize("form", ["top k", "native"])
def test_a_damaged_sample_at_the_url_is_named(tmp_path, form, place):
    cache = written(tmp_path / "c", form)
    dataset = opened(form, f"file://{cache}", **place)
    shard = cache / "shard-000001.safetensors"
    flip(shard, -20)
    with refused("E611", "shard-000001.safetensors", "sample"):
        digests(stream(dataset))
    with refused("E611", "shard-000001.safetensors"):  # again, and not the bytes of the first attempt
        digests(stream(dataset))
    assert digest_of_samples(dataset, range(3)) == digest_of_samples(opened(form, cache), range(3))


def digest_of_samples(dataset, numbers):
    samples = [dataset[number] for number in numbers]
    return digests([sample if isinstance(sample, dict) else tensors_of(sample) for sample in samples])


def tensors_of(sample):
    return {
        name: torch.as_tensor(value) for name, value in vars(sample).items() if value is not None and name != "targets"
    }


@pytest.mark.parametrize("form", ["version 1", "native"])
@pytest.mark.parametrize("at", [3, 30])
def test_a_damaged_header_at_the_url_is_named(tmp_path, form, at, place):
    cache = written(tmp_path / "c", form)
    flip(cache / "shard-000002.safetensors", at)
    with refused("E611", "shard-000002.safetensors"):
        opened(form, f"file://{cache}", **place)


def test_damaged_starts_and_loss_bits_are_named(tmp_path, place):
    cache = written(tmp_path / "c", "native")
    flip(cache / "shard-000002.safetensors", -1)  # loss bits are last
    with refused("E611", "shard-000002.safetensors"):
        NativeEagle3Dataset(f"file://{cache}", **place)


def test_a_shard_that_is_gone_or_short_is_named(tmp_path, form, place):
    cache = written(tmp_path / "c", form)
    dataset = opened(form, f"file://{cache}", **place)
    shard = cache / "shard-000000.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-200])
    with refused("E611", "shard-000000.safetensors"):
        digests(stream(dataset))
    shard.unlink()
    with refused("E611", "shard-000000.safetensors"):
        digests(stream(dataset))
    with refused("E611", "shard-000000.safetensors"):
        opened(form, f"file://{cache}", **place)
    shard.write_bytes(whole)
    assert digests(stream(dataset)) == digests(stream(opened(form, cache)))


def test_a_replaced_cache_is_refused(tmp_path, form, place):
    cache = written(tmp_path / "c", form)
    dataset = opened(form, f"file://{cache}", **place)
    before = digests(stream(dataset))
    shutil.rmtree(cache)
    shutil.copytree(written(tmp_path / "other", form, seed=1), cache)
    for piece in (tmp_path / "local").glob("*/.pieces/*"):
        piece.unlink()
    with refused("E610", str(cache)):
        digests(stream(dataset))
    assert digests(stream(opened(form, f"file://{cache}", **place))) != before


@pytest.mark.parametrize("form", ["version 1", "fp8"])
def test_a_piece_that_is_damaged_in_the_folder_is_fetched_again(tmp_path, form, place, mounts, caplog):
    cache = written(tmp_path / "c", form)
    dataset = opened(form, f"file://{cache}", **place)
    before = digests(stream(dataset))
    pieces = sorted((tmp_path / "local").glob("*/.pieces/*"))
    assert pieces
    for piece in pieces:
        flip(piece, piece.stat().st_size // 2)
    assert digests(stream(dataset)) == before
    assert "W611" in [getattr(record, "code", "") for record in caplog.records]


def test_a_cache_of_another_kind_is_refused_by_its_url(tmp_path, place):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "meta.json").write_bytes(meta_bytes({"kind": "other", "files": []}))
    with refused("E208", f"file://{tmp_path}/c/manifest.json"):
        CachedEagle3Dataset(f"file://{tmp_path}/c", **place)
    (tmp_path / "c" / "meta.json").write_bytes(meta_bytes({"kind": "other", "files": [], "shards": {}}))
    with refused("E208", f"file://{tmp_path}/c/meta.json"):
        CachedEagle3Dataset(f"file://{tmp_path}/c", **place)


# --- what is fetched --------------------------------------------------------------------------------------------------


def large(folder, form):
    """Write a cache of 160 MiB in shards of 8 MiB."""
    if form == "version 1":
        write_cache(folder, samples=20 * 16, shard_size=16, slots=6600)
    else:
        masks = [[0] * 40 + [1, 0] * 12] * (20 * 16)
        write_native(folder, masks, cuts=range(16, 20 * 16, 16), hidden_size=4300, shard_bytes=8 * MIB)
        (folder / "target_weights.safetensors").write_bytes(b"of no use here")
    return sealed(folder)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["version 1", "native"])
def test_an_epoch_by_shards_fetches_the_cache_about_once(tmp_path, form, mounts):
    cache = large(tmp_path / "c", form)
    size = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
    where = {"local": tmp_path / "local", "max_bytes": size // 10, "max_ahead": 4 * MIB}
    dataset = opened(form, f"file://{cache}", **where)
    (mount,) = mounts()
    assert mount.fetched_bytes < 20 * 2 * 65_536 + 100_000  # header, starts and loss bits of 20 shards
    assert digest_of_samples(dataset, [200]) == digest_of_samples(opened(form, cache), [200])
    assert mount.fetched_bytes < 20 * 2 * 65_536 + 7 * MIB  # a sample of half a MiB lies in several pieces
    how = {"order": "shards", "open_shards": 1, "epochs": 1}
    before = mount.fetched_bytes
    first = digest(next(iter(stream(dataset, **how))))
    time.sleep(0.3)
    assert mount.fetched_bytes - before < 20 * MIB  # a shard, and 4 MiB ahead
    there = digests(stream(dataset, **how))
    assert first == there[0]
    assert mount.fetched_bytes <= 1.1 * size
    kept = sum(path.stat().st_size for path in (tmp_path / "local").rglob("*") if path.is_file())
    assert kept <= size // 10 + MIB
    assert there == digests(stream(opened(form, cache), **how))


@pytest.mark.slow
def test_large_weights_come_in_ranges_and_must_fit(tmp_path, place, mounts):
    folder = written(tmp_path / "c", "version 1")
    weight = torch.randn(1_100_000, 8)
    write_target_embeddings(folder, weight)
    dataset = CachedEagle3Dataset(at_memory(sealed(folder), "large/weights"), **place)
    with refused("E501", "16,777,216", "35,200,088"):
        read_target_embeddings(dataset.cache_dir)
    again = CachedEagle3Dataset("memory://large/weights", **{**place, "max_bytes": "48 MiB"})
    assert read_target_embeddings(again.cache_dir).equal(weight)


def padded(folder, used, slots, width):
    """Write a cache of one shard with so many slots of content in each row. Returns its fields."""
    fields = fields_of(len(used), slots=slots)
    fields["aux_hidden_states"] = torch.randn(1, 1, width).repeat(len(used), slots, 1)
    for row, count in enumerate(used):
        for name in fields.keys() - {"input_ids", "attention_mask", "loss_mask"}:
            fields[name][row, count:] = 0
    writer = ShardWriter(folder, 0, layout_like(fields).fields, len(used))
    writer.write(range(len(used)), used, fields)
    writer.commit()
    manifest = manifest_of(samples=len(used), shard_size=len(used), slots=slots)
    write_manifest(folder, {**manifest, "aux_hidden_dim": width})
    write_target_embeddings(folder, torch.ones(20, 2))
    sealed(folder)
    return fields


@pytest.mark.slow
def test_slots_of_padding_are_not_fetched(tmp_path, place, mounts):
    folder = tmp_path / "c"
    fields = padded(folder, [500, 100_000, 1], 100_000, 6)
    dataset = CachedEagle3Dataset(at_memory(folder, "padded/c"), **place)
    row_bytes = layout_like(fields).row_bytes
    (mount,) = mounts()
    for row in (0, 2):
        assert all(tensor.equal(fields[name][row]) for name, tensor in dataset[row].items())
    assert mount.fetched_bytes < 2 * row_bytes - 3 * MIB
    assert all(tensor.equal(fields[name][1]) for name, tensor in dataset[1].items())
    assert digests(stream(dataset)) == digests(stream(CachedEagle3Dataset(folder)))


def test_a_cache_on_a_disk_whose_padding_is_holes(tmp_path, place):
    fields = padded(tmp_path / "c", [3, 1], 500, 6000)
    about = (tmp_path / "c" / "shard-000000.safetensors").stat()
    assert 512 * about.st_blocks * 64 < about.st_size  # a sixty-fourth, of other caches the least
    dataset = CachedEagle3Dataset(f"file://{tmp_path}/c", **place)
    assert all(tensor.equal(fields[name][1]) for name, tensor in dataset[1].items())


@pytest.mark.slow
@pytest.mark.parametrize("form", ["top k", "native", "fields"])
def test_over_a_server(tmp_path, form, place, s3_server, mounts):
    cache = written(tmp_path / "c", form)
    name = f"team/eagle3-{form[:3]}"
    fsspec.filesystem("s3").put(str(cache), f"s3://{name}", recursive=True)
    s3_server.delay_s = 0.005
    dataset = opened(form, f"s3://{name}", **place)
    assert digests(stream(dataset)) == digests(stream(opened(form, cache)))
    shutil.rmtree(tmp_path / "local")
    for mount in mounts():
        del MOUNTED[str(mount.folder)]
    s3_server.refuse, s3_server.cut_after = 2, 3_000
    assert digests(stream(opened(form, f"s3://{name}", **place))) == digests(stream(opened(form, cache)))
    assert s3_server.refuse == 0 and s3_server.cut_after is None


@pytest.mark.slow
def test_a_sample_that_is_altered_on_its_way_is_fetched_again(tmp_path, place, s3_server, caplog):
    cache = written(tmp_path / "c", "native")
    fsspec.filesystem("s3").put(str(cache), "s3://team/altered-eagle3", recursive=True)
    dataset = NativeEagle3Dataset("s3://team/altered-eagle3", **place)
    content = (cache / "shard-000000.safetensors").read_bytes()
    answer = b"HTTP/1.1 206 Partial Content\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(content)
    lies = [answer, content[:-20] + b"?" + content[-19:]]

    def once():
        return [lies.pop(0) for _ in range(2)] if lies else None

    s3_server.lies = {b"GET /team/altered-eagle3/shard-000000": once}
    assert digests(stream(dataset)) == digests(stream(NativeEagle3Dataset(cache)))
    assert not lies and "W611" in [getattr(record, "code", "") for record in caplog.records]
