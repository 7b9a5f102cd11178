"""Other users, other namespaces, other surroundings than a root's login shell."""
