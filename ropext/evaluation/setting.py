"""What is settled before weights are loaded: options, models, documents, questions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ropext.corpus import DocumentEncoder
from ropext.evaluation import harness, loading
from ropext.evaluation.preparing import Prepared, prepare
from ropext.evaluation.variants import Lineup, line_up
from ropext.options.evaluate import Evaluate
from ropext.results.coming import Coming
from ropext.results.gates import Gate


@dataclass(frozen=True)
class Setting:
    """Everything that is settled before weights are loaded."""

    options: Evaluate
    lineup: Lineup
    prepared: Prepared
    tokenizer: Any
    trust_remote_code: bool


def settle(
    model: str,
    revision: str | None,
    trust_remote_code: bool,
    values: Mapping[str, Any],
    lineup: Lineup | None = None,
    gates: Sequence[Gate] = (),
) -> Setting:
    """Evaluate, variants, documents and questions; gates about anything else are refused."""
    options = Evaluate(**values)
    if options.lm_eval:
        harness.check(options.lm_eval)
    lineup = lineup or line_up(model, revision, options)
    with loading.silenced():
        tokenizer = loading.load_tokenizer(lineup.variants[-1].snapshot, trust_remote_code)
    config = lineup.variants[-1].snapshot.config
    vocabulary = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    encoder = DocumentEncoder(tokenizer, vocabulary, options.seed)
    prepared = prepare(lineup, options, encoder)
    labels = [own.label for own in lineup.variants]
    Coming.of(options, labels, prepared.frame.lengths).check(gates)
    return Setting(options, lineup, prepared, tokenizer, trust_remote_code)
