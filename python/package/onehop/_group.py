"""Groups of processes that load together."""

from __future__ import annotations

import os
import secrets
import threading
import weakref
from dataclasses import dataclass
from typing import Any, Optional, Tuple

from . import errors
from ._native import decline_group


@dataclass(frozen=True)
class Group:
    """Processes of one user and one machine that load together, each for its own GPU.

    What several of them need is read once, and passed from GPU to GPU. All processes make the same calls of `load`,
    `load_file` or `stream` with `group=`, in the same order and at about the same time.

    name: the same in all processes of the group, and unique among this user's groups that load at the same time.
    rank: this process's number, from 0 on. size: how many processes there are.
    """

    name: str
    rank: int
    size: int


#: The group of each torch process group seen so far.
_OF_TORCH: "weakref.WeakKeyDictionary[Any, Optional[Group]]" = weakref.WeakKeyDictionary()


def _machine() -> Tuple[str, str, str, int]:
    """What processes that can connect have in common: machine, network and PID namespaces, and user."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    return boot, os.readlink("/proc/self/ns/net"), os.readlink("/proc/self/ns/pid"), os.geteuid()


def _of_torch(group: Any) -> Optional[Group]:
    """The ranks of a torch process group on this machine, or None if this is the only one."""
    import torch.distributed as dist

    mine = (_machine(), secrets.token_hex(8))
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    here = [rank for rank, (machine, _) in enumerate(everyone) if machine == mine[0]]
    if len(here) < 2:
        return None
    token = everyone[here[0]][1]
    return Group(f"torch-{token}", here.index(dist.get_rank(group)), len(here))


def native(group: Any) -> Optional[Tuple[str, int, int]]:
    """Name, rank and size; None for no group, or one of a single process."""
    if group is None:
        return None
    if not isinstance(group, Group):
        if not hasattr(group, "rank") or not hasattr(group, "size") or type(group).__module__.split(".")[0] != "torch":
            raise errors.RequestError(f"{group!r} is not a group: expected an onehop.Group or a torch process group")
        try:
            found = _OF_TORCH[group]
        except KeyError:
            found = _OF_TORCH[group] = _of_torch(group)
        if found is None:
            return None
        group = found
    if not isinstance(group.name, str) or not isinstance(group.rank, int) or not isinstance(group.size, int):
        raise errors.GroupError(f"{group!r}: name must be a str, rank and size int")
    if not 0 <= group.rank < group.size:
        raise errors.GroupError(f"{group!r}: rank must be from 0 to size - 1")
    return group.name, group.rank, group.size


class _Joined(threading.local):
    """Whether this thread's call has begun to load: from then on the load itself notifies the others."""

    yes = False


_JOINED = _Joined()


def joined() -> None:
    _JOINED.yes = True


class declining:
    """Notifies other ranks if a call with `group=` fails before it loads.

    It adds no frame to the call: warnings name the caller.
    """

    def __init__(self, group: Any) -> None:
        self._group = group

    def __enter__(self) -> None:
        _JOINED.yes = False

    def __exit__(self, kind: Any, error: Optional[BaseException], _: Any) -> None:
        if self._group is not None and isinstance(error, Exception) and not _JOINED.yes:
            _decline(self._group, error)


def _decline(group: Any, error: Exception) -> None:
    try:
        known = native(group)
    except Exception:
        # An invalid group has no other ranks.
        return
    if known is not None:
        decline_group(*known, f"{type(error).__name__}: {error}")
