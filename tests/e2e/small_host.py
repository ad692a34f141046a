"""An SGLang plugin for tests: HiCache on a small machine, and on one without a GPU.

SGLang leaves 10 GiB of host memory alone, which a small machine does not have. It copies BF16 rows by GPU kernels.
"""

from __future__ import annotations

from functools import partialmethod

import torch


def install() -> None:
    from sglang.srt.mem_cache.pool_host import base

    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
    if torch.cuda.is_available():
        return
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    MHATokenToKVPoolHost.__init__ = partialmethod(MHATokenToKVPoolHost.__init__, pin_memory=False)
    MHATokenToKVPoolHost.backup_from_device_all_layer = _backup
    MHATokenToKVPoolHost.load_to_device_per_layer = _load


def _backup(self, device_pool, host_indices, device_indices, io_backend) -> None:
    """Copies rows of tokens, page-first: ``[tokens, layers, heads, D]`` on the host."""
    for host, device in ((self.k_buffer, self.device_k_buffers), (self.v_buffer, self.device_v_buffers)):
        for layer, rows in enumerate(device):
            host[host_indices, layer] = rows[device_indices]


def _load(self, device_pool, host_indices, device_indices, layer_id, io_backend, *, is_draft=False) -> None:
    for host, device in ((self.k_buffer, self.device_k_buffers), (self.v_buffer, self.device_v_buffers)):
        device[layer_id][device_indices] = host[host_indices, layer_id]
