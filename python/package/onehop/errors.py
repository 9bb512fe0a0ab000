"""Exceptions. Each is an OnehopError, and also the built-in exception that Python callers expect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Sequence

if TYPE_CHECKING:
    from ._native import WhyNot

    _Base = Exception
else:
    # Programs that catch exceptions of safetensors catch ours too.
    try:
        from safetensors import SafetensorError as _Base
    except ImportError:
        _Base = Exception


class OnehopError(_Base):
    """The base of all exceptions of onehop, and a SafetensorError where safetensors is installed."""


class FileError(OnehopError, OSError):
    """A file cannot be opened or read."""


class MissingFileError(FileError, FileNotFoundError):
    """A file does not exist."""


class ForbiddenFileError(FileError, PermissionError):
    """A file may not be read."""


class ChangedFileError(OnehopError):
    """A file was written or truncated during the load: discard the result."""


class FormatError(OnehopError, ValueError):
    """A header, an index or a manifest is refused, or files do not fit together."""


class RequestError(OnehopError, ValueError):
    """An argument is invalid."""


class UnknownTensorError(OnehopError, KeyError):
    """The model has no tensor of this name, or none that a pattern matches."""

    def __str__(self) -> str:
        return Exception.__str__(self)


class RowError(OnehopError, IndexError):
    """A table has no such row."""


class PageError(OnehopError, OSError):
    """A page cannot be moved. page: its number in the list."""

    page: int = 0


class GroupError(OnehopError):
    """The processes of a group did not connect, loaded different things, or one of them ended early."""


class RouteError(OnehopError):
    """The requested route is not possible; no other one is taken instead.

    tried: if no route works for a load from a drive, the routes that were tried, and why each failed.
    """

    tried: Sequence[WhyNot] = ()


class VerificationError(OnehopError):
    """Bytes in GPU memory differ from the files or the manifest."""


class StalledError(OnehopError, TimeoutError):
    """Neither the disk nor the GPU answered."""


class CancelledError(OnehopError):
    """The load was ended early."""


class DeviceError(OnehopError, RuntimeError):
    """There is no such device, or it failed."""


class DriveError(DeviceError):
    """The drive is missing, in use or not permitted, or it failed."""


class OutOfMemoryError(OnehopError, MemoryError):
    """The CPU's memory ran out."""


class OutOfGpuMemoryError(DeviceError, OutOfMemoryError):
    """The tensors do not fit into free GPU memory."""


class SwapError(OnehopError):
    """Weights were replaced in part. new, old: the names of tensors that are already new, and of the others."""

    def __init__(self, cause: object, new: Sequence[str], old: Sequence[str]) -> None:
        super().__init__(cause, new, old)
        self.new = list(new)
        self.old = list(old)

    def __str__(self) -> str:
        return f"{len(self.new)} tensors are new, {len(self.old)} are old: {self.args[0]}"
