"""The package does not become harder to read: each count has a ceiling, and ceilings only sink."""

import house
import pytest

# What scripts/house.py counted when a ceiling was last lowered, rounded up. Lower one whenever the
# count has fallen; never raise one. The test allows 2 % more, so that one legal line fails nothing.
SLACK = 1.02
CEILINGS = {
    "nodes a statement": 7.3,
    "comprehensions": 34.3,
    "conditional expressions": 20.2,
    "starred": 6.7,
    "packed assignments": 0.3,
    "Any": 9.8,
    "functions of more than six parameters": 13.0,
    "files that import more than twenty-five others": 0.0,
    "species tests": 6.0,
}


def test_no_count_is_above_its_ceiling():
    counted = house.count().table()
    above = {
        name: f"{value:.1f} counted, {CEILINGS[name] * SLACK:.1f} allowed"
        for name, value in counted.items()
        if value > CEILINGS[name] * SLACK
    }
    assert not above, (
        f"{above}: python scripts/house.py counts this. Write the new code more simply, or simplify"
        " a place that the change touches."
    )


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("a, b = 1, 2", "packed assignments"),
        ("[x for x in y]", "comprehensions"),
        ("x = 1 if y else 2", "conditional expressions"),
        ("f(*x)", "starred"),
        ("x: Any = 1", "Any"),
        ("def f(a, b, c, d, e, f, g): pass", "functions of more than six parameters"),
        (
            "\n".join(f"from ropext.a{k} import b" for k in range(26)),
            "files that import more than twenty-five others",
        ),
        ("model.container", "species tests"),
        ("f(container=x)", "species tests"),
        ("isinstance(model, GgufFile)", "species tests"),
        ("if plan.growth is None: pass", "species tests"),
    ],
)
def test_each_count_finds_its_planted_case(code, name):
    counts = house.Counts()
    counts.add_file(code)
    found = {key: value for key, value in counts.table().items() if value and key in CEILINGS}
    del found["nodes a statement"]
    assert set(found) == {name}


def test_unpacked_files_are_not_counted():
    counts = house.Counts()
    counts.add_file("a, b = f()\nc = 1, 2\ndef g(self, a, b, c, d, e, f): pass")
    table = counts.table()
    assert table["packed assignments"] == 0
    assert table["functions of more than six parameters"] == 0
