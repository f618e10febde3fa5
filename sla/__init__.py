"""Pure promises: contracts, windows, budgets, and the error tree that every floor shares."""
