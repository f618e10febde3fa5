"""The whole stack on one machine: processes, load, trouble, and the report of the demo. A client of the public API."""
