"""One copy of the target over several processes: tensor parallelism, by the plan that transformers has for the model.

Each process, a rank, holds a part of the blocks' matrices, on a GPU of its own, and all of them run each forward pass
in lockstep. Rank 0 leads: it sends its inputs to the others through pipes, takes hidden states, computes logits and
writes; the others only compute. Embeddings and lm_head are whole in each rank, as rank 0 stores them and computes
logits from chosen rows. The parts of a sum are added in another order than in one process, so the number of ranks is in
the plan.

`eagle3.workers` starts the processes and ends them all if one fails. They find each other through a port of the
loopback interface that the system chooses.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from niels_gpt.storage.errors import TargetError

_WAIT = timedelta(minutes=30)  # for a rank that still loads; one that died is noticed at once
_HOST = "127.0.0.1"
_REMEDY = "Leave out --tensor-parallel"


class Rank(NamedTuple):
    """One process of a copy of the target."""

    number: int
    """0 leads."""
    ranks: int
    ends: tuple[Connection, ...]
    """Rank 0: to each other rank; another rank: to rank 0."""


def new_ranks(context: Any, ranks: int) -> list[Rank]:
    """Return the ranks of one copy, connected by pipes. context: of multiprocessing."""
    pipes = [context.Pipe() for _ in range(ranks - 1)]
    others = [Rank(number, ranks, (end,)) for number, (_, end) in enumerate(pipes, 1)]
    return [Rank(0, ranks, tuple(end for end, _ in pipes)), *others]


def refuse_few_gpus(device: str, ranks: int, workers: int) -> None:
    """Raise TargetError (E705) if this machine has fewer GPUs than `workers` copies of `ranks` GPUs need."""
    if ranks > 1 and device == "cuda" and ranks * workers > (found := torch.cuda.device_count()):
        copies = f" with --workers {workers}" if workers > 1 else ""
        fits = f"Pass --workers {found // ranks}" if found >= ranks else f"Pass {found} or less, or --device-map auto"
        raise TargetError(
            f"--tensor-parallel {ranks}{copies} takes {ranks * workers} GPUs, and torch finds {found}. {fits}"
        )


def distributed_config(name: str, model: Any, ranks: int) -> Any:
    """Return the `DistributedConfig` with which `from_pretrained` loads a rank's part of a model.

    name: of the target, for errors. model: transformers' model of its config, which needs no weights.
    Raises: TargetError (E705) if transformers has no plan for this model, or its heads cannot be split evenly.
    """
    import transformers
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.tensor_parallel import get_kv_heads_per_rank

    whole = {id(layer) for layer in (model.get_input_embeddings(), model.get_output_embeddings())}
    ends = {path: "replicate" for path, module in model.named_modules() if id(module) in whole}
    plan: Mapping[str, str] = {path: style for path, style in model.tp_plan.items() if path not in ends}
    if not plan:
        raise TargetError(
            f"{name}: transformers {transformers.__version__} has no tensor-parallel plan for model_type "
            f"{model.config.model_type!r}. Split its layers instead: --device-map auto, without --tensor-parallel"
        )
    text = model.config.get_text_config()
    heads = {each: getattr(text, each, None) for each in ("num_attention_heads", "num_key_value_heads")}
    for each, number in heads.items():
        if number is not None and get_kv_heads_per_rank(dict(plan), number, ranks) is None:
            raise TargetError(
                f"{name}: --tensor-parallel {ranks} does not divide its {each}, {number}. Pass a number that divides "
                f"{' and '.join(str(value) for value in heads.values() if value is not None)}"
            )
    return DistributedConfig(tp_size=ranks, tp_plan=ends)


def join_ranks(rank: Rank, device: torch.device) -> None:
    """Join torch's process group of a copy: gloo on the CPU, nccl on GPUs. Once in a process, before it loads.

    Raises: torch.distributed's errors, if another rank does not come.
    """
    distributed: Any = torch.distributed
    on_cpu = device.type == "cpu"
    os.environ |= {"RANK": str(rank.number), "WORLD_SIZE": str(rank.ranks), "LOCAL_RANK": str(device.index or 0)}
    if on_cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # transformers would take a GPU that is there
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if rank.number == 0:
        listening = socket.create_server((_HOST, 0), backlog=rank.ranks)
        port = listening.getsockname()[1]
        store = distributed.TCPStore(
            _HOST, port, rank.ranks, True, _WAIT, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        for end in rank.ends:
            end.send(port)
    else:
        store = distributed.TCPStore(_HOST, rank.ends[0].recv(), rank.ranks, False, _WAIT)
    distributed.init_process_group(
        "gloo" if on_cpu else "nccl",
        store=store,
        rank=rank.number,
        world_size=rank.ranks,
        timeout=_WAIT,
        device_id=None if on_cpu else device,
    )


def lead(model: nn.Module, rank: Rank) -> None:
    """Let each forward pass of rank 0's model run in all ranks from now on."""

    def send(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = torch.is_grad_enabled(), [_sent(each) for each in args], {name: _sent(kwargs[name]) for name in kwargs}
        for end in rank.ends:
            end.send(call)

    model.register_forward_pre_hook(send, with_kwargs=True, prepend=True)


def _sent(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.numpy(force=True)  # a tensor would go through shared memory
    if value is None or isinstance(value, bool):
        return value
    raise TargetError(f"a target on several ranks takes tensors and switches, not {type(value).__name__}. {_REMEDY}")


def follow(model: nn.Module, rank: Rank, device: torch.device) -> None:
    """Run each forward pass that rank 0 runs, until it leaves or dies."""
    lm_head: nn.Module = model.get_output_embeddings()  # type: ignore[operator]
    lm_head.register_forward_pre_hook(lambda _, inputs: (inputs[0][:, :1], *inputs[1:]))  # nobody takes the logits

    def taken(value: Any) -> Any:
        return value if value is None or isinstance(value, bool) else torch.from_numpy(value).to(device)

    while True:
        try:
            call = rank.ends[0].recv()
        except (EOFError, OSError):  # its end is reported by the process that started both
            return
        if call is None:
            return
        with_gradients, args, kwargs = call
        with torch.set_grad_enabled(with_gradients):
            model(*(taken(each) for each in args), **{name: taken(value) for name, value in kwargs.items()})


def leave(rank: Rank) -> None:
    """Leave the process group after the work; rank 0 first tells the others."""
    for end in rank.ends if rank.number == 0 else ():
        end.send(None)
    torch.distributed.destroy_process_group()
