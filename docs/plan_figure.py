"""Draws docs/plan-memory.svg: a GPU's memory within a step of the packaged recipe that full fine-tuning of Llama-2-13B has.

It is the chart that `ftkit plan llama-2-13b-full-8xv100-16gb --hardware 8xv100-16gb -o FILE.html` has, alone in a file.
`make docs` runs it; a test compares.
"""

from __future__ import annotations

import re
from pathlib import Path

from ftkit.config.recipe import load
from ftkit.plan.catalog import find_hardware
from ftkit.report.plan_view import render
from ftkit.report.style import stylesheet
from ftkit.train.planning import plan_recipe

FILE = Path(__file__).parent / "plan-memory.svg"
RECIPE, HARDWARE, RANKS = "llama-2-13b-full-8xv100-16gb", "8xv100-16gb", 8
TITLE = "Memory of a GPU within the step"


def figure() -> str:
    """Return the chart as a file of its own: with its style, on a ground of its own, light or dark as the system is."""
    plan = plan_recipe(load(RECIPE, check_files=False), RANKS, find_hardware(HARDWARE))
    page = render(plan, RECIPE)
    after = page[page.index(f"<figcaption>{TITLE}") :]
    return alone(after)


def alone(figure: str, legend: str = "") -> str:
    """Return the first chart of a page as a file.

    Args:
        figure: HTML with the chart.
        legend: Elements above the chart, at y from -20 to 0.
    """
    found = re.search(r"<svg (.*?)>(.*?)</svg>", figure, re.DOTALL)
    assert found, "the page has no such chart"
    attributes, inner = found.groups()
    inner = re.sub(r'<rect class="hit".*?</rect>', "", inner, flags=re.DOTALL)  # a picture has no pointer over it
    ground = '<rect width="100%" height="100%" fill="var(--card)"/>'
    if legend:
        attributes = re.sub(r"0 0 (\d+) (\d+)", lambda box: f"0 -20 {int(box[1]) + 10} {int(box[2]) + 20}", attributes)
        ground = ground.replace("<rect", '<rect y="-20"')
    style = f"<style>{stylesheet()}</style>"
    return f'<svg xmlns="http://www.w3.org/2000/svg" {attributes}>{style}{ground}{legend}{inner}</svg>\n'


if __name__ == "__main__":
    FILE.write_text(figure(), encoding="utf-8")
