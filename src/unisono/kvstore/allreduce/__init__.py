"""All-reduce of gradients: buckets, hierarchical reduction, shared memory."""
