"""Ranks: where this process stands, how a model is spread over them, and what they must agree on.

The model is a plain module; DDP and FSDP2 are put around it here and nowhere else. One process needs no launcher.
"""

import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from inline_attention.optimize import optimize

Value = TypeVar("Value")

JOIN_SECONDS = 300  # torch's own limit for joining a store


@dataclass(frozen=True)
class Ranks:
    device: torch.device
    rank: int = 0
    world_size: int = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def broadcast(self, value: Any) -> Any:
        """Rank 0's `value`, on every rank."""
        if self.world_size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
        return values[0]

    def decide(self, decision: Callable[[], Value]) -> Value:
        """What rank 0 decides, on every rank; an error of the user's ends all of them, told once."""
        if self.world_size == 1:
            return decision()
        outcome: tuple[Any, Exception | None] = (None, None)
        if self.is_first:
            try:
                outcome = (decision(), None)
            except (ValueError, OSError, ImportError) as error:
                outcome = (None, error)
        value, failure = self.broadcast(outcome)
        if failure is None:
            return value
        if self.is_first:
            raise failure
        raise SystemExit(2)

    def gather(self, value: Value) -> list[Value]:
        """Every rank's value, on every rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def sum(self, tensor: Tensor) -> Tensor:
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def maximum(self, tensor: Tensor) -> Tensor:
        if self.world_size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor

    def barrier(self) -> None:
        if self.world_size > 1:
            self.broadcast(None)


def is_distributed() -> bool:
    """Whether this process is one of several ranks, or of a group of one."""
    return dist.is_available() and dist.is_initialized()


def choose_device(name: str) -> torch.device:
    """`auto` takes CUDA, then Apple's GPU, then the CPU; a device that is not there is a ValueError."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(kind for kind, present in available.items() if present)
    if not available[name]:
        present = ", ".join(kind for kind, present in available.items() if present)
        raise ValueError(f"device {name} is not available here; available: {present}")
    if name == "cuda":
        number, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        if number >= count:
            raise ValueError(f"rank {number} of this machine has no GPU: there are {count}; lower --nproc-per-node")
        return torch.device("cuda", number)
    return torch.device(name)


@contextmanager
def join_ranks(device_name: str) -> Iterator[Ranks]:
    """Join the process group that torchrun's environment describes (none: a single rank), and leave it at the end."""
    device = choose_device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:
        yield Ranks(device)
        return
    store, rank, world_size = next(dist.rendezvous("env://"))
    store = unused_part(store, rank=rank, world_size=world_size)
    # Both backends: gradients over NCCL, decisions of the hosts over gloo without touching the device.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    yield Ranks(device, rank=rank, world_size=world_size)
    dist.destroy_process_group()  # not after an error: the other ranks may never come to it


def unused_part(store: dist.Store, *, rank: int, world_size: int) -> dist.Store:
    """A part of the store that no earlier attempt has written to, the same for all ranks.

    torchrun keeps its store when it restarts the ranks, and a rank that is quicker than another would find the address
    that the other had before it was killed (pytorch/pytorch#135712). So rank 0 makes up a name, and gives it to every
    process that asks under a name of its own, until all have said that they have it.
    """
    name = uuid.uuid4().hex
    if rank > 0:
        store.set(f"asking/{rank}", name)
        name_of_part = store.get(f"answer/{name}").decode()  # waits for it
        store.set(f"joined/{name_of_part}/{rank}", "")
        return dist.PrefixStore(name_of_part, store)
    waiting = set(range(1, world_size))
    deadline = time.monotonic() + JOIN_SECONDS
    while waiting:
        for other in sorted(waiting):
            if store.check([f"joined/{name}/{other}"]):
                waiting.remove(other)
            elif store.check([f"asking/{other}"]):  # perhaps a process that is dead, whose successor will ask anew
                store.set(f"answer/{store.get(f'asking/{other}').decode()}", name)
        if time.monotonic() > deadline:
            raise TimeoutError(f"ranks {sorted(waiting)} of {world_size} did not join")
        time.sleep(0.01)
    return dist.PrefixStore(name, store)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks: what FSDP shards and compiles one by one. timm's and our classes are all called …Block."""
    return [module for module in model.modules() if type(module).__name__.removeprefix("FSDP").endswith("Block")]


def spread(
    model: nn.Module,
    *,
    strategy: str,
    ranks: Ranks,
    mode: str | None = None,
    param_dtype: torch.dtype | None = None,
) -> nn.Module:
    """What the loop calls forward on: the model itself, or DDP around it, or the model sharded in place (FSDP2).

    mode: of `optimize`; None: not compiled.
    param_dtype: FSDP gathers weights in this type; None: in their own. The sharded weights stay float32, and so does
    the sum of gradients over ranks.
    """
    sharded = strategy == "fsdp" and ranks.world_size > 1
    if mode is not None:
        for module in blocks(model) if sharded else [model]:
            optimize(module, mode=mode)
    if ranks.world_size == 1:
        return model
    if not sharded:
        device_ids = [ranks.device] if ranks.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=device_ids)
    # Autocast chooses the type of activations, as it does under DDP: the inputs of a block stay as they are.
    precision = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in model.modules() if param_dtype is not None else ():
        if isinstance(module, _BatchNorm):
            fully_shard(module)  # PyTorch wants its parameters in the type of its statistics, which are buffers
    for module in (*blocks(model), model):
        fully_shard(module, mp_policy=precision)
    return model


def is_sharded(model: nn.Module) -> bool:
    return isinstance(model, FSDPModule)


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """A sharded model has its whole weights on every rank inside, so that ranks may call it unequally often."""
    parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.set_reshard_after_forward(part is not model, recurse=False)  # the default of `fully_shard`
            part.reshard()


@contextmanager
def gathering_gradients(model: nn.Module, *, sync: bool) -> Iterator[None]:
    """With `sync` off, backward passes inside add to the gradient without talking to the other ranks."""
    if isinstance(model, DistributedDataParallel) and not sync:
        with model.no_sync():
            yield
        return
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(sync)
    yield


class StopAgreement:
    """One rank that was asked to stop makes all of them stop after the same update.

    The ranks' flags are summed over gloo while the device works; each reads the sum one update later.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.flag = torch.zeros((), dtype=torch.int32)
        self.work: dist.Work | None = None

    def stop_now(self, signal_number: int) -> int:
        """Call once an update with this rank's signal (0: none); the signal that all ranks stop for, or 0."""
        if self.ranks.world_size == 1:
            return signal_number
        agreed = 0
        if self.work is not None:
            self.work.wait()
            agreed = int(self.flag)
        self.flag.fill_(signal_number)
        self.work = dist.all_reduce(self.flag, op=dist.ReduceOp.MAX, async_op=True)
        return agreed
