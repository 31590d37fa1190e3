"""What the loop measures."""

import torch

from inline_attention.training.distributed import Ranks
from inline_attention.training.meters import DeviceMeter


def test_memory_of_one_update_may_be_used_by_the_next() -> None:
    """CUDA graphs reuse memory. The meter reads what was added, even if it was overwritten since."""
    meter = DeviceMeter(Ranks(torch.device("cpu")))
    loss, norm, part, bad = torch.zeros(()), torch.zeros(()), torch.zeros(()), torch.zeros((), dtype=torch.bool)
    for update in range(1, 4):
        loss.fill_(update)
        norm.fill_(10 * update)
        part.fill_(update / 2)
        bad.fill_(update == 2)
        meter.add(loss, norm, bad=bad, parts={"main": part})
    for tensor in (loss, norm, part):
        tensor.fill_(torch.nan)
    bad.fill_(True)
    reading = meter.read()
    assert (reading.loss, reading.grad_norm, reading.parts) == (2.0, 30.0, {"main": 1.0})
    assert (reading.bad_steps, reading.first_bad) == (1, 1)
