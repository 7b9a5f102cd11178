"""Large directories, large trees, deep paths, large sparse files, many descriptors.

What runs by default is small; ``-m slow`` has the sizes of docs/guarantees.md.
"""
