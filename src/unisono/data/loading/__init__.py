"""Loading: batches of samples, built in the background and prefetched to the device."""
