import numpy as np
import pytest

from inline_attention.data.sampler import epoch_order, rank_positions, replacement


def test_order_is_a_permutation_of_seed_and_epoch() -> None:
    orders = {(seed, epoch): epoch_order(50, seed=seed, epoch=epoch) for seed in (0, 1) for epoch in (0, 1)}
    for order in orders.values():
        assert sorted(order[:, 0]) == list(range(50))
        assert (order[:, 1] == 0).all()
    assert len({tuple(order[:, 0]) for order in orders.values()}) == 4
    assert (epoch_order(50, seed=1, epoch=1) == orders[1, 1]).all()


def test_repeated_augmentation() -> None:
    order = epoch_order(20, seed=0, epoch=0, repeats=3)
    assert len(order) == 20  # the epoch keeps its length
    assert (order[:18, 0].reshape(6, 3) == order[:18:3, :1]).all()  # the copies of an image are neighbours
    assert (order[:18, 1].reshape(6, 3) == [0, 1, 2]).all()
    assert len({tuple(row) for row in order}) == 20


@pytest.mark.parametrize(("batch_size", "world_size"), [(2, 1), (8, 1), (2, 3), (4, 2), (6, 4)])
def test_ranks_hold_mirrored_pairs(batch_size: int, world_size: int) -> None:
    whole = batch_size * world_size
    ranks = [rank_positions(batch_size, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert sorted(np.concatenate(ranks)) == list(range(whole))  # every position on one rank
    for positions in ranks:
        # The local flip is the global flip: partners in the local batch are partners in the global one.
        assert (positions[::-1] == whole - 1 - positions).all()
    if world_size == 1:
        assert (ranks[0] == np.arange(batch_size)).all()


def test_odd_batches_are_divided_all_the_same() -> None:
    ranks = [rank_positions(3, rank=rank, world_size=2) for rank in range(2)]
    assert sorted(np.concatenate(ranks)) == list(range(6))


def test_replacement_depends_on_its_sample() -> None:
    chosen = [replacement(s, seed=0, epoch=0, attempt=0, num_samples=1000) for s in range(100)]
    assert len(set(chosen)) > 80  # not one favourite, and not the neighbour
    assert np.mean([abs(c - s) for s, c in enumerate(chosen)]) > 100
    assert chosen == [replacement(s, seed=0, epoch=0, attempt=0, num_samples=1000) for s in range(100)]
