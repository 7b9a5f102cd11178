"""Random programs on the file system and on a plain directory: both answer and hold the same.

`gate` makes time and threads the test's, `mount` is a mount without a kernel, `kernel` calls its
handlers as the kernel does, `world` has the plain directory beside it, `actions` are what programs
are made of, `programs` has hypothesis make them up.
"""
