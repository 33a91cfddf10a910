"""Runs `grt` as a machine would that is slow at one place.

    python slow_stand_in.py MODULE:NAME SECONDS HOW ARGUMENTS-OF-GRT...

The first call of that function takes SECONDS longer. HOW: `sleep`, which a signal ends, or `library`, a call that goes
on until it is done, as a long one of torch does.
"""

import hashlib
import importlib.util
import sys
import time
from importlib.abc import MetaPathFinder


def wait(seconds: float, how: str) -> None:
    if how == "sleep":
        time.sleep(seconds)
        return
    start, rounds = time.monotonic(), 1 << 20
    hashlib.pbkdf2_hmac("sha256", b"", b"", rounds)
    hashlib.pbkdf2_hmac("sha256", b"", b"", int(seconds / (time.monotonic() - start) * rounds))


class Slow(MetaPathFinder):
    """Puts the slow function in its module's place as soon as `grt` imports that, as late as it would by itself."""

    def __init__(self, module: str, name: str, seconds: float, how: str) -> None:
        self.module, self.name, self.seconds, self.how = module, name, seconds, how

    def find_spec(self, fullname, path=None, target=None):
        if fullname != self.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec and spec.loader
        execute = spec.loader.exec_module

        def exec_module(module) -> None:
            execute(module)
            real, seconds = getattr(module, self.name), [self.seconds]

            def slow(*args, **kwargs):
                if seconds:
                    wait(seconds.pop(), self.how)
                return real(*args, **kwargs)

            setattr(module, self.name, slow)

        spec.loader.exec_module = exec_module
        return spec


if __name__ == "__main__":
    where, seconds, how, *arguments = sys.argv[1:]
    sys.meta_path.insert(0, Slow(*where.split(":"), float(seconds), how))
    from grt.cli import main

    sys.exit(main(arguments))
