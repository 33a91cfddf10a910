"""What a table or figure of the paper is built into: Markdown, CSV and LaTeX of each table, a PNG of each figure."""

import csv
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grt.files import replace_file


@dataclass
class Table:
    """Rows of text under `columns`; the first column is a name. An empty cell means: not applicable; **x** is bold."""

    name: str
    caption: str
    columns: Sequence[str]
    rows: list[Sequence[str]]

    def markdown(self) -> str:
        rule = "|".join("---" if i == 0 else "---:" for i in range(len(self.columns)))
        cells = [[cell.replace("|", r"\|").replace("\n", " ") for cell in row] for row in [self.columns, *self.rows]]
        lines = [f"| {' | '.join(row)} |" for row in cells]
        return "\n".join([self.caption, "", lines[0], f"|{rule}|", *lines[1:], ""])

    def csv(self) -> str:
        """For programs: numbers without commas, and what follows a ± in a column of its own."""
        out = io.StringIO()
        columns = [_plain_column(list(cells)) for cells in zip(self.columns, *self.rows, strict=True)]
        rows = [[cell for cells in row for cell in cells] for row in zip(*columns, strict=True)]
        csv.writer(out, lineterminator="\n").writerows(rows)
        return out.getvalue()

    def latex(self) -> str:
        head, *body = [f"    {_latex_row(row)}" for row in [self.columns, *self.rows]]
        label = "tab:" + re.sub(r"[^\w.+-]", "-", self.name.removeprefix("tab_"))
        columns = "l" + "r" * (len(self.columns) - 1)
        narrow = len(self.columns) <= WIDEST
        return "\n".join(
            [
                r"\begin{table}[t]",
                r"  \centering",
                f"  \\caption{{{_escape(self.caption)}}}",
                f"  \\label{{{label}}}",
                f"{'' if narrow else WIDE}  \\begin{{tabular}}{{{columns}}}",
                r"    \toprule",
                head,
                r"    \midrule",
                *body,
                r"    \bottomrule",
                f"  \\end{{tabular}}{'' if narrow else '}'}",
                r"\end{table}",
                "",
            ]
        )


BOLD = re.compile(r"\*\*(.+?)\*\*")
PLUS_MINUS = " ± "
GROUPED = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d+)?")
WIDEST = 7  # columns that a page of LaTeX takes in its own size of letters
WIDE = "  \\resizebox{\\textwidth}{!}{%\n"
LATEX = {"\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "#": r"\#", "_": r"\_", "±": r"$\pm$", "×": r"$\times$",
         "`": "", "<": r"$<$", ">": r"$>$", "^": r"\^{}", "−": "$-$", "$": r"\$", "{": r"\{", "}": r"\}",
         "~": r"\textasciitilde{}", "|": r"\textbar{}", "\n": " "}  # fmt: skip


def _plain_column(cells: list[str]) -> list[tuple[str, ...]]:
    """Of each cell what CSV has of it: one value, or two in a column with spreads."""
    head, *values = [cell.replace("**", "") for cell in cells]
    values = [value.replace(",", "") if GROUPED.fullmatch(value) else value for value in values]
    if not any(PLUS_MINUS in value for value in values):
        return [(cell,) for cell in (head, *values)]
    return [(head, f"{head} ±"), *(value.partition(PLUS_MINUS)[::2] for value in values)]


def _escape(text: str) -> str:
    """`text` in LaTeX, with what stands between two ** in bold."""
    parts = ["".join(LATEX.get(character, character) for character in part) for part in BOLD.split(text)]
    return "".join(f"\\textbf{{{part}}}" if i % 2 else part for i, part in enumerate(parts))


def _latex_row(cells: Sequence[str]) -> str:
    row = f"{' & '.join(map(_escape, cells))} \\\\"
    # What begins so, the \\ or \toprule before it would take for its own argument.
    return "{}" + row if row.lstrip().startswith(("[", "*")) else row


@dataclass
class Report:
    """`figures`: name -> a function that draws on matplotlib axes. `notes`: sentences under the tables."""

    title: str
    tables: list[Table]
    figures: dict[str, Callable[[Any], None]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def markdown(self) -> str:
        parts = [f"# {self.title}", "", *(table.markdown() for table in self.tables)]
        parts += [f"![{name}]({name}.png)\n" for name in self.figures]
        return "\n".join([*parts, *(f"{note}\n" for note in self.notes)])

    def files(self, name: str) -> dict[str, str]:
        """Path -> text: name.md with everything, CSV and LaTeX of each table in tables/."""
        files = {f"{name}.md": self.markdown()}
        for table in self.tables:
            files |= {f"tables/{table.name}.csv": table.csv(), f"tables/{table.name}.tex": table.latex()}
        return files

    def write(self, folder: Path, name: str) -> list[Path]:
        """`files`, and a PNG of each figure. Their paths."""
        (folder / "tables").mkdir(parents=True, exist_ok=True)
        files = self.files(name)
        for path, text in files.items():
            replace_file(folder / path, text)
        pictures = [_draw(draw, folder / f"{figure}.png") for figure, draw in self.figures.items()]
        return [folder / path for path in files] + pictures


def _draw(draw: Callable[[Any], None], out: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    temporary = out.with_name(f".{out.name}.tmp")
    try:
        draw(axes)
        figure.savefig(temporary, dpi=120, format="png", metadata={"Software": ""})
        temporary.replace(out)
    finally:
        plt.close(figure)
        temporary.unlink(missing_ok=True)
    return out
