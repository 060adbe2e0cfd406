"""The proof's own code in this interpreter: a fresh one for each proof takes seconds.

The fresh one is what tests/test_proof.py and tests/test_proof_forward.py are about, and
`first_apart` leaves it to the first proof of an interpreter that a test starts, `none_apart` to
none.
"""

import json
import warnings
from logging import CRITICAL, NOTSET, getLogger

from ropext.families import stock

apart = stock.ask_child


def here(job, directories, timeout, task, forward=True):
    """What the fresh process says of each directory, by its code; without its forward pass, too."""
    if job["trust_remote_code"]:
        return apart(job, directories, timeout, task)
    import torch
    import transformers

    from ropext.models.load import silenced
    from ropext.proof import child

    job, found = json.loads(json.dumps(job)), []
    said = [*getLogger("transformers").handlers]  # what the fresh process says nobody reads
    for entry, directory in zip(job["directories"], directories, strict=True):
        answer = {"transformers": transformers.__version__, "error": None}
        entry |= {} if forward else {"forward": None}
        try:
            with (
                silenced(),
                torch.random.fork_rng(devices=[]),
                warnings.catch_warnings(action="ignore"),
            ):
                for handler in said:
                    handler.setLevel(CRITICAL)
                answer |= child.build(job, entry)
        except Exception as error:
            answer["error"] = child.sentence_of(error)
        for handler in said:
            handler.setLevel(NOTSET)
        found.append(json.loads(json.dumps(answer)) | {"directory": str(directory)})
    return found


def first_apart():
    """From now on, all but the next proof are made here."""

    def first(*args):
        stock.ask_child = here
        return apart(*args)

    stock.ask_child = first


def none_apart():
    """From now on, all proofs are made here."""
    stock.ask_child = here
