"""The folder of a run: whose it is, and the two files that say what was run and where."""

import contextlib
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import torch

from grt.config import VERSION, RunConfig, config_hash, dump, load
from grt.data.tokenizer import Tokenizer
from grt.data.tokenizer_json import FILE, JsonTokenizer
from grt.device import hardware
from grt.errors import ConfigError
from grt.files import replace_file
from grt.presets import change
from grt.runs.paths import located, same_tokenizer, tokenizer_facts, with_paths_of
from grt.schema import identity

try:
    import fcntl
except ImportError:  # Windows: there, two processes must not train into the same folder at once
    fcntl = None

PACKAGE = Path(__file__).resolve().parents[1]
THIS_FILE = Path(__file__).resolve().relative_to(PACKAGE).as_posix()
LOCK = ".lock"


def claim(out: Path, config: RunConfig, resume: bool) -> tuple[RunConfig, RunConfig]:
    """Make the folder of a new run, or find the one to resume; ConfigError where that would touch another run.

    Returns the run's config, and the same with its text and tokenizer where they are now: a run may be resumed with its
    text at another path, which whoever opens it compares by content.
    """
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file: give --out a folder.")
    if (out / "config.json").exists():
        there = load(out / "config.json")
        ours = same_run(config, there, out) if resume else config
        if config_hash(there) != config_hash(ours):
            remedy = f"go on with it by `{resume_command(out)}`, or " if resume else ""
            what = f"{out} holds another run ({there.name}: {difference(there, config)})"
            raise ConfigError(f"{what}: {remedy}give --out a new folder.")
        if not resume:
            raise ConfigError(f"{out} already holds this run: add --resume to go on, or give --out a new folder.")
        now = located(ours, out)
        given = config.data.path != there.data.path
        return ours, change(now, data={"path": config.data.path}) if given else now
    elif out.exists() and any(p.name not in ("env.json", FILE, LOCK) and p.suffix != ".tmp" for p in out.iterdir()):
        raise ConfigError(f"{out} is not empty and holds no run: give --out a new folder.")
    elif resume:
        raise ConfigError(f"{out} holds no run to resume: leave --resume out.")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{out} cannot be made ({error.strerror}): give --out a folder that can be written."
        ) from None
    return config, config


def same_run(config: RunConfig, there: RunConfig, out: Path) -> RunConfig:
    """The config under the paths of the run in `out`, as far as they stand for the same tokenizer."""
    ours, given = with_paths_of(config, there), config.data.tokenizer
    if given == there.data.tokenizer or same_tokenizer(given, located(there, out).data.tokenizer):
        return ours
    return change(ours, data={"tokenizer": config.data.tokenizer})


def resume_command(out: Path) -> str:
    """What goes on with a run, as a shell takes it."""
    return shlex.join(["grt", "train", "--resume", "--out", str(out)])


def cannot_write(path: str | Path, error: OSError, run: Path) -> str:
    """The sentence for a file of a run that a full disk, say, refuses."""
    saved = any(re.fullmatch(r"step-\d+", folder.name) for folder in (run / "checkpoints").glob("step-*"))
    kept = "its checkpoints so far are whole" if saved else "it has no checkpoint yet and begins at step 0"
    return f"{path} cannot be written ({error.strerror}): make room and go on with --resume, {kept}."


class HeldError(ConfigError):
    """Another process trains into this folder."""


class FolderLock:
    """Held by the one process that trains into a folder: until `release`, the end of this object or of the process.

    The empty file goes with a release. Whoever opened it before that locks a file that has no name any more, and opens
    the next one.
    """

    def __init__(self, out: Path) -> None:
        path = out / LOCK
        for _ in range(100):
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                _lock(handle)
            except BlockingIOError:
                os.close(handle)
                break
            if _is_file_of(handle, path):
                self.release = weakref.finalize(self, _let_go, handle, path)
                return
            os.close(handle)
        raise HeldError(f"{out} is being trained by another process: wait for its end, or give --out a new folder.")


def _lock(handle: int) -> None:
    """BlockingIOError where another process has locked the file."""
    if fcntl is None:
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # a network file system without locks
        pass


def _is_file_of(handle: int, path: Path) -> bool:
    """Whether the open file still has that name."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def _let_go(handle: int, path: Path) -> None:
    with contextlib.suppress(OSError):  # Windows removes no open file, and the folder may have gone
        if _is_file_of(handle, path):
            path.unlink()
    os.close(handle)


def is_held(out: Path) -> bool:
    """Whether a process trains into this folder now."""
    if not (out / LOCK).exists():
        return False
    try:
        FolderLock(out).release()
    except HeldError:
        return True
    return False


def difference(a: RunConfig, b: RunConfig) -> str:
    """The first setting in which two configs differ, for a sentence."""
    for section in ("model", "data", "optim", "train"):
        theirs, ours = getattr(a, section), getattr(b, section)
        for name in sorted(identity(theirs).keys() | identity(ours).keys()):
            if getattr(theirs, name) != getattr(ours, name):
                return f"{section}.{name} {getattr(theirs, name)} there, {getattr(ours, name)} here"
    return "the same settings"


def environment(device: torch.device, state: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    """What decides a run beside its config: code, versions, hardware, precision, text."""
    return {
        "grt": VERSION,
        "commit": commit(),
        "command": command_line(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        **hardware(device),
        "dtype": state["dtype"],
        "peak_flops": state["peak"],
        "peak_source": state["peak_source"],
        "data": {"corpus_sha256": data["corpus_sha256"], **{k: v["sha256"] for k, v in data["splits"].items()}},
    }


def write_headers(out: Path, config: RunConfig, environment: dict[str, Any], tokenizer: Tokenizer) -> None:
    """env.json and the tokenizer first: a folder counts as a run from the moment it has a config.json."""
    facts = environment | {"tokenizer": tokenizer_facts(tokenizer), "folder": str(out.resolve())}
    replace_file(out / "env.json", json.dumps(facts, indent=2) + "\n")
    if isinstance(tokenizer, JsonTokenizer):
        replace_file(out / FILE, tokenizer.data)
    replace_file(out / "config.json", dump(config))


def command_line() -> str:
    """How this process was started; `grt` stands for its console script and for python -m grt."""
    first, *rest = sys.argv or [""]
    is_module = Path(first).resolve() == PACKAGE / "__main__.py"
    is_script = Path(first).name in ("grt", "grt.exe")
    return shlex.join(["grt" if is_module or is_script else first, *rest])


def commit() -> str | None:
    """The commit of the checkout that this package runs from, if it is one; with -dirty where the package differs.

    A package that is installed somewhere within another project's checkout is no part of that.
    """

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["git", "-C", str(PACKAGE), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=5)

    with contextlib.suppress(OSError, subprocess.SubprocessError):
        if git("ls-files", "--error-unmatch", THIS_FILE).returncode:
            return None
        head = git("rev-parse", "HEAD")
        if head.returncode == 0:
            return head.stdout.strip() + ("-dirty" if git("diff", "--quiet", "HEAD", "--", ".").returncode else "")
    return None
