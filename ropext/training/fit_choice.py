"""Choose the spectrum that a fit writes: its best step, if that surely beats the start and loses no
retrieval. Write the notes on the chosen spectrum."""

from dataclasses import dataclass

from ropext.planning import Plan
from ropext.results import BASE, FITTED, START, rules
from ropext.results.measurement import Measurement
from ropext.results.values import MARGIN
from ropext.scaling.rope import divisors
from ropext.training import fit_report, spectrum


@dataclass(frozen=True)
class SpectrumChoice:
    """The step whose spectrum a fit writes, with its reason."""

    step: int  # 0 = the start
    reason: str
    plan: Plan

    @property
    def pair_factors(self) -> tuple[float, ...]:
        """Return by how much the spectrum that a fit writes slows each pair."""
        site = self.plan.main
        return divisors(site.rope.spectrum.inv_freq, site.wanted.inv_freq)


def why_start_stays(measured: Measurement, start: str) -> str | None:
    """Return why the fitted spectrum is not surely better than `start`, the closed form at which it
    began; None if it is better."""
    change = fit_report.change_text(rules.far_change(measured, FITTED, START))
    if not rules.is_better(measured, FITTED, START):
        gain = rules.far_change(measured, START, FITTED)
        if gain.gains is None:
            unknown = f"not known whether a step is better than {start}"
            return f"{unknown} over the second half of the target ({gain.why_not_known})"
        return f"no step is better than {start} by {MARGIN} nats per token or more ({change})"
    lost = rules.lost_answers(measured, FITTED, START)
    if lost is not None:
        text = fit_report.share_text(lost)
        return f"the fit answers fewer questions than {start} ({text})"
    return None


def notes_on_written(choice: SpectrumChoice, measured: Measurement, ceiling: float) -> list[str]:
    """Return notes on the written spectrum: pairs that a guard held (no pair factor above
    `ceiling`), and whether truncation is still better."""
    notes = list[str]()
    label = FITTED if choice.step else START
    guarded = spectrum.pairs_at_limit(choice.pair_factors, ceiling)
    if choice.step and guarded:
        notes.append(f"stopped at a limit of the fit: pair {', '.join(map(str, guarded))}")
    behind = rules.far_change(measured, label, BASE)
    if behind.ci95 is not None and behind.ci95[0] > 0:
        notes.append(
            "truncating the text is still better: the base on its last "
            f"{choice.plan.context} tokens predicts the second half {behind.value:.4f} nats per "
            "token better"
        )
    return notes
