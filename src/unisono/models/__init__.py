"""Reference models, plain enough to read in one sitting. Import the module you need; this package imports no torch."""
