"""The orchestrator by the rules that ``deadline-conformance`` holds any server to."""

import pytest

from tests.orchestrator.conftest import MakeService, MakeWorker
from tests.support.fake_worker import MODEL, Plan
from tools.conformance.rules import Verdict
from tools.conformance.run import examine
from tools.conformance.server import Effort
from tools.conformance.target import Target, read_saying

SMALL = Effort(rounds=1, wave_s=0.06, least_deadline_s=0.1, streams=8, patience=5.0)


GROUPS = ["expiry", "partial", "hangup"]


@pytest.mark.slow
async def test_no_rule_is_broken(make_service: MakeService, make_worker: MakeWorker) -> None:
    """But for those of overload: what a fake worker tells of its pace is not what it takes."""
    worker = await make_worker(max_running=4)
    worker.plan = lambda submit: Plan(step_s=0.005)
    service = await make_service(worker, queue__max_waiting=8)
    target = Target(
        url=f"{service.url}/v1",
        model=MODEL,
        deadline=read_saying("X-Timeout-Ms: {ms}"),
        partial={"on_deadline": "partial"},
    )
    report = await examine(target, SMALL, GROUPS)
    verdicts = {finding.rule: finding.verdict for finding in report.findings}
    assert Verdict.FAIL not in verdicts.values(), report.text()
    passed = {rule.partition(".")[0] for rule, found in verdicts.items() if found is Verdict.PASS}
    assert passed == set(GROUPS), report.text()
