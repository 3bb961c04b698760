"""What a new server has to be told that the client told the one before it."""

from mcp_types import JSONRPCNotification, JSONRPCRequest

from tidegate.proxy.answers import params_of

INITIALIZE = "initialize"
INITIALIZED = JSONRPCNotification(jsonrpc="2.0", method="notifications/initialized")


class Introduction:
    """The client's handshake, log level and subscriptions, as requests that a server answered
    well. Clients of protocol 2026-07-28 and later have none: each request says it all."""

    def __init__(self) -> None:
        self.handshake: JSONRPCRequest | None = None
        self._level: JSONRPCRequest | None = None
        self._subscriptions: dict[str, JSONRPCRequest] = {}
        """Subscriptions by URI."""

    def learn(self, request: JSONRPCRequest) -> None:
        """Remember what ``request``, which went well, has changed."""
        uri = str(params_of(request).get("uri"))
        match request.method:
            case "initialize":
                self.handshake = request
            case "logging/setLevel":
                self._level = request
            case "resources/subscribe":
                self._subscriptions[uri] = request
            case "resources/unsubscribe":
                self._subscriptions.pop(uri, None)

    def after_handshake(self) -> list[JSONRPCRequest]:
        """Requests to repeat once the handshake is done."""
        level = [] if self._level is None else [self._level]
        return [*level, *self._subscriptions.values()]
