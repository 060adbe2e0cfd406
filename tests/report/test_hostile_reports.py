"""Reports of eval, compare and run on a model, documents and a recipe that say hostile things.

They are parsed, and opened in a headless browser where one is installed.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import run
from pages import Elements, check

from ropext.report.html import page
from ropext.table import Table

sys.path.append(str(Path(__file__).parents[1] / "evaluation"))

from checkpoints import write_checkpoint, write_documents

pytestmark = pytest.mark.slow

# What would leave a trace in the page: a script in a text, an event in a file's name.
RAN = "document.documentElement.setAttribute('data-ran','yes')"
SCRIPT = f"</pre></td></title><script>{RAN}</script>"
NAME = f'"><img src=x onerror="{RAN}">'
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def ropext(*words):
    assert run(*words, "--quiet")[0] == 0, words


def poisoned(run, place):
    """A copy of a run in which a stranger names a variant, documents and models; a task of no known
    name is refused."""
    shutil.copytree(run, place)
    (store,) = (place / "variants").glob("pi-2x-*")
    store.rename(store.with_name(store.name.replace("pi-2x", NAME)))
    names = json.loads((place / "documents.json").read_text())
    for name in ("results.json", "items.jsonl", "documents.json"):
        text = (place / name).read_text()
        for word in ("pi-2x", "token-weighted", *(own["name"] for own in names)):
            text = text.replace(json.dumps(word)[1:-1], json.dumps(NAME)[1:-1])
        text = text.replace('"answer": [', f'"answer": [{json.dumps(SCRIPT)}, ')
        (place / name).write_text(text)
    return place


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """The report of each command, by its name."""
    folder = tmp_path_factory.mktemp("hostile")
    model = write_checkpoint(folder / f"model {NAME}")
    data = write_documents(folder / f"documents {NAME}.jsonl", count=3)
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    lines = [json.dumps({"text": f"{SCRIPT} {row['text']} {SCRIPT}"}) for row in rows]
    data.write_text("\n".join(lines))
    recipe = folder / f"recipe {NAME}.yaml"
    stages = {
        "model": str(model),
        "extend": {"method": ["pi", "yarn"], "factor": 2, "no_verify": True},
        "evaluate": {"data": str(data), "lengths": [64, 128], "fail_if": ["tail@128.value > 1e9"]},
    }
    recipe.write_text(f"# {SCRIPT}\n{json.dumps(stages)}\n")
    evaluated = folder / f"evaluated {NAME}"
    read = ("--data", data, "--lengths", "64,128", "--tasks", "passkey", "--items", "1")
    ropext("eval", model, *read, "--method", "pi,yarn", "--factor", 2, "-o", evaluated)
    again = shutil.copytree(evaluated, folder / f"again {NAME}")
    ropext("compare", evaluated, again, "-o", folder / "compared")
    ropext("compare", evaluated, poisoned(evaluated, folder / "theirs"), "-o", folder / "again")
    ropext("run", recipe, "-o", folder / f"ran {NAME}")
    found = {
        "eval": evaluated / "report.html",
        "compare": folder / "compared" / "report.html",
        "compare, theirs": folder / "again" / "report.html",
        **{f"run, {path.parts[-3:-1]}": path for path in folder.glob("ran *.run/**/report.html")},
    }
    table = Table(SCRIPT, SCRIPT, (SCRIPT, NAME), ((SCRIPT, NAME),))
    own = page(SCRIPT, NAME, [SCRIPT], [NAME], [table, table], {NAME: b"\x89PNG"}, SCRIPT)
    found["page"] = folder / "page.html"
    found["page"].write_text(own)
    return found


def test_what_strangers_say_is_text_in_every_report(reports):
    assert len(reports) == 9  # run's: two cells, their evaluations, and the comparison
    for name, path in reports.items():
        said = check(path.read_text(encoding="utf-8")).text.replace('\\"', '"')
        if path.parent.parent.name == "cells":
            assert SCRIPT in said, name  # the recipe is quoted
        elif path.parent.suffix != ".run":  # the comparison of a grid names its cells alone
            assert NAME in said, name


def opened(path, folder):
    """The page as the browser has it after all of its scripts."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser is installed (looked for {', '.join(BROWSERS)})")
    quiet = ("first-run", "background-networking", "component-update", "sync", "quic", "gpu")
    done = subprocess.run(
        [
            *(browser, "--headless", "--no-sandbox", f"--user-data-dir={folder / 'profile'}"),
            *(f"--{'no' if word == 'first-run' else 'disable'}-{word}" for word in quiet),
            *("--virtual-time-budget=2000", "--dump-dom", path.as_uri()),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    return Elements(done.stdout)


def ran(found):
    return dict(found.tags)["html"].get("data-ran") == "yes"


def test_a_browser_runs_nothing_in_them(reports, tmp_path):
    # It does run what is not escaped where no policy forbids it; and the policy alone forbids it.
    bare = f"<!doctype html><html><head></head><body>{SCRIPT}{NAME}</body></html>"
    (tmp_path / "bare.html").write_text(bare)
    assert ran(opened(tmp_path / "bare.html", tmp_path))
    whole = reports["page"].read_text().replace("</body>", f"{SCRIPT}{NAME}</body>")
    (tmp_path / "torn.html").write_text(whole)
    assert not ran(opened(tmp_path / "torn.html", tmp_path))
    for name, path in reports.items():
        found = opened(path, tmp_path)
        assert not ran(found), name
        assert "ropext" in found.text or name == "page"  # it was opened at all
