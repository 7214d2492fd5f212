"""What-ifs: the representative steps replayed with costs changed. One file a what-if, all listed in `registry`."""
