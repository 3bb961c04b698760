"""The example of docs/extending.md: a dialect is a module and one entry in ``dialects``."""

from orchestrator.api.dialects import SERVED, ServedDialect
from tests.examples import ask_dialect
from tests.orchestrator.conftest import MakeService
from tests.support.fake_worker import FakeWorker


async def test_a_dialect_is_added_and_taken_away(
    worker: FakeWorker, make_service: MakeService
) -> None:
    """It has deadlines, tolerance and errors of its own without a line about them."""
    SERVED.insert(0, ServedDialect(ask_dialect.ASK, ask_dialect.routes()))
    try:
        service = await make_service(worker)
    finally:
        del SERVED[0]
    body = {"question": "why?", "max_tokens": 3, "mood": "curious"}
    async with service.http.post("/ask", json=body) as response:
        assert await response.json() == {"answer": "w0 w1 w2 "}
        assert response.headers["x-tidegate-ignored"] == "mood"
    assert "sorry" in await service.ask("POST", "/ask", 504, json=body | {"deadline_ms": 0.001})
    await service.ask("POST", "/v1/completions", json=body | {"prompt": "why?"})

    without = await make_service(worker)
    assert "error" in await without.ask("POST", "/ask", 404, json=body)
