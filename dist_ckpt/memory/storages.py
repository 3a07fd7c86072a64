"""Distinct storages and their bytes: the unit in which everything here is counted."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dist_ckpt.compat.torch import storage_id


class Storages:
    """A set of distinct storages.

    Views, tied weights and aliases of one storage count once. The storages are kept referenced while the set lives:
    their addresses would otherwise be reused by others and be counted wrong.
    """

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self._by_id: dict[int, torch.UntypedStorage] = {}
        for tensor in tensors:
            self.add(tensor)

    def add(self, tensor: Tensor, unless_in: Storages | None = None) -> int:
        """Adds the tensor's storages that are new, and returns their bytes.

        A tensor subclass that wraps others (DTensor, quantised weights) stands for what it holds on this rank: its
        own ``nbytes`` would be those of all ranks together.
        """
        added = 0
        for part in plain_parts(tensor):
            storage, key = part.untyped_storage(), storage_id(part)
            if key not in self._by_id and not (unless_in is not None and key in unless_in._by_id):
                self._by_id[key] = storage
                added += storage.nbytes()
        return added

    def __contains__(self, tensor: Tensor) -> bool:
        return all(storage_id(part) in self._by_id for part in plain_parts(tensor))

    @property
    def nbytes(self) -> int:
        """Bytes now: a storage that was released in the meantime (FSDP's unsharded copies) counts 0."""
        return sum(storage.nbytes() for storage in self._by_id.values())


_SPARSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices", "values")),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices", "values")),
}
"""What sparse tensors, which have no storage of their own, lie in."""


def plain_parts(tensor: Tensor) -> list[Tensor]:
    """The tensors with storages of their own that a tensor lies in: on this rank, and itself if it wraps no others."""
    if tensor.layout in _SPARSE_PARTS:
        return [getattr(tensor, part)() for part in _SPARSE_PARTS[tensor.layout]]
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    inner = (getattr(tensor, name) for name in names)  # of a DTensor its mesh too, from torch 2.13 on
    return [part for one in inner if isinstance(one, Tensor) for part in plain_parts(one)]
