"""Published results on V100s, and the schedules of peers in the events of the plan."""
