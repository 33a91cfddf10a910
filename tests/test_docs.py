"""What the documents promise exists: links, files, commands and their options, Python that compiles.

Each check takes a document's text (and where its relative paths start) and returns its complaints.
"""

import ast
import itertools
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import tyro

import grt
from grt import cli
from grt.cli.report import diagram
from grt.config import Layout, RunConfig
from grt.errors import ConfigError
from grt.presets import preset

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/tokenizers.md"]
SHELL = {"", "bash", "sh", "shell", "console"}

# Written in halves, so that this file does not complain about itself.
FORBIDDEN = re.compile("|".join(("/" + "work/", "/tmp/" + "venv", "/opt/" + "(pypi|wheels)")))


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """(language, content) of each fenced block."""
    for found in re.finditer(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", text, re.M | re.S):
        yield found[2].lower(), found[3]


def without_blocks(text: str) -> str:
    return re.sub(r"^( *)```.*?^\1```", "", text, flags=re.M | re.S)


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def check_links(text: str, root: Path) -> list[str]:
    """Relative targets exist; an anchor is the slug of a heading."""
    prose = without_blocks(text)
    targets = re.findall(r"\]\(<?([^)\s>]+)>?[^)]*\)", prose) + re.findall(r'(?:src|href)="([^"]+)"', prose)
    anchors = {slug(heading) for heading in re.findall(r"^#+ (.*)$", prose, re.M)}
    complaints = []
    for target in targets:
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        if path and not (root / path).exists():
            complaints.append(f"{target}: no such file")
        elif not path and anchor not in anchors:
            complaints.append(f"{target}: no such heading")
    return complaints


def tree(block: str) -> Iterator[str]:
    """Paths of a drawn tree: names at the start of a line, deeper lines inside of the folder above, comments after."""
    folders: list[tuple[int, str]] = []
    for line in block.splitlines():
        indent = re.match(r"[\s│├└─|`+-]*", line)
        assert indent is not None
        names = []
        for word in re.split(r"\s{2,}|#", line[indent.end() :])[0].replace(",", " ").split():
            if not re.fullmatch(r"[\w./-]*[\w/]", word) or not (
                "." in word or "/" in word or word in {"Makefile", "LICENSE"}
            ):
                break
            names.append(word)
        while folders and folders[-1][0] >= indent.end():
            folders.pop()
        for name in names:
            yield (folders[-1][1] if folders else "") + name
        if names and names[0].endswith("/"):
            folders.append((indent.end(), (folders[-1][1] if folders else "") + names[0]))


def check_tree(text: str, root: Path) -> list[str]:
    complaints = []
    for language, block in blocks(text):
        if language not in {"", "text"} or not re.search(r"^[\s│├└─]*grt/\s", block, re.M):
            continue
        paths = list(tree(block))
        top = paths[0] if not (root / paths[0]).exists() and all(p.startswith(paths[0]) for p in paths) else ""
        complaints += [f"{path}: in the tree only" for path in paths if not (root / path.removeprefix(top)).exists()]
    return complaints


def command_lines(text: str) -> Iterator[list[str]]:
    """Words of each `grt ...` or `make ...` line of the shell blocks, up to a pipe or the like."""
    for language, block in blocks(text):
        if language not in SHELL:
            continue
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            line = re.sub(r"^\$ ", "", line.strip())
            line = re.sub(r"^(\w+=\S+ )*(\S*python3? -m grt|\S*bin/grt)(?=\s|$)", "grt", line)
            if not line.startswith(("grt ", "make ")):
                continue
            lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
            lexer.whitespace_split = True
            words = []
            for word in lexer:
                if re.fullmatch(r"[|&;<>]+", word):
                    break
                words.append(word)
            yield [word for word in words if word not in {"...", "…"}]


class Parsed(Exception):
    """Raised in the place of running a command."""


def check_commands(text: str, root: Path) -> list[str]:
    """Subcommands, options and make targets exist; nothing is run."""
    really = tyro.cli
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)

    def parse_only(*args, **kwargs):
        really(*args, **kwargs)
        raise Parsed

    complaints = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tyro, "cli", parse_only)
        patch.setattr("grt.cli.options.load", lambda path: RunConfig())
        for program, *words in command_lines(text):
            if program == "make":
                wrong = [word for word in words if re.fullmatch(r"[a-z-]+", word) and word not in targets]
                complaints += [f"make {word}: no such target" for word in wrong]
                continue
            try:
                code = cli.dispatch(words)
            except Parsed:
                continue
            except (ConfigError, SystemExit) as error:
                if not isinstance(error, SystemExit) or error.code:
                    complaints.append(f"grt {shlex.join(words)}: {error}")
            else:
                assert code == 0 and words[0] in {"-h", "--help", "--version"}, "a command must not run here"
    return complaints


