"""Reports of eval, compare and run on a model, documents and a recipe with hostile names and texts.

The tests parse them, and open them in a headless browser if one is installed.
"""

import csv
import io
import json
import shutil
import subprocess

import pytest
from browser import browser
from command_line import run
from markdown_it import MarkdownIt
from pages import Elements, check
from tiny_checkpoints import write_checkpoint, write_documents

from ropext.base.guard import FILES
from ropext.base.table import Table, as_csv
from ropext.base.workdir import SEAL, write_manifest
from ropext.results.report.html import Page, page_html, write_page

pytestmark = pytest.mark.slow

# What would leave a trace in the page: a script in a text, an event in a file's name.
RAN = "document.documentElement.setAttribute('data-ran','yes')"
SCRIPT = f"</pre></td></title><script>{RAN}</script>"


def named(what):
    """Return a hostile name that contains this word."""
    return f'"><img alt={what} src=x onerror="{RAN}">'


NAME = named("name")
WHATS = ("model", "documents", "recipe", "eval", "again", "ran", "label", "theirs", "task", "name")
# What each report shows of them; a comparison shows no model, no document and no answer.
SHOWN = {
    "eval": {"model", "documents", "eval"},
    "compare": {"eval", "again"},
    "compare, theirs": {"eval", "label"},
    "run": {"ran", "model", "documents"},
    "run's evaluation": {"ran", "recipe", "model", "documents"},
    "page": {"name"},
}


def ropext(*words):
    assert run(*words, "--quiet")[0] == 0, words


def poisoned(run, place):
    """Copy a run in which a stranger names a variant, models and documents, and put a script into
    every answer."""
    shutil.copytree(run, place)
    (store,) = (place / "variants").glob("pi-2x-*")
    store.rename(store.with_name(store.name.replace("pi-2x", named("label"))))
    names = [own["name"] for own in json.loads((place / "documents.json").read_text())]
    words = {"pi-2x": "label", **dict.fromkeys(("token-weighted", *names), "theirs")}
    for name in ("results.json", "items.jsonl", "documents.json"):
        for old, new in words.items():
            say(place / name, json.dumps(old)[1:-1], json.dumps(named(new))[1:-1])
    forget_digests(place)
    return place


def forget_digests(run):
    """Drop the digests of results from run.json, as a stranger would: they tell an edited run."""
    manifest = json.loads((run / "run.json").read_text())
    rest = {key: value for key, value in manifest.items() if key not in (SEAL, FILES)}
    write_manifest(run, rest)


def say(file, old, new):
    file.write_text(file.read_text().replace(old, new))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hostile")


@pytest.fixture(scope="module")
def reports(folder):
    """Return the report of each command, by its name."""
    model = write_checkpoint(folder / named("model"))
    data = write_documents(folder / f"{named('documents')}.jsonl", count=3)
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    lines = [json.dumps({"text": f"{SCRIPT} {row['text']} {SCRIPT}"}) for row in rows]
    data.write_text("\n".join(lines))
    recipe = folder / f"{named('recipe')}.yaml"
    stages = {
        "model": str(model),
        "extend": {"method": "pi", "factor": 2, "no_verify": True},
        "evaluate": {"data": str(data), "lengths": [64, 128], "fail_if": ["tail@128.value > 1e9"]},
    }
    recipe.write_text(f"# {SCRIPT}\n{json.dumps(stages)}\n")
    evaluated = folder / named("eval")
    read = ("--data", data, "--lengths", "64,128", "--tasks", "passkey", "--items", "1")
    ropext("eval", model, *read, "--method", "pi,yarn", "--factor", 2, "-o", evaluated)
    again = shutil.copytree(evaluated, folder / named("again"))
    ropext("compare", evaluated, again, "-o", folder / "compared")
    theirs = poisoned(evaluated, folder / "theirs")
    answers = (theirs / "items.jsonl").read_text()
    say(theirs / "items.jsonl", '"answer": [', f'"answer": [{json.dumps(SCRIPT)}, ')
    assert run("compare", evaluated, theirs, "-o", folder / "again")[0] == 2  # an answer is numbers
    (theirs / "items.jsonl").write_text(answers)
    ropext("compare", evaluated, theirs, "-o", folder / "again")
    ropext("run", recipe, "-o", folder / named("ran"))
    table = Table(SCRIPT, SCRIPT, (SCRIPT, NAME), ((SCRIPT, NAME),))
    page = Page(SCRIPT, NAME, [SCRIPT], [NAME], [table, table], SCRIPT)
    (folder / "page.html").write_text(page_html(page, {NAME: b"\x89PNG"}))
    ran = folder / f"{named('ran')}.run"
    return {
        "eval": evaluated / "report.html",
        "compare": folder / "compared" / "report.html",
        "compare, theirs": folder / "again" / "report.html",
        "run": ran / "report.html",
        "run's evaluation": ran / "evaluation/report.html",
        "page": folder / "page.html",
    }


