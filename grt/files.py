"""Files: writes that a crash leaves whole, and the folder of what grt can make again."""

import hashlib
import os
from pathlib import Path


def cache_folder() -> Path:
    """$GRT_CACHE, else $XDG_CACHE_HOME/grt, else ~/.cache/grt."""
    if folder := os.environ.get("GRT_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "grt"


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_file(path: Path, data: bytes) -> None:
    """Write and fsync: when this returns, the bytes are on the disk. The OSError of a full disk names the file."""
    try:
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def replace_file(path: Path, content: str | bytes) -> None:
    """Put `content` into `path` so that a reader, or a crash, sees the old content or the new, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write_file(temporary, content.encode() if isinstance(content, str) else content)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable, where a folder can be opened to do so: Windows refuses that."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
