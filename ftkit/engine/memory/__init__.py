"""Where shards lie: on the device, in host arenas, in files on NVMe; and on which cores ranks compute."""
