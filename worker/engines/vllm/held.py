"""Takes requests out of vLLM's batch and keeps them from its queue, for jobs that are paused.

It is vLLM's own preemption: a request's blocks go back to the pool, where the prefix cache still
has them, and what the model runner knows of it stays or is sent again, as after any preemption. The
request goes on with its next token, seeds and grammar included.
"""

import time
from typing import Any


class HeldRequests:
    """The requests that are kept from vLLM's scheduler. On the engine's thread."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._held: dict[str, Any] = {}

    def hold(self, name: str) -> bool:
        """Keep a request out of the batch. False while a step that was planned with it has yet to
        be read: ask again after that."""
        scheduler, request = self._scheduler, self._held.get(name)
        if request is None:
            request = scheduler.requests[name]
            if request in scheduler.running:
                scheduler.running.remove(request)
                scheduler._preempt_request(request, time.monotonic())
                # As after a reset of the prefix cache: the runner of version 1 is to take the
                # request for one that it has not had in its last step.
                scheduler.prev_step_scheduled_req_ids.discard(name)
            elif request in scheduler.deferred_waiting or request not in [*scheduler.waiting]:
                return False
            scheduler.waiting.remove_requests([request])
            self._held[name] = request
        return not request.num_stale_output_tokens

    def release(self, name: str) -> None:
        """Let a request go on. Does nothing for one that is not held."""
        request = self._held.pop(name, None)
        if request is not None:
            self._scheduler._enqueue_waiting_request(request)

    def forget(self, name: str) -> None:
        """Note that a request has ended."""
        self._held.pop(name, None)
