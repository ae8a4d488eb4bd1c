"""The server's port: taken first of all, opened once nothing is left that can fail early."""

import errno
import os
import socket
from collections.abc import Callable
from ipaddress import ip_address

from kv8.errors import RequestError

_BACKLOG = 2048


class Listener:
    """A bound socket. Until `open` is called, connections are refused as if nobody were there.

    Args:
        host: address or name to listen on.
        port: 0 takes any that is free.

    Raises:
        RequestError: the address is none of this machine's, or the port cannot be had.
    """

    def __init__(self, host: str, port: int) -> None:
        self._asked = f"host={host!r}, port={port}"
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except (OSError, UnicodeError) as error:
            raise RequestError(
                f"host={host!r} is no address of this machine: {_reason(error)}."
            ) from error
        family, kind, protocol, _, address = found[0]
        self.socket = socket.socket(family, kind, protocol)
        # A port whose last owner's connections still linger can be had again at once.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._try(lambda: self.socket.bind(address))

    def open(self) -> None:
        """Let connections in.

        Raises:
            RequestError: somebody else has opened the port meanwhile.
        """
        self._try(lambda: self.socket.listen(_BACKLOG))

    def close(self) -> None:
        """Give the port back."""
        self.socket.close()

    @property
    def reaches_others(self) -> bool:
        """Whether programs on other machines can connect."""
        return not ip_address(self.socket.getsockname()[0]).is_loopback

    @property
    def url(self) -> str:
        """Where a client on this machine finds the server."""
        host, port = self.socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as error:
            self.socket.close()
            hint = {
                errno.EADDRINUSE: "another program has the port. Stop it, or choose another --port",
                errno.EACCES: "ports below 1024 need privileges. Choose another --port",
                errno.EADDRNOTAVAIL: "the address is none of this machine's. Choose another --host",
            }.get(error.errno or 0, _reason(error))
            raise RequestError(f"Cannot listen on {self._asked}: {hint}.") from error


def _reason(error: Exception) -> str:
    number = getattr(error, "errno", None)
    text = getattr(error, "strerror", None) or (os.strerror(number) if number else str(error))
    return str(text)
