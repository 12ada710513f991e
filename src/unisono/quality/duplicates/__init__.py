"""Documents that are the same or near each other: sketches of all documents, and the pairs and clusters found by them."""
