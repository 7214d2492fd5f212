"""What the time of every step goes to: forward, backward, optimizer, copies to the device; and the padding of its batch."""
