"""Who did what when: intervals, links kernel <-> launch <-> op, steps, device gaps."""
