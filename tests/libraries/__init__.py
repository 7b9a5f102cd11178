"""Libraries and programs do their real work on a mount, and read it back from the share."""
