"""The public names are there, each the function of its room, and cost nothing until used."""

import subprocess
import sys

import pytest

import ropext


@pytest.mark.parametrize("name", [n for n in ropext.__all__ if n != "__version__"])
def test_every_public_name_is_a_function(name):
    assert callable(getattr(ropext, name))
    assert name in dir(ropext)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'extnd'"):
        ropext.extnd  # noqa: B018


def test_importing_ropext_imports_no_room():
    code = "import sys, ropext; print([m for m in sys.modules if m.startswith('ropext.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['ropext.version']"
