"""What each technique costs in memory, FLOPs and bytes: pure functions of a shape and a layout. No torch."""
