"""`grt`: train, evaluate and use depth-recurrent language models.

One file a subcommand: NAME.py holds a dataclass, whose fields are its options, and run_NAME; it imports torch in its
function, so that every --help answers at once. This file finds the subcommand, and turns every error that a user can
mend into one line. Exit codes: 0; 2 bad input; 3 non-finite loss; 130 Ctrl-C, 143 SIGTERM (training saves first) and
129 a closed terminal; others are a defect.

Every command runs watched (grt/console.py: none is silent for long) and ends within seconds of a signal
(grt/train/interrupt.py).
"""

import contextlib
import importlib
import io
import os
import sys
import warnings
from typing import Any

from grt.config import VERSION
from grt.errors import ConfigError, did_you_mean

COMMANDS = {
    "prepare": "turn text into token shards",
    "train": "train a preset or a config",
    "eval": "loss of a trained model at each depth",
    "generate": "continue a text",
    "calibrate": "find the threshold at which tokens leave the loop",
    "info": "parameters, FLOPs and memory of a preset or a run",
    "list": "presets, methods, and runs under a folder",
    "compare": "put runs side by side: cost and loss",
    "paper": "run the paper's comparisons or one's own, build their tables",
    "export": "a trained model for Hugging Face or as ONNX",
    "import": "a Hugging Face GPT-2 as a model folder, dense or recurrent",
    "bench": "measure speed, ours and a peer in turn",
    "demo": "train a small GRT within five minutes and show it",
}


def usage() -> str:
    lines = "\n".join(f"  {name:<10} {what}" for name, what in COMMANDS.items())
    return (
        f"usage: grt COMMAND ...\n\nDepth-recurrent language models.\n\n{lines}\n\n"
        "`grt COMMAND --help` shows its options."
    )


def main(arguments: list[str] | None = None) -> int:
    """Run one subcommand; user errors are one line on stderr and exit code 2."""
    arguments = sys.argv[1:] if arguments is None else arguments
    warnings.formatwarning = lambda message, *_: f"warning: {' '.join(str(message).split())}\n"
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8 shows ? where it cannot show a character
    try:
        code = dispatch(arguments)
        if bool(sys.stdout):  # it is None where the caller closed it
            sys.stdout.flush()  # here, where a reader that left is noticed in good order
        return code
    except BrokenPipeError:  # as in `grt generate ... | head -c 99`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        code = exit_code(error)
        if code is None:
            raise
        print(f"grt: {sentence(error)}", file=sys.stderr)
        return code
    except KeyboardInterrupt as stop:  # Stopped, where a signal has come
        with contextlib.suppress(OSError):  # of a reader that left, or a terminal that is gone
            print(f"grt: {str(stop) or 'interrupted'}", file=sys.stderr)
        return getattr(stop, "code", 130)


def dispatch(arguments: list[str]) -> int:
    name, *rest = arguments or [""]
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name == "--version":
        print(f"grt {VERSION}")
        return 0
    if name not in COMMANDS:
        if not name or name.startswith("-"):
            raise ConfigError(f"name a command first: {', '.join(COMMANDS)}; `grt --help` says what each does.")
        raise ConfigError(f"unknown command {name!r}: {did_you_mean(name, COMMANDS, '`grt --help` shows all.')}")
    from grt.console import watching
    from grt.train.interrupt import Signals

    what = rest[:1] if name in ("bench", "paper") else []
    with Signals(), watching(" ".join(["grt", name, *what])):
        command = importlib.import_module(f"grt.cli.{name}")  # here, so that no other command costs time
        return getattr(command, f"run_{name}")(rest)


def sentence(error: Exception) -> str:
    """One line that says what is wrong; for an error of the system also with which file, and what to do."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror.lower()}: check the path, its permissions and the space on its disk."
    return " ".join(str(error).split())


def exit_code(error: Exception) -> int | None:
    """2 for what the user can mend, 3 for a non-finite loss, None for a defect of ours (which keeps its traceback)."""
    diagnose: Any = sys.modules.get("grt.train.diagnose")
    if diagnose is not None and isinstance(error, diagnose.NonFiniteError):
        return 3
    return 2 if isinstance(error, ConfigError | OSError) else None
