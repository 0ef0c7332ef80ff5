"""Watching ranks from outside: what each writes into memory as it goes, and what a watcher concludes. Without torch."""
