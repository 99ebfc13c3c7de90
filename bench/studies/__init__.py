"""Studies of the library, run from a checkout: ``python bench/studies NAME``. Not installed."""
