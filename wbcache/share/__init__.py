"""The only code that touches the share."""
