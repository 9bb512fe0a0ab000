"""What can go wrong. Every exception of onehop is an OnehopError, and what a caller of Python would expect beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Sequence

if TYPE_CHECKING:
    from ._native import WhyNot

    _Base = Exception
else:
    # Programs that catch what safetensors raises catch ours too.
    try:
        from safetensors import SafetensorError as _Base
    except ImportError:
        _Base = Exception


class OnehopError(_Base):
    """The base of all exceptions of onehop, and a SafetensorError where safetensors is installed."""


class FileError(OnehopError, OSError):
    """A file cannot be opened or read, or is none."""


class MissingFileError(FileError, FileNotFoundError):
    """A file is not there."""


class ForbiddenFileError(FileError, PermissionError):
    """A file may not be read."""


class ChangedFileError(OnehopError):
    """A file was written or cut while it was loaded: what was loaded of it is not to be trusted."""


class FormatError(OnehopError, ValueError):
    """A header, an index or a manifest is refused, or files do not fit together."""


class RequestError(OnehopError, ValueError):
    """What was asked for makes no sense."""


class UnknownTensorError(OnehopError, KeyError):
    """The model has no tensor of this name, or none that a pattern matches."""

    def __str__(self) -> str:
        return Exception.__str__(self)


class RowError(OnehopError, IndexError):
    """A table has no such row."""


class GroupError(OnehopError):
    """The processes of a group did not come together, loaded different things, or one of them ended early."""


class RouteError(OnehopError):
    """The requested route is not possible; no other one is taken instead.

    tried: of a load from a drive for which no route works, the routes that were tried, with what is in their way.
    """

    tried: Sequence[WhyNot] = ()


class VerificationError(OnehopError):
    """Bytes in GPU memory are not those of the files, or of the manifest."""


class StalledError(OnehopError, TimeoutError):
    """Neither the disk nor the GPU answered."""


class CancelledError(OnehopError):
    """The load was ended before it was done."""


class DeviceError(OnehopError, RuntimeError):
    """There is no such device, or it failed."""


class DriveError(DeviceError):
    """The drive cannot be opened, because it is in use, not there or not allowed, or it failed."""


class OutOfMemoryError(OnehopError, MemoryError):
    """The CPU's memory ran out."""


class OutOfGpuMemoryError(DeviceError, OutOfMemoryError):
    """The tensors do not fit into the GPU memory that is free."""


class SwapError(OnehopError):
    """Weights were replaced in part. new, old: the names of tensors that are the new ones already, and that are not."""

    def __init__(self, cause: object, new: Sequence[str], old: Sequence[str]) -> None:
        super().__init__(cause, new, old)
        self.new = list(new)
        self.old = list(old)

    def __str__(self) -> str:
        return f"{len(self.new)} tensors are new, {len(self.old)} are old: {self.args[0]}"
