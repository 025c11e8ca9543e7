"""The report of a folder: its content, and that untrusted text stays text."""

import json
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftkit.errors import UserError
from ftkit.output.run_folder import RunFolder
from ftkit.report.compare import compare
from ftkit.report.facts import read
from ftkit.report.page import note_end, refresh, render
from ftkit.report.timeline import Part, Timeline, as_chrome, draw, from_chrome

HOSTILE = "</style></pre><script>alert(1)</script><img src=http://example.org/x onerror=alert(1)>\x00\ud800'\""
PLAN = {
    "model": {"parameters": 1000},
    "ranks": 2,
    "ranks_per_node": 2,
    "strategy": {"says": "stage 2"},
    "why": ["the fastest strategy fits"],
    "tiers": {"host": {"per": "node", "granted_bytes": 8 << 30, "purposes": {"parameters": 2 << 30, "moments": 4 << 30}}},
}


def run_folder(path, *, metrics=(), **files):
    """Write a folder of a run; returns its path."""
    path.mkdir(parents=True, exist_ok=True)
    shown = (line if isinstance(line, str) else json.dumps(line) for line in metrics)
    (path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in shown))
    for name, content in files.items():
        file = path / {"recipe": "recipe.yaml", "divergences": "divergences.jsonl"}.get(name, f"{name}.json")
        file.write_text(content if isinstance(content, str) else json.dumps(content), errors="replace")
    return path


def lines(count, loss=lambda step: 3 - step / 100):
    keys = {"learning_rate": 1e-3, "tokens_per_second": 500.0, "loss_scale": None, "peak_device_bytes": 0}
    return [
        {"step": n, "loss": loss(n), "grad_norm": 1.0, "tokens": 10 * n, "peak_host_bytes": 1 << 30, **keys}
        for n in range(1, count + 1)
    ]


