"""The page for chatting with the model: its requests, its question for the key, and its look in a
browser."""

import re
from base64 import b64encode
from dataclasses import replace
from hashlib import sha256
from html.parser import HTMLParser
from importlib.resources import files

import pytest
from browser import opened_tab
from serving.conftest import TARGET, TEMPLATE, opened
from serving.test_hostile_clients import changed, served_from
from small_tokenizer import make_tokenizer

CHAT = "/v1/chat/completions"


class Elements(HTMLParser):
    """The elements of a page with their attributes, and the texts of its scripts and styles."""

    CDATA_CONTENT_ELEMENTS = ("script", "style")

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.texts = {}
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data):
        if self.found and self.found[-1][0] in self.CDATA_CONTENT_ELEMENTS:
            tag = self.found[-1][0]
            self.texts.setdefault(tag, data)


def page_of(client, **how):
    connection, answer = client.open("/", method="GET", **how)
    text = answer.read().decode()
    connection.close()
    return answer.status, dict(answer.getheaders()), text


def test_the_page_runs_its_own_script_and_nothing_else(client):
    status, headers, text = page_of(client)
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    elements = Elements(text)
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    for tag in ("script", "style"):
        digest = b64encode(sha256(elements.texts[tag].encode()).digest()).decode()
        assert policy.pop(f"{tag}-src") == f"'sha256-{digest}'"
        assert [attrs for name, attrs in elements.found if name == tag] == [{}]
    assert policy.pop("connect-src") == "'self'"
    assert set(policy.values()) == {"'none'"}
    assert {"default-src", "base-uri", "form-action", "frame-ancestors"} == set(policy)
    names = {name for _, attrs in elements.found for name in attrs}
    assert not [name for name in names if name.startswith("on") or name in ("src", "href", "style")]
    assert "//" not in re.sub(r"(?m)(^| )// .*$", "", text)  # no address
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", text)


def test_the_page_comes_with_the_package(client):
    assert page_of(client)[2] == files("ropext.serving").joinpath("page.html").read_text("utf-8")


def test_the_page_needs_no_key_and_tells_nothing_of_the_model(loaded, monkeypatch):
    _, _, without = page_of_served(loaded["yarn"])
    monkeypatch.setenv("ROPEXT_ENDPOINT_KEY", "s3cret")
    served = replace(loaded["yarn"], names=("secret-name",))
    with opened(served) as client:
        assert page_of(client)[2] == without
        assert client.get("/v1/models")[0] == 401


def page_of_served(served):
    with opened(served) as client:
        return page_of(client)


def test_the_page_is_refused_under_another_host_name(client):
    status, _, text = page_of(client, headers={"Host": "evil.example"})
    assert (status, "ropext serve</title>" in text) == (403, False)


def test_the_list_of_models_has_the_facts_of_the_page(client, loaded, directory):
    (card,) = client.get("/v1/models")[1]["data"]
    shown = [card[name] for name in ("method", "factor", "max_model_len", "chat")]
    assert shown == ["self-extend", 4.0, TARGET, True]


@pytest.fixture
def tab(tmp_path):
    with opened_tab(tmp_path) as made:
        yield made


def url_of(client):
    return f"http://127.0.0.1:{client.port}"


def is_idle(count):
    """Return the script that is true if the page has so many answers and writes none."""
    return (
        f"document.querySelectorAll('.answer').length === {count}"
        " && !document.getElementById('send').hidden"
    )


ANSWERS = "[...document.querySelectorAll('.answer')].map((block) => block.textContent)"


@pytest.mark.slow
def test_a_browser_holds_a_conversation(client, tab):
    """Its answers equal those for another client with the same messages."""
    tab.open(url_of(client))
    tab.wait_for("!document.getElementById('ask').hidden")
    assert tab.text("name") == "tiny"
    assert tab.text("facts") == f"self-extend, 4× · up to {TARGET} tokens"
    messages = []
    for count, question in enumerate(("the fox", "jumps over\nthe dog"), 1):
        tab.type("most", "")
        tab.value("document.getElementById('most').value = 20")
        tab.type("question", question)
        tab.press_enter()
        tab.wait_for(is_idle(count))
        messages.append({"role": "user", "content": question})
        answer = client.ask(CHAT, {"messages": messages, "max_tokens": 20})[1]
        messages.append(answer["choices"][0]["message"])
        assert tab.value(ANSWERS)[-1] == messages[-1]["content"]
        usage = answer["usage"]
        told = f"{usage['prompt_tokens']} tokens read, {usage['completion_tokens']} written"
        assert tab.text("status") == told
    tab.value("document.getElementById('clear').click()")
    assert tab.text("log") == ""
    tab.type("question", "the fox")
    tab.press_enter()
    tab.wait_for(is_idle(1))
    assert tab.value(ANSWERS) == [messages[1]["content"]]
    assert tab.errors() == []
    own = {f"{url_of(client)}{path}" for path in ("/", "/v1/models", CHAT)}
    assert set(tab.requests()) == own


