"""The ranks of a run: joining them, parallelizing a model over them, and decisions that all of them share.

Models are plain single-device modules. DDP and FSDP2 are applied here and nowhere else. A single process needs no
launcher.
"""

import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from inline_attention.environment import choose_device
from inline_attention.optimize import optimize

Value = TypeVar("Value")

_REPORTED = (ValueError, OSError, ImportError)  # errors that a command prints in one line
JOIN_SECONDS = 300  # torch's own limit for joining a store


@dataclass(frozen=True)
class Ranks:
    """This process among the ranks of the run."""

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
        """Rank 0's result of `decision`, on every rank. If it raises, rank 0 raises the error and the others exit."""
        if self.world_size == 1:
            return decision()
        outcome: tuple[Any, Exception | None] = (None, None)
        if self.is_first:
            try:
                outcome = (decision(), None)
            except _REPORTED as error:
                outcome = (None, error)
        value, failure = self.broadcast(outcome)
        return value if failure is None else self.fail(failure)

    def fail(self, error: Exception) -> NoReturn:
        """End all ranks with an error that each of them has found. Rank 0 alone raises it, so it is printed once."""
        if self.is_first:
            raise error
        raise SystemExit(2)

    def together(self, action: Callable[[], Value]) -> Value:
        """This rank's result of `action`. If it raises on some ranks, the first of them raises it and the others exit.

        So an error that all ranks have is printed once.
        """
        try:
            value, failure = action(), None
        except _REPORTED as error:
            value, failure = None, error
        failed = [rank for rank, has_failed in enumerate(self.gather(failure is not None)) if has_failed]
        if not failed:
            return cast(Value, value)
        if failure is not None and failed[0] == self.rank:
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


def is_distributed() -> bool:
    """Whether this process belongs to a process group."""
    return dist.is_available() and dist.is_initialized()


def current_ranks() -> Ranks:
    """The ranks of this process group, or the only rank, for values in main memory and on any device."""
    if not is_distributed():
        return Ranks(torch.device("cpu"))
    return Ranks(torch.device("cpu"), rank=dist.get_rank(), world_size=dist.get_world_size())


def rank_device(name: str | None) -> torch.device:
    """The device of this rank. Under torchrun with CUDA, it is GPU number LOCAL_RANK. ValueError: there is none."""
    device = choose_device(name)
    if device.type != "cuda" or (device.index is not None and "RANK" not in os.environ):
        return device
    number, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if number >= count:
        raise ValueError(f"rank {number} of this machine has no GPU: there are {count}; lower --nproc-per-node")
    return torch.device("cuda", number)


@contextmanager
def join_ranks(device_name: str | None) -> Iterator[Ranks]:
    """Join the process group of torchrun's environment variables, and leave it at the end.

    Without these variables there is one rank. A nested block uses the group of the outer one.
    """
    device = rank_device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if is_distributed():
        yield Ranks(device, rank=dist.get_rank(), world_size=dist.get_world_size())
        return
    if "RANK" not in os.environ:
        yield Ranks(device)
        return
    store, rank, world_size = next(dist.rendezvous("env://"))
    store = fresh_store(store, rank=rank, world_size=world_size)
    # NCCL for tensors on GPUs. Decisions of the hosts go through gloo, so that they do not wait for the device.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    yield Ranks(device, rank=rank, world_size=world_size)
    dist.destroy_process_group()  # not after an error: other ranks may never call it


def fresh_store(store: dist.Store, *, rank: int, world_size: int) -> dist.Store:
    """A prefix of the store that no earlier attempt has used, the same for all ranks.

    torchrun keeps its store when it restarts the ranks. A fast rank could then read the address that a slower one had
    before it was killed (pytorch/pytorch#135712). So rank 0 generates a prefix. Each other rank asks for it under a
    name of its own and confirms it; rank 0 answers until all have confirmed.
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
            elif store.check([f"asking/{other}"]):  # perhaps of a dead process, whose successor asks again
                store.set(f"answer/{store.get(f'asking/{other}').decode()}", name)
        if time.monotonic() > deadline:
            raise TimeoutError(f"ranks {sorted(waiting)} of {world_size} did not join")
        time.sleep(0.01)
    return dist.PrefixStore(name, store)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks, which FSDP shards and compiles one by one: modules whose class is named …Block."""
    return [module for module in model.modules() if type(module).__name__.removeprefix("FSDP").endswith("Block")]


def parallelize(
    model: nn.Module,
    *,
    strategy: str,
    ranks: Ranks,
    mode: str | None = None,
    param_dtype: torch.dtype | None = None,
    unused_parameters: bool = False,
) -> nn.Module:
    """The module that the loop calls: the model on one rank, DDP around it, or the model sharded in place (FSDP2).

    mode: compile mode of `optimize`; None: not compiled.
    param_dtype: FSDP gathers weights in this type; None: in their own. The sharded weights and the reduction of
    gradients stay float32.
    unused_parameters: whether some parameters get no gradient. DDP then searches for them in every update.
    """
    sharded = strategy == "fsdp" and ranks.world_size > 1
    if mode is not None:
        for module in blocks(model) if sharded else [model]:
            optimize(module, mode=mode)
    if ranks.world_size == 1:
        return model
    if not sharded:
        device_ids = [ranks.device] if ranks.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=device_ids, find_unused_parameters=unused_parameters)
    # Autocast chooses the type of activations, as it does under DDP: the inputs of a block stay as they are.
    precision = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in model.modules() if param_dtype is not None else ():
        if isinstance(module, _BatchNorm):
            fully_shard(module)  # its parameters must have the type of its statistics, which are buffers
    for module in (*blocks(model), model):
        fully_shard(module, mp_policy=precision)
    return model


def share_statistics(model: nn.Module, ranks: Ranks) -> None:
    """Give the batch norms of every rank the statistics of rank 0, which are those that weights files contain."""
    if ranks.world_size > 1:
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                for statistic in module.buffers():
                    dist.broadcast(statistic, src=0)


def is_sharded(model: nn.Module) -> bool:
    return isinstance(model, FSDPModule)


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Give a sharded model its full weights on every rank. Ranks may then call it a different number of times."""
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
def gradient_sync(model: nn.Module, *, enabled: bool) -> Iterator[None]:
    """If not enabled, backward passes inside the block accumulate gradients without communication."""
    if isinstance(model, DistributedDataParallel) and not enabled:
        with model.no_sync():
            yield
        return
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(enabled)
    yield


class StopAgreement:
    """Stops all ranks after the same update when one of them receives a signal.

    The maximum of the ranks' signals is reduced over gloo while the device works, and read one update later.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.flag = torch.zeros((), dtype=torch.int32)
        self.work: dist.Work | None = None

    def stop_now(self, signal_number: int) -> int:
        """Called once per update with this rank's signal (0: none). Returns the signal to stop for, or 0."""
        if self.ranks.world_size == 1:
            return signal_number
        agreed = 0
        if self.work is not None:
            self.work.wait()
            agreed = int(self.flag)
        self.flag.fill_(signal_number)
        self.work = dist.all_reduce(self.flag, op=dist.ReduceOp.MAX, async_op=True)
        return agreed
