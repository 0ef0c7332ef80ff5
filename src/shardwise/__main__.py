"""`python -m shardwise`: the command line."""

from shardwise.cli.main import run

if __name__ == "__main__":
    run()
