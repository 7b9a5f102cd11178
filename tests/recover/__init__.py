"""`wbcache recover`: the files of a cache with no share and no daemon."""
