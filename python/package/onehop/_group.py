"""Groups of processes that load together."""

from __future__ import annotations

import os
import secrets
import weakref
from dataclasses import dataclass
from typing import Any, Optional, Tuple

from . import errors


@dataclass(frozen=True)
class Group:
    """Processes of one user and one machine that load together, each for its own GPU.

    What several of them need is read once, and passed from GPU to GPU. All processes make the same calls of `load`,
    `load_file` or `stream` with `group=`, in the same order and at about the same time.

    name: the same in all processes of the group; no other group of this user that loads at the same time has it.
    rank: this process's number, from 0 on. size: how many processes there are.
    """

    name: str
    rank: int
    size: int


#: The group for each of torch's that was used before.
_OF_TORCH: "weakref.WeakKeyDictionary[Any, Optional[Group]]" = weakref.WeakKeyDictionary()


def _machine() -> Tuple[str, str, int]:
    """What two processes have in common that can meet: machine, network namespace and user."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    return boot, os.readlink("/proc/self/ns/net"), os.geteuid()


def _of_torch(group: Any) -> Optional[Group]:
    """The ranks of a process group of torch's that are on this machine; None if this one is alone there."""
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
            raise errors.RequestError(f"{group!r} is no group: give an onehop.Group, or a process group of torch's")
        try:
            found = _OF_TORCH[group]
        except KeyError:
            found = _OF_TORCH[group] = _of_torch(group)
        if found is None:
            return None
        group = found
    return group.name, group.rank, group.size
