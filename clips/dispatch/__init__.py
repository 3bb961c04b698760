"""Clips that instances' ``slot`` models render against deadlines (docs/slot.md).

- ``job``       what a client asks for; ``task``: one offered clip, which is work as a task is
- ``forecast`` when each would be done, and how much of it: pure
- ``fleet``     all instances, each with a link by which its slot model tells its state
- ``attempt``   one clip on one instance; ``wire``: Triton's requests and answers
- ``admission`` what is refused; ``waiting``: the queue
- ``service``   from a submission to its end: placement, retries, cancels
- ``ledger``    outcomes and metrics
"""
