"""The port: had before it is open, told when it cannot be had."""

import socket

import pytest

from kv8.errors import RequestError
from kv8.server.listener import Listener


def connects(listener: Listener) -> bool:
    try:
        socket.create_connection(listener.socket.getsockname()[:2], timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True


def test_a_port_is_had_before_it_is_open() -> None:
    listener = Listener("127.0.0.1", 0)
    try:
        assert listener.url.startswith("http://127.0.0.1:")
        assert not connects(listener)
        listener.open()
        assert connects(listener)
    finally:
        listener.close()


def test_a_port_that_somebody_opened_meanwhile_is_told() -> None:
    first = Listener("127.0.0.1", 0)
    port = first.socket.getsockname()[1]
    second = Listener("127.0.0.1", port)
    first.open()
    with pytest.raises(RequestError, match=f"port={port}.*another program has the port"):
        second.open()
    first.close()


@pytest.mark.parametrize(
    ("host", "others"), [("127.0.0.1", False), ("localhost", False), ("0.0.0.0", True)]
)
def test_who_can_connect(host, others) -> None:
    listener = Listener(host, 0)
    assert listener.reaches_others is others
    listener.close()


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_ipv6() -> None:
    try:
        listener = Listener("::1", 0)
    except RequestError as error:
        pytest.skip(str(error))
    assert listener.url.startswith("http://[::1]:")
    assert not listener.reaches_others
    listener.close()
