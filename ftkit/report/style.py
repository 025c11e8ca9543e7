"""The style sheet of a report: system fonts, one column that becomes a grid, colours as variables for light and dark.

The first six colours are told apart by people who see colours otherwise (after Okabe and Ito, 2008), lighter in the dark.
"""

from __future__ import annotations

from ftkit.report.charts import COLOURS

_LIGHT = ("#0a66b7", "#c4560a", "#0b8a68", "#a8447f", "#8a6a00", "#5b5fc7")
_DARK = ("#63b3f5", "#f2935c", "#4fcfa6", "#e38fc0", "#dcb94a", "#a3a6ff")
_MORE_LIGHT = ("#7fb2dd", "#e6ad84", "#82c7b3", "#d6a3c3", "#c7b36b", "#aeb0e4")
_MORE_DARK = ("#2f6a9c", "#96562f", "#2a7a62", "#8a5074", "#84702a", "#5e60a5")


def _variables(first: tuple[str, ...], more: tuple[str, ...]) -> str:
    return "".join(f"--c{number}:{colour};" for number, colour in enumerate((*first, *more)))


_COLOURED = "".join(
    f".s{n}{{stroke:var(--c{n})}}.f{n}{{fill:var(--c{n})}}.p{n}{{fill:var(--c{n})}}.b{n}{{--own:var(--c{n})}}"
    for n in range(2 * COLOURS)
)

_LIGHT_VARIABLES = (
    "--page:#f6f7f9;--card:#fff;--ink:#1b1f24;--soft:#5c6670;--line:#dfe3e8;--grid:#eceff2;--bad:#c62828;--good:#1a7f4b;"
    f"--busy:#0a66b7;--hit:#0a66b714;--on:#fff;--learned:#d9f2e6;{_variables(_LIGHT, _MORE_LIGHT)}"
)
_DARK_VARIABLES = (
    "--page:#101317;--card:#181c21;--ink:#e6e9ed;--soft:#97a1ac;--line:#2b3138;--grid:#242a30;--bad:#ff7b72;--good:#56d38f;"
    f"--busy:#63b3f5;--hit:#63b3f51f;--on:#101317;--learned:#123d2e;{_variables(_DARK, _MORE_DARK)}"
)

_CHARTS = """
.grid-of-charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(340px,100%),1fr));gap:14px}
figure{margin:0;padding:14px 14px 8px;min-width:0;display:flex;flex-direction:column}
figure>svg{margin-top:auto!important}
figure.broad{margin-top:14px}
figcaption{font-weight:600;font-size:14px;padding:0 4px}
.scroll{overflow-x:auto}
svg.chart{display:block;width:100%;height:auto;margin-top:4px;font:12.5px system-ui,-apple-system,"Segoe UI",Roboto,
"Noto Sans","DejaVu Sans",sans-serif}
svg.chart.wide{min-width:820px}
svg text{fill:var(--soft);font-variant-numeric:tabular-nums}
svg .name,svg .axis-title{fill:var(--ink)}svg .inside{fill:var(--on);font-size:11px;pointer-events:none}
svg .grid{stroke:var(--grid)}svg .axis,svg .mark{stroke:var(--line)}
svg .line,svg .thread,svg .level{fill:none;stroke-width:1.7;stroke-linejoin:round;stroke-linecap:round}
svg .thread{stroke-width:1;opacity:.6}svg .level{stroke-dasharray:5 4;stroke-width:1.4}
svg .bad{stroke:var(--bad);stroke-width:1.8;fill:none}svg .limit{stroke:var(--bad);stroke-width:2}
svg .p-plain{fill:var(--soft)}svg .hit{fill:transparent}svg .hit:hover{fill:var(--hit)}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:2px 14px;margin:4px 0 0;padding:0 4px;font-size:12.5px;
color:var(--soft)}
.legend li{display:flex;align-items:center;gap:6px;min-width:0;overflow-wrap:anywhere}
.key{flex:none;width:14px;height:3px;border-radius:2px;background:var(--own)}
.key.part{width:11px;height:11px;border-radius:3px}.key.dots{width:8px;height:8px;border-radius:50%}
.key.level{background:none;height:0;border-top:2px dashed var(--own);border-radius:0}
"""

