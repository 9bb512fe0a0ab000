"""Pages between a file and GPU memory, as caches of keys and values move them."""

from __future__ import annotations

import array
import errno
import os
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence, Tuple, Union

from . import errors
from ._native import PageFile as _PageFile

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Type


def _integers(numbers: Any, what: str) -> List[int]:
    """Integers from 0 to 2**63 - 1 of a list, an array or a tensor."""
    if hasattr(numbers, "tolist"):
        numbers = numbers.tolist()
    if not isinstance(numbers, (list, tuple, range)):
        numbers = [numbers]
    for number in numbers:
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 1 << 63:
            raise errors.RequestError(f"{what} must be integers from 0 to 2**63 - 1, not {number!r}")
    return list(numbers)


def _bytes_of(memory: Any) -> int:
    """Bytes of a tensor or an array."""
    if hasattr(memory, "element_size"):
        return int(memory.numel() * memory.element_size())
    nbytes = getattr(memory, "nbytes", None)
    if nbytes is None:
        raise errors.RequestError(f"{type(memory).__name__} is neither a torch tensor nor an array of NumPy or CuPy")
    return int(nbytes)


def _synchronize(memories: Sequence[Any], stream: Any) -> None:
    """Waits for the work that uses these memories so far."""
    if stream is not None:
        if not hasattr(stream, "synchronize"):
            raise errors.RequestError(f"stream is a stream of torch or CuPy, not {type(stream).__name__}")
        stream.synchronize()
        return
    devices = set()
    for memory in memories:
        if getattr(memory, "is_cuda", False):
            devices.add(memory.device)
        elif hasattr(memory, "__cuda_array_interface__") and hasattr(memory, "data"):
            import cupy

            cupy.cuda.get_current_stream().synchronize()
    for device in devices:
        import torch

        current = torch.cuda.current_stream(device)
        with torch.cuda.device(device):
            if torch.cuda.is_current_stream_capturing():
                raise errors.RequestError("pages cannot be moved while the current stream is captured into a graph")
        event = torch.cuda.Event()
        event.record(current)
        event.synchronize()


