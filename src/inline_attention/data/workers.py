"""PyTorch's DataLoader behind one interface for all kinds of data: the batches of an epoch, from any step on."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset

from inline_attention.data.collate import CollatedT, CollatedT_co
from inline_attention.data.config import LoaderConfig
from inline_attention.data.sampler import EpochBatchSampler


class BatchLoader(Protocol[CollatedT_co]):
    """Loads the batches of one split."""

    def batches(self, epoch: int, start_step: int) -> Iterator[CollatedT_co]: ...

    def to(self, device: torch.device) -> None:
        """Move pixels that are kept in memory to the device. Without such pixels, nothing is to be done."""
        return

    def close(self) -> None:
        """End the worker processes, after the last batch. Without workers, nothing is to be done."""
        return


class WorkerLoader(BatchLoader[CollatedT]):
    """Decodes and transforms batches in worker processes, as they are needed."""

    def __init__(
        self,
        dataset: Dataset[CollatedT],
        sampler: EpochBatchSampler[Any],
        *,
        config: LoaderConfig,
        workers: int,
        persistent_workers: bool,
    ) -> None:
        self._sampler = sampler
        self._loader = DataLoader(
            _ErrorsAsValues(dataset),
            batch_sampler=sampler,
            collate_fn=identity,
            persistent_workers=persistent_workers and workers > 0,
            generator=torch.Generator(),  # otherwise starting an epoch would draw from the global generator
            **loader_arguments(config, workers=workers),
        )

    def batches(self, epoch: int, start_step: int) -> Iterator[CollatedT]:
        self._sampler.set_epoch(epoch, start_step=start_step)
        return map(raise_error, iter(self._loader))  # iter() starts the workers

    def close(self) -> None:
        shut_down(self._loader._iterator)
        self._loader._iterator = None


class _ErrorsAsValues(Dataset[Any]):
    """Returns a ValueError instead of raising it, which would print the traceback of a worker process."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitems__(self, keys: Sequence[Any]) -> Any:
        try:
            return self._dataset.__getitems__(keys)
        except ValueError as error:
            return error


def raise_error(batch: Any) -> Any:
    """Raise an error that a worker has returned in place of a batch."""
    if isinstance(batch, ValueError):
        # A new error: the traceback of the old one would keep this frame, and with it the workers, alive.
        raise ValueError(str(batch))
    return batch


def shut_down(iterator: Any) -> None:
    """End the workers of a DataLoader's iterator. Python waits for them at its exit otherwise."""
    if hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()


def loader_arguments(config: LoaderConfig, *, workers: int) -> dict[str, Any]:
    """Arguments of DataLoader that all loaders share."""
    return {
        "num_workers": workers,
        "prefetch_factor": config.prefetch if workers else None,
        "pin_memory": torch.cuda.is_available() if config.pin_memory is None else config.pin_memory,
    }


def identity(batch: Any) -> Any:
    """A `collate_fn` that does nothing: the datasets return whole batches."""
    return batch
