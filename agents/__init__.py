"""The edge: what runs on a device, and the messages that both sides speak."""
