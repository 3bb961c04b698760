"""Load generators outside of a service, and the requests that they send.

- ``closed_loop``  as many streams as asked for at all times, in a process of its own
- ``open_loop``    requests that arrive when they arrive, in a process of its own
- ``drive``        starts either and reads what it measured
- ``connection``   one HTTP/1.1 connection for a load generator
- ``lane``         a bare lane to a worker, without the orchestrator
- ``workload``     sizes of requests, drawn
- ``trace``        requests as a real service got them
- ``chats``        stories for the demo model, which ends them itself
- ``cells``        mixed requests on which the best number of rows depends
- ``outcomes``     outcomes of requests, as clients judge them: turns and cells
- ``usage``        CPU time and memory of other processes
"""
