"""How many blocks fit into the memory that the pool may have. Knows no model and allocates nothing."""

import os
from dataclasses import replace

import torch

from weft.config import BlockGeometry, CacheConfig
from weft.errors import ConfigError


class PoolMemory:
    """What is there now, at each call."""

    def __init__(self, config: CacheConfig, device: torch.device) -> None:
        self._config = config
        self._device = device

    def fit(
        self, geometry: BlockGeometry, bytes_per_block: int, other_bytes: int, *, weight_bytes: int = 0
    ) -> BlockGeometry:
        """The geometry, with no more blocks than there is room for where their number was left open.

        other_bytes: what the cache has to leave: the device's state, and what steps take.
        weight_bytes: what is still to be read.
        Raises: ConfigError, with the numbers, if what was asked for does not fit.
        """
        if self._device.type == "cuda":
            there = torch.cuda.mem_get_info(self._device)[0]
        else:
            there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if weight_bytes > there:
            raise ConfigError(
                f"the weights take {weight_bytes / 2**30:.1f} GiB, "
                f"and {there / 2**30:.1f} GiB are there on {self._device}",
                hint="a smaller dtype or model, or a device with more memory",
            )
        budget = int((there - weight_bytes) * self._config.gpu_memory_utilization)
        fitting = (budget - other_bytes) // bytes_per_block - 1  # one more block is scratch
        if geometry.num_blocks <= fitting:
            return geometry
        if geometry.shareable and self._config.num_blocks is None and fitting >= 1:
            return replace(geometry, num_blocks=fitting)
        needed = (geometry.num_blocks + 1) * bytes_per_block + other_bytes
        raise ConfigError(
            f"the cache needs {needed / 2**30:.1f} GiB ({geometry.num_blocks} blocks "
            f"of {geometry.block_size} tokens) and {budget / 2**30:.1f} GiB may be used"
            + (f", beside {weight_bytes / 2**30:.1f} GiB of weights" if weight_bytes else ""),
            hint="lower num_blocks, max_model_len or max_num_seqs, or raise gpu_memory_utilization",
        )
