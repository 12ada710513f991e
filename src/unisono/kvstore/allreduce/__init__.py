"""All-reduce of gradients and values: in buckets, over the network, through shared memory."""
