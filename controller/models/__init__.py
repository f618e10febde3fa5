"""Models as the controller keeps them: fetched, validated, cut into blocks, proven, profiled, and served as shard files."""
