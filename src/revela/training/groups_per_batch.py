"""How many groups a forward pass reads with ``--groups-per-batch auto``: as many as fit a GPU."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import islice

import torch
from torch import nn

from revela.training import distributed
from revela.training.device import Tensors, sent
from revela.training.groups.strategies import Groups
from revela.training.step import Rows, sides

log = logging.getLogger(__name__)

MEMORY_SHARE = 0.85  # of a GPU, which groups read at once may fill; later ones have longer texts
OPTIMIZER_BYTES = 8  # two fp32 numbers of AdamW per trained weight


def fitting_groups(
    groups_per_step: int, groups: Groups, read: Callable[[Rows], Tensors], loss_module: nn.Module
) -> int:
    """The greatest number of groups whose forward and backward pass fits into the memory of the
    GPU, among the divisors of this process's groups per step.

    Only for groups that can be read twice, as reading them uses no model, and where the groups of a
    batch do not change what is learned, as they do for losses that compare texts across groups and
    for contextual retrievers.

    Args:
        groups_per_step, groups, read: as for ``BatchReader``.
        loss_module: runs forward and backward; its gradients are dropped.
    """
    if (own := groups_per_step // distributed.world_size()) == 1:
        return 1
    trained = [p for p in loss_module.parameters() if p.requires_grad]
    device = trained[0].device
    free, _ = torch.cuda.mem_get_info(device)  # besides what torch has reserved
    room = MEMORY_SHARE * (free + torch.cuda.memory_reserved(device))
    room -= OPTIMIZER_BYTES * sum(p.numel() for p in trained)

    def run(number: int) -> int:
        """Peak bytes of a pass over this many groups."""
        rows = [(0, row) for group in islice(groups(0), number) for row in group]
        torch.cuda.reset_peak_memory_stats(device)
        on_device = {name: sent(tensor, device) for name, tensor in read(rows).items()}
        try:
            loss_module(sides(on_device)).backward()
        finally:  # an error of memory leaves gradients, too
            for p in trained:
                p.grad = None
        return torch.cuda.max_memory_allocated(device)

    fits = min(distributed.all_gather(greatest_that_fits(own, run, room)))
    log.info(f"{fits} of {groups_per_step} groups of a step are read at once")
    return fits


def greatest_that_fits(total: int, run: Callable[[int], int], room: float) -> int:
    """The greatest divisor of ``total`` whose ``run`` needs at most ``room`` bytes; at least 1.

    A divisor is not tried if the growth of the smaller ones shows that it will not fit.
    """
    peaks: dict[int, int] = {}
    for number in (n for n in range(1, total + 1) if total % n == 0):
        if len(peaks) > 1:
            (a, low), (b, high) = list(peaks.items())[-2:]
            if high + (high - low) * (number - b) / (b - a) > room:
                break
        try:
            peaks[number] = run(number)
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            break
        if peaks[number] > room:
            break
    return max((number for number, peak in peaks.items() if peak <= room), default=1)
