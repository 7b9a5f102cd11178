"""Another writer of the share changes what the mount is about to change."""
