"""Check full steps of large models: seconds, idle time, profiles, disks, peers."""
