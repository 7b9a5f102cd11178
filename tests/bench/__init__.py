"""The benchmark: the mount beside its ceiling, its peers and the bare disk, in one run."""
