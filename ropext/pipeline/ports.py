"""An evaluation of a running server: the user's texts are read here, all else stands in `ports`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ropext.options.endpoint import AskPort, port_options
from ropext.ports.gates import PortMetrics
from ropext.ports.measuring import Call, measure_port
from ropext.ports.plan import PortPlan, plan_lines, prepare_port
from ropext.ports.report import write_port_report
from ropext.results.gates import Gate
from ropext.results.measurement import Measurement


def plan_port(given: Mapping[str, Any], model: str | None, gates: Sequence[Gate] = ()) -> PortPlan:
    """Who is there, and what will be asked; gates about anything else are refused."""
    options = port_options(given)
    plan = prepare_port(options, model, _texts(options))
    asked = options.model_copy(update={"tasks": plan.wish.tasks})
    PortMetrics(asked, plan.labels, plan.wish.lengths).check(gates)
    return plan


def evaluate_port(plan: PortPlan, call: Call) -> Measurement:
    """Ask a server everything that it has not answered yet, and report."""
    for line in plan_lines(plan):
        call.hooks.say(line)
    return measure_port(plan, replace(call, report=write_port_report))


def _texts(options: AskPort) -> tuple[str, ...]:
    """The texts of --data."""
    if options.data is None:
        return ()
    from ropext.corpus import Source, read_documents  # late: most servers are asked without

    where = options.column, options.split, options.data_revision, options.max_document_mib
    texts = list[str]()
    for document in read_documents(Source(options.data, *where)):
        if isinstance(document.content, str):
            texts.append(document.content)
        if len(texts) >= options.max_docs:
            break
    return tuple(texts)
