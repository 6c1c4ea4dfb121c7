"""Ports for servers that tests start."""

import random
import socket
from contextlib import suppress

# Below those that the system gives to clients and to whoever binds port 0 (Linux: from 32,768), of whom there are many.
FIRST, LAST = 10_000, 32_000


def free_port():
    """A port that is free, as is the next one, which Ceph's monitor takes."""
    while True:
        port = random.SystemRandom().randrange(FIRST, LAST, 2)
        with socket.socket() as first, socket.socket() as second, suppress(OSError):
            first.bind(("127.0.0.1", port))
            second.bind(("127.0.0.1", port + 1))
            return port
