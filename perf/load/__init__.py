"""Load generators outside a service, and their requests.

- ``closed_loop``  a constant number of streams, in its own process
- ``open_loop``    requests at fixed arrival times, in its own process
- ``drive``        starts either generator and reads its results
- ``connection``   one HTTP/1.1 connection for a load generator
- ``lane``         a bare lane to a worker, without the orchestrator
- ``workload``     random sizes of requests
- ``trace``        requests recorded at a real service
- ``chats``        stories for the demo model, which ends them itself
- ``cells``        mixed requests with different optimal numbers of rows
- ``outcomes``     outcomes of requests for their clients: turns and cells
- ``usage``        CPU time and memory of other processes
"""
