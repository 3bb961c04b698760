"""Many orchestrators in front of many instances, on virtual time: what stale views cost.

The product's own queue, ranks, choice and shares (``queue``, ``prediction.urgency``,
``placement.place``, ``state.shares``) run at each orchestrator; instances are played by the
arithmetic of their steps, so that a thousand of them take half a minute.

- ``scene``     instances, balancer, requests
- ``sharing``   ways to share the instances
- ``instance``  slots and steps of one instance; what that leaves out
- ``member``    one orchestrator: its view, its queue, its choice
- ``world``     runs all of it, event by event
- ``report``    deadlines kept, waste, waits, fairness

    python -m perf.sim.fleet --trace FILE [--instances 1000] [--members 100] [--only free two]

Also left out, beside what ``instance`` says: time on the network (but for a queue in the store),
lengths learnt by kind (all know how long answers of the service are, and no more), retries,
hedges, pauses of running requests, the number of rows, and what each orchestrator's own CPU would
take. All reports are as old as a lane's heartbeat makes them (up to 250 ms); a lane with requests
of ours reports every 100 ms. Shares are renewed at all orchestrators at the same moment. Where
there are no shares, each is told how many orchestrators there are.
"""
