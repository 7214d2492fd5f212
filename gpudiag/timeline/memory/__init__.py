"""What memory was used for at its peak: from the allocator's events of a trace, from a snapshot of the allocator, or both."""