def check_inline_commands(text: str, root: Path) -> list[str]:
    """`grt eval RUN` in prose names a command that exists."""
    names = re.findall(r"`grt ([a-z][\w-]*)[^`]*`", without_blocks(text))
    return [f"grt {name}: no such command" for name in names if name not in cli.COMMANDS]


def check_python(text: str, root: Path) -> list[str]:
    """Python blocks compile, and what they take from grt is there."""
    complaints = []
    for language, block in blocks(text):
        if language not in {"python", "py"}:
            continue
        try:
            parsed = ast.parse(block)
        except SyntaxError as error:
            complaints.append(f"python block, line {error.lineno}: {error.msg}")
            continue
        for node in ast.walk(parsed):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "grt":
                module = __import__(node.module or "", fromlist=["_"])
                missing = [alias.name for alias in node.names if not hasattr(module, alias.name)]
                complaints += [f"{node.module} has no {name}" for name in missing]
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "grt":
                complaints += [] if node.attr in grt.__all__ else [f"grt.{node.attr} is no public name"]
    return complaints


def check_forbidden(text: str, root: Path) -> list[str]:
    """Nothing names a path of the machine that it was written on."""
    return [f"line {n}: {line.strip()}" for n, line in enumerate(text.splitlines(), 1) if FORBIDDEN.search(line)]


CHECKS = [check_links, check_tree, check_commands, check_inline_commands, check_python]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("document", DOCUMENTS)
def test_document_keeps_its_promises(document, check):
    path = ROOT / document
    if not path.exists():
        pytest.skip(f"{document} is not written yet")
    complaints = check(path.read_text(encoding="utf-8"), ROOT)
    assert not complaints, "\n".join(complaints)


def test_no_two_commands_of_the_readme_write_into_one_place_and_git_keeps_out_of_it():
    """As a user runs them, from top to bottom in a clone; what commands write by default counts too."""
    written = ["dial.png", "halting.png", "compare.png"]
    for words in command_lines((ROOT / "README.md").read_text(encoding="utf-8")):
        out = [b for a, b in itertools.pairwise(words) if a == "--out"] + (
            words[3:4] if words[1:2] == ["export"] else []
        )
        if "--resume" not in words:
            written += [path for path in out if path != "compare.png"]
    assert len(written) == len(set(written)) > 8, written
    ignored = subprocess.run(
        ["git", "-C", str(ROOT), "check-ignore", *written], check=False, capture_output=True, text=True
    ).stdout.splitlines()
    assert ignored == written


def test_the_readme_shows_how_to_use_it():
    path = ROOT / "README.md"
    if not path.exists():
        pytest.skip("README.md is not written yet")
    text = path.read_text(encoding="utf-8")
    assert list(command_lines(text)), "no command line in a fenced block"
    assert any(re.search(r"^[\s│├└─]*grt/\s", block, re.M) for _, block in blocks(text)), "no tree of the repository"


def test_no_file_names_a_path_of_one_machine():
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, check=False, cwd=ROOT, capture_output=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    complaints = []
    files = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    assert Path(__file__).resolve() in files
    for file in files:
        if file.is_file() and b"\0" not in (data := file.read_bytes()):
            complaints += [
                f"{file.relative_to(ROOT)}: {c}" for c in check_forbidden(data.decode(errors="replace"), ROOT)
            ]
    assert not complaints, "\n".join(complaints)


def fenced(language: str, content: str) -> str:
    return f"text\n\n```{language}\n{content}\n```\n"


