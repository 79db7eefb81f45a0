"""A table for the terminal and for the documentation."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table

__all__ = ["Grid"]


@dataclass(frozen=True)
class Grid:
    """Title, column names, rows of text. The first column is left-aligned, the others right-aligned."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{self.title}: {len(self.columns)} columns, and a row of {len(row)}: {row}")

    def table(self) -> Table:
        """Return the table for the terminal."""
        table = Table(title=self.title, title_justify="left")
        for place, column in enumerate(self.columns):
            table.add_column(column, justify="right" if place else "left")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        """Return the table for the documentation."""

        def line(cells: tuple[str, ...]) -> str:
            return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

        rule = "|" + "|".join(["---"] * len(self.columns)) + "|"
        return "\n".join([f"**{self.title}**", "", line(self.columns), rule, *map(line, self.rows)])
