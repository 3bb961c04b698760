"""What every dialect is made of.

- ``connection``    a client's connection: heads and idle time bounded, malformed HTTP answered in
  our shape; ``hang_ups`` tells who has hung up from who has said all
- ``browsers``      which web pages may ask
- ``context``       what every request carries: arrival, correlation id, dialect
- ``body``          JSON bodies, with errors that name the field; ``body_budget`` bounds them all
  together, ``choices`` lists what a field allows
- ``deadlines``     a client's deadlines, in every spelling
- ``fields``        placement, session, tenant and priority
- ``event_stream``  server-sent events to one client
"""
