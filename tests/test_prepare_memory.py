"""A large text: memory stays flat, and a kill in the middle costs nothing but time.

GRT_LARGE_MB sets its size (default 200); the peak is that of all processes together, sampled.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MEGABYTES = int(os.environ.get("GRT_LARGE_MB", "200"))
LIMIT = 1 << 30


def write_text(path: Path, megabytes: int) -> None:
    """Lines of words from a vocabulary of 20,000 made-up ones."""
    rng = random.Random(0)
    words = ["".join(rng.choices("etaoinshrdlucmfwyp", k=rng.randint(1, 9))) for _ in range(20_000)]
    with open(path, "w") as file:
        for _ in range(megabytes):
            lines = (" ".join(rng.choices(words, k=14)) for _ in range(20_000))
            file.write("\n".join(lines)[: (1 << 20) - 1] + "\n")


def rss(pid: int) -> int:
    """Bytes of physical memory of a process and its descendants; 0 where it is gone."""
    try:
        fields = Path(f"/proc/{pid}/smaps_rollup").read_text().split()
        own = int(fields[fields.index("Pss:") + 1]) * 1024  # what processes share counts once
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (OSError, ValueError):
        return 0
    return own + sum(rss(int(child)) for child in children)


def prepare(text: Path, out: Path, kill_at: int | None = None) -> tuple[int, int, float]:
    """Runs `grt prepare`, killed when its journal has so many lines: (exit code, peak bytes, seconds)."""
    command = [sys.executable, "-m", "grt", "prepare", str(text), "--tokenizer", "gpt2", "--workers", "2"]
    start, peak = time.monotonic(), 0
    process = subprocess.Popen([*command, "--out", str(out)], cwd=ROOT, stderr=subprocess.DEVNULL)
    while process.poll() is None:
        peak = max(peak, rss(process.pid))
        journals = list(out.parent.glob(f".{out.name}.*.partial/journal.jsonl"))
        if kill_at and journals and journals[0].read_bytes().count(b"\n") > kill_at:
            process.send_signal(signal.SIGKILL)
        time.sleep(0.2)
    return process.returncode, peak, time.monotonic() - start


@pytest.mark.slow
@pytest.mark.timeout(60 + 15 * MEGABYTES)
@pytest.mark.skipif(sys.platform != "linux", reason="memory of a process tree is read from /proc, which is Linux's")
def test_memory_stays_flat_and_a_kill_changes_nothing(tmp_path):
    text = tmp_path / "large.txt"
    write_text(text, MEGABYTES)
    assert text.stat().st_size == MEGABYTES << 20
    code, peak, seconds = prepare(text, tmp_path / "whole")
    print(f"{MEGABYTES} MB in {seconds:.0f} s, peak {peak / 2**20:.0f} MB")
    assert code == 0 and peak < LIMIT
    code, _, before = prepare(text, tmp_path / "killed", kill_at=MEGABYTES // 2)
    assert code == -signal.SIGKILL and not (tmp_path / "killed").exists()
    code, _, after = prepare(text, tmp_path / "killed")
    print(f"killed after {before:.0f} s, finished in another {after:.0f} s")
    assert code == 0
    names = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "killed").iterdir())
    for name in names:
        assert (
            subprocess.run(["cmp", tmp_path / "whole" / name, tmp_path / "killed" / name], check=False).returncode == 0
        )
