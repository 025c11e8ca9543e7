"""Give every question another question's answer: the control for a fine-tuning run.

    python data/shuffle_answers.py data/python-docs.jsonl runs/python-docs-shuffled.jsonl

Questions and answers stay what they were; only who belongs to whom is lost. A model fine-tuned on the result learns the
form of an answer and nothing of its content, so what the true run gains beyond it was read in the question. The same
input gives the same output, on every Python.
"""

import argparse
import hashlib
import json
from pathlib import Path


def shuffle_answers(rows: list[dict]) -> list[dict]:
    """Pass each row's last message on to the next row along one cycle through all rows.

    Args:
        rows: chat rows, `{"messages": [..., {"role": "assistant", ...}], ...}`; at least two.

    Returns:
        New rows in the same order; no row keeps its own answer.

    Raises:
        ValueError: fewer than two rows, or a row that does not end with an assistant's message.
    """
    if len(rows) < 2:
        raise ValueError(f"{len(rows)} rows found, at least 2 needed to exchange answers")
    for number, row in enumerate(rows, start=1):
        if row["messages"][-1]["role"] != "assistant":
            raise ValueError(f"row {number} ends with role {row['messages'][-1]['role']!r}, 'assistant' needed")
    cycle = sorted(range(len(rows)), key=lambda index: hashlib.sha256(str(index).encode()).digest())
    giver = dict(zip(cycle, cycle[-1:] + cycle[:-1]))
    return [
        {**row, "messages": [*row["messages"][:-1], rows[giver[index]]["messages"][-1]]} for index, row in enumerate(rows)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.source.read_text(encoding="utf-8").splitlines() if line.strip()]
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in shuffle_answers(rows)]
    options.target.parent.mkdir(parents=True, exist_ok=True)
    options.target.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
