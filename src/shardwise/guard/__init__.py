"""Watches ranks from outside: what each writes into shared memory, and what a watcher concludes. Without torch."""
