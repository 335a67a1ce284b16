"""The table of samplers in docs/samplers.md, made of what the host lists and the pack knows.

``python tests/host/sampler_table.py`` writes it, in the environment that ``bash .ci/env host``
makes, for the ComfyUI of $COMFYUI_PATH or ~/comfy/ComfyUI.
"""

from __future__ import annotations

import json
import re

import conftest  # noqa: F401  the host on the path, with its command line for the CPU
from harness import ROOT, part

FILE = ROOT / "docs" / "samplers.md"
START, END = "<!-- table -->", "<!-- end of table -->"
STEPS = 10
PATHS = {
    "single": "every step stands by itself",
    "second": "two evaluations a step",
    "multistep": "every step builds on earlier ones",
}
HEAD = """# Which samplers reuse

Made from the sampler list of ComfyUI {version} and `carnator/samplers.py`, with the risk tables in
`carnator/risk_tables`, by

    $(bash .ci/env host)/bin/python tests/host/sampler_table.py

`tests/host/test_sampler_table.py` fails when it is out of date. The reason for a dense run also
stands in the log and in Carnator Report.

- **reuses**: after a change, a run makes some of its evaluations and predicts the others.
- **exact repeats**: runs are recorded, and the same request made again is served; after a change
  the run is dense, since no plan of such a path has been measured.
- **dense**: neither recorded nor served.
"""
TAIL = """
Samplers of other packs, among them `res_2s`, run dense: their names say nothing of how often and
where they evaluate. So do the listed ones with noise of their own (`eta`, `s_churn` above 0), and a
sampler under any name that reads the guidance branches by a post-CFG function. Where an evaluation
does not come where the sampler's contract puts it, the rest of that run is dense.
"""

Row = tuple[str, str, str, str]


def measured() -> dict[str, list[str]]:
    """Sampler class -> names of the backbones whose risk table holds plans for it."""
    found: dict[str, list[str]] = {}
    for file in sorted((ROOT / "carnator" / "risk_tables").glob("*.json")):
        data = json.loads(file.read_text())
        for kind, rows in data["kinds"].items():
            if rows:
                found.setdefault(kind, []).append(data["name"])
    return found


def row(name: str, plans: dict[str, list[str]]) -> Row:
    """Sampler, its evaluations in a run of ``STEPS`` steps, what happens, and why."""
    import comfy.samplers

    refusals = part("nodes.refusals")
    try:
        key = refusals.sampler_name(comfy.samplers.sampler_object(name))
    except refusals.Unsupported as reason:
        return name, "", "dense", str(reason)
    contract = part("carnator.samplers").contract(key)
    if contract.kind == "refused":
        return name, "", "dense", contract.why
    calls = str(len(contract.calls([1 - i / STEPS for i in range(STEPS + 1)])))
    why = PATHS[contract.kind]
    if contract.kind not in plans:
        return name, calls, "exact repeats", f"{why}; no risk table has plans for it"
    return name, calls, "reuses", f"{why}; plans in {', '.join(plans[contract.kind])}"


def rows() -> list[Row]:
    import comfy.samplers

    plans = measured()
    return [row(name, plans) for name in comfy.samplers.SAMPLER_NAMES]


def written(text: str) -> list[Row]:
    """The rows of a file's table."""
    lines = text.split(START)[1].split(END)[0].strip().splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [(name.strip("`"), calls, what, why) for name, calls, what, why in cells]


def version_in(text: str) -> tuple[int, ...]:
    """The version of ComfyUI a file was made from."""
    found = re.search(r"ComfyUI (\d+)\.(\d+)\.(\d+)", text)
    assert found, f"no version of ComfyUI in {FILE.name}"
    return tuple(map(int, found.groups()))


def document() -> str:
    from comfyui_version import __version__

    lines = [f"| sampler | evaluations in {STEPS} steps | Carnator | why |", "|---|---|---|---|"]
    lines += [f"| `{name}` | {calls} | {what} | {why} |" for name, calls, what, why in rows()]
    table = "\n".join([START, *lines, END])
    return f"{HEAD.format(version=__version__)}\n{table}\n{TAIL}"


if __name__ == "__main__":
    FILE.write_text(document())
    print(f"written: {FILE.relative_to(ROOT)}")
