"""Memory of a rank: host arenas, NVMe files, tiers of shards, and CPU cores."""