def test_foreign_text_stays_text_in_every_report(reports):
    found = {}
    for name, path in reports.items():
        said = check(path.read_text(encoding="utf-8")).text.replace('\\"', '"')
        assert (SCRIPT in said) == (name in ("page", "run")), name  # the recipe is quoted
        found[name] = {what for what in WHATS if named(what) in said}
    assert found == SHOWN


def markdown_tokens(path):
    """Return all tokens that a Markdown renderer finds in a file."""
    tokens = list(MarkdownIt("commonmark").enable("table").parse(path.read_text("utf-8")))
    for token in tokens:
        tokens += token.children or ()
    return tokens


def test_foreign_text_stays_text_in_markdown(reports, tmp_path):
    """The reports of commands, and a page of which every part is hostile."""
    remote = "![seen](http://evil.example/x.png) [link](http://evil.example) `x` **y** https://evil"
    hostile = f"{remote} {SCRIPT}\n# {NAME}\n\n<b>"
    table = Table(hostile, hostile, (hostile, ""), ((hostile, hostile),))
    page = Page(hostile, hostile, [hostile], [hostile], [table], hostile)
    write_page(tmp_path, page, {"plots/a.png": (hostile, b"\x89PNG")})
    paths = {name: path.with_name("report.md") for name, path in reports.items() if name != "page"}
    for name, path in {**paths, "page": tmp_path / "report.md"}.items():
        tokens = markdown_tokens(path)
        kinds = {token.type for token in tokens}
        assert not kinds & {"html_block", "html_inline", "link_open", "code_inline"}, name
        pictures = [token.attrs["src"] for token in tokens if token.type == "image"]
        assert all(source.startswith("plots/") or "/plots/" in source for source in pictures), name
        heads = [token.tag for token in tokens if token.type == "heading_open"]
        assert heads.count("h1") == 1, name
        said = "".join(token.content for token in tokens if token.type == "text")
        assert "<img" in said or "<script>" in said or name == "compare", name


def test_a_title_is_one_cell_of_a_csv():
    tables = [Table("R,=1+1,x\n=2", "", ("a",), (("b",),)) for _ in range(2)]
    rows = list(csv.reader(io.StringIO(as_csv(tables))))
    assert rows == [["# R,=1+1,x =2"], ["a"], ["b"], [], ["# R,=1+1,x =2"], ["a"], ["b"]]


@pytest.mark.parametrize("files", [["items.jsonl"], ["items.jsonl", "results.json"]])
def test_a_task_that_a_stranger_named_is_no_name_in_a_report(reports, tmp_path, files, capsys):
    theirs = shutil.copytree(reports["eval"].parent, tmp_path / "theirs")
    for name in files:
        say(theirs / name, "passkey", json.dumps(named("task"))[1:-1])
    forget_digests(theirs)
    code, said = run(
        "compare", reports["eval"].parent, theirs, "-o", tmp_path / "out", capsys=capsys
    )
    assert (code, (tmp_path / "out").exists(), said.err.count("\n")) == (2, False, 1)
    assert "items.jsonl is damaged: task is not well formed" in said.err


def opened(path, folder):
    """Return the page as the browser has it after all of its scripts."""
    quiet = ("component-update", "sync", "quic")
    done = subprocess.run(
        [
            *(*browser(), f"--user-data-dir={folder / 'profile'}"),
            *(f"--disable-{word}" for word in quiet),
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
    # Without a policy, unescaped text does run; and the policy alone forbids it.
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
