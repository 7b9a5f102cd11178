"""What surrounds a mount: a share that can't hold everything, is full, or is shared with enemies,
and a machine that wants to shut down."""