STYLE = (
    f"""
:root{{color-scheme:light dark;{_LIGHT_VARIABLES}}}
@media (prefers-color-scheme:dark){{:root{{{_DARK_VARIABLES}}}}}
"""
    """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--page);color:var(--ink);line-height:1.5;
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans","DejaVu Sans",sans-serif}
main{max-width:1240px;margin:0 auto;padding:32px 24px 64px}
header{display:flex;flex-wrap:wrap;align-items:center;gap:6px 14px;margin-bottom:4px}
h1{font-size:26px;font-weight:650;letter-spacing:-.015em;line-height:1.2;margin:0;overflow-wrap:anywhere;min-width:0}
h2{font-size:17px;font-weight:650;letter-spacing:-.005em;margin:40px 0 12px}
.status{font-size:13px;font-weight:600;padding:2px 10px;border-radius:99px;border:1px solid currentColor;white-space:nowrap}
.status.good{color:var(--good)}.status.busy{color:var(--busy)}.status.early{color:var(--bad)}
.under{color:var(--soft);margin:0 0 24px;overflow-wrap:anywhere}
.under b{font-weight:500;color:var(--ink)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(180px,1fr));gap:14px}
.card,figure,.sample,.sheet,.said{background:var(--card);border:1px solid var(--line);border-radius:10px}
.card{padding:14px 18px}
.card .name{color:var(--soft);font-size:13px}
.card .value{font-size:25px;font-weight:600;letter-spacing:-.02em;line-height:1.3;font-variant-numeric:tabular-nums}
.card .value small{font-size:14px;font-weight:500;letter-spacing:0;color:var(--soft)}
.card .note{color:var(--soft);font-size:13px}
"""
    + _CHARTS
    + """
.said{padding:10px 16px;margin:0 0 14px;border-left:4px solid var(--bad);overflow-wrap:anywhere;white-space:pre-wrap}
.samples{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(360px,100%),1fr));gap:14px}
.sample{padding:14px 18px;min-width:0}
.sample h3{font-size:14px;font-weight:600;margin:0 0 8px;overflow-wrap:anywhere;white-space:pre-wrap}
.sample dl{margin:0;display:grid;gap:10px}
.sample dt{font-size:12px;color:var(--soft)}
.sample dd{margin:0;overflow-wrap:anywhere;white-space:pre-wrap;font-size:14px}
.sample dd.after{padding-left:10px;border-left:3px solid var(--c0)}
.sheet{overflow-x:auto;padding:6px 18px}
table{border-collapse:collapse;width:100%;font-size:14px}
th,td{text-align:left;vertical-align:top;padding:6px 16px 6px 0;border-top:1px solid var(--grid);overflow-wrap:anywhere}
tr:first-child>*{border-top:0}
th{font-weight:500;color:var(--soft);white-space:nowrap}
thead th{color:var(--ink);font-weight:600;white-space:normal}
td{font-variant-numeric:tabular-nums}
ul.plain{margin:0;padding:0;list-style:none}
pre{margin:0;padding:12px 0;columns:300px;column-gap:32px;
font:13px/1.55 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
.soft{color:var(--soft)}.remark{color:var(--soft);font-size:13px;margin:8px 4px 0}
footer{margin-top:40px;color:var(--soft);font-size:13px}
@media (max-width:600px){main{padding:20px 14px 40px}.cards{grid-template-columns:repeat(2,1fr);gap:10px}
.card:last-child:nth-child(odd){grid-column:1/-1}
.card{padding:10px 12px}.card .value{font-size:20px}h2{margin-top:32px}figure{padding:12px 8px 6px}th{white-space:normal}}
@media print{body{background:#fff}figure,.card,.sample{break-inside:avoid}}
"""
    + _COLOURED
)


def embedded(root: str, rules: str = "") -> str:
    """Return the style sheet of charts inside an element of a page that is not ours, such as a notebook's.

    JupyterLab and VS Code say on `body` whether they are dark; elsewhere the system does.

    Args:
        root: selector of the element.
        rules: further rules, flat: without @media.
    """
    flat = (*_rules(_CHARTS), *_rules(_COLOURED), *_rules(rules))
    own = "".join(f"{','.join(f'{root} {each}' for each in selectors.split(','))}{{{body}}}" for selectors, body in flat)
    told_dark = ",".join(f"{where} {root}" for where in ('[data-jp-theme-light="false"]', ".vscode-dark"))
    untold = f"body:not([data-jp-theme-light]):not(.vscode-light) {root}"
    return (
        f"{root}{{{_LIGHT_VARIABLES}}}{told_dark}{{{_DARK_VARIABLES}}}"
        f"@media (prefers-color-scheme:dark){{{untold}{{{_DARK_VARIABLES}}}}}{own}"
    )


def _rules(sheet: str) -> list[tuple[str, str]]:
    """Return the selectors and the body of each rule of a flat sheet."""
    parts = (rule.partition("{") for rule in sheet.replace("\n", "").split("}"))
    return [(selectors, body) for selectors, brace, body in parts if brace]
