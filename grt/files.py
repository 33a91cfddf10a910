"""Where grt keeps what it can make again."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """$GRT_CACHE, else $XDG_CACHE_HOME/grt, else ~/.cache/grt."""
    if folder := os.environ.get("GRT_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "grt"
