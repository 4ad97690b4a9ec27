"""Figures as Markdown: a table of what is here and what the paper has, and a plot of the same numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from harness import draw_bars, load_pyplot

SOURCE = "Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention, SOSP 2023"
Curves = Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]  # points of a line, by panel and name


class Range(NamedTuple):
    """What the paper says of several cases at once. low: None where the paper says "at most" or "up to"."""

    low: float | None
    high: float


@dataclass(frozen=True)
class Row:
    """here: None if there is no such number. form: of here and paper.

    how: "computed" numbers follow from the model's sizes or from lengths, without a clock.
    """

    name: str
    here: float | None
    form: str
    how: Literal["simulated", "measured", "computed"]
    paper: float | Range | None = None

    def cells(self) -> list[str]:
        here = "-" if self.here is None else self.form.format(self.here)
        return [self.name, here, self._in_paper(), self._ratio(), self.how]

    def _in_paper(self) -> str:
        if self.paper is None:
            return ""
        if not isinstance(self.paper, Range):
            return self.form.format(self.paper)
        low, high = self.paper
        return (
            f"up to {self.form.format(high)}" if low is None else f"{self.form.format(low)} to {self.form.format(high)}"
        )

    def _ratio(self) -> str:
        """Of a range, to its nearer end."""
        if self.here is None or self.paper is None:
            return ""
        if not isinstance(self.paper, Range):
            return f"{self.here / self.paper:.2f}"
        low, high = self.paper
        if self.here > high:
            return f"{self.here / high:.2f}"
        return "within" if low is None or self.here >= low else f"{self.here / low:.2f}"


@dataclass(frozen=True)
class Figure:
    """What is written about a figure of the paper.

    differs: what differs from the paper's set-up, and why a number is off.
    missing: what of the figure there is not.
    curves: drawn instead of the rows, with axes of these names.
    """

    title: str
    rows: Sequence[Row]
    differs: str
    missing: str = ""
    curves: Curves = field(default_factory=dict)
    axes: tuple[str, str] = ("", "")
    y_limit: float | None = None


def markdown_table(rows: Sequence[Row]) -> str:
    lines = [["", "here", "paper", "here / paper", "how"], ["---"] * 5, *(row.cells() for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def markdown(figure: Figure, plot: str | None) -> str:
    """plot: name of the file with the plot, if there is one."""
    parts = [f"## {figure.title}", markdown_table(figure.rows), figure.differs]
    if figure.missing:
        parts.append(f"Not reproduced: {figure.missing}")
    if plot:
        parts.append(f"![{figure.title}]({plot})")
    return "\n\n".join(parts)


def draw(figure: Figure, path: Path) -> None:
    """The curves; or, if there are none, bars of the rows that have the unit of the first row."""
    if figure.curves:
        drawing = draw_curves(figure)
    else:
        bars: dict[str, dict[str, float]] = {}
        for row in figure.rows:
            if row.form != figure.rows[0].form:
                continue
            low, high = row.paper if isinstance(row.paper, Range) else (row.paper, None)
            numbers = {"here": row.here, "paper": low, "paper, end of the range": high}
            for colour, number in numbers.items():
                if number is not None:
                    bars.setdefault(colour, {})[row.name] = number
        drawing, axes = draw_bars(bars, figure.rows[0].form)
        axes.set_title(figure.title, fontsize=9)
    drawing.savefig(path, dpi=120)
    load_pyplot().close(drawing)


def draw_curves(figure: Figure) -> Any:
    num_columns = min(2, len(figure.curves))
    num_lines = -(-len(figure.curves) // num_columns)
    drawing, all_axes = load_pyplot().subplots(
        num_lines, num_columns, squeeze=False, figsize=(5 * num_columns, 3.2 * num_lines), layout="constrained"
    )
    for axes, (panel, lines) in zip(all_axes.flat, figure.curves.items(), strict=False):
        for name, points in lines.items():
            axes.plot(*zip(*sorted(points), strict=True), marker=".", label=name)
        axes.set_title(panel, fontsize=9)
        axes.set_xlabel(figure.axes[0], fontsize=8)
        axes.set_ylabel(figure.axes[1], fontsize=8)
        axes.set_ylim(0, figure.y_limit)
    names = {
        name: handle for axes in all_axes.flat for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    drawing.legend(names.values(), names.keys(), loc="outside lower center", ncols=1 + 2 * num_columns, fontsize=8)
    return drawing


def write_report(directory: Path, facts: Sequence[str], figures: Mapping[str, Figure], with_plots: bool) -> None:
    """report.md, and a plot for each figure, whose name is that of the figure."""
    sections = []
    for name, figure in figures.items():
        plot = f"{name}.png" if with_plots else None
        if plot and not (directory / plot).exists():
            draw(figure, directory / plot)
        sections.append(markdown(figure, plot))
    if not with_plots:
        facts = [*facts, "Without matplotlib there are no plots: `pip install matplotlib`, and run this again."]
    explained = (
        "A ratio to a range of the paper is one to its nearer end. Simulated: the engine's scheduler, or another "
        "system's, on a clock that a cost model moves (docs/simulate.md). Measured: run on this machine, with small "
        "models. Computed: from sizes and lengths, without a clock."
    )
    head = ["# The paper's figures", SOURCE + ".", "\n".join(f"- {fact}" for fact in facts), explained]
    path = directory / "report.md"
    path.write_text("\n\n".join([*head, *sections]) + "\n", encoding="utf-8")
