"""The documentation site: its navigation, its links, and its pages in a browser over HTTP."""

import json
import re
import shutil
import subprocess
import threading
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import docs_site
import pytest
from browser import browser

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
WIDTH = 400
# It opens each page in a frame of WIDTH pixels, searches, and switches the colours.
PROBE = """<!doctype html><iframe id="frame" width="WIDTH" height="800"></iframe><script>
const frame = document.getElementById("frame");
const pause = (time) => new Promise((done) => setTimeout(done, time));
const open = (page) => new Promise((done) => { frame.onload = done; frame.src = page; });
async function until(condition) {
  for (let tries = 0; tries < 400 && !condition(); tries++) await pause(50);
  return condition();
}
async function probe() {
  const found = { widths: {}, colours: [] };
  for (const page of PAGES) {
    await open(page);
    await until(() => frame.contentDocument.querySelector(".md-header"));
    await pause(100);
    found.widths[page] = frame.contentDocument.documentElement.scrollWidth;
  }
  await open("/");
  const inside = () => frame.contentDocument;
  const colour = () => frame.contentWindow.getComputedStyle(inside().body).backgroundColor;
  found.colours.push(colour());
  const dark = inside().querySelector("input[data-md-color-scheme=slate]");
  const choose = () => { dark.checked = false; dark.click(); };
  await until(() => { choose(); return colour() !== found.colours[0]; });
  found.colours.push(colour());
  const query = inside().querySelector(".md-search__input");
  query.focus();
  query.value = "passkey";
  const typed = () => query.dispatchEvent(new KeyboardEvent("keyup", { bubbles: true }));
  const links = () => [...inside().querySelectorAll(".md-search-result__link")];
  await until(() => { typed(); return links().length; });
  found.results = links().map((own) => new URL(own.href).pathname);
  return found;
}
probe().catch((error) => ({ error: String(error) })).then((found) =>
  fetch("/found", { method: "POST", body: JSON.stringify(found) }));
</script>"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site and return its folder."""
    if not (ROOT / ".venv-docs").exists():
        pytest.skip("the site's environment is not installed: run .ci/site")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run([".ci/site", folder], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING -" not in done.stderr
    return folder


class Loaded(HTMLParser):
    """The addresses that a page loads by itself."""

    def __init__(self, text):
        super().__init__()
        self.addresses = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        own = dict(attrs)
        if tag in ("script", "img", "iframe", "link") and own.get("rel") != "canonical":
            self.addresses += [own[name] for name in ("src", "href") if own.get(name)]


def test_the_navigation_holds_each_page_once_in_the_order_of_the_index():
    index = "Words. [x](a.md)\n\n## One\n\n| [b](b.md#c) | [a](a.md) | [h](https://x.md) |\n"
    index += "\n## Two\n\n[c](reference/c.md), [up](../README.md), [b](b.md)\n"
    assert docs_site.navigation(index) == [
        "README.md",
        {"Pages": ["a.md"]},
        {"One": ["b.md"]},
        {"Two": ["reference/c.md"]},
    ]


def test_the_navigation_holds_every_page():
    (first, *sections) = docs_site.navigation((DOCS / "README.md").read_text("utf-8"))
    named = [page for section in sections for pages in section.values() for page in pages]
    there = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")]
    assert sorted([first, *named]) == sorted(there)


@pytest.mark.parametrize(
    ("page", "text", "as_text", "as_link"),
    [
        ("a.md", "[b](b.md#c)", "[b](b.md#c)", "[b](b.md#c)"),
        ("a.md", "see [C](../C.md#d).", "see C.", "see [C](https://host/own/blob/main/C.md#d)."),
        ("reference/a.md", "[up](../b.md)", "[up](../b.md)", "[up](../b.md)"),
        ("reference/a.md", "[t](../../t)", "t", "[t](https://host/own/blob/main/t)"),
        ("a.md", "[x](https://y) [z](#z)", "[x](https://y) [z](#z)", "[x](https://y) [z](#z)"),
        ("a.md", "```\n[C](../C.md)\n```", "```\n[C](../C.md)\n```", "```\n[C](../C.md)\n```"),
    ],
)
def test_a_link_that_leaves_the_pages_is_text_or_an_address(page, text, as_text, as_link):
    assert docs_site.stay(text, page, None) == as_text
    assert docs_site.stay(text, page, "https://host/own/") == as_link


@pytest.mark.slow
def test_the_site_loads_nothing_from_another_host(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(list(DOCS.rglob("*.md")))
    for page in pages:
        text = page.read_text("utf-8")
        assert [own for own in Loaded(text).addresses if re.match(r"(\w+:)?//", own)] == [], page
    for style in site.rglob("*.css"):
        assert re.findall(r"(?:url\(|@import)\s*['\"]?(?:https?:)?//[^)]*", style.read_text()) == []


@pytest.mark.slow
def test_a_link_that_leads_nowhere_fails_the_build(site, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("mkdocs.yml", "docs", "scripts"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, copy / name)
    page = copy / "docs/glossary.md"
    page.write_text(page.read_text("utf-8") + "\n[there](warnings.md#no-such-heading)\n", "utf-8")
    command = [ROOT / ".venv-docs/bin/python", "-m", "mkdocs", "build", "--strict"]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    assert done.returncode != 0
    assert "no-such-heading" in done.stderr


class Handler(SimpleHTTPRequestHandler):
    """Serves the site and the page that probes it, and keeps what that page found."""

    def do_GET(self):
        if self.path != "/probe":
            return super().do_GET()
        pages = sorted(
            f"/{path.parent.relative_to(self.directory).as_posix()}/"
            for path in Path(self.directory).rglob("index.html")
        )
        text = PROBE.replace("WIDTH", str(WIDTH), 1).replace("PAGES", json.dumps(pages), 1)
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        return self.wfile.write(text.encode())

    def do_POST(self):
        self.server.found = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(204)
        self.end_headers()
        self.server.done.set()

    def log_message(self, *_):
        """Print nothing."""


@pytest.mark.slow
def test_a_browser_searches_it_and_no_page_is_wider_than_a_phone(site, tmp_path):
    command = browser()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(site)))
    server.done = threading.Event()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}/probe"
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    started = subprocess.Popen([*command, profile, "--remote-debugging-port=0", address], stderr=-3)
    try:
        assert server.done.wait(300), "the browser did not report"
    finally:
        started.kill()
        started.wait()
        server.shutdown()
        server.server_close()
    assert "error" not in server.found, server.found
    assert len(server.found["widths"]) == len(list(DOCS.rglob("*.md")))
    assert {page: own for page, own in server.found["widths"].items() if own > WIDTH} == {}
    assert len(set(server.found["colours"])) == 2  # light and dark
    assert "/reference/tasks/" in server.found["results"]  # the page that defines the passkey task
