"""How commands talk to a running daemon: the socket, its protocol, and the registry of mounts."""