class Pages:
    """A file whose pages are moved to and from GPU memory, many at a time.

        with onehop.Pages("kv.bin", device="cuda:0", create=64 << 30) as kv:
            kv.write(cache, offsets, rows=blocks)
            kv.read(cache, offsets, rows=blocks)

    A file in /dev/shm, or one that is only read and is in the page cache, is registered with the GPU, which moves the bytes;
    no CPU touches them. As long as that lasts, other programs that open the file wait for some milliseconds. After that, and
    for other files, threads move the bytes. `moved` and `why_staged` report it.

    path: the file.
    device: "cuda:0", 0, a PCI address, "cpu", or None: GPU 0 where CUDA works, else the CPU's memory.
    mode: "r+" to read and write, or "r".
    create: creates the file with so many bytes if it does not exist, all of them allocated.
    registered: the most bytes of the file that are registered at once; by default half of the machine's memory. 0 is none.
    """

    def __init__(
        self,
        path: Union[str, bytes, "os.PathLike[str]"],
        *,
        device: Any = None,
        mode: str = "r+",
        create: Optional[int] = None,
        registered: Optional[int] = None,
    ) -> None:
        from . import _device

        if mode not in ("r", "r+"):
            raise errors.RequestError(f"mode is 'r' or 'r+', not {mode!r}")
        if registered is not None:
            (registered,) = _integers(registered, "registered bytes")
        name = os.fsdecode(path)
        if create is not None:
            if mode == "r":
                raise errors.RequestError("a file that is created must be opened with mode 'r+'")
            _create(name, *_integers(create, "bytes"))
        self._file: Optional[_PageFile] = _PageFile(
            name, writes=mode == "r+", registered=registered, device=_device(device)
        )
        self._path = name
        self._process = os.getpid()

    def read(self, pages: Any, offsets: Any, *, rows: Any = None, stream: Any = None) -> None:
        """Reads pages. Returns when all of them have arrived.

        pages: tensors or arrays on the device, contiguous; each is filled. Or one of them, of which each row is a page.
        offsets: where each page lies in the file.
        rows: of one tensor or array, the rows that are read, one for each offset; by default all.
        stream: the torch or CuPy stream whose work must have ended before; by default the current one.
        """
        self._transfer(False, pages, offsets, rows, stream)

    def write(self, pages: Any, offsets: Any, *, rows: Any = None, stream: Any = None) -> None:
        """Writes pages, which are described as for `read`. Returns when all are in the file: other programs see them.

        The file grows if they lie behind its end.
        """
        self._transfer(True, pages, offsets, rows, stream)

    def register(self) -> int:
        """Registers all of the file that may be, and returns how many bytes are registered.

        Without this, each part of 64 MiB is registered in the background when its first page is moved.
        """
        return self._native().register()

    def fsync(self) -> None:
        """Returns when everything that was written is on the disk."""
        self._native().sync()

    def close(self) -> None:
        """Closes the file. Returns when nothing of it is registered any more."""
        file, self._file = self._file, None
        if file is not None and os.getpid() == self._process:
            file.release()

    def _native(self) -> _PageFile:
        if self._file is None:
            raise errors.RequestError("the file is closed")
        return self._file

    def _transfer(self, writes: bool, pages: Any, offsets: Any, rows: Any, stream: Any) -> None:
        file = self._native()
        places = _integers(offsets, "offsets")
        if isinstance(pages, (list, tuple)):
            if rows is not None:
                raise errors.RequestError("rows are those of one tensor or array, not of a list")
            memories, parts = list(pages), [(number, 0, _bytes_of(page)) for number, page in enumerate(pages)]
        else:
            memories, parts = [pages], _rows(pages, rows)
        if len(parts) != len(places):
            raise errors.RequestError(f"there are {len(parts)} pages and {len(places)} offsets")
        numbers = array.array("Q")
        for offset, part in zip(places, parts):
            numbers.append(offset)
            numbers.extend(part)
        _synchronize(memories, stream)
        file.transfer(writes, memories, numbers.tobytes())

    @property
    def path(self) -> str:
        """The file's path."""
        return self._path

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._native().size

    @property
    def device(self) -> str:
        """The device whose memory pages are in."""
        return self._native().device

    @property
    def moved(self) -> Dict[str, int]:
        """Bytes moved so far: "registered" by the GPU alone, "staged" by threads."""
        registered, staged = self._native().moved
        return {"registered": registered, "staged": staged}

    @property
    def why_staged(self) -> Optional[str]:
        """The last known reason why threads move pages, and not the GPU alone."""
        return self._native().why_staged

    def __enter__(self) -> Pages:
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Pages({self._path!r}{', closed' if self._file is None else f', device={self.device!r}'})"


def _rows(memory: Any, rows: Any) -> List[Tuple[int, int, int]]:
    """Rows of one tensor or array as parts of it."""
    shape = getattr(memory, "shape", None)
    if shape is None:
        raise errors.RequestError(f"{type(memory).__name__} is neither a torch tensor nor an array of NumPy or CuPy")
    if len(shape) == 0:
        raise errors.RequestError("a tensor without dimensions has no rows: pass it in a list")
    count = int(shape[0])
    size = _bytes_of(memory) // count if count else 0
    wanted = range(count) if rows is None else _integers(rows, "rows")
    for row in wanted:
        if row >= count:
            raise errors.RequestError(f"row {row} does not exist: there are {count}")
    return [(0, row * size, size) for row in wanted]


def _create(path: str, size: int) -> None:
    """Creates a file with so many allocated bytes, unless it exists. It has its name only when it has its bytes."""
    if os.path.exists(path):
        return
    folder, flags, is_named = os.path.dirname(path) or ".", os.O_RDWR | os.O_CLOEXEC, False
    try:
        try:
            file = os.open(folder, flags | os.O_TMPFILE, 0o600)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise
            # The file system has no files without names.
            file = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
            is_named = True
        try:
            if size:
                os.posix_fallocate(file, 0, size)
            if not is_named:
                # With a directory descriptor the kernel follows the link.
                os.link(f"/proc/self/fd/{file}", path, src_dir_fd=file)
        except BaseException:
            if is_named:
                os.unlink(path)
            raise
        finally:
            os.close(file)
    except FileExistsError:
        # Another program was faster.
        pass
    except OSError as error:
        raise errors.FileError(error.errno, error.strerror, path) from None
