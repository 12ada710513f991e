"""Files of other frameworks."""