class Tags(HTMLParser):
    """Collects the tags of a page, and checks that they are closed."""

    VOID = {"meta", "link", "br", "rect", "line", "path", "circle"}

    def __init__(self, text):
        super().__init__()
        self.found, self.open = [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def check(text):
    """Check that a page is well-formed, has no scripts, asks for nothing, and that its charts have axes with units."""
    tags = Tags(text).found
    assert not [name for name, _ in tags if name in ("script", "iframe", "img", "object", "form", "a", "base")]
    for _, attributes in tags:
        assert not [key for key in attributes if key.startswith("on")]
        assert attributes.get("href", "data:,") == "data:,"
        assert "src" not in attributes
    for chart in re.findall(r'<svg class="chart.*?</svg>', text, re.DOTALL):
        titles = re.findall(r'class="axis-title [xy]".*?>(.*?)</text>', chart)
        assert len(titles) == (1 if "chart wide" in chart else 2), titles
        assert all(re.fullmatch(r".+ \(.+\)", title) for title in titles), titles
    return text


def test_a_run_that_ended(tmp_path):
    answers = [{"question": "3+1?", "before": "<b>", "after": "4", "expected": "4"}]
    summary = {"eval_loss_before": 4.0, "eval_loss_after": 3.0, "seconds": 90.0, "steps": 20, "tokens": 200, "plan": PLAN}
    peaks = {"peaks_per_rank": [{"device_bytes": 0, "host_bytes": 2 << 30}] * 2, "answers": answers, "world_size": 2}
    parts = [Part("compute", "forward 0", 0.0, 0.1), Part("compute", "recompute 0", 0.3, 0.4)]
    trace = as_chrome(Timeline(parts, 0.5, 3, "cpu"))
    standing = {"status": "finished", "started": "2026-01-01T10:00:00+00:00", "steps": 20}
    folder = run_folder(
        tmp_path / "run",
        metrics=[{"step": 0, "eval_loss": 4.0}, *lines(20), {"step": 20, "eval_loss": 3.0}],
        summary={**summary, **peaks},
        trace=trace,
        report=standing,
        recipe="seed: 17\n",
    )
    path = refresh(folder)
    text = check(path.read_text())
    assert 'class="status good">finished<' in text
    assert 'http-equiv="refresh"' not in text
    for shown in ("4 →</small> 3<", "−25.0 %", "2.00 GiB", "3.00 GiB planned", "90 s", "seed: 17"):
        assert shown in text, shown
    assert "Step 3 of rank 0, measured: 0.5 s" in text
    assert "recompute 0: 100 ms, from 300 ms on" in text
    assert "&lt;b&gt;" in text
    assert "Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:;" in text


def test_a_run_that_failed(tmp_path):
    """Its last loss stands there as it is, and not an earlier one in its place."""
    problem = "training failed: the loss of the held-out rows at the end is nan"
    summary = {"eval_loss_before": 4.0, "eval_loss_after": None, "steps": 20, "problem": problem}
    metrics = [{"step": 0, "eval_loss": 4.0}, {"step": 10, "eval_loss": 3.0}, *lines(20), {"step": 20, "eval_loss": None}]
    folder = run_folder(tmp_path / "run", metrics=metrics, summary=summary, report={"status": "finished", "steps": 20})
    text = check(refresh(folder).read_text())
    assert 'class="status early">failed<' in text
    assert problem in text
    assert "4 →</small> not a number<" in text
    out = tmp_path / "both.html"
    compare([folder], out)
    assert "<td>not a number</td>" in out.read_text()


def test_a_run_that_goes_on_and_one_that_was_killed(tmp_path):
    standing = {"status": "running", "steps": 10, "plan": PLAN}
    folder = run_folder(tmp_path / "run", metrics=lines(5), report=standing)
    RunFolder(folder).write_recipe("")
    with RunFolder(folder).lock():
        live = check(render(read(RunFolder(folder))))
    assert 'class="status busy">running<' in live
    assert '<meta http-equiv="refresh" content="5">' in live
    assert "50% done" in live
    text = check(refresh(folder).read_text())
    assert "ended early<" in text
    assert "no process has its folder locked" in text
    assert 'http-equiv="refresh"' not in text
    note_end(RunFolder(folder), "rank 1 died <SIGKILL>")
    assert "rank 1 died &lt;SIGKILL&gt;" in (folder / "report.html").read_text()
    note_end(RunFolder(folder), "something later")
    assert json.loads((folder / "report.json").read_text())["why"] == "rank 1 died <SIGKILL>"


def test_answers_by_step(tmp_path):
    """The last three evaluations are shown, the earlier ones folded. An evaluation of the last step is not shown twice."""
    during = [{"step": step, "answer": f"at {step}"} for step in (1000, 2000, 3000, 4000, 5000)]
    sample = {"question": "3+1?", "before": "B", "during": during, "after": "", "expected": "4"}

    def shown(name, **files):
        text = check(refresh(run_folder(tmp_path / name, **files)).read_text())
        folded, unfolded = re.search(r"<details>(.*?)</details>(.*?)</article>", text, re.DOTALL).groups()
        return [re.findall("<dt>(.*?)</dt>", part) for part in (folded, unfolded)]

    steps = [f"after step {each['step']}" for each in during]
    assert shown("going", report={"status": "running", "answers": [sample]}) == [steps[:2], [*steps[2:], "expected"]]
    over = {"answers": [{**sample, "after": "at 5000"}], "steps": 5000}
    assert shown("over", summary=over) == [steps[:1], [*steps[1:4], "after training", "expected"]]


def test_what_a_loss_that_went_wrong_leaves(tmp_path):
    metrics = lines(6, loss=lambda step: None if step == 4 else 2.0)
    events = [{"step": 4, "reason": "the loss is nan", "action": "skip"}, {"step": 7, "reason": "a spike", "action": "stop"}]
    divergences = "".join(json.dumps(each) + "\n" for each in events) + "half a li"
    text = check(refresh(run_folder(tmp_path / "run", metrics=metrics, divergences=divergences)).read_text())
    assert "training, 4: not a number" in text
    assert "step 4: the loss is nan, then: skip\nstep 7: a spike, then: stop" in text


TEXT = st.text() | st.just(HOSTILE)


@settings(max_examples=30)
@given(st.lists(TEXT, min_size=9, max_size=9))
def test_hostile_text_stays_text(tmp_path_factory, texts):
    folder = tmp_path_factory.mktemp("hostile") / "run"
    question, answer, why, command, device, name, reason, problem, recipe = texts
    trace = as_chrome(Timeline([Part(name, f"forward {name}", 0.0, 0.25)], 1.0, 3, "cpu"))
    plan = {**PLAN, "why": [why], "tiers": {"host": {**PLAN["tiers"]["host"], "purposes": {name: 1 << 30}}}}
    during = [{"step": step, "answer": answer} for step in range(1, 6)]
    answers = [{"question": question, "before": answer, "during": during, "after": answer, "expected": answer}]
    run_folder(
        folder,
        metrics=lines(3),
        summary={"problem": problem, "answers": answers, "plan": plan, "world_size": 2, "cores_per_rank": [name]},
        report={"status": why, "why": why, "command": command, "device": device, "versions": {name: name}},
        trace=trace,
        recipe=recipe,
        divergences=json.dumps({"step": 1, "reason": reason, "action": name}),
    )
    check(refresh(folder).read_text())
    compare([folder], folder / "both.html")
    check((folder / "both.html").read_text())


def test_lines_that_are_no_json_object_are_skipped(tmp_path):
    folder = run_folder(tmp_path / "run", metrics=[*lines(2), "[3]", "no JSON", *lines(1)], summary="{", trace="")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "loss": 1.5}\n{"step": 5, "lo')
    facts = read(RunFolder(folder))
    assert [step for step, _ in facts.points("loss")] == [1, 2, 1, 4]
    assert "ended early<" in check(refresh(folder).read_text())


def test_runs_are_compared(tmp_path):
    recipe = "optimizer: {{lr: {lr}, betas: [0.9, 0.95]}}\ntrain: {{seed: 17}}\n"
    first = run_folder(tmp_path / "a" / "demo", metrics=lines(5), recipe=recipe.format(lr=0.1))
    second = run_folder(tmp_path / "b" / "demo", metrics=lines(9), recipe=recipe.format(lr=0.2))
    out = tmp_path / "new" / "both.html"
    compare([first, second, first], out)
    text = check(out.read_text())
    assert f"<th>{first}</th><th>{second}</th>" in text
    assert "<tr><th>optimizer.lr</th><td>0.1</td><td>0.2</td></tr>" in text
    assert "seed" not in text
    assert "<tr><th>steps</th><td>5</td><td>9</td></tr>" in text
    assert 'class="line s1"' in text
    with pytest.raises(UserError, match="nowhere has no recipe"):
        compare([first, tmp_path / "nowhere"], out)
    with pytest.raises(UserError, match="has no recipe"):
        refresh(tmp_path)


def test_a_trace_goes_out_and_comes_back():
    parts = [Part("compute", "forward 0", 0.0, 0.25), Part("collectives", "gather 1", 0.125, 0.5)]
    timeline = Timeline(parts, 1.0, 3, "cpu")
    assert from_chrome(json.loads(json.dumps(as_chrome(timeline)))) == timeline
    many = Timeline([Part("compute", f"forward {n}", n * 1e-5, n * 1e-5 + 1e-6) for n in range(5_000)], 0.5)
    assert draw("many", many).count('class="part') == 1, "spans too short to be seen are one"
