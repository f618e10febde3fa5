"""Pure decisions: what a fleet is, what a plan is, what it would cost, and which plan to choose."""
