"""The device table, name resolution, measured peaks."""