@pytest.mark.slow
def test_a_browser_shows_an_answer_while_it_is_written_and_stops_it(
    client, tab, loaded, monkeypatch
):
    model = loaded["self-extend"].model
    monkeypatch.setattr(model.generation_config, "eos_token_id", None)
    fast = model.forward

    def forward(*args, **kwargs):
        import time

        time.sleep(0.1)
        return fast(*args, **kwargs)

    monkeypatch.setattr(model, "forward", forward)
    tab.open(url_of(client))
    tab.wait_for("!document.getElementById('ask').hidden")
    tab.type("question", "the fox")
    tab.press_enter()
    tab.wait_for(f"({ANSWERS}[0] || '').length > 3 && !document.getElementById('stop').hidden")
    tab.value("document.getElementById('stop').click()")
    tab.wait_for(is_idle(1))
    line = client.wait_for("its client has gone")
    assert int(line.split(" written")[0].split()[-1]) < 120
    assert tab.errors() == []


@pytest.mark.slow
def test_a_browser_shows_a_refusal_and_keeps_the_question(client, tab):
    tab.open(url_of(client))
    tab.wait_for("!document.getElementById('ask').hidden")
    long = "fox " * TARGET
    tab.type("question", long)
    tab.press_enter()
    tab.wait_for("!!document.querySelector('.error')")
    assert "maximum context length is 256 tokens" in tab.text("log")
    assert tab.value("document.getElementById('question').value") == long


@pytest.mark.slow
def test_a_browser_asks_for_the_key_and_forgets_it(loaded, monkeypatch, tab):
    monkeypatch.setenv("ROPEXT_ENDPOINT_KEY", "s3cret")
    with opened(loaded["yarn"]) as client:
        tab.open(url_of(client))
        tab.wait_for("!document.getElementById('unlock').hidden")
        assert "tiny" not in tab.value("document.documentElement.innerText")
        tab.type("key", "wrong")
        tab.press_enter()
        tab.wait_for("document.getElementById('facts').innerText.includes('key is wrong')")
        tab.type("key", "s3cret")
        tab.press_enter()
        tab.wait_for("!document.getElementById('ask').hidden")
        assert tab.text("name") == "tiny"
        tab.type("question", "the fox")
        tab.press_enter()
        tab.wait_for(is_idle(1))
        kept = "[localStorage.length, sessionStorage.length, document.cookie, location.href]"
        assert tab.value(kept) == [0, 0, "", url_of(client) + "/"]
        assert "s3cret" not in tab.value("document.documentElement.outerHTML")
        tab.open(url_of(client))
        tab.wait_for("!document.getElementById('unlock').hidden")
        assert tab.value("document.getElementById('key').value") == ""
    assert "s3cret" not in "".join(client.lines)


HTML = "<img src=x onerror=\"document.title='hit'\"><script>document.title='hit'</script>"


@pytest.fixture
def writing_html(directory, tmp_path):
    """Serve a model that answers with nothing but HTML, which is one token of it."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.add_tokens([HTML])
    number = tokenizer.convert_tokens_to_ids(HTML)
    bias = [[[number], 100.0]]
    place = changed(directory, tmp_path / "html", "generation_config.json", sequence_bias=bias)
    tokenizer.save_pretrained(place)
    return served_from(place)


@pytest.mark.slow
def test_a_browser_shows_html_as_text_and_runs_no_other_script(writing_html, tab):
    served = replace(writing_html, names=("<b>tiny</b>",))
    with opened(served) as client:
        tab.open(url_of(client))
        tab.wait_for("!document.getElementById('ask').hidden")
        tab.value("document.getElementById('most').value = 3")
        tab.type("question", "<i>fox</i>")
        tab.press_enter()
        tab.wait_for(is_idle(1))
        assert tab.value(ANSWERS) == [HTML * 3]
        assert tab.text("name") == "<b>tiny</b>"
        assert tab.value("document.querySelectorAll('img, i, b, header script').length") == 0
        assert tab.errors() == []
        added = (
            "const made = document.createElement('script'); made.textContent = 'window.hit = 1';"
        )
        assert tab.value(f"{{{added} document.body.append(made); window.hit}}") is None
        refused = "Content Security Policy"
        assert any(refused in str(entry) for entry in tab.errors())


@pytest.mark.slow
def test_a_browser_continues_a_text_if_the_model_has_no_chat_template(
    client, tab, loaded, monkeypatch, tmp_path
):
    monkeypatch.setattr(loaded["self-extend"].tokenizer, "chat_template", None)
    for width in (900, 320):
        tab.resize(width, 600)
        tab.open(url_of(client))
        tab.wait_for("!document.getElementById('ask').hidden")
        assert tab.value("document.documentElement.scrollWidth") == width
    assert "it continues your text" in tab.text("facts")
    tab.type("question", "the fox")
    tab.press_enter()
    tab.wait_for(is_idle(1))
    wanted = client.ask("/v1/completions", {"prompt": "the fox", "max_tokens": 128})[1]
    assert tab.value(ANSWERS) == [wanted["choices"][0]["text"]]
    assert tab.value("document.documentElement.scrollWidth") == 320
