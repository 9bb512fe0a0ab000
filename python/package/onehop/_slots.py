"""Slots of a file for the pages of a cache. The backends for LMCache and SGLang share them."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import uuid
from collections import OrderedDict
from typing import Any, Callable, Hashable, Iterator, List, Optional, Sequence, Tuple

from . import Pages, errors
from ._pages import _bytes_of

_logger = logging.getLogger(__name__)

#: Slots begin at multiples of this, as pages of the page cache do.
_ALIGNMENT = 4096

#: Seconds between two warnings of pages that were not stored.
_WARNING_INTERVAL = 10


class Slot:
    """A page's place in the file. While it has users or pins, no other page gets it.

    info: what the backend keeps about the page.
    """

    __slots__ = ("key", "offset", "size", "info", "users", "pins", "is_stored")

    def __init__(self, key: Hashable, offset: int, size: int, info: Any) -> None:
        self.key = key
        self.offset = offset
        self.size = size
        self.info = info
        # The first user is the writer.
        self.users = 1
        self.pins = 0
        self.is_stored = False


#: A slot, and the arrays or tensors that its page is read into or written from, one after the other.
Transfer = Tuple[Slot, Sequence[Any]]


class Slots:
    """A file of slots of one size, and an index of the pages in them. The least recently used pages make room for new ones.

    The file has no name, so no other process can open it, and it is gone when this process ends.

    folder: the directory of the file.
    size: bytes of the file.
    page_size: the most bytes of a page.
    device: the device whose memory pages are in.
    """

    def __init__(self, folder: Any, size: Any, page_size: int, device: Any) -> None:
        if not isinstance(folder, (str, os.PathLike)) or not os.path.isdir(folder):
            raise errors.RequestError(f"path must be a directory, not {folder!r}")
        if not isinstance(size, int) or isinstance(size, bool):
            raise errors.RequestError(f"bytes must be an integer, not {size!r}")
        if page_size <= 0:
            raise errors.RequestError(f"a page has {page_size} bytes")
        self._page_size = page_size
        self._slot_size = -(-page_size // _ALIGNMENT) * _ALIGNMENT
        self._size = size // self._slot_size * self._slot_size
        if self._size <= 0:
            raise errors.RequestError(f"bytes must be at least {self._slot_size}, the size of a page, not {size}")
        name = os.path.join(folder, f"onehop-{uuid.uuid4().hex}")
        try:
            self._pages = Pages(name, device=device, create=self._size)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
        self._lock = threading.Condition()
        # By key, the least recently used first. Pages that are being written are among them.
        self._slots: OrderedDict[Hashable, Slot] = OrderedDict()
        # Offsets of slots that were used before, and where the slots begin that never were.
        self._free: List[int] = []
        self._unused = 0
        # Threads that move pages.
        self._moves = 0
        self._reserves = True
        self._next_warning = 0.0
        self._is_closed = False
        self._process = os.getpid()
        _logger.info("%d slots of %d bytes in %s", self._size // self._slot_size, self._slot_size, folder)

    def contains(self, key: Hashable, pin: bool = False) -> bool:
        """Whether the page is stored. `pin` keeps it until `unpin`."""
        with self._lock:
            slot = self._stored(key)
            if slot is not None and pin:
                slot.pins += 1
            return slot is not None

    def is_being_written(self, key: Hashable) -> bool:
        """Whether the page has a slot, but is not yet stored."""
        with self._lock:
            slot = self._slots.get(key)
            return slot is not None and not slot.is_stored

    def unpin(self, key: Hashable) -> bool:
        """Releases one pin. False if there is no such page."""
        with self._lock:
            slot = self._slots.get(key)
            if slot is not None:
                slot.pins = max(0, slot.pins - 1)
            return slot is not None

    def reserve(self, key: Hashable, size: int, info: Any = None) -> Optional[Slot]:
        """A slot for `write`. None if the page is stored or being written, or has no room."""
        if not 0 < size <= self._page_size:
            _logger.error("a page of %d bytes does not fit into a slot: it has %d", size, self._page_size)
            return None
        with self._lock:
            if self._is_closed or not self._reserves:
                why = "the file is closed"
            elif self._stored(key) is not None or key in self._slots:
                return None
            else:
                offset = self._free_offset()
                if offset is not None:
                    slot = self._slots[key] = Slot(key, offset, size, info)
                    return slot
                why = "all slots are pinned or in use"
        self._warn(why)
        return None

    def _warn(self, why: str) -> None:
        """Logs why a page was not stored, now and then: there may be thousands in a second."""
        now = time.monotonic()
        if now >= self._next_warning:
            self._next_warning = now + _WARNING_INTERVAL
            _logger.warning("a page was not stored: %s. Others are not logged for %d s.", why, _WARNING_INTERVAL)

    def abandon(self, slots: Sequence[Slot]) -> None:
        """Forgets reserved slots that are not written."""
        with self._lock:
            for slot in slots:
                self._forget(slot)
                self._end_use(slot)

    def write(self, transfers: Sequence[Transfer]) -> bool:
        """Writes pages to reserved slots, and then lets them be found. After a failure none of them is."""
        is_written = False
        try:
            self._move(self._pages.write, transfers)
            is_written = True
        except errors.OnehopError as error:
            _logger.error("%d pages were not written: %s", len(transfers), error)
        finally:
            with self._lock:
                for slot, _ in transfers:
                    slot.is_stored = is_written
                    if not is_written:
                        self._forget(slot)
                    self._end_use(slot)
        return is_written

    @contextlib.contextmanager
    def using(self, keys: Sequence[Hashable]) -> Iterator[List[Optional[Slot]]]:
        """The slots of pages, None for those that are not stored. They can be read within this block."""
        with self._lock:
            slots = [self._stored(key) for key in keys]
            for slot in slots:
                if slot is not None:
                    slot.users += 1
        try:
            yield slots
        finally:
            with self._lock:
                for slot in slots:
                    if slot is not None:
                        self._end_use(slot)

    def read(self, transfers: Sequence[Transfer]) -> bool:
        """Reads pages whose slots are in use. Pages that the file system or the GPU cannot read are forgotten.

        Raises a StalledError if bytes may still arrive in the memory later.
        """
        try:
            self._move(self._pages.read, transfers)
            return True
        except errors.StalledError:
            raise
        except errors.OnehopError as error:
            _logger.error("%d pages were not read: %s", len(transfers), error)
            if not isinstance(error, errors.RequestError):
                with self._lock:
                    for slot, _ in transfers:
                        self._forget(slot)
            return False

    def remove(self, key: Hashable, force: bool = True) -> bool:
        """Forgets a page; a pinned one only with `force`. False if it stays, or there is none."""
        with self._lock:
            slot = self._slots.get(key)
            if slot is None or (slot.pins and not force):
                return False
            self._forget(slot)
            return True

    def clear(self) -> int:
        """Forgets all pages, and returns how many there were."""
        with self._lock:
            slots = list(self._slots.values())
            for slot in slots:
                self._forget(slot)
            return len(slots)

    def close(self) -> None:
        """Forgets all pages and closes the file. Returns when no page is being moved any more."""
        if os.getpid() != self._process:
            # Another thread may have held the lock at the fork, and the file is the parent's.
            return
        with self._lock:
            self._is_closed = True
            self._slots.clear()
            self._lock.wait_for(lambda: self._moves == 0)
        self._pages.close()

    def stop_reserving(self) -> None:
        """Reserves no slot from now on. Those that are reserved can still be written."""
        with self._lock:
            self._reserves = False

    def _move(self, move: Callable[[List[Any], List[int]], None], transfers: Sequence[Transfer]) -> None:
        if not transfers:
            return
        memories: List[Any] = []
        offsets: List[int] = []
        for slot, parts in transfers:
            offset = slot.offset
            for part in parts:
                memories.append(part)
                offsets.append(offset)
                offset += _bytes_of(part)
            if offset != slot.offset + slot.size:
                raise errors.RequestError(f"a page has {slot.size} bytes, its memory {offset - slot.offset}")
        with self._lock:
            if self._is_closed:
                raise errors.RequestError("the file is closed")
            self._moves += 1
        try:
            move(memories, offsets)
        except errors.StalledError as error:
            _logger.critical("%s. Nothing is cached from now on.", error)
            # Late bytes may still reach the slots, so none is used again.
            with self._lock:
                self._is_closed = True
                self._slots.clear()
            raise
        finally:
            with self._lock:
                self._moves -= 1
                self._lock.notify_all()

    # The methods below are called with the lock held.

    def _stored(self, key: Hashable) -> Optional[Slot]:
        """The slot of a stored page, which is now the most recently used one."""
        slot = self._slots.get(key)
        if slot is None or not slot.is_stored:
            return None
        self._slots.move_to_end(key)
        return slot

    def _free_offset(self) -> Optional[int]:
        if self._free:
            return self._free.pop()
        if self._unused < self._size:
            self._unused += self._slot_size
            return self._unused - self._slot_size
        for slot in self._slots.values():
            if slot.users == 0 and slot.pins == 0:
                del self._slots[slot.key]
                return slot.offset
        return None

    def _forget(self, slot: Slot) -> None:
        """The page is not found any more. Its slot is free when it has no users."""
        if self._slots.get(slot.key) is slot:
            del self._slots[slot.key]
            if slot.users == 0:
                self._free.append(slot.offset)

    def _end_use(self, slot: Slot) -> None:
        slot.users -= 1
        if slot.users == 0 and self._slots.get(slot.key) is not slot:
            self._free.append(slot.offset)