WRONG = [
    (check_links, "see [this](docs/none.md)"),
    (check_links, "![figure](none.png)"),
    (check_links, '<img src="none.png" width="80">'),
    (check_links, "# One\nsee [below](#two)"),
    (check_tree, fenced("", "grt/          the package\n  none.py     nothing")),
    (check_tree, fenced("text", "grt/\n├── cli/   # commands\n└── model/\n    └── none.py  # nothing")),
    (check_tree, fenced("", "repo/\n  grt/  the package\n    none.py  nothing")),
    (check_commands, fenced("bash", "grt trian grt-nano --out runs/a")),
    (check_commands, fenced("bash", "grt train grt-nano --out runs/a --steps 3")),
    (check_commands, fenced("", "$ grt train grt-nanoo --out runs/a")),
    (check_commands, fenced("sh", "grt train grt-nano --out runs/a \\\n  --optim.lr fast")),
    (check_commands, fenced("bash", ".venv/bin/grt eval runs/a --depht 3 | head -1")),
    (check_commands, fenced("console", "$ python -m grt eval")),
    (check_commands, fenced("bash", "make everything")),
    (check_inline_commands, "use `grt trian` for it"),
    (check_python, fenced("python", "print('a'")),
    (check_python, fenced("py", "from grt import nothing_like_it")),
    (check_python, fenced("python", "import grt\ngrt.nothing_like_it()")),
    (check_forbidden, "cd /" + "work/project"),
    (check_forbidden, "run /tmp/" + "venv0/bin/python"),
    (check_forbidden, "in /opt/" + "wheels"),
    (check_forbidden, "in /opt/" + "pypi"),
]

RIGHT = [
    (check_links, "# Two words!\nsee [this](CONTRIBUTING.md#set-up), [that](https://a.b/c) and [below](#two-words)"),
    (check_links, fenced("", "a[0](none)")),
    (
        check_tree,
        fenced("", "grt/          the package\n  config.py   runs\n  data/ evals/  text\nMakefile  targets"),
    ),
    (
        check_tree,
        fenced("", "repo/\n├── grt/     # the package\n│   ├── model/\n│   │   └── loop.py\n│   └── config.py  # x.y"),
    ),
    (check_tree, fenced("", "other/  nothing\n  none.py")),
    (check_commands, fenced("bash", "make setup  # first\ngrt train grt-nano --out runs/a --optim.lr 1e-3 && ls")),
    (check_commands, fenced("", "$ grt eval runs/a --depth 0 2 --json > a.json\n0.1")),
    (check_commands, fenced("bash", "grt train --config my.json --out runs/b\ngrt --version\ngrt info --help; rm x")),
    (check_commands, fenced("bash", "grt demo\ngrt list\ngrt generate runs/a --prompt 'a b' | less")),
    (check_inline_commands, "use `grt train PRESET --out DIR`, or `grt` alone"),
    (check_python, fenced("python", "import grt\nfrom grt.config import RunConfig\ngrt.load_model('runs/a')")),
    (check_forbidden, "the work/life balance of a network/worker in /tmp"),
]


@pytest.mark.parametrize(("check", "text"), WRONG)
def test_wrong_sample_is_rejected(check, text):
    assert len(check(text, ROOT)) == 1


@pytest.mark.parametrize(("check", "text"), RIGHT)
def test_right_sample_is_accepted(check, text):
    assert check(text, ROOT) == []


def test_every_check_has_a_wrong_and_a_right_sample():
    assert {check for check, _ in WRONG} == {check for check, _ in RIGHT} == {*CHECKS, check_forbidden}


def test_the_readme_draws_the_layout_it_names():
    """The diagram is what `grt info` prints for grt-nano."""
    layout = preset("grt-nano").model.blocks
    assert diagram(layout) in (ROOT / "README.md").read_text(encoding="utf-8")
    assert diagram(layout) != diagram(Layout.parse("2+5x4+2")) and "x 4" in diagram(Layout.parse("2+5x4+2"))
    assert diagram(Layout.parse("8L")) == "tokens -> embed -> [8 blocks] -> ln_f -> head -> logits"
