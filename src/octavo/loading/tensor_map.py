"""Weights by name, each made when it is asked for, so that reordered ones are never all in memory at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from octavo.loading.tensor import StoredTensor


class TensorMap(Mapping[str, StoredTensor]):
    """A read-only mapping over functions that make the tensors."""

    def __init__(self, makers: Mapping[str, Callable[[], StoredTensor]]) -> None:
        self._makers = makers

    def __getitem__(self, name: str) -> StoredTensor:
        return self._makers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)

    def __contains__(self, name: object) -> bool:
        return name in self._makers
