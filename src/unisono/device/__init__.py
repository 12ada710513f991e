"""One kind of device in one value: the functions by which all other packages use it. Importing it imports no torch."""
