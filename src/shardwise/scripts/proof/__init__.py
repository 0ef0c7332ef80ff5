"""`shardwise verify SCRIPT.py`: a script in one process against the same script on ranks, step by step, in float64."""
