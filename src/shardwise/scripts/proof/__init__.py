"""`shardwise verify SCRIPT.py`: compares a script in one process with it on ranks, step by step, in float64."""
