"""The centre: API, state, loop, rollout, cloud, dashboard and the command line."""
