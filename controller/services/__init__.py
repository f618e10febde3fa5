"""The services that Tidegate brings along, with what is needed to demonstrate and to judge them."""
