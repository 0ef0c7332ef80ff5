"""Entry point of the command line: `python -m shardwise`, and the program `shardwise`. Commands: cli/main."""

import signal


def main() -> None:
    """Run the command line. A signal that arrives while it is imported waits until there is somebody to hear it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    from shardwise.cli.main import run

    run()


if __name__ == "__main__":
    main()
