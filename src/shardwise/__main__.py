"""Entry point of `python -m shardwise` and of the program `shardwise`. Commands: cli/main."""

import signal


def main() -> None:
    """Runs the command line. SIGINT and SIGTERM are blocked during its import, until their handlers are installed."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    from shardwise.cli.main import run

    run()


if __name__ == "__main__":
    main()
