"""Settings found by search: trials are trainings of their own. Imports no torch."""
