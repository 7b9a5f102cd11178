"""What processes see of each other on a mount: locks, mappings, events, signals, descriptors.

Most of it is the kernel's to get right and wbcache's not to disturb, by a flush above all.
"""
