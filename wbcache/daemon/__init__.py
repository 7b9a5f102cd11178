"""One mount's life: check, lock, bind, recover, mount, serve, drain, unmount."""
