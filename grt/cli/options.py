"""Command-line options from dataclasses (tyro), the types that commands share, and errors of one sentence."""

import contextlib
import dataclasses
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import tyro

from grt.config import RunConfig, load
from grt.errors import ConfigError, nearest
from grt.presets import PRESETS, preset

T = TypeVar("T")
Device = Literal["auto", "cpu", "cuda", "mps"]
Run = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]

# What tyro says (first part of its box) -> what we say; the groups of the pattern fill the sentence.
SENTENCES = {
    r"Error parsing (-\S+): invalid literal for int\(\) with base 10: (.*)": "{0} is {1}: give a whole number",
    r"Error parsing (-\S+): could not convert string to float: (.*)": "{0} is {1}: give a number",
    r"Error parsing (-\S+): Could not find valid parse for arguments: \[(.*)\]": "{0} is {1}: give whole numbers",
    r"Error parsing (-\S+): no type matching .*INT could .*from \[(.*)\]": "{0} is {1}: give a whole number",
    r"Error parsing [\w.]+: (.*)": "{0}",
    r"invalid choice '(fp16|float16)' for argument '(.*)'\..*": "{1} {0} is not supported: choose bf16 or fp32",
    r"invalid choice (.*) for argument '(.*)'\. Expected one of \((.*?),?\)": "{1} is {0}: choose one of {2}",
    r"Missing value for argument '(.*)'\. Expected .*": "{0} has no value: give one (as {0}=VALUE if it begins with -)",
}


# How nanoGPT and others spell some of our options.
ELSEWHERE = {
    "learning-rate": "--optim.lr", "max-iters": "--train.steps", "max-steps": "--train.steps",
    "eval-interval": "--train.eval-every", "block-size": "--model.context", "n-embd": "--model.d-model",
    "n-head": "--model.n-heads", "n-layer": "--model.layout", "hidden-size": "--model.d-model",
}  # fmt: skip


def parse(command: type[T], arguments: list[str], name: str, default: Any = None) -> T:
    """Fill a command's dataclass from the command line; tyro's boxed errors become one sentence."""
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
            parsed = tyro.cli(
                command, args=arguments, prog=f"grt {name}", default=default, config=(tyro.conf.FlagCreatePairsOff,)
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise ConfigError(one_sentence(told.getvalue(), options_of(command))) from None
    name_what_is_empty(parsed, arguments)
    return parsed


def name_what_is_empty(command: Any, arguments: list[str]) -> None:
    """ConfigError for an option that takes several values and was given none."""
    for field in dataclasses.fields(command):
        option = "--" + field.name.replace("_", "-")
        if getattr(command, field.name) == [] and option in arguments:
            raise ConfigError(f"{option} has no value: name at least one, or leave it out.")


def starting_config(arguments: list[str]) -> tuple[RunConfig, list[str]]:
    """The config that options are applied to: a preset, a --config file, or the one of the run to resume."""
    arguments = [
        part for a in arguments for part in (a.split("=", 1) if a.startswith(("--config=", "--out=")) else [a])
    ]
    for at, argument in enumerate(arguments):  # the preset comes first, or is the last of `train --out DIR PRESET`
        if not argument.startswith("-") and (at == 0 or (argument in PRESETS and not takes_value(arguments[at - 1]))):
            return preset(argument), arguments[:at] + arguments[at + 1 :]
    for option in ("--config", "--out"):
        if option in arguments[:-1] and (option == "--config" or "--resume" in arguments):
            at = arguments.index(option)
            path = Path(arguments[at + 1])
            rest = arguments if option == "--out" else arguments[:at] + arguments[at + 2 :]
            file = path / "config.json" if path.is_dir() else path
            if option == "--out":  # the run to resume, by the paths that it was begun with
                return load(file), rest
            from grt.runs.paths import located

            return located(load(file), file.parent), rest
    if "-h" in arguments or "--help" in arguments:
        return preset("grt-nano"), arguments
    raise ConfigError("name a preset (`grt list` shows all, grt-nano is one) or a file with --config.")


def takes_value(argument: str) -> bool:
    return argument.startswith("-") and "=" not in argument and argument != "--resume"


def options_of(command: Any, prefix: str = "--") -> list[str]:
    """The options of a command's dataclass, those of nested ones with a dot."""
    names = []
    for name, hint in get_type_hints(command, include_extras=True).items():
        kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
        if dataclasses.is_dataclass(kind):
            flat = any(getattr(mark, "name", None) == "" for mark in get_args(hint)[1:])
            names += options_of(kind, prefix if flat else f"{prefix}{name}.")
        else:
            names.append(prefix + name.replace("_", "-"))
    return names


def one_sentence(box: str, options: Sequence[str] = ()) -> str:
    """The message of one of tyro's error boxes, and the option that was meant."""
    lines = [line.strip("│╭╮╰╯ ") for line in box.splitlines()[1:]]
    parts = [part.strip() for part in " ".join("\n" if not line.strip("─-") else line for line in lines).split("\n")]
    parts = [part for part in parts if part]
    message = parts[0].rstrip(".")
    if message.startswith("Missing from"):
        return missing(message)
    if message.startswith("Unrecognized options: "):
        return unknown(message.removeprefix("Unrecognized options: "), options)
    for pattern, sentence in SENTENCES.items():
        if found := re.fullmatch(pattern, message):
            return sentence.format(*(without_none(group) for group in found.groups())).rstrip(".") + "."
    return message + "."


def without_none(choices: str) -> str:
    """tyro counts the None of an option that may be left out among its choices, all in no order."""
    return ", ".join(sorted(set(choices.split(", ")) - {"'None'"})) if "'None'" in choices else choices


def missing(message: str) -> str:
    """Missing from grt eval: PATH A run's folder. (required) -> missing: PATH (A run's folder)."""
    items = re.findall(r"((?:--\S+ )?[A-Z|]+) (.*?)\.? \(required\)", message.partition(": ")[2])
    return "missing: " + ", ".join(f"{name} ({what})" for name, what in items) + "."


def unknown(given: str, options: Sequence[str]) -> str:
    """The first option or argument that nobody knows, and the nearest option; one without a dot may lack its part."""
    if not given.startswith("-"):
        return f"unexpected argument {given!r}: leave it out, or quote a value that has spaces."
    option = re.split(r"[=,]", given)[0]
    word = option.lstrip("-")
    synonym = ELSEWHERE.get(nearest(word.split(".")[-1].replace("_", "-"), ELSEWHERE) or "")
    if synonym in options:
        return f"unknown option {option}: did you mean {synonym}?"
    whole = {name.lstrip("-"): name for name in options}
    last = {name.split(".")[-1]: option for name, option in whole.items()}
    known = whole | last if "." not in word else whole
    meant = nearest(word, known)
    return f"unknown option {option}: {f'did you mean {known[meant]}?' if meant else '--help shows all.'}"
