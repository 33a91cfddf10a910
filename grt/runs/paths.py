"""The paths that a config holds: made absolute when a run begins, found again when it, or what it reads, has moved.

A run's folder keeps its tokenizer.json, and env.json says which it was (sha256), where the run's folder stood and which
text it read. What is no longer where config.json says is looked for beside the run as it stood then, and the text, in
the last place, among the prepared ones of the cache.
"""

import glob
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from grt.config import RunConfig
from grt.data.corpus import RESERVED, split_sources
from grt.data.prepare import cached
from grt.data.remote import SHORTCUTS
from grt.data.tasks import PREFIX
from grt.data.tokenizer import Tokenizer, get_tokenizer
from grt.data.tokenizer_json import FILE, tokenizer_from
from grt.errors import ConfigError
from grt.files import sha256
from grt.presets import change

HUB = "hf:"


def absolute(config: RunConfig) -> RunConfig:
    """The config with every path in it absolute, as a new run keeps it. Names of corpora and of a hub stay."""
    return change(
        config,
        data={
            "path": _absolute_sources(config.data.path),
            "tokenizer": _absolute_tokenizer(config.data.tokenizer),
        },
        train={"init_from": config.train.init_from and _absolute(config.train.init_from)},
    )


def located(config: RunConfig, folder: Path) -> RunConfig:
    """The config of the run, or model folder, in `folder`, with its text and tokenizer where they are now.

    Raises ConfigError where the tokenizer is not the one that the run was trained with.
    """
    facts, folder = facts_of(folder), folder.resolve()
    tokenizer = _own_tokenizer(config.data.tokenizer, folder, facts)
    here = replace(config, data=replace(config.data, tokenizer=tokenizer))
    return replace(here, data=replace(here.data, path=_text_now(here, folder, facts)))


def facts_of(folder: Path) -> dict[str, Any]:
    """env.json of a run's folder; empty where there is none, or none that can be read."""
    try:
        facts = json.loads((folder / "env.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return facts if isinstance(facts, dict) else {}


def tokenizer_facts(tokenizer: Tokenizer) -> dict[str, str]:
    """What env.json keeps of a run's tokenizer."""
    return {"name": tokenizer.name, "sha256": tokenizer.sha256}


def same_tokenizer(a: str, b: str) -> bool:
    """Whether two names stand for one mapping of text to ids."""
    return a == b or get_tokenizer(a).sha256 == get_tokenizer(b).sha256


def with_paths_of(config: RunConfig, there: RunConfig) -> RunConfig:
    """`config` under the paths of `there`: by which others the same run may be asked for is compared by content."""
    source = there.train.init_from
    begun = {"init_from": source} if source and _absolute(source) == config.train.init_from else {}
    return change(config, data={"path": there.data.path, "tokenizer": there.data.tokenizer}, train=begun)


# Text


def _absolute_sources(sources: str) -> str:
    """Those that begin at the root and are gone stay: which commas part them is known of what is there alone."""
    found = split_sources(sources)
    gone = not all(map(_is_there, found))
    return sources if gone and os.path.isabs(sources.removeprefix(HUB)) else ",".join(map(_absolute_source, found))


def _absolute_source(source: str) -> str:
    if source.startswith(HUB):
        name = source.removeprefix(HUB)
        return HUB + _absolute(name) if Path(name).is_dir() else source
    if _is_name(source):
        return source
    if _is_pattern(source):
        return os.path.join(glob.escape(os.getcwd()), source)  # as it is where it is absolute
    return _absolute(source)


def _absolute(source: str) -> str:
    """The path from the root, through real folders; the last name stays, also where it is a link."""
    path = Path(source)
    return str(path.parent.resolve() / path.name if path.name not in ("", "..") else path.resolve())


def _is_name(source: str) -> bool:
    """Of a corpus, a task or an address, and no path."""
    return source in (*RESERVED, *SHORTCUTS) or source.startswith((PREFIX, "url:"))


def _is_pattern(source: str) -> bool:
    return glob.has_magic(source) and not Path(source).exists()


def _is_there(source: str) -> bool:
    path = source.removeprefix(HUB)
    if _is_name(source) or (source.startswith(HUB) and not os.path.isabs(path)):
        return True
    return Path(path).exists() or (_is_pattern(path) and any(glob.iglob(path)))


def _parts(sources: str) -> list[str]:
    """The single sources of a list of absolute ones: a comma before anything else belongs to a name."""
    found: list[str] = []
    for part in sources.split(","):
        begins = os.path.isabs(part) or part.startswith(HUB) or _is_name(part)
        if begins or not found:
            found.append(part)
        else:
            found[-1] += f",{part}"
    return found


def _text_now(config: RunConfig, folder: Path, facts: dict[str, Any]) -> str:
    """Where the text is: as it was written, beside the run as it stood when it began, or prepared in the cache."""
    written = config.data.path
    if all(map(_is_there, split_sources(written))) or all(map(_is_there, _parts(written))):
        return written
    then = facts.get("folder")
    if isinstance(then, str):
        moved = [_beside(source, then, str(folder)) for source in _parts(written)]
        if all(map(_is_there, moved)):
            return ",".join(moved)
    text = facts.get("data")
    sha = text.get("corpus_sha256") if isinstance(text, dict) else None
    try:
        kept = cached(sha, config.data.tokenizer, config.data.val_fraction) if isinstance(sha, str) else None
    except ConfigError:  # the tokenizer is not to be had: whoever needs it says so
        kept = None
    return written if kept is None else str(kept)


def _beside(source: str, then: str, now: str) -> str:
    """The path that lies to the folder `now` as `source` lay to `then`."""
    hub, path = (HUB, source.removeprefix(HUB)) if source.startswith(HUB) else ("", source)
    if not os.path.isabs(path):
        return source
    if glob.has_magic(path):
        then, now = glob.escape(then), glob.escape(now)
    return hub + os.path.normpath(os.path.join(now, os.path.relpath(path, then)))


# Tokenizer


def _absolute_tokenizer(name: str) -> str:
    path = name.removeprefix(HUB)
    return HUB + _absolute(path) if name.startswith(HUB) and path and Path(path).exists() else name


def _own_tokenizer(name: str, folder: Path, facts: dict[str, Any]) -> str:
    """The tokenizer.json that the folder holds, for one that is no tokenizer of ours; checked where env.json tells."""
    if not name.startswith(HUB):
        return name
    own = folder / FILE
    kept = facts.get("tokenizer")
    expected = kept.get("sha256") if isinstance(kept, dict) else None
    if own.is_file():
        try:
            found = sha256(own)
        except OSError as error:
            raise ConfigError(f"{own} cannot be read ({error.strerror}): mend its permissions.") from None
        if expected not in (None, found):
            raise ConfigError(
                f"{own} is not the tokenizer that this was trained with (its sha256 differs from env.json): restore it."
            )
        return f"{HUB}{own}"
    if expected is not None and tokenizer_from(name).sha256 != expected:
        raise ConfigError(
            f"{own} is missing, and {name} is another tokenizer than this was trained with (its sha256 differs): "
            "restore the file."
        )
    return name
