"""Converts settings to the configurations of components that several rooms build."""

from orchestrator.prediction.feasibility import REFUSAL_SAMPLE, FeasibilityConfig
from orchestrator.settings import Settings
from orchestrator.tasks.journal.file import JournalConfig
from orchestrator.tasks.journal.store import JournalTerms


def journal_config(settings: Settings) -> JournalConfig | None:
    """Configuration of the journal of durable tasks; None if there is no journal."""
    path = settings.journal.path
    return None if path is None else JournalConfig(path, journal_terms(settings))


def journal_terms(settings: Settings) -> JournalTerms:
    """How long durable tasks are kept, and how much may be lost."""
    return JournalTerms(settings.journal.loss_window_ms, settings.journal.keep_results_s)


def feasibility_config(settings: Settings) -> FeasibilityConfig:
    """When to refuse work as infeasible."""
    admission = settings.admission
    return FeasibilityConfig(
        mode=admission.mode,
        least_chance=admission.least_chance,
        refusal_cap=admission.refusal_cap,
        sample=REFUSAL_SAMPLE,
    )
