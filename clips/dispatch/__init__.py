"""Dispatches clips to the ``slot`` models of instances, with deadlines (docs/slot.md).

- ``task``      one submitted clip, a work item like a task
- ``forecast``  predicts when, and how completely, each clip is rendered: pure functions
- ``fleet``     all instances, each with a link on which its slot model reports its state
- ``attempt``   one clip on one instance; ``wire``: Triton's requests and answers
- ``admission`` refuses clips; ``waiting``: the queue
- ``service``   a clip from submission to end: placement, retries, cancels
- ``ledger``    outcomes and metrics
"""
