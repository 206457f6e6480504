"""What many tensors are like, and whether others are just like them.

All that a layout depends on: class, dtype, shape, strides, device, and which of them share memory.
Nothing of the tensors is kept but numbers and descriptions.

To look at a tensor takes a call for each property, and there is no call for many. So the calls are
few: strides are looked at where they say more than that there are no gaps, and what nothing but
complex numbers can be is not asked of others. And they are made for some tensors at a time, so that
what is read of a tensor is still in a cache when the next property is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import compress
from operator import attrgetter
from typing import Any

from torch import Tensor

__all__ = ["TensorFacts"]

_TOGETHER = 256

_dtype_of, _shape_of = attrgetter("dtype"), attrgetter("shape")
_device_of, _is_cpu = attrgetter("device"), attrgetter("is_cpu")
_is_dense, _address_of = Tensor.is_contiguous, Tensor.data_ptr


class TensorFacts:
    """What some tensors are like.

    Args:
        tensors: Strided tensors that hold their values, and not the conjugate or negative of them.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._types = list(map(type, tensors))
        self._dtypes = list(map(_dtype_of, tensors))
        self._shapes = list(map(_shape_of, tensors))
        self._is_dense = list(map(_is_dense, tensors))
        self._devices = None if all(map(_is_cpu, tensors)) else list(map(_device_of, tensors))
        self._complex = [at for at, dtype in enumerate(self._dtypes) if dtype.is_complex]
        self._has_elements = [tensor.numel() > 0 for tensor in tensors]
        self._addresses = list(map(_address_of, tensors))
        self._shared = self._sharing(self._addresses)
        shared = {at for places in self._shared for at in places}
        # Strides of one element say nothing, but are among what tells one tensor from another.
        self._strided = [
            at for at, is_dense in enumerate(self._is_dense) if at in shared or not is_dense
        ]
        self._strides = [tensors[at].stride() for at in self._strided]

    def are_of(self, found: Sequence[Any]) -> bool:
        """Return whether other values are tensors just like these, at whatever addresses.

        Those that shared memory still do, in the same way, and no others.
        """
        if len(found) != len(self._types):
            return False
        try:
            addresses = self._addresses_of(found)
            if addresses is None or not self._are_strided_in(found):
                return False
            if addresses != self._addresses:
                if self._sharing(addresses) != self._shared or any(map(Tensor.is_neg, found)):
                    return False
                self._addresses = addresses
        except RuntimeError:  # it has no memory, or no such property
            return False
        return True

    def _addresses_of(self, found: Sequence[Any]) -> list[int] | None:
        """Return the address of each; ``None`` if one is not like it was."""
        addresses: list[int] = []
        for start in range(0, len(found), _TOGETHER):
            places = slice(start, start + _TOGETHER)
            some = found[places]
            if list(map(type, some)) != self._types[places]:
                return None
            addresses += map(_address_of, some)
            if list(map(_dtype_of, some)) != self._dtypes[places]:
                return None
            if list(map(_shape_of, some)) != self._shapes[places]:
                return None
            if list(map(_is_dense, some)) != self._is_dense[places]:
                return None
            if self._devices is None:
                if not all(map(_is_cpu, some)):
                    return None
            elif list(map(_device_of, some)) != self._devices[places]:
                return None
        return addresses

    def _are_strided_in(self, found: Sequence[Tensor]) -> bool:
        """Return whether strides are the same where they matter, and values are what is there."""
        if [found[at].stride() for at in self._strided] != self._strides:
            return False
        # The negative of real numbers comes from complex ones: others lie between them.
        unusual = (found[at] for at in (*self._strided, *self._complex))
        return not any(one.is_conj() or one.is_neg() for one in unusual)

    def _sharing(self, addresses: Sequence[int]) -> list[list[int]]:
        """Return the places of those that begin at the same address, where there are several."""
        there = list(compress(addresses, self._has_elements))
        if len(set(there)) == len(there):
            return []
        places: dict[int, list[int]] = defaultdict(list)
        for at, address in enumerate(addresses):
            if self._has_elements[at]:
                places[address].append(at)
        return [found for found in places.values() if len(found) > 1]
