"""The tasks of lm-evaluation-harness: found by name, with their own data or with local files in its place.

A local task is a YAML file that includes lm-eval's own (or DIR/NAME.yaml, a task of the user's) and names as its data
DIR/NAME.jsonl: one item a line, with the fields that the task's data have on the hub.
"""

import functools
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import lm_eval.tasks
import yaml
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager

from grt.errors import ConfigError, did_you_mean
from grt.evals.harness import quiet

OWN = Path(lm_eval.tasks.__file__).parent
NAME = re.compile(r"^task: *[\"']?([\w.-]+)[\"']? *$", re.M)


def task_files(folder: Path) -> dict[str, Path]:
    """Name -> YAML file, of every single task below a folder."""
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("**/*.yaml")):
        if name := NAME.search(path.read_text(encoding="utf-8")):
            found.setdefault(name[1], path)
    return found


@functools.cache
def known_tasks() -> dict[str, Path]:
    """Those of lm-eval, which are thousands. (Its own index takes many times as long.)"""
    return task_files(OWN)


def load_tasks(names: list[str], data_dir: Path | None, scratch: Path) -> dict[str, Task]:
    """The tasks, zero-shot, each with its data read. scratch: a folder that lasts as long as they do. ConfigError where
    there is no such task, its data cannot be read, or it asks for more than log-probabilities."""
    own = {} if data_dir is None else {path.stem: path for path in data_dir.glob("*.yaml")}
    files = own if own.keys() >= set(names) else known_tasks() | own
    for name in names:
        if name not in files:
            meant = did_you_mean(name, files, "`lm-eval ls tasks` shows all.")
            raise ConfigError(f"tasks has {name!r}, which lm-eval does not know: {meant}")
    return {name: _load(name, files[name], data_dir, scratch) for name in names}


def _load(name: str, path: Path, data_dir: Path | None, scratch: Path) -> Task:
    changes: dict[str, Any] = {"include": str(path), "task": name, "num_fewshot": 0, "fewshot_split": None}
    where = "its data on the hub (without a network: --data-dir, a folder with NAME.jsonl for each task)"
    if data_dir is not None:
        data = data_dir / f"{name}.jsonl"
        if not data.is_file():
            raise ConfigError(f"{data} is missing: --data-dir takes a folder with NAME.jsonl for each of the tasks.")
        where = str(data)
        files = {"data_files": {"test": str(data.resolve())}, "cache_dir": str(scratch / "data")}
        splits = {"training_split": None, "validation_split": None, "test_split": "test"}
        changes |= {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": files, **splits}
    local = scratch / f"{name}.yaml"
    local.write_text(yaml.safe_dump(changes), encoding="utf-8")
    try:
        with quiet():
            task = TaskManager(include_defaults=False).load([str(local)])["tasks"][name]
    except Exception as error:  # of datasets, its readers, the network, jinja, the task's own functions
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ConfigError(f"tasks has {name!r}, which cannot use {where}; {why}") from None
    if task.OUTPUT_TYPE == "generate_until":
        raise ConfigError(f"tasks has {name!r}, for which a model has to write: choose tasks that compare likelihoods.")
    return task


def describe(task: Task, limit: int | None) -> dict[str, Any]:
    """What decides its numbers beside the model: version, data and a hash of the items, prompts and metrics."""
    config = task.dump_config()
    docs = [doc for _, doc in task.doc_iterator(limit=limit)]
    text = json.dumps(docs, sort_keys=True, default=str)
    source = {key: config.get(key) for key in ("dataset_path", "dataset_name")}
    kept = ("output_type", "num_fewshot", "description", "doc_to_text", "doc_to_target", "doc_to_choice",
            "process_docs", "target_delimiter", "fewshot_delimiter", "metric_list")  # fmt: skip
    return {
        "version": task.VERSION,
        "items": len(docs),
        "items_of": len(task.eval_docs),
        "items_sha256": hashlib.sha256(text.encode()).hexdigest(),
        **source,
        "config": {key: config[key] for key in kept if key in config},
    }
