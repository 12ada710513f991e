"""The step loop, what it must remember, and how a run is assembled from its parts."""
